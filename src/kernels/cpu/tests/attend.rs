//! Both attend kernels against a softmax in f64 over dequantised caches (section 6).

use half::bf16;

use super::super::cell::Cell;
use super::super::fp8::F8E4M3;
use super::super::ops;
use super::{Rng, ptr, run};
use crate::kernels::msa::{AttendDenseArgs, AttendSparseArgs};

/// A cache with its keys and values as plain [block, head, token, channel] too.
#[derive(Clone)]
struct Cache<T> {
    heads: usize,
    dim: usize,
    block_size: usize,
    blocks: usize,
    cells: Vec<T>,
}

impl<T: Cell> Cache<T> {
    fn random(rng: &mut Rng, heads: usize, dim: usize, block_size: usize, blocks: usize) -> Cache<T> {
        let cells = (0..2 * blocks * block_size * heads * dim).map(|_| T::encode(rng.normal())).collect();
        Cache { heads, dim, block_size, blocks, cells }
    }

    /// Section 2.4, written as it is there.
    fn at(&self, value: bool, block: usize, head: usize, token: usize, d: usize) -> usize {
        let (x, pages, t) = (16 / size_of::<T>(), self.block_size / 16, token % 16);
        let page = block * 2 * pages + token / 16 + if value { pages } else { 0 };
        let base = (page * self.heads + head) * self.dim * 16;
        if value { base + (t / x) * self.dim * x + d * x + t % x } else { base + (d / x) * 16 * x + t * x + d % x }
    }

    fn get(&self, value: bool, block: usize, head: usize, token: usize, d: usize) -> f64 {
        f64::from(self.cells[self.at(value, block, head, token, d)].decode())
    }

    /// Attention of one query head over (block, token) pairs.
    fn reference(&self, query: &[f32], head: usize, tokens: &[(usize, usize)], scale: f64, v_scale: f64) -> Vec<f64> {
        let scores: Vec<f64> = tokens
            .iter()
            .map(|&(b, t)| scale * (0..self.dim).map(|d| f64::from(query[d]) * self.get(false, b, head, t, d)).sum::<f64>())
            .collect();
        let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<f64> = scores.iter().map(|s| (s - most).exp()).collect();
        let total: f64 = weights.iter().sum();
        (0..self.dim)
            .map(|d| {
                tokens.iter().zip(&weights).map(|(&(b, t), w)| w * v_scale * self.get(true, b, head, t, d)).sum::<f64>() / total
            })
            .map(|x| if tokens.is_empty() { 0.0 } else { x })
            .collect()
    }
}

/// Rows that attend to page tables, built as `topk_emit` builds them.
#[derive(Clone)]
struct Sparse<T> {
    cache: Cache<T>,
    group: usize,
    query: Vec<f32>,
    /// Per (row, KV head): the blocks, and how many of their tokens count.
    blocks: Vec<Vec<usize>>,
    page_table: Vec<i32>,
    page_len: Vec<i32>,
    table_pages: usize,
    scales: [f32; 2],
}

impl<T: Cell> Sparse<T> {
    fn random(rng: &mut Rng, heads: usize, dim: usize, block_size: usize, group: usize, lens: &[i32]) -> Sparse<T> {
        let cache = Cache::random(rng, heads, dim, block_size, 24);
        let (pages, table_pages) = (block_size / 16, 16 * block_size / 16);
        let query = (0..lens.len() * heads * group * dim).map(|_| rng.normal()).collect();
        let (mut blocks, mut page_table, mut page_len) = (Vec::new(), Vec::new(), Vec::new());
        for &len in lens {
            for k in 0..heads {
                let chosen: Vec<usize> =
                    rng.permutation(24)[..(len as usize).div_ceil(block_size)].iter().map(|&b| b as usize).collect();
                let mut ids: Vec<i32> =
                    chosen.iter().flat_map(|b| (0..pages).map(move |j| ((2 * pages * b + j) * heads + k) as i32)).collect();
                ids.resize(table_pages, 0);
                page_table.extend(ids);
                page_len.push(len);
                blocks.push(chosen);
            }
        }
        Sparse { cache, group, query, blocks, page_table, page_len, table_pages, scales: [1.0, 1.0] }
    }

    fn attend(&self) -> Vec<f32> {
        let mut s = self.clone();
        let c = &mut s.cache;
        let rows = s.page_len.len() / c.heads;
        let mut out = vec![f32::NAN; s.query.len()];
        let args = AttendSparseArgs {
            q: ptr(&mut s.query),
            kv_cache: ptr(&mut c.cells),
            page_table: ptr(&mut s.page_table),
            page_len: ptr(&mut s.page_len),
            out: ptr(&mut out),
            rows: rows as u32,
            q_heads: (c.heads * s.group) as u32,
            kv_heads: c.heads as u32,
            head_dim: c.dim as u32,
            table_pages: s.table_pages as u32,
            block_size: c.block_size as u32,
            cache_blocks: c.blocks as u32,
            kv_dtype: T::DTYPE.code(),
            scale: (c.dim as f32).powf(-0.5),
            k_scale: s.scales[0],
            v_scale: s.scales[1],
            reserved: 0,
        };
        run(ops::attend_sparse, [rows as u32, c.heads as u32, 1], &args);
        out
    }

