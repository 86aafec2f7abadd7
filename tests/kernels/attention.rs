//! Cases of `norm_rope_insert`, the score kernels, `topk_emit` and the attends.

use capstan::DType;
use capstan::kernels::KernelSpec;
use capstan::kernels::msa::{
    AttendDenseArgs, AttendSparseArgs, NormRopeInsertArgs, ScoreDecodeArgs, ScorePrefillArgs, TopkEmitArgs,
};
use capstan::kernels::registry::{
    ATTEND_DENSE, ATTEND_SPARSE, NORM_ROPE_INSERT, SCORE_DECODE, SCORE_DECODE_M3, SCORE_PREFILL, TOPK_EMIT,
};

use super::{Case, Compare, Draw};

const CELLS: [DType; 3] = [DType::F32, DType::Bf16, DType::F8E4M3];
/// Matrix instructions sum in an order and width of their own.
const MATRIX: Compare = Compare::Close { abs: 1e-2, rel: 1e-2 };

pub fn cases(draw: &mut Draw) -> Vec<Case> {
    let mut all: Vec<Case> = (0..4).map(|_| norm_rope_insert(draw)).collect();
    // Every shape runs on the general kernel, the contract's on its own too.
    for (contract, kernel) in [
        (false, &SCORE_DECODE),
        (false, &SCORE_DECODE),
        (true, &SCORE_DECODE),
        (true, &SCORE_DECODE_M3),
        (true, &SCORE_DECODE_M3),
    ] {
        all.push(score_decode(draw, contract, kernel));
        all.push(score_prefill(draw, contract));
    }
    all.extend((0..6).map(|_| topk_emit(draw)));
    all.extend((0..4).flat_map(|_| [attend_sparse(draw), attend_dense(draw)]));
    all
}

/// A block table [slots, width] whose rows own different cache blocks; some entries are none.
pub fn table(draw: &mut Draw, slots: u32, width: u32, cache_blocks: u32) -> Vec<i32> {
    let mut free = draw.permutation(cache_blocks);
    (0..slots * width).map(|_| if draw.chance(20) { -1 } else { free.pop().unwrap_or(cache_blocks as i32) }).collect()
}

fn norm_rope_insert(draw: &mut Draw) -> Case {
    let (kv_dtype, index_dtype) = (draw.of(&CELLS), draw.of(&CELLS));
    let (kv_heads, head_dim, index_dim) = (draw.of(&[1, 2, 4]), draw.of(&[16, 64, 128]), draw.of(&[16, 128, 40]));
    let q_heads = kv_heads * draw.of(&[1, 4, 16]);
    let index_heads = draw.of(&[0, 1, 4]);
    let rotary_dim = draw.of(&[16, head_dim.min(index_dim) / 2 * 2]);
    let (block_size, table_width, slots) = (draw.of(&[16, 128]), 3, draw.between(1, 5));
    let (rows, cache_blocks) = (draw.between(1, 8), slots * table_width + 1);
    let packed_width = (q_heads + 2 * kv_heads) * head_dim + if index_heads > 0 { (index_heads + 1) * index_dim } else { 0 };
    // Rows of one slot write different tokens.
    let positions = block_size * table_width - draw.between(0, 2);
    let places = draw.permutation(slots * (block_size * table_width + 1));
    let row_slot: Vec<i32> = places[..rows as usize].iter().map(|place| place % slots as i32).collect();
    let row_len: Vec<i32> = places[..rows as usize].iter().map(|place| place / slots as i32).collect();
    let angles: Vec<f32> = draw.floats(positions * rotary_dim);
    let args = NormRopeInsertArgs {
        rows,
        packed_width,
        q_heads,
        kv_heads,
        head_dim,
        index_heads,
        index_dim,
        rotary_dim,
        positions,
        slots,
        table_width,
        block_size,
        cache_blocks,
        kv_dtype: kv_dtype.code(),
        index_dtype: index_dtype.code(),
        eps: 1e-6,
        ..Default::default()
    };
    let mut packed = draw.floats(rows * packed_width);
    if draw.chance(3) {
        // A row of large values: caches saturate.
        packed[..packed_width as usize].iter_mut().for_each(|x| *x *= 1e4);
    }
    let case = Case::new(format!("{args:?}"), &NORM_ROPE_INSERT, [rows, 1, 1], &args)
        .with("packed", &packed)
        .with("q_norm", &draw.floats(head_dim))
        .with("k_norm", &draw.floats(head_dim))
        .with("cos_sin", &angles)
        .with("row_slot", &row_slot)
        .with("row_len", &row_len)
        .with("block_table", &table(draw, slots, table_width, cache_blocks))
        .undefined("q", Compare::Exact)
        .undefined("index_q", Compare::Exact)
        .undefined("kv_cache", Compare::Exact);
    if index_heads == 0 {
        return case;
    }
    case.with("index_q_norm", &draw.floats(index_dim))
        .with("index_k_norm", &draw.floats(index_dim))
        .undefined("index_cache", Compare::Exact)
}

