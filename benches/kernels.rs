//! The MSA ops on one core: score at 8K, 32K and 128K with its share of the core's read bandwidth, top-k, attend.
//!
//! `cargo bench --bench kernels` prints the score table first (bandwidth is measured in the same run, right before each row),
//! then criterion's own figures.

#![expect(unsafe_code, reason = "launches ops on buffers of the bench")]

use std::hint::black_box;
use std::time::Instant;

use bytemuck::bytes_of;
use capstan::DType;
use capstan::hal::{LaunchShape, Workgroup};
use capstan::kernels::msa::{AttendSparseArgs, ScoreDecodeArgs, TopkEmitArgs};
use capstan::kernels::registry::{ATTEND_SPARSE, SCORE_DECODE_M3, TOPK_EMIT};
use capstan::kernels::{KernelArgs, KernelSpec, Ptr};
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};

const HEADS: usize = 4;
/// Bytes that no cache of the machine holds.
const COLD_BYTES: usize = 512 << 20;

fn ptr<T>(buffer: &mut [T]) -> Ptr {
    Ptr(buffer.as_mut_ptr().expose_provenance() as u64)
}

/// Runs every workgroup of a launch on this thread.
fn launch<A: KernelArgs>(kernel: &KernelSpec, grid: [u32; 3], args: &A) {
    let shape = LaunchShape { grid, workgroup: [256, 1, 1], lds_bytes: 0 };
    for at in 0..grid.iter().product() {
        let id = [at % grid[0], at / grid[0] % grid[1], at / grid[0] / grid[1]];
        // SAFETY: the pointers are those of the bench's own buffers, of the extents the arguments say.
        unsafe { (kernel.cpu)(bytes_of(args), &mut Workgroup { id, shape, lds: &mut [] }) }
    }
}

fn scrambled(count: usize) -> Vec<i32> {
    let mut all: Vec<i32> = (0..count as i32).collect();
    let mut state = 1u64;
    for i in (1..count).rev() {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        all.swap(i, (state >> 33) as usize % (i + 1));
    }
    all
}

/// Finite e4m3 codes of values below 16.
fn codes(count: usize) -> Vec<u8> {
    (0..count).map(|i| (i.wrapping_mul(2654435761) >> 13) as u8 & 0xd7).collect()
}

/// Several sequences of one context length over one large cache, so that every pass reads cold memory.
struct Score {
    keys: Vec<u8>,
    query: Vec<u8>,
    table: Vec<i32>,
    slot: Vec<i32>,
    len: Vec<i32>,
    score: Vec<f32>,
    blocks: usize,
    turn: usize,
}

impl Score {
    fn new(context: usize) -> Score {
        let blocks = context / 128;
        let sequences = COLD_BYTES / (context * 128);
        Score {
            keys: codes(COLD_BYTES),
            query: codes(HEADS * 128),
            table: scrambled(sequences * blocks),
            slot: vec![0],
            len: vec![context as i32],
            score: vec![0.0; HEADS * blocks],
            blocks,
            turn: 0,
        }
    }

    fn sequences(&self) -> usize {
        self.table.len() / self.blocks
    }

    /// One row of four heads, all its blocks.
    fn run(&mut self) {
        self.slot[0] = self.turn as i32;
        self.turn = (self.turn + 1) % self.sequences();
        let args = ScoreDecodeArgs {
            index_q: ptr(&mut self.query),
            index_cache: ptr(&mut self.keys),
            block_table: ptr(&mut self.table),
            seq_slot: ptr(&mut self.slot),
            seq_len: ptr(&mut self.len),
            score: ptr(&mut self.score),
            sequences: 1,
            query_len: 1,
            heads: HEADS as u32,
            dim: 128,
            block_size: 128,
            init_blocks: 0,
            local_blocks: 1,
            score_rows: 1,
            score_width: self.blocks as u32,
            slots: self.sequences() as u32,
            table_width: self.blocks as u32,
            cache_blocks: self.table.len() as u32,
            rank: 0,
            world: 1,
            index_dtype: DType::F8E4M3.code(),
            reserved: 0,
        };
        launch(&SCORE_DECODE_M3, [8, 1, 1], &args);
    }
}

/// Bytes a second of one core that only reads: sums of 64-bit words, eight at a time, over all of a cold buffer.
fn read_bandwidth(buffer: &[u8]) -> f64 {
    let words: &[u64] = bytemuck::cast_slice(&buffer[..buffer.len() / 8 * 8]);
    let start = Instant::now();
    let mut sums = [0u64; 32];
    for chunk in words.as_chunks::<32>().0 {
        (0..32).for_each(|i| sums[i] = sums[i].wrapping_add(chunk[i]));
    }
    black_box(sums);
    buffer.len() as f64 / start.elapsed().as_secs_f64()
}

