//! Host costs: a decode step, its checks, the audit of a graph, capture, and the plan. Null device: nothing of this is kernels.
//!
//! `cargo bench --bench executor`

use std::hint::black_box;
use std::sync::Arc;
use std::time::Duration;

use capstan::chain::{GraphKey, MsaChains, StepChains};
use capstan::config::{CacheBudget, CaptureSizes, Limits, ModelShape};
use capstan::hal::{self, NodeId};
use capstan::invariant::race::Reach;
use capstan::invariant::{self, Report, bake};
use capstan::measure::Probe;
use capstan::model::M3Chains;
use capstan::planning::MsaPlan;
use capstan::runtime::{Checks, Executor};
use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};

fn limits(capture: CaptureSizes) -> Limits {
    Limits { max_model_len: 131_072, cache: CacheBudget::Blocks(8192), capture, ..Limits::default() }
}

fn executor(chains: Arc<dyn StepChains>) -> Executor {
    Executor::new(&hal::open("null").expect("null is always there"), chains).expect("the null device holds any plan")
}

/// The 57 sparse layers of MiniMax-M3.
fn msa(capture: CaptureSizes) -> Arc<dyn StepChains> {
    Arc::new(MsaChains::new(&ModelShape::minimax_m3(), &limits(capture), 0).expect("the published shape plans"))
}

/// All 60 layers of MiniMax-M3, with products and experts.
fn m3(capture: CaptureSizes) -> Arc<dyn StepChains> {
    Arc::new(M3Chains::without_weights(&ModelShape::minimax_m3(), &limits(capture)).expect("the published shape plans"))
}

/// Submit of one decode step: checks, ring slot, launch.
fn decode_step(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("decode_step");
    for rows in [1u32, 8, 32, 128] {
        let mut executor = executor(msa(CaptureSizes::List(vec![rows])));
        executor.capture(|_| ()).expect("the null device captures");
        let probe = Probe::open(&mut executor, rows, 4000).expect("the cache is large enough");
        probe.run(&mut executor, 8).expect("the null device replays");
        group.bench_function(BenchmarkId::new("57_layers", rows), |bencher| {
            bencher.iter_custom(|count| {
                let micros: f64 = (0..count).map(|_| probe.step(&mut executor).expect("a step").0).sum();
                Duration::from_secs_f64(micros / 1e6)
            });
        });
    }
    group.finish();
}

/// What every step pays for its checks of the graph, and what the audits cost that run at capture, on demand or every n-th step.
fn checks(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("checks");
    let mut executor = executor(m3(CaptureSizes::List(vec![32])));
    executor.capture(|_| ()).expect("the null device captures");
    let graph = executor.graphs().iter().next().expect("one size was captured");
    group.bench_function("fingerprint", |bencher| bencher.iter(|| black_box(graph).check_fingerprint()));
    let nodes = graph.launches().len();
    group.bench_function(BenchmarkId::new("recorded_nodes", nodes), |bencher| bencher.iter(|| graph.check_nodes()));
    group.bench_function(BenchmarkId::new("lint_nodes", nodes), |bencher| bencher.iter(|| invariant::lint(graph)));
    group.bench_function(BenchmarkId::new("graph_audit", nodes), |bencher| bencher.iter(|| invariant::audit(graph)));
    group.bench_function(BenchmarkId::new("bake_compare", nodes), |bencher| {
        bencher.iter(|| {
            let (device, mut report) = (&**graph.graph(), Report::new("bench"));
            bake::compare(device, device, graph.chain(), graph.modules(), graph.arena(), &mut report);
            report
        });
    });
    group.bench_function(BenchmarkId::new("executor_audit", nodes), |bencher| bencher.iter(|| executor.audit()));
    group.bench_function(BenchmarkId::new("race_reach_line", nodes), |bencher| {
        let line: Vec<_> = (1..nodes as u32).map(|after| (NodeId(after - 1), NodeId(after))).collect();
        bencher.iter(|| Reach::of(nodes, black_box(&line)));
    });
    group.bench_function(BenchmarkId::new("race_reach_branches", nodes), |bencher| {
        // Two lines, joined at both ends.
        let mut edges: Vec<_> = (2..nodes as u32).map(|after| (NodeId(after - 2), NodeId(after))).collect();
        edges.extend([(NodeId(0), NodeId(1)), (NodeId(nodes as u32 - 2), NodeId(nodes as u32 - 1))]);
        bencher.iter(|| Reach::of(nodes, black_box(&edges)));
    });
    let cpu = hal::open("cpu").expect("the CPU is always there");
    group.sample_size(10);
    group.bench_function("self_test_cpu", |bencher| bencher.iter(|| invariant::self_test(&cpu).expect("the CPU device runs")));
    group.finish();
    audited_steps(criterion);
}

/// A whole decode step, result included, of the nano chains on the CPU device: unchecked and under each level of audit.
fn audited_steps(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("audited_step");
    let limits =
        Limits { max_model_len: 512, max_num_seqs: 8, max_num_batched_tokens: 64, ..limits(CaptureSizes::List(vec![8])) };
    let limits = Limits { cache: CacheBudget::Blocks(256), ..limits };
    let chains: Arc<dyn StepChains> = Arc::new(MsaChains::new(&ModelShape::nano(), &limits, 0).expect("the nano shape plans"));
    let mut executor = Executor::new(&hal::open("cpu").expect("the CPU is always there"), chains).expect("a small plan");
    executor.capture(|_| ()).expect("the CPU device captures");
    let probe = Probe::open(&mut executor, 5, 100).expect("the cache is large enough");
    let off = Checks { self_test: None, audit_every: None, poison_free_blocks: false, each_node: false, shadow_every: None };
    let every = Checks { audit_every: Some(1), ..off };
    let levels = [("off", off), ("every_64th", Checks { audit_every: Some(64), ..off }), ("every", every)];
    for (name, checks) in levels.into_iter().chain([
        ("each_node", Checks { each_node: true, ..every }),
        ("poison_free_blocks", Checks { poison_free_blocks: true, ..every }),
        ("shadow", Checks { shadow_every: Some(1), ..off }),
    ]) {
        executor.set_checks(checks);
        group.bench_function(name, |bencher| bencher.iter(|| probe.step(&mut executor).expect("a step")));
    }
    group.finish();
}

fn capture(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("capture");
    group.sample_size(10);
    let mut ladder = executor(msa(CaptureSizes::Default));
    let sizes = ladder.ladder().sizes().len();
    group.bench_function(BenchmarkId::new("msa_57_layers_sizes", sizes), |bencher| {
        bencher.iter(|| ladder.capture(|_| ()).expect("the null device captures"));
    });
    let mut one = executor(m3(CaptureSizes::List(vec![256])));
    group.bench_function("m3_60_layers_one_size", |bencher| {
        bencher.iter(|| one.capture(|_| ()).expect("the null device captures"));
    });
    group.finish();
}

fn plan(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("plan");
    let (shape, limits) = (ModelShape::minimax_m3(), limits(CaptureSizes::Default));
    group.bench_function("msa_57_layers", |bencher| bencher.iter(|| MsaPlan::new(&shape, &limits)));
    let chains = msa(CaptureSizes::Default);
    let key = GraphKey { query_len: 1, sequences: 32, kv_len_max: limits.max_model_len, rank: 0, world: 1 };
    group.bench_function("decode_chain_57_layers", |bencher| bencher.iter(|| chains.decode(black_box(&key))));
    group.finish();
}

criterion_group!(benches, decode_step, checks, capture, plan);
criterion_main!(benches);
