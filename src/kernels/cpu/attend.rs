//! The attend kernels: softmax attention over pages of 16 tokens (`msa-spec` section 6).
//!
//! A page is widened to f32 once and serves all query heads of its KV head. The softmax runs online, page by page, so a row's
//! bits depend on its query, its pages in their order and its length. What lies past the length is never used: a NaN there
//! cannot reach a result, even as a factor of zero. Page ids outside the cache are skipped.

use super::attend_f32;
use super::attend_tile::{Rows, Tile};
use super::cell::{Cell, with_cell};
use super::simd::{LaneOp, Lanes, dispatch, prefetch};
use super::view::{Bound, View, ViewMut};
use crate::hal::Workgroup;
use crate::kernels::msa::{AttendDenseArgs, AttendSparseArgs, PAGE_TOKENS};

/// Tokens of a page.
pub(super) const PAGE: usize = PAGE_TOKENS as usize;
/// Query heads that share one pass over the pages.
pub(super) const GROUP: usize = 16;

/// `attend_sparse`.
pub fn attend_sparse(args: &Bound<'_, AttendSparseArgs>, workgroup: &mut Workgroup<'_>) {
    let [row, kv_head, _] = workgroup.id;
    if row >= args.rows || kv_head >= args.kv_heads {
        return;
    }
    let (kv_head, kv_heads, width) = (kv_head as usize, args.kv_heads as usize, args.table_pages as usize);
    let half = args.block_size as usize / PAGE;
    let shape = Shape {
        q_heads: args.q_heads as usize,
        kv_heads,
        kv_head,
        head_dim: args.head_dim as usize,
        v_pages: half,
        scale: args.scale * args.k_scale,
        v_scale: args.v_scale,
    };
    let table = args.read::<i32>(|a| &a.page_table);
    let lens = args.read::<i32>(|a| &a.page_len);
    let len = |row: usize| lens.get(row * kv_heads + kv_head).clamp(0, (width * PAGE) as i32) as usize;
    // An id folds the KV head in: page * kv_heads + head.
    let page_at = |row: usize, page: usize| {
        let id = usize::try_from(table.get((row * kv_heads + kv_head) * width + page)).ok()?;
        let page = id / kv_heads;
        (page % (2 * half) < half && page / (2 * half) < args.cache_blocks as usize).then_some(id)
    };
    let Some(rows) = Rows::of(row as usize, args.rows as usize, &shape, len, page_at) else { return };
    let (query, mut out) = (args.read::<f32>(|a| &a.q), args.write::<f32>(|a| &a.out));
    with_cell!(args.kv_dtype, T => attend(shape, rows, query, args.read::<T>(|a| &a.kv_cache), page_at, &mut out));
}

/// `attend_dense`.
pub fn attend_dense(args: &Bound<'_, AttendDenseArgs>, workgroup: &mut Workgroup<'_>) {
    let [row, kv_head, _] = workgroup.id;
    if row >= args.rows || kv_head >= args.kv_heads {
        return;
    }
    let (kv_head, kv_heads, width) = (kv_head as usize, args.kv_heads as usize, args.table_width as usize);
    let block_pages = args.block_size as usize / PAGE;
    let shape = Shape {
        q_heads: args.q_heads as usize,
        kv_heads,
        kv_head,
        head_dim: args.head_dim as usize,
        v_pages: block_pages,
        scale: args.scale,
        v_scale: 1.0,
    };
    let table = args.read::<i32>(|a| &a.block_table);
    let (lens, slots) = (args.read::<i32>(|a| &a.row_len), args.read::<i32>(|a| &a.row_slot));
    let slot = |row: usize| usize::try_from(slots.get(row)).ok().filter(|&slot| slot < args.slots as usize);
    let len = |row: usize| match slot(row) {
        Some(_) => lens.get(row).clamp(0, (width * block_pages * PAGE) as i32) as usize,
        None => 0,
    };
    let page_at = |row: usize, page: usize| {
        let id = table.get(slot(row)? * width + page / block_pages);
        let id = usize::try_from(id).ok().filter(|&id| id < args.cache_blocks as usize)?;
        Some((id * 2 * block_pages + page % block_pages) * kv_heads + kv_head)
    };
    let Some(rows) = Rows::of(row as usize, args.rows as usize, &shape, len, page_at) else { return };
    let (query, mut out) = (args.read::<f32>(|a| &a.q), args.write::<f32>(|a| &a.out));
    with_cell!(args.kv_dtype, T => attend(shape, rows, query, args.read::<T>(|a| &a.kv_cache), page_at, &mut out));
}

