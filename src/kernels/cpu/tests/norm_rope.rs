//! `norm_rope_insert` against f64, and its cache writes element by element (sections 2.2 to 2.5).

use half::bf16;

use super::super::cell::Cell;
use super::super::fp8::F8E4M3;
use super::super::ops;
use super::{Rng, ptr, run};
use crate::kernels::msa::NormRopeInsertArgs;

struct Shape {
    q_heads: usize,
    kv_heads: usize,
    dim: usize,
    index_heads: usize,
    index_dim: usize,
    rotary: usize,
    block_size: usize,
}

/// Section 2.2 in f64.
fn normed(x: &[f32], weight: &[f32], angles: &[f32], rotate: bool) -> Vec<f64> {
    let mean = x.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / x.len() as f64;
    let mut y: Vec<f64> =
        x.iter().zip(weight).map(|(&x, &w)| f64::from(x) / (mean + 1e-6).sqrt() * (1.0 + f64::from(w))).collect();
    let half = angles.len() / 2;
    for d in 0..if rotate { half } else { 0 } {
        let (cos, sin) = (f64::from(angles[d]), f64::from(angles[d + half]));
        (y[d], y[d + half]) = (y[d] * cos - y[d + half] * sin, y[d + half] * cos + y[d] * sin);
    }
    y
}

/// True if `found` is the code of `expected`, or of a value within f32's rounding of it.
fn encoded<T: Cell>(found: T, expected: f64, through_bf16: bool) -> bool {
    let encode = |x: f64| {
        let x = if through_bf16 { bf16::from_f32(x as f32).to_f32() } else { x as f32 };
        T::encode(x).decode()
    };
    let slack = 2e-6 * (1.0 + expected.abs());
    found.decode() >= encode(expected - slack) && found.decode() <= encode(expected + slack)
}