    fn check(&self) {
        let out = self.attend();
        let (dim, size) = (self.cache.dim, self.cache.block_size);
        for (at, blocks) in self.blocks.iter().enumerate() {
            let len = self.page_len[at] as usize;
            let tokens: Vec<(usize, usize)> = (0..len).map(|i| (blocks[i / size], i % size)).collect();
            let (row, k) = (at / self.cache.heads, at % self.cache.heads);
            for h in 0..self.group {
                let start = ((row * self.cache.heads + k) * self.group + h) * dim;
                let scale = (dim as f64).powf(-0.5) * f64::from(self.scales[0]);
                let expected =
                    self.cache.reference(&self.query[start..start + dim], k, &tokens, scale, f64::from(self.scales[1]));
                for (d, expected) in expected.into_iter().enumerate() {
                    let found = f64::from(out[start + d]);
                    assert!(
                        (found - expected).abs() <= 2e-5 * (1.0 + expected.abs()),
                        "row {row} kv head {k} head {h} channel {d}: {found}, expected {expected}"
                    );
                }
            }
        }
    }
}

const LENS: [i32; 8] = [0, 1, 15, 16, 17, 128, 300, 2048];

#[test]
fn sparse_matches_f64_for_every_cache_type() {
    let mut rng = Rng::seeded("attend sparse");
    for (heads, dim, block_size, group) in
        [(1, 128, 128, 16), (4, 128, 128, 4), (2, 64, 64, 1), (1, 32, 32, 5), (1, 16, 16, 20), (1, 256, 128, 2), (2, 96, 128, 3)]
    {
        let lens: Vec<i32> = LENS.iter().map(|&len| len.min(16 * block_size as i32)).collect();
        Sparse::<bf16>::random(&mut rng, heads, dim, block_size, group, &lens).check();
        Sparse::<F8E4M3>::random(&mut rng, heads, dim, block_size, group, &lens).check();
        Sparse::<f32>::random(&mut rng, heads, dim, block_size, group, &lens).check();
    }
    let mut scaled = Sparse::<F8E4M3>::random(&mut rng, 1, 128, 128, 16, &LENS);
    scaled.scales = [0.37, 2.5];
    scaled.check();
}

#[test]
fn large_scores_do_not_overflow() {
    let mut rng = Rng::seeded("attend large");
    let mut case = Sparse::<bf16>::random(&mut rng, 1, 128, 128, 2, &[600]);
    case.query.iter_mut().for_each(|x| *x *= 100.0);
    case.check();
}

/// Everything past each row's length becomes NaN; no bit of a result may change.
fn poison<T: Cell>(rng: &mut Rng) {
    for lens in [&[1, 300][..], &[5, 128, 2047], &[17, 0]] {
        let mut case = Sparse::<T>::random(rng, 2, 64, 128, 4, lens);
        let clean = case.attend();
        let mut used = vec![false; case.cache.cells.len()];
        let c = &case.cache;
        for (at, blocks) in case.blocks.iter().enumerate() {
            for i in 0..case.page_len[at] as usize {
                for (value, d) in [false, true].into_iter().flat_map(|value| (0..c.dim).map(move |d| (value, d))) {
                    used[c.at(value, blocks[i / 128], at % 2, i % 128, d)] = true;
                }
            }
        }
        case.cache.cells.iter_mut().zip(used).filter(|(_, used)| !used).for_each(|(cell, _)| *cell = T::encode(f32::NAN));
        let poisoned = case.attend();
        assert!(clean.iter().zip(&poisoned).all(|(a, b)| a.to_bits() == b.to_bits()), "{} {lens:?}", T::DTYPE);
    }
}

#[test]
fn poison_past_the_length_does_not_leak() {
    let mut rng = Rng::seeded("attend poison");
    poison::<bf16>(&mut rng);
    poison::<F8E4M3>(&mut rng);
    poison::<f32>(&mut rng);
}

#[test]
fn nan_inside_the_length_shows() {
    let mut rng = Rng::seeded("attend nan");
    let mut case = Sparse::<F8E4M3>::random(&mut rng, 1, 64, 128, 2, &[40]);
    let at = case.cache.at(true, case.blocks[0][0], 0, 39, 7);
    case.cache.cells[at] = F8E4M3(0x7f);
    let out = case.attend();
    assert!(out[7].is_nan() && out[64 + 7].is_nan() && out[8].is_finite());
}

#[test]
fn page_ids_outside_the_cache_are_skipped() {
    let mut rng = Rng::seeded("attend ids");
    let mut case = Sparse::<bf16>::random(&mut rng, 1, 64, 128, 2, &[256, 128]);
    let with = case.attend();
    // A K id past the cache, a negative one, and one on the V side of a block.
    for id in [i32::MAX, -1, 8, 24 * 16] {
        case.page_table[128..136].fill(id);
        let out = case.attend();
        assert!(out[128..].iter().all(|&x| x == 0.0), "{id}");
        assert!(out[..128].iter().zip(&with).all(|(a, b)| a.to_bits() == b.to_bits()));
    }
}

