//! `norm_rope_insert`: per-head norm, partial RoPE and the insert into both caches (`msa-spec` section 2).

use super::cell::{Cell, with_cell};
use super::view::Bound;
use crate::DType;
use crate::hal::Workgroup;
use crate::kernels::msa::{NormRopeInsertArgs, PAGE_TOKENS};
use half::bf16;

/// Channels of a head at most.
const HEAD_MOST: usize = 512;

/// One packed row.
pub fn norm_rope_insert(args: &Bound<'_, NormRopeInsertArgs>, workgroup: &mut Workgroup<'_>) {
    let row = workgroup.id[0] as usize;
    if workgroup.id[0] >= args.rows {
        return;
    }
    assert!(args.head_dim.max(args.index_dim) as usize <= HEAD_MOST, "a head has more than {HEAD_MOST} channels");
    assert!(args.rotary_dim <= args.head_dim && (args.index_heads == 0 || args.rotary_dim <= args.index_dim));
    let len = args.read::<i32>(|a| &a.row_len).get(row);
    let position = usize::try_from(len - 1).ok().filter(|&position| position < args.positions as usize);
    with_cell!(args.index_dtype, I => index_queries::<I>(args, row, position));
    let Some(position) = position else {
        let size = (args.q_heads * args.head_dim) as usize;
        args.write::<f32>(|a| &a.q).slice_mut(row * size, size).fill(0.0);
        return;
    };
    queries(args, row, position);
    if let Some(block) = cache_block(args, row, position) {
        let token = position % args.block_size as usize;
        with_cell!(args.kv_dtype, T => insert_kv::<T>(args, row, position, block, token));
        if args.index_heads > 0 {
            with_cell!(args.index_dtype, T => insert_index::<T>(args, row, position, block, token));
        }
    }
}

/// The cache block of a row's position; `None` if the table holds none there.
fn cache_block(args: &Bound<'_, NormRopeInsertArgs>, row: usize, position: usize) -> Option<usize> {
    let slot = args.read::<i32>(|a| &a.row_slot).get(row);
    let block = position / args.block_size as usize;
    if slot < 0 || slot as u32 >= args.slots || block >= args.table_width as usize {
        return None;
    }
    let id = args.read::<i32>(|a| &a.block_table).get(slot as usize * args.table_width as usize + block);
    usize::try_from(id).ok().filter(|&id| id < args.cache_blocks as usize)
}

/// Channel where a part of the packed row starts: [q | k | v | index_q | index_k].
fn part(args: &NormRopeInsertArgs, number: usize) -> usize {
    let (q, kv) = (args.q_heads * args.head_dim, args.kv_heads * args.head_dim);
    [0, q, q + kv, q + 2 * kv, q + 2 * kv + args.index_heads * args.index_dim][number] as usize
}

fn queries(args: &Bound<'_, NormRopeInsertArgs>, row: usize, position: usize) {
    let dim = args.head_dim as usize;
    let weight = args.read::<f32>(|a| &a.q_norm).slice(0, dim);
    let mut out = args.write::<f32>(|a| &a.q);
    for head in 0..args.q_heads as usize {
        let to = out.slice_mut((row * args.q_heads as usize + head) * dim, dim);
        norm_rope(args, row, part(args, 0) + head * dim, weight, position, to);
    }
}

fn index_queries<T: Cell>(args: &Bound<'_, NormRopeInsertArgs>, row: usize, position: Option<usize>) {
    let (heads, dim) = (args.index_heads as usize, args.index_dim as usize);
    if heads == 0 {
        return;
    }
    let mut out = args.write::<T>(|a| &a.index_q);
    let Some(position) = position else {
        out.slice_mut(row * heads * dim, heads * dim).fill(T::zeroed());
        return;
    };
    let weight = args.read::<f32>(|a| &a.index_q_norm).slice(0, dim);
    let mut head_values = [0.0; HEAD_MOST];
    for head in 0..heads {
        norm_rope(args, row, part(args, 3) + head * dim, weight, position, &mut head_values[..dim]);
        let to = out.slice_mut((row * heads + head) * dim, dim);
        to.iter_mut().zip(&head_values).for_each(|(to, &value)| *to = T::encode(value));
    }
}

fn insert_index<T: Cell>(args: &Bound<'_, NormRopeInsertArgs>, row: usize, position: usize, block: usize, token: usize) {
    let dim = args.index_dim as usize;
    let mut key = [0.0; HEAD_MOST];
    norm_rope(args, row, part(args, 4), args.read::<f32>(|a| &a.index_k_norm).slice(0, dim), position, &mut key[..dim]);
    let mut cache = args.write::<T>(|a| &a.index_cache);
    let to = cache.slice_mut((block * args.block_size as usize + token) * dim, dim);
    for (to, &value) in to.iter_mut().zip(&key) {
        // Section 2.3: the key passes through the model's bf16 before it is quantised.
        *to = T::encode(if T::DTYPE == DType::F32 { value } else { bf16::from_f32(value).to_f32() });
    }
}

fn insert_kv<T: Cell>(args: &Bound<'_, NormRopeInsertArgs>, row: usize, position: usize, block: usize, token: usize) {
    let (dim, heads, page_tokens) = (args.head_dim as usize, args.kv_heads as usize, PAGE_TOKENS as usize);
    let x = 16 / size_of::<T>();
    let pages = args.block_size as usize / page_tokens;
    let (k_page, t) = (block * 2 * pages + token / page_tokens, token % page_tokens);
    let weight = args.read::<f32>(|a| &a.k_norm).slice(0, dim);
    let packed = args.read::<f32>(|a| &a.packed);
    // Other rows write other tokens of the same page, between this row's elements: so one element at a time.
    let mut cache = args.write::<T>(|a| &a.kv_cache);
    let mut key = [0.0; HEAD_MOST];
    for head in 0..heads {
        norm_rope(args, row, part(args, 1) + head * dim, weight, position, &mut key[..dim]);
        let value = packed.slice(row * args.packed_width as usize + part(args, 2) + head * dim, dim);
        let k_at = (k_page * heads + head) * dim * page_tokens;
        let v_at = ((k_page + pages) * heads + head) * dim * page_tokens;
        for d in 0..dim {
            cache.set(k_at + (d / x) * page_tokens * x + t * x + d % x, T::encode(key[d]));
            cache.set(v_at + (t / x) * dim * x + d * x + t % x, T::encode(value[d]));
        }
    }
}

/// Gemma RMSNorm of one head of the packed row, x / sqrt(mean(x^2) + eps) * (1 + w), then NeoX RoPE of its first channels.
fn norm_rope(args: &Bound<'_, NormRopeInsertArgs>, row: usize, channel: usize, weight: &[f32], position: usize, out: &mut [f32]) {
    let packed = args.read::<f32>(|a| &a.packed);
    let x = packed.slice(row * args.packed_width as usize + channel, out.len());
    let mean = x.iter().map(|x| x * x).sum::<f32>() / x.len() as f32;
    let scale = 1.0 / (mean + args.eps).sqrt();
    for (out, (x, w)) in out.iter_mut().zip(x.iter().zip(weight)) {
        *out = x * scale * (1.0 + w);
    }
    let half = args.rotary_dim as usize / 2;
    let angles = args.read::<f32>(|a| &a.cos_sin).slice(position * args.rotary_dim as usize, 2 * half);
    let (cos, sin) = angles.split_at(half);
    for d in 0..half {
        let (low, high) = (out[d], out[d + half]);
        out[d] = low * cos[d] - high * sin[d];
        out[d + half] = high * cos[d] + low * sin[d];
    }
}
