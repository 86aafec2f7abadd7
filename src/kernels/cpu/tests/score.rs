//! `score_decode`, `score_decode_m3`, `score_prefill` against an f64 loop over section 3.1's definition.

use half::bf16;

use super::super::cell::Cell;
use super::super::fp8::F8E4M3;
use super::super::ops;
use super::{Rng, ptr, run};
use crate::hal::CpuOp;
use crate::kernels::msa::{INIT_SENTINEL, LOCAL_SENTINEL, ScoreDecodeArgs, ScorePrefillArgs};

const UNTOUCHED: f32 = 12345.0;

/// A batch of uniform decode rows.
#[derive(Clone)]
struct Batch<T> {
    heads: usize,
    dim: usize,
    block_size: usize,
    query_len: usize,
    init: u32,
    local: u32,
    lens: Vec<i32>,
    width: usize,
    table_width: usize,
    cache_blocks: usize,
    query: Vec<T>,
    keys: Vec<T>,
    table: Vec<i32>,
    slots: Vec<i32>,
}

impl<T: Cell> Batch<T> {
    fn random(rng: &mut Rng, heads: usize, dim: usize, block_size: usize, query_len: usize, lens: &[i32]) -> Batch<T> {
        let blocks: Vec<usize> = lens.iter().map(|&len| (len as usize).div_ceil(block_size)).collect();
        let (table_width, cache_blocks) = (blocks.iter().max().unwrap() + 2, blocks.iter().sum::<usize>() + 3);
        let mut free = rng.permutation(cache_blocks);
        let slots: Vec<i32> = rng.permutation(lens.len() + 2)[..lens.len()].to_vec();
        let mut table = vec![-1; (lens.len() + 2) * table_width];
        for (&slot, &blocks) in slots.iter().zip(&blocks) {
            (0..blocks).for_each(|b| table[slot as usize * table_width + b] = free.pop().unwrap());
        }
        let mut cells = |count| (0..count).map(|_| T::encode(rng.normal() * 0.5)).collect();
        let query = cells(lens.len() * query_len * heads * dim);
        let keys = cells(cache_blocks * block_size * dim);
        let (lens, width) = (lens.to_vec(), table_width + 3);
        Batch {
            heads,
            dim,
            block_size,
            query_len,
            init: 0,
            local: 1,
            lens,
            width,
            table_width,
            cache_blocks,
            query,
            keys,
            table,
            slots,
        }
    }

    fn rows(&self) -> usize {
        self.lens.len() * self.query_len
    }

    /// Scores [heads, rows + 1, width] of one shard; untouched elements keep [`UNTOUCHED`].
    fn decode(&self, op: CpuOp, chunks: u32, rank: u32, world: u32) -> Vec<f32> {
        let mut b = self.clone();
        let mut score = vec![UNTOUCHED; b.heads * (b.rows() + 1) * b.width];
        let args = ScoreDecodeArgs {
            index_q: ptr(&mut b.query),
            index_cache: ptr(&mut b.keys),
            block_table: ptr(&mut b.table),
            seq_slot: ptr(&mut b.slots),
            seq_len: ptr(&mut b.lens),
            score: ptr(&mut score),
            sequences: b.lens.len() as u32,
            query_len: b.query_len as u32,
            heads: b.heads as u32,
            dim: b.dim as u32,
            block_size: b.block_size as u32,
            init_blocks: b.init,
            local_blocks: b.local,
            score_rows: b.rows() as u32 + 1,
            score_width: b.width as u32,
            slots: (b.table.len() / b.table_width) as u32,
            table_width: b.table_width as u32,
            cache_blocks: b.cache_blocks as u32,
            rank,
            world,
            index_dtype: T::DTYPE.code(),
            reserved: 0,
        };
        run(op, [chunks, b.lens.len() as u32, 1], &args);
        score
    }

    fn at(&self, head: usize, row: usize, block: usize) -> usize {
        (head * (self.rows() + 1) + row) * self.width + block
    }