/// Shape of an index cache: its type, heads, channels, tokens of a block.
fn index_shape(draw: &mut Draw, contract: bool) -> (DType, u32, u32, u32) {
    if contract {
        return (DType::F8E4M3, draw.of(&[1, 2, 4]), 128, 128);
    }
    (draw.of(&CELLS), draw.of(&[1, 2, 3, 4]), draw.of(&[8, 36, 64, 128, 200]), draw.of(&[16, 32, 64, 128, 272]))
}

/// Keys with an occasional NaN code.
fn keys(draw: &mut Draw, dtype: DType, count: u32) -> Vec<u8> {
    let mut keys = draw.cells(dtype, count, 0.5);
    if dtype == DType::F8E4M3 {
        for _ in 0..draw.between(0, 3) {
            let at = draw.between(0, count - 1) as usize;
            keys[at] = draw.of(&[0x7f, 0xff, 0x80]);
        }
    }
    keys
}

fn score_decode(draw: &mut Draw, contract: bool, kernel: &'static KernelSpec) -> Case {
    let (dtype, heads, dim, block_size) = index_shape(draw, contract);
    let query_len = if contract { draw.between(1, 16 / heads) } else { draw.of(&[1, 2, 5, 70]) };
    let (sequences, table_width) = (draw.between(1, 4), if contract { draw.of(&[3, 20]) } else { 6 });
    let (slots, world) = (sequences + 1, draw.of(&[1, 1, 2, 4]));
    let cache_blocks = slots * table_width;
    let (score_rows, score_width) = (sequences * query_len + 1, table_width + draw.between(0, 5));
    let seq_len: Vec<i32> =
        (0..sequences).map(|_| if draw.chance(5) { 0 } else { draw.between(1, table_width * block_size) as i32 }).collect();
    let args = ScoreDecodeArgs {
        sequences,
        query_len,
        heads,
        dim,
        block_size,
        init_blocks: draw.between(0, 2),
        local_blocks: draw.between(0, 2),
        score_rows,
        score_width,
        slots,
        table_width,
        cache_blocks,
        rank: draw.between(0, world - 1),
        world,
        index_dtype: dtype.code(),
        ..Default::default()
    };
    let grid = [draw.of(&[1, 2, 5, 30]), sequences, 1];
    let compare = if contract { MATRIX } else { Compare::Exact };
    Case::new(format!("{args:?} {seq_len:?} {grid:?}"), kernel, grid, &args)
        .with("index_q", &draw.cells(dtype, sequences * query_len * heads * dim, 0.5))
        .with("index_cache", &keys(draw, dtype, cache_blocks * block_size * dim))
        .with("block_table", &table(draw, slots, table_width, cache_blocks))
        .with("seq_slot", &draw.permutation(slots)[..sequences as usize])
        .with("seq_len", &seq_len)
        .undefined("score", compare)
}

fn score_prefill(draw: &mut Draw, contract: bool) -> Case {
    let (dtype, heads, dim, block_size) = index_shape(draw, contract);
    let (slots, table_width, tile_rows) = (4, 5, draw.of(&[16, 5, 80]));
    let cache_blocks = slots * table_width;
    let (mut row_slot, mut row_len) = (Vec::new(), Vec::new());
    for slot in draw.permutation(slots) {
        // A prompt's rows one after another; then a few pads.
        let rows = draw.of(&[1, 3, 40]);
        let first = draw.between(1, table_width * block_size - rows + 1);
        (0..rows).for_each(|t| {
            row_slot.push(slot);
            row_len.push((first + t) as i32);
        });
        if draw.chance(3) {
            (0..draw.between(1, 3)).for_each(|_| {
                row_slot.push(0);
                row_len.push(0);
            });
        }
    }
    let rows = row_len.len() as u32;
    let first_head = draw.between(0, 2);
    let q_heads_stride = first_head + heads + draw.between(0, 1);
    let args = ScorePrefillArgs {
        rows,
        tile_rows,
        heads,
        dim,
        block_size,
        init_blocks: draw.between(0, 1),
        local_blocks: draw.between(0, 2),
        score_rows: rows + 1,
        score_width: table_width + draw.between(0, 3),
        slots,
        table_width,
        cache_blocks,
        first_head,
        q_heads_stride,
        index_dtype: dtype.code(),
        ..Default::default()
    };
    let grid = [draw.of(&[1, 2, 7]), rows.div_ceil(tile_rows), 1];
    let compare = if contract { MATRIX } else { Compare::Exact };
    Case::new(format!("{args:?} {row_len:?}"), &SCORE_PREFILL, grid, &args)
        .with("index_q", &draw.cells(dtype, rows * q_heads_stride * dim, 0.5))
        .with("index_cache", &keys(draw, dtype, cache_blocks * block_size * dim))
        .with("block_table", &table(draw, slots, table_width, cache_blocks))
        .with("row_slot", &row_slot)
        .with("row_len", &row_len)
        .undefined("score", compare)
}

