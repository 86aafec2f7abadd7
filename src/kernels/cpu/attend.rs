//! The attend kernels: softmax attention over pages of 16 tokens (`msa-spec` section 6).
//!
//! A page is widened to f32 once and serves all query heads of its KV head. The softmax runs online, page by page, so a row's
//! bits depend on its query, its pages in their order and its length. What lies past the length is never used: a NaN there
//! cannot reach a result, even as a factor of zero. Page ids outside the cache are skipped.

use super::attend_f32;
use super::cell::{Cell, with_cell};
use super::simd::{LaneOp, Lanes, dispatch, prefetch};
use super::view::{Bound, View};
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
    let (row, kv_heads, width) = (row as usize, args.kv_heads as usize, args.table_pages as usize);
    let at = row * kv_heads + kv_head as usize;
    let table = args.read::<i32>(|a| &a.page_table);
    let half = args.block_size as usize / PAGE;
    // An id folds the KV head in: page * kv_heads + head.
    let page_at = |page: usize| {
        let id = usize::try_from(table.get(at * width + page)).ok()?;
        let (page, head) = (id / kv_heads, id % kv_heads);
        (page % (2 * half) < half && page / (2 * half) < args.cache_blocks as usize).then_some((page, head))
    };
    let shape = Shape {
        q_heads: args.q_heads as usize,
        kv_heads,
        head_dim: args.head_dim as usize,
        v_pages: half,
        scale: args.scale * args.k_scale,
        v_scale: args.v_scale,
        row,
        kv_head: kv_head as usize,
        len: args.read::<i32>(|a| &a.page_len).get(at).clamp(0, (width * PAGE) as i32) as usize,
    };
    let query = args.read::<f32>(|a| &a.q);
    let mut out = args.write::<f32>(|a| &a.out);
    let (query, out) = (query.slice(shape.start(), shape.size()), out.slice_mut(shape.start(), shape.size()));
    with_cell!(args.kv_dtype, T => attend(shape, query, args.read::<T>(|a| &a.kv_cache), page_at, out));
}

/// `attend_dense`.
pub fn attend_dense(args: &Bound<'_, AttendDenseArgs>, workgroup: &mut Workgroup<'_>) {
    let [row, kv_head, _] = workgroup.id;
    if row >= args.rows || kv_head >= args.kv_heads {
        return;
    }
    let (row, kv_head, width) = (row as usize, kv_head as usize, args.table_width as usize);
    let block_pages = args.block_size as usize / PAGE;
    let len = args.read::<i32>(|a| &a.row_len).get(row).clamp(0, (width * block_pages * PAGE) as i32) as usize;
    let slot = args.read::<i32>(|a| &a.row_slot).get(row);
    let known = slot >= 0 && (slot as u32) < args.slots;
    let table = args.read::<i32>(|a| &a.block_table);
    let page_at = |page: usize| {
        let id = table.get(slot as usize * width + page / block_pages);
        let id = usize::try_from(id).ok().filter(|&id| id < args.cache_blocks as usize)?;
        Some((id * 2 * block_pages + page % block_pages, kv_head))
    };
    let shape = Shape {
        q_heads: args.q_heads as usize,
        kv_heads: args.kv_heads as usize,
        head_dim: args.head_dim as usize,
        v_pages: block_pages,
        scale: args.scale,
        v_scale: 1.0,
        row,
        kv_head,
        len: if known { len } else { 0 },
    };
    let query = args.read::<f32>(|a| &a.q);
    let mut out = args.write::<f32>(|a| &a.out);
    let (query, out) = (query.slice(shape.start(), shape.size()), out.slice_mut(shape.start(), shape.size()));
    with_cell!(args.kv_dtype, T => attend(shape, query, args.read::<T>(|a| &a.kv_cache), page_at, out));
}

/// What of the geometry both kernels share.
#[derive(Clone, Copy)]
struct Shape {
    q_heads: usize,
    kv_heads: usize,
    head_dim: usize,
    /// Pages from a K page to its V page.
    v_pages: usize,
    scale: f32,
    v_scale: f32,
    row: usize,
    kv_head: usize,
    len: usize,
}