/// The score pass against the read bandwidth; medians of interleaved runs, so that both see the same machine.
fn score_table() {
    println!("score_decode_m3, 1 row, {HEADS} heads, fp8 index cache, one core, cold memory");
    println!("{:>9} {:>12} {:>12} {:>12} {:>7}", "context", "us", "score GB/s", "read GB/s", "share");
    for context in [8 << 10, 32 << 10, 128 << 10] {
        let mut score = Score::new(context);
        let (mut passes, mut reads) = (Vec::new(), Vec::new());
        for _ in 0..7 {
            reads.push(read_bandwidth(&score.keys));
            let turns = score.sequences();
            let start = Instant::now();
            (0..turns).for_each(|_| score.run());
            passes.push(start.elapsed().as_secs_f64() / turns as f64);
        }
        passes.sort_by(f64::total_cmp);
        reads.sort_by(f64::total_cmp);
        let (pass, read) = (passes[3], reads[3]);
        let rate = (context * 128) as f64 / pass;
        println!("{context:>9} {:>12.1} {:>12.2} {:>12.2} {:>6.1}%", pass * 1e6, rate / 1e9, read / 1e9, 100.0 * rate / read);
    }
}

fn score(c: &mut Criterion) {
    score_table();
    let mut group = c.benchmark_group("score_decode_m3");
    for context in [8 << 10, 32 << 10, 128 << 10] {
        let mut score = Score::new(context);
        group.throughput(Throughput::Bytes((context * 128) as u64));
        group.bench_function(BenchmarkId::from_parameter(context), |b| b.iter(|| score.run()));
    }
}

fn topk(c: &mut Criterion) {
    let mut group = c.benchmark_group("topk_emit");
    for context in [8usize << 10, 128 << 10, 1 << 20] {
        let blocks = context / 128;
        let mut score: Vec<f32> = scrambled(HEADS * blocks).iter().map(|&x| x as f32).collect();
        let (mut slot, mut len, mut table) = (vec![0], vec![context as i32], scrambled(blocks));
        let (mut topk_idx, mut page_table, mut page_len) = (vec![0; HEADS * 16], vec![0; HEADS * 128], vec![0; HEADS]);
        let args = TopkEmitArgs {
            score: ptr(&mut score),
            row_slot: ptr(&mut slot),
            row_len: ptr(&mut len),
            block_table: ptr(&mut table),
            topk_idx: ptr(&mut topk_idx),
            page_table: ptr(&mut page_table),
            page_len: ptr(&mut page_len),
            rows: 1,
            heads: HEADS as u32,
            kv_heads: HEADS as u32,
            topk: 16,
            block_size: 128,
            score_rows: 1,
            score_width: blocks as u32,
            topk_rows: 1,
            slots: 1,
            table_width: blocks as u32,
            cache_blocks: blocks as u32,
            reserved: 0,
        };
        group
            .bench_function(BenchmarkId::new("4_heads", context), |b| b.iter(|| launch(&TOPK_EMIT, [1, HEADS as u32, 1], &args)));
    }
}

fn attend(c: &mut Criterion) {
    let mut group = c.benchmark_group("attend_sparse");
    // One row of one KV head and its 16 query heads over 2,048 tokens; the cache is far larger than the machine's caches.
    let (blocks, rows) = (4096usize, 256);
    for dtype in [DType::Bf16, DType::F8E4M3] {
        let bytes = dtype.bytes() as usize;
        // As bf16, 0x3e00..: small positive values; as fp8 codes, finite ones.
        let mut cache: Vec<u16> = (0..blocks * 2 * 128 * 128 * bytes / 2).map(|i| 0x3c3c + (i % 251) as u16).collect();
        let mut page_table: Vec<i32> =
            scrambled(blocks).iter().flat_map(|b| (0..8).map(move |j| b * 16 + j)).take(rows * 128).collect();
        let (mut page_len, mut query, mut out) = (vec![2048; rows], vec![0.5f32; rows * 16 * 128], vec![0.0f32; rows * 16 * 128]);
        let args = AttendSparseArgs {
            q: ptr(&mut query),
            kv_cache: ptr(&mut cache),
            page_table: ptr(&mut page_table),
            page_len: ptr(&mut page_len),
            out: ptr(&mut out),
            rows: rows as u32,
            q_heads: 16,
            kv_heads: 1,
            head_dim: 128,
            table_pages: 128,
            block_size: 128,
            cache_blocks: blocks as u32,
            kv_dtype: dtype.code(),
            scale: 128f32.powf(-0.5),
            k_scale: 1.0,
            v_scale: 1.0,
            reserved: 0,
        };
        group.throughput(Throughput::Elements(2 * 2 * 2048 * 16 * 128));
        let mut row = 0;
        let shape = LaunchShape { grid: [rows as u32, 1, 1], workgroup: [256, 1, 1], lds_bytes: 0 };
        group.bench_function(BenchmarkId::new("2048_tokens_16_heads", dtype.name()), |b| {
            b.iter(|| {
                row = (row + 1) % rows as u32;
                // SAFETY: as in `launch`.
                unsafe { (ATTEND_SPARSE.cpu)(bytes_of(&args), &mut Workgroup { id: [row, 0, 0], shape, lds: &mut [] }) }
            });
        });
    }
}

criterion_group!(benches, score, topk, attend);
criterion_main!(benches);
