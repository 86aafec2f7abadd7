//! Context parallelism on the CPU device: latency of an exchange by world and rows, cost of an agreement, and the time from
//! `kill -9` of a rank until every other process has ended.
//!
//! `cargo bench --bench cp`. Ranks are threads of this process, or processes where one is killed; more ranks than cores share them.

#![expect(unsafe_code, reason = "launches ops on buffers of the bench")]

#[path = "../tests/parallel/processes.rs"]
#[allow(dead_code, clippy::allow_attributes, reason = "this bench uses a part of it")]
mod processes;

use std::sync::Barrier;
use std::time::{Duration, Instant};

use bytemuck::bytes_of;
use capstan::hal::{LaunchShape, Workgroup};
use capstan::kernels::exchange::{AgreeArgs, HEAD_WORDS, TAG_BITS, TopkExchangeArgs, peer_words};
use capstan::kernels::registry::{AGREE, TOPK_EXCHANGE};
use capstan::kernels::{KernelArgs, KernelSpec, Ptr};
use criterion::{BenchmarkId, Criterion, SamplingMode, criterion_group, criterion_main};

const HEADS: u32 = 4;
const TOPK: u32 = 16;
const BLOCK: u32 = 128;
/// Tokens of a row: 64 blocks a rank and more.
const LEN: u32 = 32_768;
const BUDGET_US: u32 = 20_000_000;

fn ptr<T>(buffer: &mut [T]) -> Ptr {
    Ptr(buffer.as_mut_ptr().expose_provenance() as u64)
}

/// Runs every workgroup of a launch on this thread, in the order in which a device dispatches them.
fn launch<A: KernelArgs>(kernel: &KernelSpec, grid: [u32; 3], args: &A) {
    let shape = LaunchShape { grid, workgroup: [64, 1, 1], lds_bytes: 0 };
    for at in 0..grid.iter().product() {
        let id = [at % grid[0], at / grid[0] % grid[1], at / grid[0] / grid[1]];
        // SAFETY: the pointers are those of the bench's own buffers, of the extents the arguments say.
        unsafe { (kernel.cpu)(bytes_of(args), &mut Workgroup { id, shape, lds: &mut [] }) }
    }
}

/// Every rank runs its launches `count` times, in step through nothing but the protocol; gives the time of rank 0.
fn in_step(world: u32, count: u64, rank: impl Fn(u32) -> Box<dyn FnMut()> + Sync) -> Duration {
    let start = Barrier::new(world as usize);
    let run = |at: u32| {
        let mut launch = rank(at);
        start.wait();
        let began = Instant::now();
        (0..count).for_each(|_| launch());
        began.elapsed()
    };
    std::thread::scope(|scope| {
        let others: Vec<_> = (1..world).map(|at| scope.spawn(move || run(at))).collect();
        let took = run(0);
        for other in others {
            other.join().expect("a rank runs to its end");
        }
        took
    })
}

/// Peer buffers of all ranks.
fn buffers(world: u32, words: u64) -> (Vec<Vec<u64>>, [Ptr; 8]) {
    let mut all: Vec<Vec<u64>> = (0..world).map(|_| vec![0; words as usize]).collect();
    let mut pointers = [Ptr::NULL; 8];
    all.iter_mut().zip(&mut pointers).for_each(|(words, pointer)| *pointer = ptr(words));
    (all, pointers)
}

fn exchange(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("exchange");
    group.sample_size(20);
    for world in [2, 4] {
        for rows in [1, 8, 32] {
            group.bench_function(BenchmarkId::new(format!("world_{world}"), rows), |bencher| {
                bencher.iter_custom(|count| {
                    let (_words, peers) = buffers(world, peer_words(world, HEADS / world, rows, TOPK));
                    in_step(world, count, |rank| exchange_of(rank, world, rows, peers))
                });
            });
        }
    }
    group.finish();
}