impl Shape {
    fn group(&self) -> usize {
        self.q_heads / self.kv_heads
    }
    /// First element of this workgroup's query heads.
    fn start(&self) -> usize {
        (self.row * self.q_heads + self.kv_head * self.group()) * self.head_dim
    }
    fn size(&self) -> usize {
        self.group() * self.head_dim
    }
}

/// All query heads of one KV head, in passes of [`GROUP`].
fn attend<T: Cell>(
    shape: Shape,
    query: &[f32],
    cache: View<'_, T>,
    page_at: impl Fn(usize) -> Option<(usize, usize)> + Copy,
    out: &mut [f32],
) {
    assert!(
        (shape.head_dim * size_of::<T>()).is_multiple_of(16),
        "a head of {} channels does not fill 16-byte groups",
        shape.head_dim
    );
    if shape.len == 0 {
        out.fill(0.0);
        return;
    }
    let pass = GROUP * shape.head_dim;
    for (query, out) in query.chunks(pass).zip(out.chunks_mut(pass)) {
        match shape.head_dim {
            0..=32 => dispatch(Pass::<T, _, 32> { shape, query, cache, page_at, out }),
            33..=64 => dispatch(Pass::<T, _, 64> { shape, query, cache, page_at, out }),
            65..=128 => dispatch(Pass::<T, _, 128> { shape, query, cache, page_at, out }),
            129..=256 => dispatch(Pass::<T, _, 256> { shape, query, cache, page_at, out }),
            dim => panic!("a head of {dim} channels is past 256"),
        }
    }
}

struct Pass<'a, T, F, const D: usize> {
    shape: Shape,
    query: &'a [f32],
    cache: View<'a, T>,
    page_at: F,
    out: &'a mut [f32],
}

impl<T: Cell, F: Fn(usize) -> Option<(usize, usize)>, const D: usize> LaneOp for Pass<'_, T, F, D> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let Shape { head_dim, kv_heads, len, .. } = self.shape;
        let heads = self.query.len() / head_dim;
        let mut query = [[0.0; D]; GROUP];
        for (to, from) in query.iter_mut().zip(self.query.chunks(head_dim)) {
            to.iter_mut().zip(from).for_each(|(to, from)| *to = from * (self.shape.scale * T::UNIT));
        }
        let (mut k, mut v) = ([[0.0; D]; PAGE], [[0.0; D]; PAGE]);
        let mut state = Softmax::<D> { sums: [[0.0; D]; GROUP], most: [f32::NEG_INFINITY; GROUP], total: [0.0; GROUP] };
        let one = PAGE * head_dim;
        let cache = |page: usize| {
            let (id, head) = (self.page_at)(page)?;
            let [k, v] = [id, id + self.shape.v_pages].map(|id| self.cache.slice((id * kv_heads + head) * one, one));
            Some((k, v))
        };
        let pages = len.div_ceil(PAGE);
        for page in 0..pages {
            let Some((from_k, from_v)) = cache(page) else { continue };
            let tokens = (len - page * PAGE).min(PAGE);
            // A page lies anywhere in memory: no hardware looks ahead to the next one.
            let (next_k, next_v) = if page + 1 < pages { cache(page + 1) } else { None }.unwrap_or_default();
            if let (Some(k), Some(v)) = (T::as_f32(from_k), T::as_f32(from_v)) {
                let [next_k, next_v] = [next_k, next_v].map(|next| T::as_f32(next).unwrap_or_default());
                let mut scores = attend_f32::scores::<L, D>(&query, heads, k, next_k);
                let fade = state.weigh::<L>(&mut scores, heads, tokens);
                attend_f32::accumulate::<L, D>(&mut state.sums, &fade, &scores, heads, tokens, v, next_v);
                continue;
            }
            widen_k::<L, T, D>(from_k, next_k, head_dim, &mut k);
            widen_v::<L, T, D>(from_v, next_v, head_dim, &mut v);
            let mut scores = scores::<L, D>(&query, heads, &k);
            let fade = state.weigh::<L>(&mut scores, heads, tokens);
            for h in (0..heads).step_by(2) {
                for d in (0..D / 8).step_by(4) {
                    state.accumulate::<L>(h, d, &fade, &scores, tokens, &v);
                }
            }
        }
        for (h, out) in self.out.chunks_mut(head_dim).enumerate() {
            // No page was found: zeros, as for length 0.
            let share = if state.total[h] == 0.0 { 0.0 } else { self.shape.v_scale * T::UNIT / state.total[h] };
            out.iter_mut().zip(&state.sums[h]).for_each(|(out, sum)| *out = sum * share);
        }
    }
}

