//! The score kernels: the largest dot product of each visible block (`msa-spec` section 3).
//!
//! One function computes the score of (row, head, block) for decode and prefill, all shapes, all shards. Its bits depend on that
//! row's query, the block's visible keys and nothing else: products are summed over channels in one order, and a largest
//! value has no order. NaN products are skipped, as an IEEE maxNum does; a block of nothing else scores minus infinity.
//! So does a visible block whose table entry is no cache block.

use std::ops::Range;

use super::cell::{Cell, with_cell};
use super::fp8::F8E4M3;
use super::simd::{LaneOp, Lanes, dispatch, prefetch};
use super::view::{Bound, View, ViewMut};
use crate::hal::Workgroup;
use crate::kernels::msa::{INIT_SENTINEL, LOCAL_SENTINEL, ScoreDecodeArgs, ScorePrefillArgs};

/// Floats of a workgroup's query scratch; an index head has at most as many channels.
const SCRATCH: usize = 4096;
/// (row, head) pairs that one pass over the keys takes at most.
const PAIRS: usize = 64;

/// `score_decode` for any shape.
pub fn score_decode(args: &Bound<'_, ScoreDecodeArgs>, workgroup: &mut Workgroup<'_>) {
    with_cell!(args.index_dtype, T => dispatch(Decode::<T, 0> { args, id: workgroup.id, chunks: workgroup.shape.grid[0], kind: Default::default() }))
}

/// `score_decode` for the shape of the M3 contract; the same bits.
pub fn score_decode_m3(args: &Bound<'_, ScoreDecodeArgs>, workgroup: &mut Workgroup<'_>) {
    assert!(
        args.dim == 128 && args.block_size == 128 && args.heads * args.query_len <= 16,
        "score_decode_m3 takes dim 128, block_size 128, heads * query_len <= 16"
    );
    let chunks = workgroup.shape.grid[0];
    dispatch(Decode::<F8E4M3, 128> { args, id: workgroup.id, chunks, kind: Default::default() })
}

/// `score_prefill`.
pub fn score_prefill(args: &Bound<'_, ScorePrefillArgs>, workgroup: &mut Workgroup<'_>) {
    let chunks = workgroup.shape.grid[0];
    with_cell!(args.index_dtype, T => dispatch(Prefill::<T> { args, id: workgroup.id, chunks, kind: Default::default() }))
}

/// What of the geometry both kernels share.
#[derive(Clone, Copy)]
struct Geometry {
    heads: usize,
    dim: usize,
    block_size: usize,
    init_blocks: usize,
    local_blocks: usize,
    score_rows: usize,
    score_width: usize,
    table_width: usize,
    cache_blocks: usize,
}

macro_rules! geometry {
    ($args:expr) => {
        Geometry {
            heads: $args.heads as usize,
            dim: $args.dim as usize,
            block_size: $args.block_size as usize,
            init_blocks: $args.init_blocks as usize,
            local_blocks: $args.local_blocks as usize,
            score_rows: $args.score_rows as usize,
            score_width: $args.score_width as usize,
            table_width: $args.table_width as usize,
            cache_blocks: $args.cache_blocks as usize,
        }
    };
}

struct Decode<'a, T, const DIM: usize> {
    args: &'a Bound<'a, ScoreDecodeArgs>,
    id: [u32; 3],
    chunks: u32,
    kind: std::marker::PhantomData<T>,
}

impl<T: Cell, const DIM: usize> LaneOp for Decode<'_, T, DIM> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let args = self.args;
        let sequence = self.id[1] as usize;
        if self.id[1] >= args.sequences {
            return;
        }
        let kv_len = i64::from(args.read::<i32>(|a| &a.seq_len).get(sequence));
        let slot = args.read::<i32>(|a| &a.seq_slot).get(sequence);
        if kv_len <= 0 || slot < 0 || slot as u32 >= args.slots {
            return;
        }
        let query_len = args.query_len as usize;
        // The last row sees the whole sequence, so its blocks are the request's.
        let blocks = (kv_len as usize).div_ceil(args.block_size as usize);
        let (rank, world) = (args.rank as usize, args.world.max(1) as usize);
        let local = blocks.saturating_sub(rank).div_ceil(world).min(args.score_width as usize);
        let per = local.div_ceil(self.chunks as usize);
        let first = self.id[0] as usize * per;
        let run = Run {
            geometry: geometry!(args),
            first_row: sequence * query_len,
            rows: query_len,
            len_of: |t: usize| (kv_len - query_len as i64 + t as i64 + 1).max(0) as usize,
            query: args.read::<T>(|a| &a.index_q),
            query_start: sequence * query_len * (args.heads * args.dim) as usize,
            query_row: (args.heads * args.dim) as usize,
            keys: args.read::<T>(|a| &a.index_cache),
            table: args.read(|a| &a.block_table),
            slot: slot as usize,
            rank,
            world,
        };
        run.score::<L, DIM>(first..(first + per).min(local), &mut args.write(|a| &a.score));
    }
}

