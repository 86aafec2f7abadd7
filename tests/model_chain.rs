//! The whole model's chains on the CPU's ops: against the recorded fixtures, against the oracle op by op, and bit for bit
//! against themselves under other batches, paddings and chunkings.

mod oracle;
mod plain;

use std::collections::BTreeSet;
use std::sync::Arc;

use capstan::DType;
use capstan::config::{CacheBudget, CaptureSizes, Limits};
use capstan::model::Checkpoint;
use oracle::{Oracle, Tensors, argmax, fixtures};
use plain::{Plain, Turn};

/// Logits may differ by this share of the largest.
const LOGITS: f64 = 2e-4;

fn limits(max_model_len: u32, max_num_batched_tokens: u32) -> Limits {
    Limits {
        max_model_len,
        max_num_seqs: 4,
        max_num_batched_tokens,
        num_speculative_tokens: 0,
        capture: CaptureSizes::Default,
        cache: CacheBudget::Blocks(200),
        kv_dtype: DType::F32,
        index_dtype: DType::F32,
        ..Limits::default()
    }
}

fn turn(slot: u32, tokens: &[i64]) -> Turn {
    Turn { slot, tokens: tokens.iter().map(|&token| token as i32).collect() }
}

/// Blocks selected by `row` of the last step's op, by head, as sets.
fn selected(model: &mut Plain, row: usize) -> Vec<BTreeSet<usize>> {
    let plan = model.chains.m3_plan();
    let (heads, topk, rows) = (plan.dims.index_heads as usize, plan.dims.topk as usize, plan.layout.row_capacity as usize);
    let buffer = plan.attention.topk_idx;
    let of = |ids: Vec<i32>| ids.into_iter().filter_map(|id| usize::try_from(id).ok()).collect();
    (0..heads).map(|head| of(model.ints(buffer, (head * rows + row) * topk, topk))).collect()
}

/// Recorded blocks of one row, by head, as sets.
fn recorded_blocks(recorded: &Tensors, name: &str, row: usize, heads: usize) -> Vec<BTreeSet<usize>> {
    let width = *recorded.shape(name).last().unwrap();
    let ids = recorded.ints(name);
    let of =
        |head: usize| ids[(row * heads + head) * width..][..width].iter().filter_map(|&id| usize::try_from(id).ok()).collect();
    (0..heads).map(of).collect()
}

/// A fixture's prompt: prefill in chunks of `chunk`, then decode by the recorded tokens.
fn check_recorded(name: &str, prompt: usize, chunk: usize) {
    let dir = fixtures().join(name);
    let checkpoint = Arc::new(Checkpoint::open(&dir).unwrap());
    let recorded = Tensors::file(&dir.join("reference.safetensors"));
    let input = recorded.ints(&format!("p{prompt}.input_ids"));
    let greedy = recorded.ints(&format!("p{prompt}.greedy_ids"));
    let logits = recorded.get(&format!("p{prompt}.logits"));
    let largest = logits.iter().fold(0.0f64, |most, x| most.max(x.abs()));
    let vocab = checkpoint.shape().vocab as usize;
    let heads = checkpoint.shape().index_heads as usize;
    let mut model = Plain::new(&checkpoint, &limits((input.len() + greedy.len()) as u32, chunk as u32)).threads(2);
    let mut worst = 0.0f64;
    let mut check = |model: &mut Plain, step: usize| {
        let found = model.logits(0);
        for (found, expected) in found.iter().zip(&logits[step * vocab..][..vocab]) {
            worst = worst.max((f64::from(*found) - expected).abs() / largest);
        }
        assert!(worst <= LOGITS, "{name} p{prompt} step {step}: logits differ by {worst:e} of the largest");
        assert_eq!(i64::from(model.sampled(1)[0]), greedy[step], "{name} p{prompt} step {step}");
    };
    for (at, tokens) in input.chunks(chunk).enumerate() {
        let last = (at + 1) * chunk >= input.len();
        model.prefill(&[turn(0, tokens)], |op, model| {
            if let (true, Some(layer), true) = (last, op.layer, op.label.ends_with("topk_emit")) {
                let name = format!("p{prompt}.prefill_last_blocks.layer{layer}");
                assert_eq!(selected(model, tokens.len() - 1), recorded_blocks(&recorded, &name, 0, heads), "{name}");
            }
        });
    }
    check(&mut model, 0);
    for step in 1..greedy.len() {
        model.decode(&[turn(0, &greedy[step - 1..step])], 2, |op, model| {
            if let (Some(layer), true) = (op.layer, op.label.ends_with("topk_emit")) {
                let name = format!("p{prompt}.decode_blocks.layer{layer}");
                assert_eq!(selected(model, 0), recorded_blocks(&recorded, &name, step - 1, heads), "{name} step {step}");
            }
        });
        check(&mut model, step);
    }
    eprintln!("{name} p{prompt} chunk {chunk}: logits within {worst:.1e} of the largest");
}