/// BF16 or E4M3FN \[head_dim / x, 16, x\] to [16, D]; the last channels stay zero. Asks for `next` first.
#[inline(always)]
fn widen_k<L: Lanes, T: Cell, const D: usize>(from: &[T], next: &[T], head_dim: usize, to: &mut [[f32; D]; PAGE]) {
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
    let eights = 2 / size_of::<T>(); // of one channel in a row
    let (eight, _) = from.as_chunks::<8>();
    for half in 0..PAGE / 8 {
        for d in 0..head_dim / 8 {
            let mut rows = [L::splat(0.0); 8];
            for (i, row) in rows.iter_mut().enumerate() {
                let channel = d * 8 + i;
                *row = T::load_as(&eight[if eights == 2 { channel * 2 + half } else { half * head_dim + channel }], hidden);
            }
            L::transpose(&mut rows);
            for (t, row) in rows.iter().enumerate() {
                row.store(&mut to[half * 8 + t].as_chunks_mut::<8>().0[d]);
            }
        }
    }
}

/// Prefetches every cache line of `data`.
#[inline(always)]
fn ask_for<T>(data: &[T]) {
    for line in data.chunks(64 / size_of::<T>()) {
        prefetch(line);
    }
}

/// Scores [head, token] of a page, the scale already in the query.
#[inline(always)]
fn scores<L: Lanes, const D: usize>(query: &[[f32; D]; GROUP], heads: usize, k: &[[f32; D]; PAGE]) -> [[f32; PAGE]; GROUP] {
    let mut out = [[0.0; PAGE]; GROUP];
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
    out
}

/// The online softmax of a pass.
struct Softmax<const D: usize> {
    /// Sum of e^(score - most) V, a head a row.
    sums: [[f32; D]; GROUP],
    /// Largest score so far.
    most: [f32; GROUP],
    /// Sum of e^(score - most).
    total: [f32; GROUP],
}

impl<const D: usize> Softmax<D> {
    /// Turns scores into weights e^(score - most), zero past the first `tokens` tokens; gives what older sums must be
    /// multiplied by.
    #[inline(always)]
    fn weigh<L: Lanes>(&mut self, scores: &mut [[f32; PAGE]; GROUP], heads: usize, tokens: usize) -> [f32; GROUP] {
        let mut fade = [0.0; GROUP];
        for h in 0..heads {
            scores[h][tokens..].fill(f32::NEG_INFINITY);
            let (eight, _) = scores[h].as_chunks_mut::<8>();
            let (low, high) = (L::load(&eight[0]), L::load(&eight[1]));
            let most = low.max(L::splat(self.most[h])).max_lane().max(high.max_lane()).max(self.most[h]);
            let shift = L::splat(most);
            low.sub(shift).exp().store(&mut eight[0]);
            high.sub(shift).exp().store(&mut eight[1]);
            scores[h][tokens..].fill(0.0);
            let (eight, _) = scores[h].as_chunks::<8>();
            let mut faded = [0.0; 8];
            L::splat(self.most[h] - most).exp().store(&mut faded);
            fade[h] = faded[0];
            self.total[h] = self.total[h].mul_add(fade[h], L::load(&eight[0]).add(L::load(&eight[1])).sum());
            self.most[h] = most;
        }
        fade
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