struct Prefill<'a, T> {
    args: &'a Bound<'a, ScorePrefillArgs>,
    id: [u32; 3],
    chunks: u32,
    kind: std::marker::PhantomData<T>,
}

impl<T: Cell> LaneOp for Prefill<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let args = self.args;
        let (rows, tile) = (args.rows as usize, args.tile_rows as usize);
        let slots = args.read::<i32>(|a| &a.row_slot);
        let lens = args.read::<i32>(|a| &a.row_len);
        let mut score = args.write(|a| &a.score);
        let end = ((self.id[1] as usize + 1) * tile).min(rows);
        let mut first = self.id[1] as usize * tile;
        while first < end {
            // The rows of one sequence follow each other; a pad row is a run of its own that scores nothing.
            let slot = slots.get(first);
            let mut last = first + 1;
            while last < end && slots.get(last) == slot && lens.get(last) > 0 && lens.get(first) > 0 {
                last += 1;
            }
            let len_of = |t: usize| lens.get(first + t).max(0) as usize;
            let longest = (0..last - first).map(len_of).max().unwrap_or(0);
            if longest > 0 && slot >= 0 && (slot as u32) < args.slots {
                let blocks = longest.div_ceil(args.block_size as usize).min(args.score_width as usize);
                let per = blocks.div_ceil(self.chunks as usize);
                let start = self.id[0] as usize * per;
                let stride = (args.q_heads_stride * args.dim) as usize;
                let run = Run {
                    geometry: geometry!(args),
                    first_row: first,
                    rows: last - first,
                    len_of,
                    query: args.read::<T>(|a| &a.index_q),
                    query_start: first * stride + (args.first_head * args.dim) as usize,
                    query_row: stride,
                    keys: args.read::<T>(|a| &a.index_cache),
                    table: args.read(|a| &a.block_table),
                    slot: slot as usize,
                    rank: 0,
                    world: 1,
                };
                // The contract's width gets its own copy of the loops.
                match run.geometry.dim {
                    128 => run.score::<L, 128>(start..(start + per).min(blocks), &mut score),
                    _ => run.score::<L, 0>(start..(start + per).min(blocks), &mut score),
                }
            }
            first = last;
        }
    }
}

/// Consecutive rows of one sequence.
struct Run<'a, T, F> {
    geometry: Geometry,
    first_row: usize,
    rows: usize,
    len_of: F,
    query: View<'a, T>,
    query_start: usize,
    query_row: usize,
    keys: View<'a, T>,
    table: View<'a, i32>,
    slot: usize,
    rank: usize,
    world: usize,
}