    /// Section 3.1 in f64; `None` where nothing may be written.
    fn expected(&self, head: usize, row: usize, block: usize) -> Option<f64> {
        let (s, t) = (row / self.query_len, row % self.query_len);
        let longest = self.lens[s].max(0) as usize;
        let len = (self.lens[s] as i64 - self.query_len as i64 + t as i64 + 1).max(0) as usize;
        let size = self.block_size;
        if block * size >= longest {
            return None;
        }
        let blocks = len.div_ceil(size);
        if block < blocks && block + self.local as usize >= blocks {
            return Some(f64::from(LOCAL_SENTINEL));
        }
        if block < blocks && block < self.init as usize {
            return Some(f64::from(INIT_SENTINEL));
        }
        let id = self.table[self.slots[s] as usize * self.table_width + block];
        let mut best = f64::NEG_INFINITY;
        for token in block * size..((block + 1) * size).min(len) {
            if id < 0 || id as usize >= self.cache_blocks {
                continue;
            }
            let dot: f64 = (0..self.dim)
                .map(|d| {
                    let q = self.query[(row * self.heads + head) * self.dim + d].decode();
                    f64::from(q) * f64::from(self.keys[(id as usize * size + token % size) * self.dim + d].decode())
                })
                .sum();
            if dot > best {
                best = dot;
            }
        }
        Some(best)
    }

    fn check(&self, score: &[f32]) {
        for head in 0..self.heads {
            for row in 0..self.rows() {
                for block in 0..self.width {
                    let found = score[self.at(head, row, block)];
                    match self.expected(head, row, block) {
                        None => assert_eq!(found, UNTOUCHED, "head {head} row {row} block {block} is to stay untouched"),
                        Some(value) if value.is_infinite() => {
                            assert_eq!(f64::from(found), value, "head {head} row {row} block {block}")
                        }
                        Some(value) => assert!(
                            (f64::from(found) - value).abs() <= 1e-4 * (1.0 + value.abs()),
                            "head {head} row {row} block {block}: {found}, expected {value}"
                        ),
                    }
                }
            }
            let spare = self.at(head, self.rows(), 0);
            assert!(score[spare..spare + self.width].iter().all(|&x| x == UNTOUCHED));
        }
    }