/// What of the geometry both kernels share.
#[derive(Clone, Copy)]
pub(super) struct Shape {
    pub q_heads: usize,
    pub kv_heads: usize,
    pub kv_head: usize,
    pub head_dim: usize,
    /// Pages from a K page to its V page.
    pub v_pages: usize,
    pub scale: f32,
    pub v_scale: f32,
}

impl Shape {
    pub fn group(&self) -> usize {
        self.q_heads / self.kv_heads
    }
    /// First element of a query head of this KV head's group.
    pub fn at(&self, row: usize, head: usize) -> usize {
        (row * self.q_heads + self.kv_head * self.group() + head) * self.head_dim
    }
    /// The K and the V page of a page id with the KV head folded in; both are empty for none.
    #[inline(always)]
    pub fn pages<'a, T: Cell>(&self, cache: &View<'a, T>, id: Option<usize>) -> (&'a [T], &'a [T]) {
        let one = PAGE * self.head_dim;
        match id {
            Some(id) => (cache.slice(id * one, one), cache.slice((id + self.v_pages * self.kv_heads) * one, one)),
            None => (&[], &[]),
        }
    }
}

/// All query heads of one KV head.
fn attend<T: Cell>(
    shape: Shape,
    rows: Rows,
    query: View<'_, f32>,
    cache: View<'_, T>,
    page_at: impl Fn(usize, usize) -> Option<usize> + Copy,
    out: &mut ViewMut<'_, f32>,
) {
    assert!(
        (shape.head_dim * size_of::<T>()).is_multiple_of(16),
        "a head of {} channels does not fill 16-byte groups",
        shape.head_dim
    );
    match shape.head_dim {
        0..=32 => attend_heads::<T, _, 32>(shape, rows, query, cache, page_at, out),
        33..=64 => attend_heads::<T, _, 64>(shape, rows, query, cache, page_at, out),
        65..=128 => attend_heads::<T, _, 128>(shape, rows, query, cache, page_at, out),
        129..=256 => attend_heads::<T, _, 256>(shape, rows, query, cache, page_at, out),
        dim => panic!("a head of {dim} channels is past 256"),
    }
}

fn attend_heads<T: Cell, F: Fn(usize, usize) -> Option<usize> + Copy, const D: usize>(
    shape: Shape,
    rows: Rows,
    query: View<'_, f32>,
    cache: View<'_, T>,
    page_at: F,
    out: &mut ViewMut<'_, f32>,
) {
    if rows.count > 1 {
        return dispatch(Tile::<T, F, D> { shape, rows, query, cache, page_at, out });
    }
    for head in (0..shape.group()).step_by(GROUP) {
        let heads = (shape.group() - head).min(GROUP);
        let at = shape.at(rows.first, head);
        let (query, out) = (query.slice(at, heads * shape.head_dim), out.slice_mut(at, heads * shape.head_dim));
        dispatch(Pass::<T, F, D> { shape, row: rows.first, len: rows.lens[0], query, cache, page_at, out });
    }
}

/// Up to [`GROUP`] query heads of one row.
struct Pass<'a, T, F, const D: usize> {
    shape: Shape,
    row: usize,
    len: usize,
    query: &'a [f32],
    cache: View<'a, T>,
    page_at: F,
    out: &'a mut [f32],
}