impl<T: Cell, F: Fn(usize) -> usize> Run<'_, T, F> {
    /// Scores the shard's blocks `local` for all rows and heads.
    #[inline(always)]
    fn score<L: Lanes, const DIM: usize>(&self, local: Range<usize>, score: &mut ViewMut<'_, f32>) {
        if local.is_empty() {
            return;
        }
        let dim = if DIM > 0 { DIM } else { self.geometry.dim };
        let padded = dim.next_multiple_of(8);
        assert!(padded <= SCRATCH, "an index head of {dim} channels is past {SCRATCH}");
        let mut query = [0.0; SCRATCH];
        let most = (SCRATCH / padded).min(PAIRS);
        let pairs = self.rows * self.geometry.heads;
        for first in (0..pairs).step_by(most) {
            let batch = first..(first + most).min(pairs);
            for (pair, to) in batch.clone().zip(query.chunks_exact_mut(padded)) {
                let (t, head) = (pair / self.geometry.heads, pair % self.geometry.heads);
                let from = self.query.slice(self.query_start + t * self.query_row + head * dim, dim);
                to.iter_mut().zip(from).for_each(|(to, from)| *to = from.decode() * T::UNIT);
                to[dim..].fill(0.0);
            }
            for at in local.clone() {
                let next = if at + 1 < local.end { self.block_keys(at + 1) } else { None };
                self.score_block::<L, DIM>(&query, batch.clone(), at, next, score);
            }
        }
    }

    /// The keys of a local block, or `None` if the table holds no cache block there.
    #[inline(always)]
    fn block_keys(&self, local: usize) -> Option<&[T]> {
        let g = &self.geometry;
        let block = local * self.world + self.rank;
        let id = if block < g.table_width { self.table.get(self.slot * g.table_width + block) } else { -1 };
        let one = g.block_size * g.dim;
        (id >= 0 && (id as usize) < g.cache_blocks).then(|| self.keys.slice(id as usize * one, one))
    }

    #[inline(always)]
    fn score_block<L: Lanes, const DIM: usize>(
        &self,
        query: &[f32],
        batch: Range<usize>,
        local: usize,
        next: Option<&[T]>,
        score: &mut ViewMut<'_, f32>,
    ) {
        let g = &self.geometry;
        let block = local * self.world + self.rank;
        let (mut visible, mut best) = ([0; PAIRS], [f32::NEG_INFINITY; PAIRS]);
        for (seen, pair) in visible.iter_mut().zip(batch.clone()) {
            let len = (self.len_of)(pair / g.heads);
            if g.forced(block, len).is_none() {
                *seen = len.saturating_sub(block * g.block_size).min(g.block_size);
            }
        }
        let pairs = batch.len();
        if visible[..pairs].iter().any(|&tokens| tokens > 0)
            && let Some(keys) = self.block_keys(local)
        {
            max_dots::<L, T, DIM>(query, g.dim, keys, &visible[..pairs], next, &mut best[..pairs]);
        }
        for (best, pair) in best.iter().zip(batch) {
            let (t, head) = (pair / g.heads, pair % g.heads);
            let value = g.forced(block, (self.len_of)(t)).unwrap_or(*best);
            score.set((head * g.score_rows + self.first_row + t) * g.score_width + local, value);
        }
    }
}

impl Geometry {
    /// The sentinel of a block that a row of causal length `len` must select; local wins over init (section 3.1).
    #[inline(always)]
    fn forced(&self, block: usize, len: usize) -> Option<f32> {
        let blocks = len.div_ceil(self.block_size);
        if block >= blocks {
            None
        } else if block + self.local_blocks >= blocks {
            Some(LOCAL_SENTINEL)
        } else {
            (block < self.init_blocks).then_some(INIT_SENTINEL)
        }
    }
}

/// For each pair p: the largest dot product of query p with its first `visible[p]` keys, if larger than `best[p]`.
#[inline(always)]
fn max_dots<L: Lanes, T: Cell, const DIM: usize>(
    query: &[f32],
    dim: usize,
    keys: &[T],
    visible: &[usize],
    next: Option<&[T]>,
    best: &mut [f32],
) {
    let dim = if DIM > 0 { DIM } else { dim };
    let padded = dim.next_multiple_of(8);
    let mut first = 0;
    while first < visible.len() {
        let query = &query[first * padded..];
        let (seen, best) = (&visible[first..], &mut best[first..]);
        let next = if first == 0 { next } else { None };
        first += match visible.len() - first {
            8.. => exact_or_fast::<L, T, DIM, 8, 1>(query, dim, keys, seen, next, best),
            4.. => exact_or_fast::<L, T, DIM, 4, 2>(query, dim, keys, seen, next, best),
            2.. => exact_or_fast::<L, T, DIM, 2, 4>(query, dim, keys, seen, next, best),
            _ => exact_or_fast::<L, T, DIM, 1, 4>(query, dim, keys, seen, next, best),
        };
    }
}

/// The first `P` pairs, `S` keys at a time; keys that hide a NaN are read once more, exactly. Gives `P`.
#[inline(always)]
fn exact_or_fast<L: Lanes, T: Cell, const DIM: usize, const P: usize, const S: usize>(
    query: &[f32],
    dim: usize,
    keys: &[T],
    visible: &[usize],
    next: Option<&[T]>,
    best: &mut [f32],
) -> usize {
    let before: [f32; P] = std::array::from_fn(|p| best[p]);
    if tile::<L, T, DIM, P, S, false>(query, dim, keys, visible, next, best) {
        best[..P].copy_from_slice(&before);
        tile::<L, T, DIM, P, S, true>(query, dim, keys, visible, None, best);
    }
    P
}

