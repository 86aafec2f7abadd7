//! Host cost of a decode step on the null device: the whole step, its checks, and the capture of the default ladder.
//!
//! `cargo bench --bench executor`

use std::hint::black_box;
use std::sync::Arc;

use capstan::chain::{MsaChains, StepChains};
use capstan::config::{CacheBudget, Limits, ModelShape};
use capstan::hal;
use capstan::measure::Probe;
use capstan::runtime::Executor;
use criterion::{Criterion, criterion_group, criterion_main};

/// The full MiniMax-M3 attention shape: 57 sparse layers.
fn full(max_model_len: u32) -> Executor {
    let limits = Limits { max_model_len, max_num_seqs: 256, cache: CacheBudget::Blocks(4096), ..Limits::default() };
    let chains: Arc<dyn StepChains> = Arc::new(MsaChains::new(&ModelShape::minimax_m3(), &limits, 1).expect("plans"));
    Executor::new(&hal::open("null").expect("always there"), chains).expect("builds")
}

fn decode(c: &mut Criterion) {
    let mut executor = full(131_072);
    executor.capture(|_| ()).expect("captures");
    for rows in [1, 32, 256] {
        let probe = Probe::open(&mut executor, rows, 1000).expect("room");
        probe.step(&mut executor, 100).expect("steps");
        c.bench_function(&format!("decode_step_host/null/57_layers/{rows}_rows"), |b| {
            b.iter_custom(|count| {
                let times = probe.step(&mut executor, count as usize).expect("steps");
                std::time::Duration::from_secs_f64(times.iter().map(|(submit, _)| submit * 1e-6).sum())
            });
        });
        probe.close(&mut executor).expect("closes");
    }
    let graph = executor.graphs().iter().next().expect("captured");
    c.bench_function("address_check/fingerprint", |b| b.iter(|| black_box(graph).check_fingerprint()));
    c.bench_function("audit/nodes_of_one_graph", |b| b.iter(|| black_box(graph).check_nodes()));
    c.bench_function("graph_lookup/35_sizes", |b| b.iter(|| executor.graphs().pick(1, black_box(77), black_box(5000))));
}

fn capture(c: &mut Criterion) {
    let mut executor = full(131_072);
    let mut group = c.benchmark_group("capture");
    group.sample_size(10);
    group.bench_function("default_ladder/256_seqs/57_layers", |b| b.iter(|| executor.capture(|_| ()).expect("captures")));
}

criterion_group!(benches, decode, capture);
criterion_main!(benches);
