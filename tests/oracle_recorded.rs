//! The oracle itself against recorded values: what the chain is held against must be right first.

mod oracle;

use std::collections::BTreeSet;

use oracle::{Oracle, RowTrace, Tensors, fixtures};

/// Greedy tokens, logits within 2e-4 of the largest, and the same blocks as sets, for prompt `prompt` of fixture `name`.
fn check(name: &str, prompt: usize) {
    let dir = fixtures().join(name);
    let recorded = Tensors::file(&dir.join("reference.safetensors"));
    let greedy = recorded.ints(&format!("p{prompt}.greedy_ids"));
    let logits = recorded.get(&format!("p{prompt}.logits"));
    let mut oracle = Oracle::open(&dir);
    let (tokens, traces) = oracle.greedy(&recorded.ints(&format!("p{prompt}.input_ids")), greedy.len());
    assert_eq!(tokens.iter().map(|&token| token as i64).collect::<Vec<_>>(), greedy);
    let largest = logits.iter().fold(0.0f64, |most, x| most.max(x.abs()));
    for (step, trace) in traces.iter().enumerate() {
        let expected = &logits[step * oracle.vocab..][..oracle.vocab];
        let worst = trace.logits.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        assert!(worst <= 2e-4 * largest, "{name} p{prompt} step {step}: {worst} of {largest}");
    }
    check_blocks(&recorded, &format!("p{prompt}.prefill_last_blocks"), 0, &traces[0]);
    for (step, trace) in traces.iter().enumerate().skip(1) {
        check_blocks(&recorded, &format!("p{prompt}.decode_blocks"), step - 1, trace);
    }
}

fn check_blocks(recorded: &Tensors, prefix: &str, row: usize, trace: &RowTrace) {
    for (layer, trace) in trace.layers.iter().enumerate().filter(|(_, trace)| !trace.blocks.is_empty()) {
        let name = format!("{prefix}.layer{layer}");
        let (width, heads) = (*recorded.shape(&name).last().unwrap(), trace.blocks.len());
        for (head, blocks) in trace.blocks.iter().enumerate() {
            let expected = &recorded.ints(&name)[(row * heads + head) * width..][..width];
            let expected: BTreeSet<usize> = expected.iter().filter_map(|&block| usize::try_from(block).ok()).collect();
            assert_eq!(blocks.iter().copied().collect::<BTreeSet<_>>(), expected, "{name} row {row} head {head}");
        }
    }
}

#[test]
fn nano() {
    (0..3).for_each(|prompt| check("m3-nano", prompt));
}

#[test]
fn nano_published() {
    (0..3).for_each(|prompt| check("m3-nano-published", prompt));
}

/// The short prompt; the long ones take the plain loops minutes, and the chain is held against the record itself there.
#[test]
fn tiny() {
    check("m3-tiny", 0);
}