fn check<K: Cell, I: Cell>(rng: &mut Rng, s: &Shape) {
    let lens = [5, 0, 6, 300, 1, 128];
    let rows = lens.len();
    let width = (s.q_heads + 2 * s.kv_heads) * s.dim + if s.index_heads > 0 { (s.index_heads + 1) * s.index_dim } else { 0 };
    let (table_width, positions) = (20, 320);
    let mut normals = |count: usize, by: f32| -> Vec<f32> { (0..count).map(|_| rng.normal() * by).collect() };
    let mut packed = normals(rows * width, 3.0);
    let mut weights: [Vec<f32>; 4] = [s.dim, s.dim, s.index_dim, s.index_dim].map(|dim| normals(dim, 0.3));
    // One index key leaves fp8's range and must saturate.
    weights[3][0] = 4000.0;
    let mut cos_sin: Vec<f32> = normals(positions * s.rotary, 1.0).iter().map(|x| x.sin()).collect();
    let mut row_slot = vec![0, 0, 0, 1, 2, 2];
    let mut row_len = lens.to_vec();
    let mut table = rng.permutation(3 * table_width);
    let blocks = 3 * table_width;
    let mut q = vec![f32::NAN; rows * s.q_heads * s.dim];
    let mut index_q = vec![I::encode(7.0); rows * s.index_heads * s.index_dim];
    let mut kv = vec![K::encode(7.0); blocks * 2 * s.block_size * s.kv_heads * s.dim];
    let mut keys = vec![I::encode(7.0); if s.index_heads > 0 { blocks * s.block_size * s.index_dim } else { 0 }];
    let args = NormRopeInsertArgs {
        packed: ptr(&mut packed),
        q_norm: ptr(&mut weights[0]),
        k_norm: ptr(&mut weights[1]),
        index_q_norm: ptr(&mut weights[2]),
        index_k_norm: ptr(&mut weights[3]),
        cos_sin: ptr(&mut cos_sin),
        row_slot: ptr(&mut row_slot),
        row_len: ptr(&mut row_len),
        block_table: ptr(&mut table),
        q: ptr(&mut q),
        index_q: ptr(&mut index_q),
        kv_cache: ptr(&mut kv),
        index_cache: ptr(&mut keys),
        rows: rows as u32,
        packed_width: width as u32,
        q_heads: s.q_heads as u32,
        kv_heads: s.kv_heads as u32,
        head_dim: s.dim as u32,
        index_heads: s.index_heads as u32,
        index_dim: s.index_dim as u32,
        rotary_dim: s.rotary as u32,
        positions: positions as u32,
        slots: 3,
        table_width: table_width as u32,
        block_size: s.block_size as u32,
        cache_blocks: blocks as u32,
        kv_dtype: K::DTYPE.code(),
        index_dtype: I::DTYPE.code(),
        eps: 1e-6,
    };
    run(ops::norm_rope_insert, [rows as u32, 1, 1], &args);

    let (mut kv_written, mut keys_written) = (0, 0);
    for row in 0..rows {
        let len = lens[row] as usize;
        if len == 0 {
            assert!(q[row * s.q_heads * s.dim..][..s.q_heads * s.dim].iter().all(|&x| x == 0.0));
            assert!(
                index_q[row * s.index_heads * s.index_dim..][..s.index_heads * s.index_dim].iter().all(|x| x.decode() == 0.0)
            );
            continue;
        }
        let (position, mut at) = (len - 1, row * width);
        let angles = &cos_sin[position * s.rotary..][..s.rotary];
        let mut take = |dim: usize| {
            at += dim;
            packed[at - dim..at].to_vec()
        };
        for head in 0..s.q_heads {
            let found = &q[(row * s.q_heads + head) * s.dim..][..s.dim];
            for (found, expected) in found.iter().zip(normed(&take(s.dim), &weights[0], angles, true)) {
                assert!((f64::from(*found) - expected).abs() <= 1e-5 * (1.0 + expected.abs()));
            }
        }
        let block = table[row_slot[row] as usize * table_width + position / s.block_size] as usize;
        let (token, x, pages) = (position % s.block_size, 16 / size_of::<K>(), s.block_size / 16);
        let (page, t) = (block * 2 * pages + token / 16, token % 16);
        for head in 0..s.kv_heads {
            let base = (page * s.kv_heads + head) * s.dim * 16;
            for (d, expected) in normed(&take(s.dim), &weights[1], angles, true).into_iter().enumerate() {
                assert!(encoded(kv[base + (d / x) * 16 * x + t * x + d % x], expected, false));
            }
        }
        for head in 0..s.kv_heads {
            let base = ((page + pages) * s.kv_heads + head) * s.dim * 16;
            for (d, value) in take(s.dim).into_iter().enumerate() {
                assert_eq!(kv[base + (t / x) * s.dim * x + d * x + t % x].decode(), K::encode(value).decode());
            }
        }
        kv_written += 2 * s.kv_heads * s.dim;
        for head in 0..s.index_heads {
            let found = &index_q[(row * s.index_heads + head) * s.index_dim..][..s.index_dim];
            for (found, expected) in found.iter().zip(normed(&take(s.index_dim), &weights[2], angles, true)) {
                assert!(encoded(*found, expected, false));
            }
        }
        if s.index_heads > 0 {
            let found = &keys[(block * s.block_size + token) * s.index_dim..][..s.index_dim];
            for (found, expected) in found.iter().zip(normed(&take(s.index_dim), &weights[3], angles, true)) {
                assert!(encoded(*found, expected, I::DTYPE != crate::DType::F32), "{} {expected}", found.decode());
            }
            keys_written += s.index_dim;
        }
    }
    // Nothing else was written. (7.0 itself may be written too, so this is a bound.)
    assert!(kv.iter().filter(|x| x.decode() != 7.0).count() <= kv_written);
    assert!(keys.iter().filter(|x| x.decode() != 7.0).count() <= keys_written);
}

#[test]
fn matches_f64_for_every_cache_type() {
    let mut rng = Rng::seeded("norm_rope");
    let m3 = Shape { q_heads: 16, kv_heads: 1, dim: 128, index_heads: 1, index_dim: 128, rotary: 64, block_size: 128 };
    let tp1 = Shape { q_heads: 8, kv_heads: 4, dim: 64, index_heads: 4, index_dim: 32, rotary: 32, block_size: 16 };
    let dense = Shape { q_heads: 4, kv_heads: 2, dim: 32, index_heads: 0, index_dim: 32, rotary: 16, block_size: 64 };
    for shape in [m3, tp1, dense] {
        check::<bf16, F8E4M3>(&mut rng, &shape);
        check::<F8E4M3, F8E4M3>(&mut rng, &shape);
        check::<f32, f32>(&mut rng, &shape);
        check::<bf16, bf16>(&mut rng, &shape);
    }
}

#[test]
fn index_keys_round_twice() {
    // A value whose direct fp8 code differs from the one through bf16: just above the midpoint of 1.0 and 1.125.
    let value = 1.0625 + 1.0 / 4096.0;
    assert_eq!(F8E4M3::from_f32(value).to_f32(), 1.125);
    assert_eq!(F8E4M3::from_f32(bf16::from_f32(value).to_f32()).to_f32(), 1.0);
}