#[test]
fn nano_as_recorded() {
    for name in ["m3-nano", "m3-nano-published"] {
        for (prompt, chunk) in [(0, 20), (1, 33), (2, 512)] {
            check_recorded(name, prompt, chunk);
        }
    }
}

#[test]
fn tiny_as_recorded() {
    check_recorded("m3-tiny", 0, 128);
}

#[test]
#[cfg_attr(debug_assertions, ignore = "long prompts need an optimised build")]
fn tiny_long_prompts_as_recorded() {
    check_recorded("m3-tiny", 1, 4096);
    check_recorded("m3-tiny", 2, 1500);
}

/// The residual after each layer, the attention before its projection and the logits of every row, against the oracle.
#[test]
fn every_layer_matches_the_oracle() {
    let dir = fixtures().join("m3-nano");
    let checkpoint = Arc::new(Checkpoint::open(&dir).unwrap());
    let input = Tensors::file(&dir.join("reference.safetensors")).ints("p1.input_ids");
    let (prompt, rest) = input.split_at(90);
    let mut oracle = Oracle::open(&dir);
    let traces: Vec<_> = input.iter().map(|&token| oracle.step(token as usize)).collect();
    let hidden = oracle.hidden;
    let mut model = Plain::new(&checkpoint, &limits(256, 128));
    let plan = model.chains.m3_plan();
    let (residual, attention) = (plan.activations.residual, plan.attention.out);
    let width = (plan.dims.q_heads * plan.dims.head_dim) as usize;
    let last_op = |layer: u32| if layer == 0 { "layer0.down".to_string() } else { format!("layer{layer}.shared_down") };
    let mut compared = 0;
    let mut compare = |op: &capstan::chain::Op, model: &mut Plain, rows: usize, first: usize| {
        let Some(layer) = op.layer else { return };
        for row in 0..rows {
            let trace = &traces[first + row].layers[layer as usize];
            let (found, expected) = if op.label == last_op(layer) {
                (model.floats(residual, row * hidden, hidden), &trace.residual)
            } else if op.label.ends_with(".attend") {
                (model.floats(attention, row * width, width), &trace.attention)
            } else {
                continue;
            };
            compared += 1;
            close(&found, expected, 1e-5, &format!("{} row {}", op.label, first + row));
        }
    };
    model.prefill(&[turn(0, prompt)], |op, model| compare(op, model, prompt.len(), 0));
    close(&model.logits(0), &traces[prompt.len() - 1].logits, 1e-5, "logits");
    for (at, &token) in rest.iter().enumerate() {
        let row = prompt.len() + at;
        model.decode(&[turn(0, &[token])], 4, |op, model| compare(op, model, 1, row));
        close(&model.logits(0), &traces[row].logits, 1e-5, "logits");
        assert_eq!(model.sampled(4), [argmax(&traces[row].logits) as i32, 0, 0, 0], "pads sample token 0");
    }
    assert_eq!(compared, 100 * 3 * 2, "every row of every layer was seen twice");
}

fn close(found: &[f32], expected: &[f64], share: f64, what: &str) {
    assert_eq!(found.len(), expected.len());
    let largest = expected.iter().fold(0.0f64, |most, x| most.max(x.abs()));
    for (at, (found, expected)) in found.iter().zip(expected).enumerate() {
        let difference = (f64::from(*found) - expected).abs();
        assert!(difference <= share * largest, "{what} [{at}]: {found} for {expected}");
    }
}