/// The exchanges of one rank over random scores.
fn exchange_of(rank: u32, world: u32, rows: u32, peers: [Ptr; 8]) -> Box<dyn FnMut()> {
    let (blocks, owned) = (LEN / BLOCK, HEADS / world);
    let width = blocks.div_ceil(world);
    let mut random = capstan::random::Random::new(u64::from(rank));
    let mut score: Vec<f32> = (0..HEADS * rows * width).map(|_| random.range(0, 1 << 20) as f32).collect();
    let (mut row_slot, mut row_len) = (vec![0i32; rows as usize], vec![LEN as i32; rows as usize]);
    let mut block_table: Vec<i32> = (0..blocks as i32).collect();
    let mut topk_idx = vec![0i32; (owned * rows * TOPK) as usize];
    let mut page_table = vec![0i32; (rows * owned * TOPK * BLOCK / 16) as usize];
    let mut page_len = vec![0i32; (rows * owned) as usize];
    let mut generations = vec![0u32; (HEADS * rows) as usize];
    let mut state = vec![0u64; 8];
    let [peer0, peer1, peer2, peer3, peer4, peer5, peer6, peer7] = peers;
    Box::new(move || {
        let args = TopkExchangeArgs {
            score: ptr(&mut score),
            row_slot: ptr(&mut row_slot),
            row_len: ptr(&mut row_len),
            block_table: ptr(&mut block_table),
            topk_idx: ptr(&mut topk_idx),
            page_table: ptr(&mut page_table),
            page_len: ptr(&mut page_len),
            generations: ptr(&mut generations),
            state: ptr(&mut state),
            peer0,
            peer1,
            peer2,
            peer3,
            peer4,
            peer5,
            peer6,
            peer7,
            rows,
            heads: HEADS,
            owned,
            kv_heads: owned,
            topk: TOPK,
            block_size: BLOCK,
            score_rows: rows,
            score_width: width,
            topk_rows: rows,
            slots: 1,
            table_width: blocks,
            cache_blocks: blocks,
            peer_rows: rows,
            rank,
            world,
            tag_bits: TAG_BITS,
            budget_us: BUDGET_US,
            reserved: 0,
        };
        launch(&TOPK_EXCHANGE, [rows, HEADS, 1], &args);
    })
}

fn agreement(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("agreement");
    group.sample_size(20);
    for world in [2, 4] {
        group.bench_function(BenchmarkId::new("world", world), |bencher| {
            bencher.iter_custom(|count| {
                let (_words, peers) = buffers(world, u64::from(HEAD_WORDS));
                in_step(world, count, |rank| agreement_of(rank, world, peers))
            });
        });
    }
    group.finish();
}

/// The agreements of one rank on steps of 32 sequences.
fn agreement_of(rank: u32, world: u32, peers: [Ptr; 8]) -> Box<dyn FnMut()> {
    let (mut seq_len, mut agreements, mut state) = (vec![LEN as i32; 32], vec![0u64], vec![0u64; 8]);
    let [peer0, peer1, peer2, peer3, peer4, peer5, peer6, peer7] = peers;
    Box::new(move || {
        let args = AgreeArgs {
            seq_len: ptr(&mut seq_len),
            agreements: ptr(&mut agreements),
            state: ptr(&mut state),
            peer0,
            peer1,
            peer2,
            peer3,
            peer4,
            peer5,
            peer6,
            peer7,
            sequences: 32,
            rows: 32,
            query_len: 1,
            graph: LEN,
            rank,
            world,
            budget_us: BUDGET_US,
            reserved: 0,
        };
        launch(&AGREE, [1, 1, 1], &args);
    })
}

/// From `kill -9` in the middle of replays until the last of the other processes has ended, at the default timeout.
fn dead_rank(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("dead_rank");
    group.sample_size(10).sampling_mode(SamplingMode::Flat).warm_up_time(Duration::from_millis(1));
    group.measurement_time(Duration::from_secs(10));
    let timeout_ms = capstan::config::Limits::default().peer_timeout_ms;
    for world in [2, 4] {
        group.bench_function(BenchmarkId::new(format!("timeout_{timeout_ms}_ms"), world), |bencher| {
            bencher.iter_custom(|count| (0..count).map(|_| kill_one(world, timeout_ms)).sum());
        });
    }
    group.finish();
}

fn kill_one(world: u32, timeout_ms: u32) -> Duration {
    let mut ranks = processes::start_all(world, &["--steps", "1000000000"], timeout_ms);
    ranks.iter_mut().for_each(processes::Rank::await_replays);
    std::thread::sleep(Duration::from_millis(30));
    let start = Instant::now();
    ranks[1].kill();
    let ended = processes::end_all(ranks, Duration::from_secs(20));
    ended.iter().map(|ended| ended.at.duration_since(start)).max().expect("there are ranks")
}

criterion_group!(benches, exchange, agreement, dead_rank);
criterion_main!(benches);
