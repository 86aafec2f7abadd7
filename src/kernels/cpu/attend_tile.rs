//! The attend for neighbouring rows that read many of the same pages, as the rows of a prompt do, each in an order of its own.
//!
//! The scores of a page do not depend on other pages, nor a channel of the output on other channels. So a tile first scores each
//! page for all rows that see it, then turns scores into weights row by row, and last sums the values a few channels at a time:
//! these channels of all pages are transposed once for all rows and stay in the core's own cache. Every value is made by the
//! operations of one row alone, in their order, so it has the same bits.

use super::attend::{self, GROUP, PAGE, Shape, Softmax, eight_by_eight, weigh, widen_k};
use super::attend_f32;
use super::cell::Cell;
use super::simd::{LaneOp, Lanes};
use super::view::{View, ViewMut};

/// Rows that may share a tile.
const ROWS: usize = 4;
/// Query heads that go through the products together.
const QUAD: usize = 4;
/// Pages of a row that one part of the work takes.
const PART: usize = 128;
/// Different pages of a part.
const PAGES: usize = 192;
/// Places of the table that finds a page of a part.
const PLACES: usize = 512;
/// Channels that are summed together.
const CHANNELS: usize = 16;
/// Pages below which a row is not worth a tile.
const PAGES_MIN: usize = 4;
/// No page, no place.
const NONE: u16 = u16::MAX;

/// The rows of a workgroup.
#[derive(Clone, Copy)]
pub(super) struct Rows {
    pub first: usize,
    pub count: usize,
    /// Tokens that each row attends to.
    pub lens: [usize; ROWS],
}

impl Rows {
    /// The rows that the workgroup of `row` computes, of `rows`; `None` if the workgroup of an earlier row computes it.
    ///
    /// Rows are tiled if all of them see the first page of the first one.
    pub fn of(
        row: usize,
        rows: usize,
        shape: &Shape,
        len: impl Fn(usize) -> usize,
        page_at: impl Fn(usize, usize) -> Option<usize>,
    ) -> Option<Rows> {
        let count = if shape.group().is_multiple_of(QUAD) { (GROUP / shape.group()).min(ROWS) } else { 1 };
        let first = row - row % count.max(1);
        if count > 1 && first + count <= rows {
            let lens = std::array::from_fn(|i| if i < count { len(first + i) } else { 0 });
            let pages = |i: usize| lens[i].div_ceil(PAGE);
            let lead = if pages(0) >= PAGES_MIN { page_at(first, 0) } else { None };
            let shared = |i: usize| pages(i) >= PAGES_MIN && (0..pages(i).min(PART)).any(|page| page_at(first + i, page) == lead);
            if lead.is_some() && (1..count).all(shared) {
                return (row == first).then_some(Rows { first, count, lens });
            }
        }
        Some(Rows { first: row, count: 1, lens: [len(row), 0, 0, 0] })
    }
}

/// All query heads of the tile's rows: head h of row i is at i * group + h.
pub(super) struct Tile<'a, 'b, T, F, const D: usize> {
    pub shape: Shape,
    pub rows: Rows,
    pub query: View<'a, f32>,
    pub cache: View<'a, T>,
    pub page_at: F,
    pub out: &'a mut ViewMut<'b, f32>,
}

impl<T: Cell, F: Fn(usize, usize) -> Option<usize>, const D: usize> LaneOp for Tile<'_, '_, T, F, D> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let Tile { shape, rows, .. } = self;
        let (group, head_dim) = (shape.group(), shape.head_dim);
        let mut work = Work::<D>::new();
        for i in 0..rows.count {
            let from = self.query.slice(shape.at(rows.first + i, 0), group * head_dim);
            for (to, from) in work.query[i * group..].iter_mut().zip(from.chunks(head_dim)) {
                to.iter_mut().zip(from).for_each(|(to, from)| *to = from * (shape.scale * T::UNIT));
            }
        }
        let mut from = 0;
        while let Some(part) = Part::gather(&rows, from, &self.page_at) {
            self.score::<L>(&part, &mut work);
            self.weigh::<L>(&part, &mut work);
            for channel in (0..head_dim).step_by(CHANNELS) {
                self.widen::<L>(&part, channel, &mut work);
                for i in 0..rows.count {
                    for h in (0..group).step_by(QUAD) {
                        self.sum::<L>(&part, channel, i, h, &mut work);
                    }
                }
            }
            from += part.pages;
        }
        for i in 0..rows.count {
            let out = self.out.slice_mut(shape.at(rows.first + i, 0), group * head_dim);
            for (h, out) in out.chunks_mut(head_dim).enumerate() {
                work.state.write(i * group + h, shape.v_scale * T::UNIT, out);
            }
        }
    }
}