/// Logits and tokens of `prompt` and of `steps` decode steps, alone and unpadded.
fn alone(checkpoint: &Arc<Checkpoint>, limits: &Limits, prompt: &[i64], steps: usize) -> Vec<Vec<u32>> {
    let mut model = Plain::new(checkpoint, limits);
    model.prefill(&[turn(0, prompt)], |_, _| ());
    let mut logits = vec![bits(&model.logits(0))];
    for _ in 0..steps {
        let token = i64::from(model.sampled(1)[0]);
        model.decode(&[turn(0, &[token])], 1, |_, _| ());
        logits.push(bits(&model.logits(0)));
    }
    logits
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

/// The same bits alone and among others, padded, chunked, after preemption, with other blocks; for each pair of cache types.
#[test]
fn results_do_not_depend_on_the_batch() {
    let dir = fixtures().join("m3-nano");
    let checkpoint = Arc::new(Checkpoint::open(&dir).unwrap());
    let recorded = Tensors::file(&dir.join("reference.safetensors"));
    let prompts: Vec<Vec<i64>> = (0..3).map(|prompt| recorded.ints(&format!("p{prompt}.input_ids"))).collect();
    const STEPS: usize = 6;
    for (kv_dtype, index_dtype) in [(DType::F32, DType::F32), (DType::Bf16, DType::Bf16), (DType::F8E4M3, DType::F8E4M3)] {
        let limits = Limits { kv_dtype, index_dtype, ..limits(512, 512) };
        let expected: Vec<_> = prompts.iter().map(|prompt| alone(&checkpoint, &limits, prompt, STEPS)).collect();
        let mut model = Plain::new(&checkpoint, &limits).threads(2);
        // A sequence that is preempted leaves its blocks, poisoned by nothing, to the others.
        model.prefill(&[turn(3, &prompts[1])], |_, _| ());
        model.close(3);
        // Slots in another order than rows; the long prompt in chunks beside whole short ones.
        let slots = [2, 0, 3];
        let (head, tail) = prompts[2].split_at(201);
        model.prefill(&[turn(slots[2], head), turn(slots[0], &prompts[0])], |_, _| ());
        assert_eq!(bits(&model.logits(1)), expected[0][0], "{kv_dtype} prefill of prompt 0");
        let mut next = [i64::from(model.sampled(2)[1]), 0, 0];
        model.prefill(&[turn(slots[1], &prompts[1]), turn(slots[2], tail)], |_, _| ());
        for (at, prompt) in [1, 2].into_iter().enumerate() {
            assert_eq!(bits(&model.logits(at)), expected[prompt][0], "{kv_dtype} prefill of prompt {prompt}");
            next[prompt] = i64::from(model.sampled(2)[at]);
        }
        for step in 1..=STEPS {
            let turns: Vec<Turn> = (0..3).map(|prompt| turn(slots[prompt], &[next[prompt]])).collect();
            model.decode(&turns, 4, |_, _| ());
            for (prompt, expected) in expected.iter().enumerate() {
                assert_eq!(bits(&model.logits(prompt)), expected[step], "{kv_dtype} prompt {prompt} step {step}");
                next[prompt] = i64::from(model.sampled(3)[prompt]);
            }
        }
    }
}

/// Several rows a sequence (draft verification) give each row the bits of single steps.
#[test]
fn rows_of_a_draft_equal_single_steps() {
    let dir = fixtures().join("m3-nano");
    let checkpoint = Arc::new(Checkpoint::open(&dir).unwrap());
    let input = Tensors::file(&dir.join("reference.safetensors")).ints("p1.input_ids");
    let limits = Limits { num_speculative_tokens: 3, ..limits(256, 128) };
    let mut single = Plain::new(&checkpoint, &limits);
    let mut draft = Plain::new(&checkpoint, &limits);
    single.prefill(&[turn(1, &input[..77])], |_, _| ());
    draft.prefill(&[turn(1, &input[..77])], |_, _| ());
    draft.decode(&[turn(1, &input[77..81])], 2, |_, _| ());
    for row in 0..4 {
        single.decode(&[turn(1, &input[77 + row..78 + row])], 1, |_, _| ());
        assert_eq!(bits(&draft.logits(row)), bits(&single.logits(0)), "row {row}");
    }
}