fn topk_emit(draw: &mut Draw) -> Case {
    let (heads, block_size) = (draw.of(&[1, 2, 4]), draw.of(&[16, 128]));
    let kv_heads = heads * draw.of(&[1, 1, 2]);
    let (rows, slots, topk) = (draw.between(1, 4), 6, draw.of(&[16, 16, 16, 1, 3, 40]));
    // Up to past what the candidate buffer holds.
    let table_width: u32 = draw.of(&[4, 16, 60, 300, 1500, 9000]);
    let score_width = table_width.next_multiple_of(64);
    let cache_blocks = slots * table_width;
    let kind = draw.between(0, 3);
    let mut score: Vec<f32> = (0..heads * (rows + 1) * score_width)
        .map(|at| match kind {
            0 => draw.normal(),
            // Many ties.
            1 => draw.normal().round(),
            // Ascending: the best are all in one place.
            2 => at as f32,
            _ => draw.of(&[f32::NAN, f32::NEG_INFINITY, 0.0, -0.0, 1e29, 1e30]),
        })
        .collect();
    for _ in 0..4 {
        let at = draw.between(0, heads * (rows + 1) * score_width - 1) as usize;
        score[at] = draw.of(&[1e30, 1e29, f32::NAN]);
    }
    let row_len: Vec<i32> =
        (0..rows).map(|_| if draw.chance(5) { 0 } else { draw.between(1, table_width * block_size) as i32 }).collect();
    let args = TopkEmitArgs {
        rows,
        heads,
        kv_heads,
        topk,
        block_size,
        score_rows: rows + 1,
        score_width,
        topk_rows: rows + 2,
        slots,
        table_width,
        cache_blocks,
        ..Default::default()
    };
    Case::new(format!("{args:?} {row_len:?}"), &TOPK_EMIT, [rows, heads, 1], &args)
        .with("score", &score)
        .with("row_slot", &draw.permutation(slots)[..rows as usize])
        .with("row_len", &row_len)
        .with("block_table", &table(draw, slots, table_width, cache_blocks))
        .undefined("topk_idx", Compare::Exact)
        .undefined("page_table", Compare::Exact)
        .undefined("page_len", Compare::Exact)
}

/// Shape of an attend: its type, KV heads, query heads, channels.
fn heads(draw: &mut Draw) -> (DType, u32, u32, u32) {
    let kv_heads = draw.of(&[1, 2, 4]);
    (draw.of(&CELLS), kv_heads, kv_heads * draw.of(&[1, 3, 16, 20]), draw.of(&[16, 64, 128, 128, 256]))
}

/// How an attend's results are compared: f32 caches are attended to in the CPU op's order.
fn attended(dtype: DType) -> Compare {
    if dtype == DType::F32 { Compare::Exact } else { Compare::Close { abs: 1e-4, rel: 1e-3 } }
}

/// A KV cache with NaN here and there: where no row may look, mostly.
fn attend_sparse(draw: &mut Draw) -> Case {
    let (dtype, kv_heads, q_heads, head_dim) = heads(draw);
    let (rows, block_size, cache_blocks) = (draw.between(1, 4), draw.of(&[16, 128]), 5);
    let table_pages = draw.of(&[8, 32, 128]);
    let pages = block_size / 16;
    let page_table: Vec<i32> = (0..rows * kv_heads * table_pages)
        .map(|at| {
            let head = at / table_pages % kv_heads;
            let page = draw.between(0, cache_blocks - 1) * 2 * pages + draw.between(0, pages - 1);
            // Now and then an id that is none, or a V page's.
            if draw.chance(20) { draw.of(&[-1, (pages * kv_heads) as i32, i32::MAX]) } else { (page * kv_heads + head) as i32 }
        })
        .collect();
    let page_len: Vec<i32> =
        (0..rows * kv_heads).map(|_| draw.of(&[0, 1, 17, -3]) + draw.between(0, table_pages * 16 + 5) as i32).collect();
    let args = AttendSparseArgs {
        rows,
        q_heads,
        kv_heads,
        head_dim,
        table_pages,
        block_size,
        cache_blocks,
        kv_dtype: dtype.code(),
        scale: (head_dim as f32).powf(-0.5),
        k_scale: draw.of(&[1.0, 0.7]),
        v_scale: draw.of(&[1.0, 1.3]),
        ..Default::default()
    };
    Case::new(format!("{args:?} {page_len:?}"), &ATTEND_SPARSE, [rows, kv_heads, 1], &args)
        .with("q", &draw.floats(rows * q_heads * head_dim))
        .with("kv_cache", &draw.cells(dtype, cache_blocks * 2 * block_size * kv_heads * head_dim, 1.0))
        .with("page_table", &page_table)
        .with("page_len", &page_len)
        .undefined("out", attended(dtype))
}