/// What a tile works on.
struct Work<const D: usize> {
    query: [[f32; D]; GROUP],
    state: Softmax<D>,
    /// [row, page of the row's part, head]: scores, then weights.
    weights: [[f32; PAGE]; GROUP * PART],
    /// The same places: what older sums are multiplied by.
    fades: [f32; GROUP * PART],
    /// Some channels of each different page.
    values: [[[f32; CHANNELS]; PAGE]; PAGES],
    /// Different pages whose values hold a NaN that fast loads lose.
    hidden: [bool; PAGES],
}

impl<const D: usize> Work<D> {
    #[inline(always)]
    fn new() -> Work<D> {
        Work {
            query: [[0.0; D]; GROUP],
            state: Softmax::new(),
            weights: [[0.0; PAGE]; GROUP * PART],
            fades: [0.0; GROUP * PART],
            values: [[[0.0; CHANNELS]; PAGE]; PAGES],
            hidden: [false; PAGES],
        }
    }
}

impl<T: Cell, F: Fn(usize, usize) -> Option<usize>, const D: usize> Tile<'_, '_, T, F, D> {
    /// Place of the first head of a row's page.
    #[inline(always)]
    fn place(&self, row: usize, page: usize) -> usize {
        (row * PART + page) * self.shape.group()
    }

    /// Scores each different page for every row that sees it.
    #[inline(always)]
    fn score<L: Lanes>(&self, part: &Part, work: &mut Work<D>) {
        let Shape { head_dim, .. } = self.shape;
        let group = self.shape.group();
        let mut wide = [[0.0; D]; PAGE];
        for page in 0..part.count {
            let (k, v) = self.shape.pages(&self.cache, part.id(page));
            let (next, _) = self.shape.pages(&self.cache, part.id(page + 1));
            if T::as_f32(k).is_none() {
                widen_k::<L, T, D>(k, next, head_dim, &mut wide);
                work.hidden[page] = T::nan_hidden::<L>(v);
            }
            for i in 0..self.rows.count {
                let at = part.place[page][i];
                if at == NONE {
                    continue;
                }
                let (query, out) = (&work.query[i * group..], &mut work.weights[self.place(i, at as usize)..]);
                match T::as_f32(k) {
                    Some(k) => {
                        let next = if i == 0 { T::as_f32(next).unwrap_or_default() } else { &[] };
                        attend_f32::scores::<L, D>(query, group, k, next, out);
                    }
                    None => attend::scores::<L, D>(query, group, &wide, out),
                }
            }
        }
    }

    /// Turns scores into weights, each row in the order of its own pages.
    #[inline(always)]
    fn weigh<L: Lanes>(&self, part: &Part, work: &mut Work<D>) {
        let (group, state) = (self.shape.group(), &mut work.state);
        for i in 0..self.rows.count {
            for page in (0..part.pages).filter(|&page| part.page[i][page] != NONE) {
                let tokens = self.tokens(part, i, page);
                for h in 0..group {
                    let (at, head) = (self.place(i, page) + h, i * group + h);
                    work.fades[at] = weigh::<L>(&mut work.weights[at], tokens, &mut state.most[head], &mut state.total[head]);
                }
            }
        }
    }

    /// Transposes the channels from `channel` on of each different page.
    #[inline(always)]
    fn widen<L: Lanes>(&self, part: &Part, channel: usize, work: &mut Work<D>) {
        let Shape { head_dim, .. } = self.shape;
        for page in 0..part.count {
            let (_, v) = self.shape.pages(&self.cache, part.id(page));
            let (_, next) = self.shape.pages(&self.cache, part.id(page + 1));
            let to = &mut work.values[page];
            match T::as_f32(v) {
                Some(v) => attend_f32::slice::<L>(v, T::as_f32(next).unwrap_or_default(), head_dim, channel, to),
                None => slice::<L, T>(v, head_dim, channel, work.hidden[page], to),
            }
        }
    }

