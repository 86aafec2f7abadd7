//! Fault injection: a correct setup is damaged in one way at a time; each must be caught, by the right invariant, with a message
//! that names the culprit. And without damage the full audit of every step must find nothing.
//!
//! The table of all faults is `docs/faults.md`; `CAPSTAN_BLESS=1 cargo test --test faults` writes it anew.

#![expect(unsafe_code, reason = "damages the memory of a device on purpose")]

#[path = "faults/chain.rs"]
mod chain;
#[path = "faults/damaged.rs"]
mod damaged;
#[path = "faults/graph.rs"]
mod graph;
#[path = "faults/liar.rs"]
mod liar;
#[path = "faults/page.rs"]
mod page;
#[path = "faults/peers.rs"]
mod peers;
#[path = "faults/recorded.rs"]
mod recorded;
#[path = "faults/rig.rs"]
mod rig;
mod serving;
#[path = "faults/shadow.rs"]
mod shadow;
#[path = "faults/step.rs"]
mod step;
#[path = "faults/user.rs"]
mod user;
#[path = "faults/window.rs"]
mod window;

use std::path::Path;
use std::sync::Arc;

use capstan::chain::StepChains;
use capstan::config::Limits;
use capstan::error::ErrorKind;
use capstan::random::Random;
use capstan::runtime::Checks;
use capstan::{DType, Error};

use rig::{Fault, Rig};
use serving::{Open, limits, m3, msa, prompt, sampling, seed};

/// Random steps under the full audit of each; an executor without checks sees the same and must agree.
fn clean(chains: &Arc<dyn StepChains>, checks: Checks, steps: u32, seed: u64) {
    let mut random = Random::new(seed);
    let (mut audited, mut plain) = (Open::new(chains), Open::new(chains));
    audited.executor.capture(|_| ()).unwrap();
    plain.executor.capture(|_| ()).unwrap();
    audited.executor.set_checks(checks);
    plain.executor.set_checks(Checks { audit_every: None, ..Checks::default() });
    audited.executor.audit().unwrap();
    let query_len = 1 + chains.limits().num_speculative_tokens;
    for step in 0..steps {
        while audited.sequences.len() < 3 || (audited.sequences.len() < 8 && random.range(0, 2) > 0) {
            let len = random.range(1, 90);
            let prompt = prompt(&mut random, len);
            assert_eq!(audited.prefill(&prompt), plain.prefill(&prompt), "step {step}");
        }
        let order: Vec<usize> = (0..random.range(1, audited.sequences.len() as u32) as usize).collect();
        let tokens: Vec<_> = order.iter().map(|_| prompt(&mut random, query_len)).collect();
        let sampling: Vec<_> = order.iter().map(|_| sampling(&mut random)).collect();
        assert_eq!(audited.decode(&order, &tokens, &sampling), plain.decode(&order, &tokens, &sampling), "step {step}");
        if random.range(0, 4) == 0 {
            audited.close(0);
            plain.close(0);
        }
    }
    audited.executor.audit().unwrap();
}

#[test]
fn every_chain_runs_clean_under_the_full_audit_of_every_step() {
    let replayed =
        Checks { self_test: None, audit_every: Some(1), poison_free_blocks: true, each_node: false, shadow_every: None };
    let each_node = Checks { each_node: true, ..replayed };
    for query_len in [1, 3] {
        let limits = Limits { num_speculative_tokens: query_len - 1, ..limits() };
        for (at, chains) in [msa(&limits), m3(&limits)].iter().enumerate() {
            clean(chains, replayed, 12, seed(40 + at as u64));
            clean(chains, each_node, 5, seed(50 + at as u64));
            clean(chains, shadow::SHADOW, 8, seed(60 + at as u64));
            clean(chains, Checks { shadow_every: Some(1), ..replayed }, 8, seed(70 + at as u64));
        }
    }
    for (at, dtype) in [DType::F32, DType::Bf16, DType::F8E4M3].into_iter().enumerate() {
        let chains = m3(&Limits { kv_dtype: dtype, index_dtype: dtype, ..limits() });
        clean(&chains, Checks { shadow_every: Some(2), ..replayed }, 8, seed(80 + at as u64));
    }
}

/// Branches that a chain orders as its kernels' declarations ask for are no false alarm.
#[test]
fn a_branch_of_a_users_kernel_runs_clean() {
    let mut rig = Rig::captured(chain::branch()).unwrap();
    for each_node in [false, true] {
        rig.executor.set_checks(Checks {
            self_test: None,
            audit_every: Some(1),
            poison_free_blocks: true,
            each_node,
            shadow_every: None,
        });
        (0..5).for_each(|_| drop(rig.decode().unwrap()));
    }
    rig.executor.audit().unwrap();
}

/// Every fault is caught by the right check, the message names the culprit, and `docs/faults.md` tells it.
#[test]
fn every_fault_is_caught_and_named() {
    let (mut wrong, mut page) = (Vec::new(), page::Page::new());
    for (title, faults) in SUITE {
        page.section(title);
        for fault in *faults {
            match (fault.run)() {
                Err(error) => match judge(fault, &error) {
                    Ok(()) => page.row(fault, &error),
                    Err(why) => wrong.push(why),
                },
                Ok(()) => wrong.push(format!("{}: not caught", fault.name)),
            }
        }
    }
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n\n"));
    page.hold(Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/faults.md"));
}

/// The parts of the suite.
const SUITE: &[(&str, &[Fault])] = &[
    ("The device's graph is not what was recorded", graph::FAULTS),
    ("Calls in the capture window", window::FAULTS),
    ("Chains and plans with a mistake", chain::FAULTS),
    ("What a rank holds of its peers", peers::FAULTS),
    ("Memory, rings and kernels while serving", step::FAULTS),
    ("Replays that differ from eager runs", shadow::FAULTS),
];

/// Was it caught by the check that must catch it, and does the message name what it must name?
fn judge(fault: &Fault, error: &Error) -> Result<(), String> {
    let text = error.to_string();
    let caught = match error.kind() {
        ErrorKind::Invariant(id) => id == fault.caught_by || text.contains(&format!("\n  {} ", fault.caught_by)),
        kind => format!("{kind:?}").to_lowercase() == fault.caught_by,
    };
    let missing: Vec<_> = fault.names.iter().filter(|name| !text.contains(**name)).collect();
    if caught && missing.is_empty() && error.help_line().is_some() {
        return Ok(());
    }
    Err(format!("{} ({}): missing {missing:?} in\n{text}", fault.name, fault.caught_by))
}