#[test]
fn rows_do_not_depend_on_their_batch() {
    let mut rng = Rng::seeded("attend batch");
    let case = Sparse::<F8E4M3>::random(&mut rng, 2, 128, 128, 16, &[300, 0, 1000]);
    let all = case.attend();
    let mut last = case.clone();
    last.query.drain(..2 * 2 * 16 * 128);
    last.page_table.drain(..4 * 128);
    last.page_len.drain(..4);
    assert!(last.attend().iter().zip(&all[2 * 2 * 16 * 128..]).all(|(a, b)| a.to_bits() == b.to_bits()));
}

/// Eight rows that see 16 of 24 blocks each, in orders of their own, with the first row's first block among them.
fn prompt<T: Cell>(rng: &mut Rng, dim: usize, block_size: usize, group: usize) {
    let heads = 2;
    let lens: Vec<i32> = (0..8).map(|i| (16 * block_size - 3 * i) as i32).collect();
    let mut whole = Sparse::<T>::random(rng, heads, dim, block_size, group, &lens);
    let (width, pages) = (whole.table_pages, block_size / 16);
    for at in heads..8 * heads {
        let lead = whole.page_table[at % heads * width..][..pages].to_vec();
        let row = &mut whole.page_table[at * width..][..width];
        if !row.contains(&lead[0]) {
            row[3 * pages..4 * pages].copy_from_slice(&lead);
        }
    }
    // A page that nobody has, and one that a row names twice.
    whole.page_table[5 * width + 2] = -1;
    whole.page_table[6 * width + 4] = whole.page_table[6 * width + 1];
    let one = heads * group * dim;
    let out = whole.attend();
    for row in 0..8 {
        let alone = Sparse {
            query: whole.query[row * one..][..one].to_vec(),
            page_table: whole.page_table[row * heads * width..][..heads * width].to_vec(),
            page_len: whole.page_len[row * heads..][..heads].to_vec(),
            ..whole.clone()
        };
        let bits = |out: &[f32]| out.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&alone.attend()), bits(&out[row * one..][..one]), "row {row} dim {dim} block {block_size} group {group}");
    }
}

#[test]
fn rows_of_a_prompt_have_the_bits_of_a_row_alone() {
    let mut rng = Rng::seeded("attend prompt");
    for (dim, block_size, group) in [(32, 16, 4), (48, 32, 8), (64, 128, 4), (128, 128, 4), (256, 64, 8)] {
        prompt::<f32>(&mut rng, dim, block_size, group);
        prompt::<bf16>(&mut rng, dim, block_size, group);
        prompt::<F8E4M3>(&mut rng, dim, block_size, group);
    }
}

fn dense<T: Cell>(rng: &mut Rng, heads: usize, dim: usize, block_size: usize, group: usize) {
    let mut cache = Cache::<T>::random(rng, heads, dim, block_size, 24);
    let mut lens = vec![0, 1, block_size as i32, 3 * block_size as i32 + 5];
    let mut slots = vec![3, 1, 0, 2];
    let mut table = rng.permutation(24);
    let mut query: Vec<f32> = (0..4 * heads * group * dim).map(|_| rng.normal()).collect();
    let mut out = vec![f32::NAN; query.len()];
    let args = AttendDenseArgs {
        q: ptr(&mut query),
        kv_cache: ptr(&mut cache.cells),
        row_slot: ptr(&mut slots),
        row_len: ptr(&mut lens),
        block_table: ptr(&mut table),
        out: ptr(&mut out),
        rows: 4,
        q_heads: (heads * group) as u32,
        kv_heads: heads as u32,
        head_dim: dim as u32,
        block_size: block_size as u32,
        cache_blocks: 24,
        slots: 4,
        table_width: 6,
        kv_dtype: T::DTYPE.code(),
        scale: (dim as f32).powf(-0.5),
    };
    run(ops::attend_dense, [4, heads as u32, 1], &args);
    for row in 0..4 {
        let tokens: Vec<(usize, usize)> =
            (0..lens[row] as usize).map(|i| (table[slots[row] as usize * 6 + i / block_size] as usize, i % block_size)).collect();
        for head in 0..heads * group {
            let start = (row * heads * group + head) * dim;
            let expected = cache.reference(&query[start..start + dim], head / group, &tokens, (dim as f64).powf(-0.5), 1.0);
            for (found, expected) in out[start..start + dim].iter().zip(expected) {
                assert!((f64::from(*found) - expected).abs() <= 2e-5 * (1.0 + expected.abs()), "{found} {expected}");
            }
        }
    }
}

#[test]
fn dense_matches_f64() {
    let mut rng = Rng::seeded("attend dense");
    dense::<bf16>(&mut rng, 2, 64, 128, 4);
    dense::<F8E4M3>(&mut rng, 1, 32, 16, 16);
    dense::<f32>(&mut rng, 4, 128, 64, 1);
    dense::<f32>(&mut rng, 1, 12, 16, 2);
}