    /// Adds weights times values of these channels to four heads of a row.
    #[inline(always)]
    fn sum<L: Lanes>(&self, part: &Part, channel: usize, row: usize, head: usize, work: &mut Work<D>) {
        let sums = &mut work.state.sums[row * self.shape.group() + head..][..QUAD];
        let mut held = [[L::splat(0.0); 2]; QUAD];
        for (held, sums) in held.iter_mut().zip(&*sums) {
            let sums = &sums.as_chunks::<8>().0[channel / 8..];
            *held = [L::load(&sums[0]), L::load(&sums[1])];
        }
        for (page, &id) in part.page[row][..part.pages].iter().enumerate() {
            if id == NONE {
                continue;
            }
            let at = self.place(row, page) + head;
            let weights = &work.weights[at..][..QUAD];
            for (held, &fade) in held.iter_mut().zip(&work.fades[at..]) {
                let fade = L::splat(fade);
                *held = [held[0].mul(fade), held[1].mul(fade)];
            }
            let values = &work.values[id as usize];
            // Two loops, so that the usual one has a constant count.
            match self.tokens(part, row, page) {
                PAGE => {
                    for (t, values) in values.iter().enumerate() {
                        add_token(&mut held, values, weights, t);
                    }
                }
                tokens => {
                    for (t, values) in values[..tokens].iter().enumerate() {
                        add_token(&mut held, values, weights, t);
                    }
                }
            }
        }
        for (held, sums) in held.iter().zip(sums) {
            let sums = &mut sums.as_chunks_mut::<8>().0[channel / 8..];
            held[0].store(&mut sums[0]);
            held[1].store(&mut sums[1]);
        }
    }

    /// Tokens of a row's page that count.
    #[inline(always)]
    fn tokens(&self, part: &Part, row: usize, page: usize) -> usize {
        (self.rows.lens[row] - (part.from + page) * PAGE).min(PAGE)
    }
}

#[inline(always)]
fn add_token<L: Lanes>(held: &mut [[L; 2]; QUAD], values: &[f32; CHANNELS], weights: &[[f32; PAGE]], t: usize) {
    let values = values.as_chunks::<8>().0;
    let (low, high) = (L::load(&values[0]), L::load(&values[1]));
    for (held, weights) in held.iter_mut().zip(weights) {
        let weight = L::splat(weights[t]);
        *held = [weight.mul_add(low, held[0]), weight.mul_add(high, held[1])];
    }
}

/// Channels from `channel` on of V `[16 / x, head_dim, x]`, BF16 or E4M3FN; those past the head are left as they were.
#[inline(always)]
fn slice<L: Lanes, T: Cell>(v: &[T], head_dim: usize, channel: usize, exact: bool, to: &mut [[f32; CHANNELS]; PAGE]) {
    for half in 0..PAGE / 8 {
        for d in channel / 8..(head_dim / 8).min((channel + CHANNELS) / 8) {
            for (t, row) in eight_by_eight::<L, T>(v, head_dim, half, d, exact).iter().enumerate() {
                row.store(&mut to[half * 8 + t].as_chunks_mut::<8>().0[d - channel / 8]);
            }
        }
    }
}

/// The next pages of a tile's rows, each page once.
struct Part {
    /// Where in every row's list the part begins.
    from: usize,
    /// Pages taken of every row's list, as far as it goes.
    pages: usize,
    /// Different pages among them, and their ids.
    count: usize,
    ids: [usize; PAGES],
    /// [different page, row]: where in the row's part of its list.
    place: [[u16; ROWS]; PAGES],
    /// [row, page of the row's part]: which different page.
    page: [[u16; PART]; ROWS],
}

impl Part {
    /// The pages from `from` on; `None` at the end of all rows.
    fn gather(rows: &Rows, from: usize, page_at: impl Fn(usize, usize) -> Option<usize>) -> Option<Part> {
        let ends = rows.lens.map(|len| len.div_ceil(PAGE));
        let left = ends.iter().max().map_or(0, |&end| end.saturating_sub(from)).min(PART);
        if left == 0 {
            return None;
        }
        let mut part =
            Part { from, pages: 0, count: 0, ids: [0; PAGES], place: [[NONE; ROWS]; PAGES], page: [[NONE; PART]; ROWS] };
        let mut found = [NONE; PLACES];
        while part.pages < left && part.count + rows.count <= PAGES {
            for (row, &end) in ends.iter().enumerate().take(rows.count) {
                let at = from + part.pages;
                if let Some(id) = if at < end { page_at(rows.first + row, at) } else { None } {
                    part.take(&mut found, row, id);
                }
            }
            part.pages += 1;
        }
        Some(part)
    }

    /// The id of a different page, if there is one.
    #[inline(always)]
    fn id(&self, page: usize) -> Option<usize> {
        (page < self.count).then(|| self.ids[page])
    }

    fn take(&mut self, found: &mut [u16; PLACES], row: usize, id: usize) {
        let mut place = (id as u32).wrapping_mul(0x9e37_79b1) as usize >> 16 & (PLACES - 1);
        // A page that a row's list names twice counts as two.
        while found[place] != NONE && (self.ids[found[place] as usize] != id || self.place[found[place] as usize][row] != NONE) {
            place = (place + 1) % PLACES;
        }
        if found[place] == NONE {
            found[place] = self.count as u16;
            self.ids[self.count] = id;
            self.count += 1;
        }
        self.place[found[place] as usize][row] = self.pages as u16;
        self.page[row][self.pages] = found[place];
    }
}
