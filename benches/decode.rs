//! The whole model step against a peer: tokens a second of decode, seconds of a prefill, at one context length.
//!
//! `cargo bench --bench decode` measures this program; with `CAPSTAN_PEER_PYTHON=python3` it runs `benches/transformers_peer.py`
//! (torch and transformers installed there) on the same checkpoint in the same run and prints the ratio. `CAPSTAN_MODEL` names
//! the checkpoint; without it `../shared/fixtures/m3-tiny` or a random one of the same shape is used.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Instant;

use capstan::config::{CacheBudget, CaptureSizes, Limits};
use capstan::dtype::DType;
use capstan::hal;
use capstan::model::{Checkpoint, M3Chains, make};
use capstan::random::Random;
use capstan::runtime::{Executor, Sampling, SequenceId, SequenceStep};

const PROMPT: u32 = 2700;
const STEPS: u32 = 64;
const ROUNDS: usize = 3;

/// Best of the rounds: decode tokens a second, and seconds of one prompt's prefill.
#[derive(Clone, Copy, Debug)]
struct Figures {
    decode: f64,
    prefill: f64,
}

fn main() {
    let (_scratch, dir) = model();
    let peer = std::env::var("CAPSTAN_PEER_PYTHON").ok();
    println!("{}, {PROMPT} tokens of context, float32 caches, best of {ROUNDS}", dir.display());
    println!(
        "{:>9} {:>16} {:>16} {:>7} {:>14} {:>14} {:>7}",
        "sequences", "decode tok/s", "transformers", "ratio", "prefill s", "transformers", "ratio"
    );
    for sequences in [1, 8] {
        let ours = measure(&dir, sequences);
        let theirs = peer.as_ref().map(|python| measure_peer(python, &dir, sequences));
        let cell = |value: Option<f64>, digits: usize| value.map_or("-".into(), |value| format!("{value:.digits$}"));
        println!(
            "{sequences:>9} {:>16.0} {:>16} {:>7} {:>14.3} {:>14} {:>7}",
            ours.decode,
            cell(theirs.map(|peer| peer.decode), 0),
            cell(theirs.map(|peer| ours.decode / peer.decode), 2),
            ours.prefill,
            cell(theirs.map(|peer| peer.prefill), 3),
            cell(theirs.map(|peer| peer.prefill / ours.prefill), 2),
        );
    }
}

fn model() -> (Option<tempfile::TempDir>, PathBuf) {
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared/fixtures/m3-tiny");
    if let Some(dir) = std::env::var_os("CAPSTAN_MODEL") {
        return (None, dir.into());
    }
    if fixture.is_dir() {
        return (None, fixture);
    }
    let scratch = tempfile::tempdir().expect("a temporary folder");
    let shape = make::named_shape("tiny").expect("a known shape");
    make::make_model(&shape, 1, scratch.path(), |_| ()).expect("a model is written");
    let dir = scratch.path().to_path_buf();
    (Some(scratch), dir)
}

fn measure(dir: &Path, sequences: u32) -> Figures {
    let checkpoint = Arc::new(Checkpoint::open(dir).expect("the checkpoint opens"));
    let (vocab, block) = (checkpoint.shape().vocab, checkpoint.shape().block_size);
    let kv_len_max = PROMPT + STEPS + 1;
    let limits = Limits {
        max_model_len: kv_len_max.next_multiple_of(block),
        max_num_seqs: sequences,
        max_num_batched_tokens: 512,
        cache: CacheBudget::Blocks(kv_len_max.div_ceil(block) * sequences),
        capture: CaptureSizes::List(vec![sequences]),
        kv_dtype: DType::F32,
        index_dtype: DType::F32,
        ..Limits::default()
    };
    let chains = Arc::new(M3Chains::new(checkpoint, &limits).expect("the model plans"));
    let mut executor = Executor::new(&hal::open("cpu").expect("the CPU device"), chains).expect("an executor");
    executor.capture(|_| ()).expect("a captured size");
    let mut random = Random::new(1);
    let mut best = Figures { decode: 0.0, prefill: f64::INFINITY };
    for _ in 0..ROUNDS {
        let blocks = kv_len_max.div_ceil(block);
        let mut open: Vec<(SequenceId, i32)> = Vec::new();
        for at in 0..sequences {
            let id = executor.open_sequence().expect("a free sequence");
            executor.grant_blocks(id, &(at * blocks..(at + 1) * blocks).collect::<Vec<_>>()).expect("free blocks");
            let prompt: Vec<i32> = (0..PROMPT).map(|_| random.range(0, vocab - 1) as i32).collect();
            let started = Instant::now();
            let token = prefill(&mut executor, id, &prompt, limits.max_num_batched_tokens as usize);
            best.prefill = best.prefill.min(started.elapsed().as_secs_f64());
            open.push((id, token));
        }
        let started = Instant::now();
        for step in 0..STEPS {
            let batch: Vec<_> = open
                .iter()
                .map(|(sequence, token)| SequenceStep {
                    sequence: *sequence,
                    tokens: std::slice::from_ref(token),
                    kv_len: PROMPT + step + 1,
                    sampling: Sampling::GREEDY,
                })
                .collect();
            let ticket = executor.decode(&batch).expect("a decode step");
            let tokens = executor.wait(ticket).expect("its tokens").tokens.to_vec();
            open.iter_mut().zip(tokens).for_each(|((_, last), token)| *last = token);
        }
        best.decode = best.decode.max(f64::from(STEPS * sequences) / started.elapsed().as_secs_f64());
        for (id, _) in open {
            executor.close_sequence(id, |_| ()).expect("an open sequence");
        }
    }
    assert_eq!(executor.metrics().fallbacks, [0; 3], "every decode step replayed");
    best
}

/// Prefills in chunks; gives the sampled token.
fn prefill(executor: &mut Executor, sequence: SequenceId, prompt: &[i32], chunk: usize) -> i32 {
    let mut token = 0;
    for (at, tokens) in prompt.chunks(chunk).enumerate() {
        let kv_len = (at * chunk + tokens.len()) as u32;
        let batch = [SequenceStep { sequence, tokens, kv_len, sampling: Sampling::GREEDY }];
        let ticket = executor.prefill(&batch).expect("a prefill step");
        token = executor.wait(ticket).expect("its token").tokens[0];
    }
    token
}

fn measure_peer(python: &str, dir: &Path, sequences: u32) -> Figures {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/transformers_peer.py");
    let numbers = [sequences, PROMPT, STEPS, ROUNDS as u32].map(|number| number.to_string());
    let output = Command::new(python).arg(script).arg(dir).args(numbers).output().expect("the peer's python runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).expect("the peer prints text");
    let line = text.lines().last().expect("the peer prints its figures");
    let mut numbers = line.split_whitespace().map(|number| number.parse().expect("two numbers"));
    Figures { decode: numbers.next().expect("decode"), prefill: numbers.next().expect("prefill") }
}
