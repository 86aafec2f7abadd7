//! The attend's two products over a page of f32, where it lies: nothing is widened, so nothing is copied.
//!
//! Both give the bits of the products over widened pages (`attend`): a score sums channels 8c + i in lane i, an output sums its
//! tokens in their order. `next` is the same part of the next page: it lies anywhere in memory, so each cache line of it is
//! asked for while the same line of this page is used.

use super::attend::{GROUP, PAGE};
use super::simd::{Lanes, prefetch};

/// Scores [head, token] of K `[head_dim / 4, 16, 4]`, of heads up to the next multiple of four.
#[inline(always)]
pub(super) fn scores<L: Lanes, const D: usize>(
    query: &[[f32; D]],
    heads: usize,
    k: &[f32],
    next: &[f32],
    out: &mut [[f32; PAGE]],
) {
    for h in (0..heads).step_by(4) {
        let next = if h == 0 { next } else { &[] };
        for t in (0..PAGE).step_by(4) {
            let even = planes::<L, D>(&query[h..], k, next, t, 0);
            let odd = planes::<L, D>(&query[h..], k, next, t, 1);
            for pair in 0..2 {
                let (mut first, mut second) = ([L::splat(0.0); 4], [L::splat(0.0); 4]);
                for p in 0..4 {
                    [first[p], second[p]] = L::halves(even[pair][p], odd[pair][p]);
                }
                let sums = [L::sum4(first), L::sum4(second)];
                for p in 0..4 {
                    (out[h + p][t + 2 * pair], out[h + p][t + 2 * pair + 1]) = (sums[0][p], sums[1][p]);
                }
            }
        }
    }
}

/// Sums [pair of tokens, head] over every second plane of four channels: lane i is channel i % 4 of token i / 4.
#[inline(always)]
fn planes<L: Lanes, const D: usize>(query: &[[f32; D]], k: &[f32], next: &[f32], t: usize, odd: usize) -> [[L; 4]; 2] {
    let [a, b, c, d] = [0, 1, 2, 3].map(|p| query[p].as_chunks::<4>().0);
    let mut sums = [[L::splat(0.0); 4]; 2];
    let (rows, next) = (k.as_chunks::<{ 4 * PAGE }>().0, next.as_chunks::<{ 4 * PAGE }>().0);
    let mut plane = odd;
    while plane < rows.len().min(D / 4) {
        let pairs = rows[plane].as_chunks::<8>().0;
        let keys = [L::load(&pairs[t / 2]), L::load(&pairs[t / 2 + 1])];
        if let Some(next) = next.get(plane) {
            prefetch(&next[4 * t..]);
        }
        let query = [L::load_twice(&a[plane]), L::load_twice(&b[plane]), L::load_twice(&c[plane]), L::load_twice(&d[plane])];
        for p in 0..4 {
            sums[0][p] = query[p].mul_add(keys[0], sums[0][p]);
            sums[1][p] = query[p].mul_add(keys[1], sums[1][p]);
        }
        plane += 2;
    }
    sums
}

/// Adds weights [head, token] times the first `tokens` tokens of V `[4, head_dim, 4]` to `sums` [head, channel], which fade first.
#[inline(always)]
pub(super) fn accumulate<L: Lanes, const D: usize>(
    sums: &mut [[f32; D]; GROUP],
    fade: &[f32; GROUP],
    weights: &[[f32; PAGE]; GROUP],
    heads: usize,
    tokens: usize,
    v: &[f32],
    next: &[f32],
) {
    let head_dim = v.len() / PAGE;
    let (v, _) = v.as_chunks::<4>();
    let (next, _) = next.as_chunks::<4>();
    for h in (0..heads).step_by(4) {
        for d in (0..head_dim).step_by(16) {
            let mut held = [[L::splat(0.0); 2]; 4];
            for p in 0..4 {
                let (from, fade) = (sums[h + p].as_chunks::<8>().0, L::splat(fade[h + p]));
                held[p] = [L::load(&from[d / 8]).mul(fade), L::load(&from[d / 8 + 1]).mul(fade)];
            }
            for four in 0..tokens.div_ceil(4) {
                let at = four * head_dim;
                if h == 0 {
                    for line in (d..head_dim.min(d + 16)).step_by(4) {
                        if let Some(next) = next.get(at + line..) {
                            prefetch(next);
                        }
                    }
                }
                let part = &v[at + d..at + head_dim];
                let (low, high) = (channels::<L>(part), channels::<L>(part.get(8..).unwrap_or(&[])));
                let values = low.into_iter().zip(high).enumerate();
                // Two loops, so that the usual one has a constant count.
                if tokens >= 4 * four + 4 {
                    for (t, values) in values {
                        add_token(&mut held, values, &weights[h..], 4 * four + t);
                    }
                } else {
                    for (t, values) in values.take(tokens % 4) {
                        add_token(&mut held, values, &weights[h..], 4 * four + t);
                    }
                }
            }
            for p in 0..4 {
                let to = sums[h + p].as_chunks_mut::<8>().0;
                held[p][0].store(&mut to[d / 8]);
                held[p][1].store(&mut to[d / 8 + 1]);
            }
        }
    }
}

#[inline(always)]
fn add_token<L: Lanes>(held: &mut [[L; 2]; 4], (low, high): (L, L), weights: &[[f32; PAGE]], token: usize) {
    for p in 0..4 {
        let weight = L::splat(weights[p][token]);
        held[p] = [weight.mul_add(low, held[p][0]), weight.mul_add(high, held[p][1])];
    }
}

/// Sixteen channels from `channel` on of V `[4, head_dim, 4]`, a token a row; channels past the head are zero.
#[inline(always)]
pub(super) fn slice<L: Lanes>(v: &[f32], next: &[f32], head_dim: usize, channel: usize, to: &mut [[f32; 16]; PAGE]) {
    let width = 4 * (head_dim - channel).min(16);
    for four in 0..PAGE / 4 {
        let at = 4 * (four * head_dim + channel);
        for line in (0..width).step_by(16) {
            if let Some(next) = next.get(at + line..) {
                prefetch(next);
            }
        }
        let (part, _) = v[at..at + width].as_chunks::<4>();
        let (low, high) = (channels::<L>(part), channels::<L>(part.get(8..).unwrap_or(&[])));
        for t in 0..4 {
            let to = to[4 * four + t].as_chunks_mut::<8>().0;
            low[t].store(&mut to[0]);
            high[t].store(&mut to[1]);
        }
    }
}

/// Four tokens of the first eight channels of [channel, 4], a token a row; channels that are not there are zero.
#[inline(always)]
fn channels<L: Lanes>(v: &[[f32; 4]]) -> [L; 4] {
    let mut rows = match *v {
        [a, b, c, d, e, f, g, h, ..] => {
            [L::load_halves(&a, &e), L::load_halves(&b, &f), L::load_halves(&c, &g), L::load_halves(&d, &h)]
        }
        // A head is a multiple of four channels.
        [a, b, c, d, ..] => {
            let zero = [0.0; 4];
            [L::load_halves(&a, &zero), L::load_halves(&b, &zero), L::load_halves(&c, &zero), L::load_halves(&d, &zero)]
        }
        _ => [L::splat(0.0); 4],
    };
    L::transpose_halves(&mut rows);
    rows
}