impl<T: Cell, F: Fn(usize, usize) -> Option<usize>, const D: usize> LaneOp for Pass<'_, T, F, D> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let (head_dim, len) = (self.shape.head_dim, self.len);
        let heads = self.query.len() / head_dim;
        let mut query = [[0.0; D]; GROUP];
        for (to, from) in query.iter_mut().zip(self.query.chunks(head_dim)) {
            to.iter_mut().zip(from).for_each(|(to, from)| *to = from * (self.shape.scale * T::UNIT));
        }
        let (mut k, mut v) = ([[0.0; D]; PAGE], [[0.0; D]; PAGE]);
        let mut state = Softmax::<D>::new();
        let mut scores_of = [[0.0; PAGE]; GROUP];
        let mut fade = [0.0; GROUP];
        let pages = len.div_ceil(PAGE);
        for page in 0..pages {
            let Some(id) = (self.page_at)(self.row, page) else { continue };
            let (from_k, from_v) = self.shape.pages(&self.cache, Some(id));
            let tokens = (len - page * PAGE).min(PAGE);
            // A page lies anywhere in memory: no hardware looks ahead to the next one.
            let next = if page + 1 < pages { (self.page_at)(self.row, page + 1) } else { None };
            let (next_k, next_v) = self.shape.pages(&self.cache, next);
            match T::as_f32(from_k) {
                Some(k) => {
                    let next = T::as_f32(next_k).unwrap_or_default();
                    attend_f32::scores::<L, D>(&query, heads, k, next, &mut scores_of);
                }
                None => {
                    widen_k::<L, T, D>(from_k, next_k, head_dim, &mut k);
                    scores::<L, D>(&query, heads, &k, &mut scores_of);
                }
            }
            for h in 0..heads {
                fade[h] = weigh::<L>(&mut scores_of[h], tokens, &mut state.most[h], &mut state.total[h]);
            }
            if let (Some(v), Some(next)) = (T::as_f32(from_v), T::as_f32(next_v)) {
                attend_f32::accumulate::<L, D>(&mut state.sums, &fade, &scores_of, heads, tokens, v, next);
                continue;
            }
            widen_v::<L, T, D>(from_v, next_v, head_dim, &mut v);
            for h in (0..heads).step_by(2) {
                for d in (0..D / 8).step_by(4) {
                    state.accumulate::<L>(h, d, &fade, &scores_of, tokens, &v);
                }
            }
        }
        for (h, out) in self.out.chunks_mut(head_dim).enumerate() {
            state.write(h, self.shape.v_scale * T::UNIT, out);
        }
    }
}

/// BF16 or E4M3FN \[head_dim / x, 16, x\] to [16, D]; the last channels stay zero. Asks for `next` first.
#[inline(always)]
pub(super) fn widen_k<L: Lanes, T: Cell, const D: usize>(from: &[T], next: &[T], head_dim: usize, to: &mut [[f32; D]; PAGE]) {
    ask_for(next);
    let hidden = T::nan_hidden::<L>(from);
    let eights = 2 / size_of::<T>(); // of one token in a row: 1 for bf16, 2 for fp8
    for (i, values) in from[..head_dim * PAGE].as_chunks::<8>().0.iter().enumerate() {
        let (d, t) = (i / (PAGE * eights) * eights + i % eights, i / eights % PAGE);
        T::load_as::<L>(values, hidden).store(&mut to[t].as_chunks_mut::<8>().0[d]);
    }
}

/// BF16 or E4M3FN \[16 / x, head_dim, x\] to [16, D]; the last channels stay zero. Asks for `next` first.
#[inline(always)]
fn widen_v<L: Lanes, T: Cell, const D: usize>(from: &[T], next: &[T], head_dim: usize, to: &mut [[f32; D]; PAGE]) {
    ask_for(next);
    let hidden = T::nan_hidden::<L>(from);
    for half in 0..PAGE / 8 {
        for d in 0..head_dim / 8 {
            for (t, row) in eight_by_eight::<L, T>(from, head_dim, half, d, hidden).iter().enumerate() {
                row.store(&mut to[half * 8 + t].as_chunks_mut::<8>().0[d]);
            }
        }
    }
}

/// Channels 8d.. of tokens 8half.. of V `[16 / x, head_dim, x]`, BF16 or E4M3FN, a token a row.
#[inline(always)]
pub(super) fn eight_by_eight<L: Lanes, T: Cell>(from: &[T], head_dim: usize, half: usize, d: usize, exact: bool) -> [L; 8] {
    let (eight, _) = from.as_chunks::<8>();
    let one_row = size_of::<T>() == 1; // E4M3FN: both halves of a channel's tokens lie side by side
    let mut rows = [L::splat(0.0); 8];
    for (i, row) in rows.iter_mut().enumerate() {
        let channel = d * 8 + i;
        *row = T::load_as(&eight[if one_row { channel * 2 + half } else { half * head_dim + channel }], exact);
    }
    L::transpose(&mut rows);
    rows
}

/// Prefetches every cache line of `data`.
#[inline(always)]
fn ask_for<T>(data: &[T]) {
    for line in data.chunks(64 / size_of::<T>()) {
        prefetch(line);
    }
}