    /// The same rows through `score_prefill`, [heads, rows + 1, width]; `owned` heads from `first_head`.
    fn prefill(&self, chunks: u32, tile_rows: u32, first_head: usize, owned: usize) -> Vec<f32> {
        let mut b = self.clone();
        let rows = b.rows();
        let mut row_slot: Vec<i32> = (0..rows).map(|n| b.slots[n / b.query_len]).collect();
        let mut row_len: Vec<i32> =
            (0..rows).map(|n| (b.lens[n / b.query_len] - b.query_len as i32 + (n % b.query_len) as i32 + 1).max(0)).collect();
        let mut score = vec![UNTOUCHED; owned * (rows + 1) * b.width];
        let args = ScorePrefillArgs {
            index_q: ptr(&mut b.query),
            index_cache: ptr(&mut b.keys),
            block_table: ptr(&mut b.table),
            row_slot: ptr(&mut row_slot),
            row_len: ptr(&mut row_len),
            score: ptr(&mut score),
            rows: rows as u32,
            tile_rows,
            heads: owned as u32,
            dim: b.dim as u32,
            block_size: b.block_size as u32,
            init_blocks: b.init,
            local_blocks: b.local,
            score_rows: rows as u32 + 1,
            score_width: b.width as u32,
            slots: (b.table.len() / b.table_width) as u32,
            table_width: b.table_width as u32,
            cache_blocks: b.cache_blocks as u32,
            first_head: first_head as u32,
            q_heads_stride: b.heads as u32,
            index_dtype: T::DTYPE.code(),
            reserved: 0,
        };
        run(ops::score_prefill, [chunks, (rows as u32).div_ceil(tile_rows), 1], &args);
        score
    }
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

const LENS: [i32; 8] = [0, 1, 2, 128, 129, 300, 1000, 1024];

#[test]
fn m3_matches_f64_and_the_general_kernel_bit_for_bit() {
    let mut rng = Rng::seeded("score m3");
    for (heads, query_len) in [(1, 1), (1, 4), (2, 3), (4, 1), (4, 2), (4, 4), (3, 5)] {
        let mut batch = Batch::<F8E4M3>::random(&mut rng, heads, 128, 128, query_len, &LENS);
        batch.init = rng.below(3) as u32;
        batch.local = rng.below(3) as u32;
        let score = batch.decode(ops::score_decode_m3, 3, 0, 1);
        batch.check(&score);
        assert_eq!(bits(&score), bits(&batch.decode(ops::score_decode, 1, 0, 1)));
    }
}

#[test]
fn any_shape_and_dtype_matches_f64() {
    let mut rng = Rng::seeded("score general");
    for (heads, dim, block_size, query_len) in
        [(1, 16, 16, 1), (4, 36, 32, 2), (2, 64, 64, 4), (5, 7, 48, 3), (24, 128, 128, 1), (17, 256, 16, 2)]
    {
        let lens = [0, 1, 3, block_size as i32, block_size as i32 + 1, 5 * block_size as i32 - 1];
        let f32s = Batch::<f32>::random(&mut rng, heads, dim, block_size, query_len, &lens);
        f32s.check(&f32s.decode(ops::score_decode, 2, 0, 1));
        let halves = Batch::<bf16>::random(&mut rng, heads, dim, block_size, query_len, &lens);
        halves.check(&halves.decode(ops::score_decode, 2, 0, 1));
        let eighths = Batch::<F8E4M3>::random(&mut rng, heads, dim, block_size, query_len, &lens);
        eighths.check(&eighths.decode(ops::score_decode, 2, 0, 1));
    }
}

#[test]
fn chunks_bound_and_shards_change_no_bit() {
    let mut rng = Rng::seeded("score shards");
    let mut batch = Batch::<F8E4M3>::random(&mut rng, 4, 128, 128, 2, &LENS);
    (batch.init, batch.local) = (1, 2);
    let whole = batch.decode(ops::score_decode_m3, 1, 0, 1);
    for chunks in [2, 5, 100] {
        assert_eq!(bits(&whole), bits(&batch.decode(ops::score_decode_m3, chunks, 0, 1)));
    }
    let mut wider = batch.clone();
    wider.width = 64;
    let wide = wider.decode(ops::score_decode_m3, 7, 0, 1);
    for world in [2, 3, 4] {
        for rank in 0..world {
            let shard = batch.decode(ops::score_decode_m3, 2, rank, world);
            for (head, row) in (0..4).flat_map(|head| (0..batch.rows()).map(move |row| (head, row))) {
                for block in 0..batch.width {
                    let value = whole[batch.at(head, row, block)].to_bits();
                    assert_eq!(value, wide[wider.at(head, row, block)].to_bits(), "bound");
                    if block as u32 % world == rank {
                        assert_eq!(value, shard[batch.at(head, row, block / world as usize)].to_bits(), "shard {rank}/{world}");
                    }
                }
            }
        }
    }
}

#[test]
fn prefill_gives_the_bits_of_decode() {
    let mut rng = Rng::seeded("score prefill");
    let query_len = 37;
    for dim in [128, 40] {
        let mut batch = Batch::<F8E4M3>::random(&mut rng, 4, dim, 128, query_len, &[37, 60, 300, 1000]);
        batch.local = 1 + rng.below(2) as u32;
        let decode = batch.decode(ops::score_decode, 1, 0, 1);
        for (chunks, tile_rows) in [(1, 64), (3, 16), (2, 1), (1, 1000)] {
            let prefill = batch.prefill(chunks, tile_rows, 0, 4);
            let owned = batch.prefill(chunks, tile_rows, 2, 2);
            for (head, row) in (0..4).flat_map(|head| (0..batch.rows()).map(move |row| (head, row))) {
                let len = batch.lens[row / query_len] as usize - query_len + row % query_len + 1;
                for block in 0..batch.width {
                    let (expected, found) = (decode[batch.at(head, row, block)], prefill[batch.at(head, row, block)]);
                    if block * 128 < len {
                        assert_eq!(expected.to_bits(), found.to_bits(), "head {head} row {row} block {block} tile {tile_rows}");
                    } else {
                        assert!(found == UNTOUCHED || found == f32::NEG_INFINITY, "{found}");
                        assert!(expected == f32::NEG_INFINITY || found == UNTOUCHED, "written past the sequence");
                    }
                    if head >= 2 {
                        assert_eq!(found.to_bits(), owned[batch.at(head - 2, row, block)].to_bits());
                    }
                }
            }
        }
    }
}

#[test]
fn nan_keys_are_skipped_and_infinite_blocks_score_minus_infinity() {
    let mut rng = Rng::seeded("score nan");
    for dim in [128, 20] {
        let mut batch = Batch::<F8E4M3>::random(&mut rng, 4, dim, 128, 1, &[640]);
        batch.local = 0;
        let key = |batch: &Batch<F8E4M3>, block: usize, token: usize| {
            (batch.table[batch.slots[0] as usize * batch.table_width + block] as usize * 128 + token) * dim
        };
        for token in 0..128 {
            let at = key(&batch, 0, token);
            batch.keys[at + rng.below(dim)] = F8E4M3(0x7f);
            let at = key(&batch, 1, token);
            if token % 3 > 0 {
                batch.keys[at + rng.below(dim)] = F8E4M3(0xff);
            }
        }
        let score = batch.decode(ops::score_decode, 1, 0, 1);
        batch.check(&score);
        assert_eq!(score[batch.at(0, 0, 0)], f32::NEG_INFINITY);
        assert!(score[batch.at(0, 0, 1)].is_finite());
        // A NaN in the query reaches no score either.
        batch.query[5] = F8E4M3(0x7f);
        let score = batch.decode(ops::score_decode, 1, 0, 1);
        assert!((0..5).all(|block| score[batch.at(0, 0, block)] == f32::NEG_INFINITY));
    }
}

#[test]
fn products_of_zero_score_plus_zero() {
    let mut rng = Rng::seeded("score zero");
    let mut batch = Batch::<F8E4M3>::random(&mut rng, 2, 128, 128, 1, &[256]);
    batch.query.fill(F8E4M3(0x80));
    batch.local = 0;
    let score = batch.decode(ops::score_decode_m3, 1, 0, 1);
    assert!((0..2).all(|block| score[batch.at(0, 0, block)].to_bits() == 0));
}

#[test]
fn tables_are_not_trusted() {
    let mut rng = Rng::seeded("score tables");
    let mut batch = Batch::<F8E4M3>::random(&mut rng, 2, 128, 128, 2, &[600, 0, 300]);
    let row = batch.slots[0] as usize * batch.table_width;
    batch.table[row] = -1;
    batch.table[row + 1] = batch.cache_blocks as i32;
    batch.table[row + 2] = i32::MAX;
    let score = batch.decode(ops::score_decode_m3, 2, 0, 1);
    batch.check(&score);
    assert_eq!(score[batch.at(0, 0, 1)], f32::NEG_INFINITY);
    batch.slots[2] = 99;
    let score = batch.decode(ops::score_decode_m3, 2, 0, 1);
    assert_eq!(score[batch.at(0, 4, 0)], UNTOUCHED);
}

#[test]
fn unseen_tokens_do_not_matter() {
    let mut rng = Rng::seeded("score poison");
    let mut batch = Batch::<F8E4M3>::random(&mut rng, 4, 128, 128, 3, &[200, 1, 130]);
    let clean = batch.decode(ops::score_decode_m3, 1, 0, 1);
    for s in 0..3 {
        let len = batch.lens[s] as usize;
        let id = batch.table[batch.slots[s] as usize * batch.table_width + (len - 1) / 128] as usize;
        batch.keys[(id * 128 + len % 128) * 128..(id + 1) * 128 * 128].fill(F8E4M3(0x7e));
    }
    assert_eq!(bits(&clean), bits(&batch.decode(ops::score_decode_m3, 1, 0, 1)));
}