fn attend_dense(draw: &mut Draw) -> Case {
    let (dtype, kv_heads, q_heads, head_dim) = heads(draw);
    let (rows, slots, block_size) = (draw.between(1, 4), 5, draw.of(&[16, 128]));
    let table_width = draw.of(&[1, 4, 9]);
    let cache_blocks = slots * table_width;
    let block_table = table(draw, slots, table_width, cache_blocks);
    let row_slot = draw.permutation(slots)[..rows as usize].to_vec();
    let row_len: Vec<i32> = (0..rows).map(|_| draw.of(&[0, 1]) * draw.between(1, table_width * block_size + 3) as i32).collect();
    let mut cache = draw.cells(dtype, cache_blocks * 2 * block_size * kv_heads * head_dim, 1.0);
    poison(
        &mut cache,
        dtype,
        kv_heads * head_dim,
        block_size,
        &visible(&block_table, table_width, &row_slot, &row_len, block_size),
    );
    let args = AttendDenseArgs {
        rows,
        q_heads,
        kv_heads,
        head_dim,
        block_size,
        cache_blocks,
        slots,
        table_width,
        kv_dtype: dtype.code(),
        scale: (head_dim as f32).powf(-0.5),
        ..Default::default()
    };
    Case::new(format!("{args:?} {row_len:?}"), &ATTEND_DENSE, [rows, kv_heads, 1], &args)
        .with("q", &draw.floats(rows * q_heads * head_dim))
        .with("kv_cache", &cache)
        .with("row_slot", &row_slot)
        .with("row_len", &row_len)
        .with("block_table", &block_table)
        .undefined("out", attended(dtype))
}

/// Tokens of each cache block that a row may see.
fn visible(table: &[i32], width: u32, row_slot: &[i32], row_len: &[i32], block_size: u32) -> Vec<(usize, usize)> {
    let mut seen = Vec::new();
    for (&slot, &len) in row_slot.iter().zip(row_len) {
        for block in 0..width {
            let id = table[(slot as u32 * width + block) as usize];
            if id >= 0 {
                let tokens = (len as i64 - i64::from(block * block_size)).clamp(0, i64::from(block_size));
                seen.push((id as usize, tokens as usize));
            }
        }
    }
    seen
}

/// NaN in every token that no row may see: of a whole block's K and V, page by page (msa-spec 2.4).
fn poison(cache: &mut [u8], dtype: DType, channels: u32, block_size: u32, seen: &[(usize, usize)]) {
    let (size, x) = (dtype.bytes() as usize, 16 / dtype.bytes() as usize);
    let (channels, block_size) = (channels as usize, block_size as usize);
    let nan: &[u8] = match dtype {
        DType::F32 => &[0, 0, 0xc0, 0x7f],
        DType::Bf16 => &[0xc0, 0x7f],
        _ => &[0x7f],
    };
    let block_elements = 2 * block_size * channels;
    for (id, block) in cache.chunks_mut(block_elements * size).enumerate() {
        let tokens = seen.iter().filter(|(seen, _)| *seen == id).map(|&(_, tokens)| tokens).max().unwrap_or(0);
        for (at, element) in block.chunks_mut(size).enumerate() {
            let (side, within) = (at / (block_size * channels), at % (block_size * channels));
            let (page, within) = (within / (16 * channels), within % (16 * channels));
            // Pages hold heads one after another, each [head_dim / x, 16, x] or [16 / x, head_dim, x]; a head's size divides out
            // only for K, so V is poisoned by whole pages.
            let token = page * 16 + if side == 0 { within / x % 16 } else { 0 };
            if token >= tokens {
                element.copy_from_slice(nan);
            }
        }
    }
}