/// Scores [head, token] of a page, the scale already in the query; of heads up to the next multiple of four.
#[inline(always)]
pub(super) fn scores<L: Lanes, const D: usize>(query: &[[f32; D]], heads: usize, k: &[[f32; D]; PAGE], out: &mut [[f32; PAGE]]) {
    for h in (0..heads).step_by(4) {
        for t in (0..PAGE).step_by(2) {
            let mut sums = [[L::splat(0.0); 4]; 2];
            for c in 0..D / 8 {
                let keys = [L::load(&k[t].as_chunks::<8>().0[c]), L::load(&k[t + 1].as_chunks::<8>().0[c])];
                for p in 0..4 {
                    let query = L::load(&query[h + p].as_chunks::<8>().0[c]);
                    sums[0][p] = query.mul_add(keys[0], sums[0][p]);
                    sums[1][p] = query.mul_add(keys[1], sums[1][p]);
                }
            }
            let sums = [L::sum4(sums[0]), L::sum4(sums[1])];
            for p in 0..4 {
                (out[h + p][t], out[h + p][t + 1]) = (sums[0][p], sums[1][p]);
            }
        }
    }
}

/// Turns a page's scores of one head into weights e^(score - most), zero past the first `tokens` tokens; gives what older sums
/// must be multiplied by. `most` is the head's largest score so far, `total` the sum of its weights.
#[inline(always)]
pub(super) fn weigh<L: Lanes>(scores: &mut [f32; PAGE], tokens: usize, most: &mut f32, total: &mut f32) -> f32 {
    scores[tokens..].fill(f32::NEG_INFINITY);
    let (eight, _) = scores.as_chunks_mut::<8>();
    let (low, high) = (L::load(&eight[0]), L::load(&eight[1]));
    let old = *most;
    *most = low.max(L::splat(old)).max_lane().max(high.max_lane()).max(old);
    let shift = L::splat(*most);
    low.sub(shift).exp().store(&mut eight[0]);
    high.sub(shift).exp().store(&mut eight[1]);
    scores[tokens..].fill(0.0);
    let (eight, _) = scores.as_chunks::<8>();
    let mut fade = [1.0; 8];
    // e^0 is 1 exactly; minus infinity less itself is NaN.
    if old != *most || old == f32::NEG_INFINITY {
        L::splat(old - *most).exp().store(&mut fade);
    }
    *total = total.mul_add(fade[0], L::load(&eight[0]).add(L::load(&eight[1])).sum());
    fade[0]
}

/// The online softmax of up to [`GROUP`] heads.
pub(super) struct Softmax<const D: usize> {
    /// Sum of e^(score - most) V, a head a row.
    pub sums: [[f32; D]; GROUP],
    /// Largest score so far.
    pub most: [f32; GROUP],
    /// Sum of e^(score - most).
    pub total: [f32; GROUP],
}

impl<const D: usize> Softmax<D> {
    pub fn new() -> Softmax<D> {
        Softmax { sums: [[0.0; D]; GROUP], most: [f32::NEG_INFINITY; GROUP], total: [0.0; GROUP] }
    }

    /// The output of a head, times `scale`. No page was found: zeros, as for length 0.
    #[inline(always)]
    pub fn write(&self, head: usize, scale: f32, out: &mut [f32]) {
        let share = if self.total[head] == 0.0 { 0.0 } else { scale / self.total[head] };
        out.iter_mut().zip(&self.sums[head]).for_each(|(out, sum)| *out = sum * share);
    }

    /// Two heads, four lanes' worth of channels.
    #[inline(always)]
    fn accumulate<L: Lanes>(
        &mut self,
        h: usize,
        d: usize,
        fade: &[f32; GROUP],
        weights: &[[f32; PAGE]; GROUP],
        tokens: usize,
        v: &[[f32; D]; PAGE],
    ) {
        let mut sums = [[L::splat(0.0); 4]; 2];
        for (p, sums) in sums.iter_mut().enumerate() {
            let (from, fade) = (self.sums[h + p].as_chunks::<8>().0, L::splat(fade[h + p]));
            for (i, sum) in sums.iter_mut().enumerate() {
                *sum = L::load(&from[d + i]).mul(fade);
            }
        }
        for (t, v) in v[..tokens].iter().enumerate() {
            let v = &v.as_chunks::<8>().0[d..d + 4];
            let values = [L::load(&v[0]), L::load(&v[1]), L::load(&v[2]), L::load(&v[3])];
            for (p, sums) in sums.iter_mut().enumerate() {
                let weight = L::splat(weights[h + p][t]);
                for (sum, &value) in sums.iter_mut().zip(&values) {
                    *sum = weight.mul_add(value, *sum);
                }
            }
        }
        for (p, sums) in sums.iter().enumerate() {
            let to = self.sums[h + p].as_chunks_mut::<8>().0;
            for (i, sum) in sums.iter().enumerate() {
                sum.store(&mut to[d + i]);
            }
        }
    }
}
