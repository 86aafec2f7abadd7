//! The whole model under context parallelism: every rank generates the tokens that one rank alone does.

mod serving;

use std::sync::Arc;
use std::time::Duration;

use capstan::config::{CaptureSizes, Limits, ModelShape};
use capstan::engine::{Engine, EngineLimits, Request};
use capstan::hal::Device;
use capstan::hal::cpu::CpuDevice;
use capstan::kernels::registry::TOPK_EXCHANGE;
use capstan::model::{Checkpoint, M3Chains, make};
use capstan::peers::{Group, ThreadGroup};
use capstan::random::Random;
use capstan::runtime::Executor;

use serving::{prompt, sampling, seed};

/// Long prompts that outgrow the selection, short ones that do not, greedy and sampled.
fn requests(random: &mut Random) -> Vec<Request> {
    (0..9)
        .map(|at| {
            let (len, max_new) = if at % 3 == 0 { (random.range(200, 330), 40) } else { (random.range(1, 60), 60) };
            Request { prompt: prompt(random, len), max_new, sampling: sampling(random), stop: Vec::new() }
        })
        .collect()
}

/// What one rank generates for all requests, batched as they come, and the decode steps it took.
fn generate(
    checkpoint: &Arc<Checkpoint>,
    requests: &[Request],
    limits: &Limits,
    group: Option<Arc<ThreadGroup>>,
) -> Vec<Vec<i32>> {
    let chains = Arc::new(M3Chains::new(checkpoint.clone(), limits).expect("the nano model plans"));
    let device: Arc<dyn Device> = CpuDevice::new(1).unwrap();
    let engine_limits = EngineLimits::of(&*chains);
    let parallel = group.is_some();
    let mut executor = match group {
        Some(group) => Executor::join(&device, chains, group as Arc<dyn Group>).unwrap(),
        None => Executor::new(&device, chains).unwrap(),
    };
    executor.capture(|_| ()).unwrap();
    let graph = executor.graphs().iter().next().expect("sizes were captured");
    let exchanges = graph.chain().ops.iter().any(|op| op.kernel.symbol == TOPK_EXCHANGE.symbol);
    assert_eq!(exchanges, parallel, "ranks exchange, one rank alone does not");
    let mut engine = Engine::new(executor, engine_limits);
    let events: Vec<_> = requests.iter().map(|request| engine.submit(request.clone()).unwrap().1).collect();
    while !engine.is_idle() {
        engine.step().unwrap();
    }
    let tokens = |event| match event {
        capstan::engine::Event::Token(token) => Some(token),
        capstan::engine::Event::Finished(_) => None,
    };
    events.iter().map(|events| events.try_iter().filter_map(tokens).collect()).collect()
}

#[test]
fn every_rank_generates_what_one_rank_alone_does() {
    let dir = tempfile::tempdir().unwrap();
    make::make_model(&ModelShape::nano(), 3, dir.path(), |_| ()).unwrap();
    let checkpoint = Arc::new(Checkpoint::open(dir.path()).unwrap());
    let requests = requests(&mut Random::new(seed(31)));
    let limits =
        Limits { max_num_seqs: 4, peer_timeout_ms: 30_000, capture: CaptureSizes::List(vec![1, 2, 4]), ..serving::limits() };
    let alone = generate(&checkpoint, &requests, &limits, None);
    assert!(alone.iter().zip(&requests).all(|(tokens, request)| tokens.len() == request.max_new as usize));
    for world in [2, 4, 8] {
        let ranks: Vec<Vec<Vec<i32>>> = std::thread::scope(|scope| {
            let start = |group: Arc<ThreadGroup>| {
                let limits = Limits { rank: group.rank(), world, ..limits.clone() };
                let (checkpoint, requests) = (&checkpoint, &requests);
                scope.spawn(move || generate(checkpoint, requests, &limits, Some(group)))
            };
            let ranks: Vec<_> = ThreadGroup::all(world, Duration::from_secs(60)).into_iter().map(start).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        });
        for (rank, tokens) in ranks.iter().enumerate() {
            assert_eq!(tokens, &alone, "rank {rank} of {world}");
        }
    }
}

#[test]
#[cfg(feature = "cli")]
fn generate_under_launch_prints_once_what_one_process_prints() {
    let dir = tempfile::tempdir().unwrap();
    make::make_model(&ModelShape::nano(), 3, dir.path(), |_| ()).unwrap();
    let ids = dir.path().join("ids.txt");
    let prompt: Vec<String> = prompt(&mut Random::new(seed(32)), 150).iter().map(i32::to_string).collect();
    std::fs::write(&ids, prompt.join(" ")).unwrap();
    let program = env!("CARGO_BIN_EXE_capstan");
    let generate = ["generate", "--device", "cpu", "--max-new", "50", "--ignore-eos", "--peer-timeout-ms", "20000"];
    let model = ["--model", dir.path().to_str().unwrap(), "--prompt-ids", ids.to_str().unwrap()];
    let alone = std::process::Command::new(program).args(generate).args(model).output().unwrap();
    let launch = ["launch", "--world", "4", "--", program];
    let ranks = std::process::Command::new(program).args(launch).args(generate).args(model).output().unwrap();
    assert!(alone.status.success() && ranks.status.success(), "{}", String::from_utf8_lossy(&ranks.stderr));
    assert_eq!(String::from_utf8_lossy(&alone.stdout).split_whitespace().count(), 50);
    assert_eq!(String::from_utf8_lossy(&ranks.stdout), String::from_utf8_lossy(&alone.stdout));
}