/// Gives true if a key hides a NaN, so that `best` must be computed again with `EXACT`.
#[inline(always)]
fn tile<L: Lanes, T: Cell, const DIM: usize, const P: usize, const S: usize, const EXACT: bool>(
    query: &[f32],
    dim: usize,
    keys: &[T],
    visible: &[usize],
    next: Option<&[T]>,
    best: &mut [f32],
) -> bool {
    let dim = if DIM > 0 { DIM } else { dim };
    let query = &query[..P * dim.next_multiple_of(8)];
    let most = visible[..P].iter().copied().max().unwrap_or(0);
    let least = visible[..P].iter().copied().min().unwrap_or(0);
    let mut found: [f32; P] = std::array::from_fn(|p| best[p]);
    let mut codes = L::no_codes();
    let mut hidden = false;
    let mut token = 0;
    while token < most {
        // Past the last key of the block its last key is taken again, which changes no maximum.
        let rows: [&[T]; S] = std::array::from_fn(|s| &keys[(token + s).min(most - 1) * dim..][..dim]);
        if let Some(next) = next {
            let ahead = &next[token * dim..(token + S).min(next.len() / dim) * dim];
            for line in ahead.chunks(64 / size_of::<T>()) {
                prefetch(line);
            }
        }
        if T::HIDES_NAN && !EXACT {
            for row in rows {
                if DIM > 0 && DIM.is_multiple_of(32) {
                    for chunk in row.as_chunks::<32>().0 {
                        codes = T::codes::<L>(codes, chunk);
                    }
                } else {
                    hidden |= T::nan_hidden::<L>(row);
                }
            }
        }
        let dots = dots::<L, T, DIM, P, S, EXACT>(query, dim, &rows);
        if token + S <= least {
            for dots in dots {
                (0..P).for_each(|p| found[p] = if dots[p] > found[p] { dots[p] } else { found[p] });
            }
        } else {
            for (s, dots) in dots.iter().enumerate() {
                (0..P).for_each(|p| found[p] = if token + s < visible[p] && dots[p] > found[p] { dots[p] } else { found[p] });
            }
        }
        token += S;
    }
    best[..P].copy_from_slice(&found);
    hidden || L::nan_seen(codes)
}

/// Dot products of `P` queries with `S` keys, over channels in the one order.
#[inline(always)]
fn dots<L: Lanes, T: Cell, const DIM: usize, const P: usize, const S: usize, const EXACT: bool>(
    query: &[f32],
    dim: usize,
    keys: &[&[T]; S],
) -> [[f32; P]; S] {
    let dim = if DIM > 0 { DIM } else { dim };
    let (query, stride) = (query.as_chunks::<8>().0, dim.div_ceil(8));
    // Lengths that the compiler knows where `DIM` is given, so that nothing is checked in the loop.
    let query = &query[..P * stride];
    let mut sums = [[L::splat(0.0); P]; S];
    for c in 0..dim / 8 {
        let mut lanes = [L::splat(0.0); S];
        for s in 0..S {
            lanes[s] = T::load_as(&keys[s][..dim].as_chunks().0[c], EXACT);
        }
        for p in 0..P {
            let query = L::load(&query[p * stride + c]);
            for s in 0..S {
                sums[s][p] = query.mul_add(lanes[s], sums[s][p]);
            }
        }
    }
    let (c, rest) = (dim / 8, dim % 8);
    if rest > 0 {
        for s in 0..S {
            let mut last = [T::zeroed(); 8];
            last[..rest].copy_from_slice(&keys[s][c * 8..]);
            let lanes: L = T::load_as(&last, EXACT);
            for p in 0..P {
                sums[s][p] = L::load(&query[p * stride + c]).mul_add(lanes, sums[s][p]);
            }
        }
    }
    reduce(sums)
}

#[inline(always)]
fn reduce<L: Lanes, const P: usize, const S: usize>(sums: [[L; P]; S]) -> [[f32; P]; S] {
    let mut out = [[0.0; P]; S];
    let flat = sums.as_flattened();
    for (from, to) in flat.as_chunks::<4>().0.iter().zip(out.as_flattened_mut().as_chunks_mut::<4>().0) {
        *to = L::sum4(*from);
    }
    out
}
