//! Properties of plans, over random limits and shapes: buffers never overlap, keep their alignment and guard bands, and no plan
//! shrinks when a limit grows. A failing case prints its seed and input.

use capstan::arena::plan::{ALIGNMENT_BYTES, GUARD_BYTES, PEER_PAGE_BYTES};
use capstan::arena::{ArenaPlan, BufferSpec, PlanBuilder, Purpose};
use capstan::config::{CacheBudget, CaptureSizes, Limits, ModelShape};
use capstan::error::ErrorKind;
use capstan::hal::MemoryKind;
use capstan::planning::{MsaPlan, device_bytes, score_width};
use capstan::{DType, Error};
use proptest::prelude::*;

const KINDS: [MemoryKind; 3] = [MemoryKind::Device, MemoryKind::Peer, MemoryKind::Pinned];

fn check_layout(plan: &ArenaPlan) -> Result<(), TestCaseError> {
    for slab in &plan.slabs {
        let mut ranges: Vec<(u64, u64)> = plan
            .own()
            .filter(|buffer| buffer.spec.memory == slab.memory)
            .map(|buffer| (buffer.offset, buffer.offset + buffer.bytes))
            .collect();
        ranges.sort_unstable();
        let mut end = 0;
        for (from, to) in ranges {
            prop_assert_eq!(from % ALIGNMENT_BYTES, 0);
            prop_assert!(from >= end + GUARD_BYTES, "a buffer at {} follows one that ends at {}", from, end);
            end = to;
        }
        prop_assert!(slab.bytes >= end + GUARD_BYTES, "no guard band after the last buffer");
        prop_assert!(slab.memory != MemoryKind::Peer || slab.bytes % PEER_PAGE_BYTES == 0);
    }
    for buffer in &plan.buffers {
        prop_assert_eq!(Some(buffer.bytes), buffer.spec.bytes());
        prop_assert_eq!(plan.slabs.iter().filter(|slab| slab.memory == buffer.spec.memory).count(), 1);
    }
    Ok(())
}

fn spec(name: String, shape: Vec<u64>, dtype: DType, memory: MemoryKind) -> BufferSpec {
    BufferSpec { name, dtype, shape, formula: "[n]".into(), memory, purpose: Purpose::Workspace, reason: "test".into() }
}

prop_compose! {
    fn any_limits()(
        max_model_len in 1u32..=1 << 20,
        max_num_seqs in 1u32..300,
        tokens in 0u32..4096,
        num_speculative_tokens in 0u32..4,
        world in prop::sample::select(vec![1u32, 2, 4, 8]),
        blocks in 1u32..5000,
        capture in prop_oneof![Just(CaptureSizes::Default), (4u32..100).prop_map(CaptureSizes::Max)],
        kv_dtype in prop::sample::select(vec![DType::F32, DType::Bf16, DType::F8E4M3]),
    ) -> Limits {
        let max_num_batched_tokens = (max_num_seqs * (1 + num_speculative_tokens)).max(tokens).max(100);
        Limits {
            max_model_len, max_num_seqs, max_num_batched_tokens, num_speculative_tokens, world, capture, kv_dtype,
            cache: CacheBudget::Blocks(blocks), ..Limits::default()
        }
    }
}

proptest! {
    #[test]
    fn any_buffers_lie_apart_and_aligned(
        buffers in prop::collection::vec((prop::collection::vec(0u64..600, 1..4), 0usize..7, 0usize..3), 1..60)
    ) {
        let mut builder = PlanBuilder::default();
        for (at, (shape, dtype, kind)) in buffers.into_iter().enumerate() {
            builder.add(spec(format!("b{at}"), shape, DType::ALL[dtype], KINDS[kind]));
        }
        check_layout(&builder.finish().unwrap())?;
    }

    #[test]
    fn plans_of_the_chain_are_laid_out_well_and_repeat(limits in any_limits()) {
        let shape = ModelShape::minimax_m3();
        let plan = MsaPlan::new(&shape, &limits).unwrap();
        check_layout(&plan.arena)?;
        let again = MsaPlan::new(&shape, &limits).unwrap();
        prop_assert_eq!(serde_json::to_string(&plan.arena).unwrap(), serde_json::to_string(&again.arena).unwrap());
    }

    #[test]
    fn no_plan_shrinks_when_a_limit_grows(limits in any_limits(), which in 0usize..4, more in 1u32..500) {
        let shape = ModelShape::minimax_m3();
        let mut larger = limits.clone();
        match which {
            0 => larger.max_model_len = (limits.max_model_len + more).min(shape.max_position_embeddings),
            1 => larger.max_num_batched_tokens += more,
            2 => {
                larger.max_num_seqs += more;
                larger.max_num_batched_tokens = limits.max_num_batched_tokens.max(larger.max_num_seqs * (1 + limits.num_speculative_tokens));
            }
            _ => {
                let CacheBudget::Blocks(blocks) = limits.cache else { unreachable!("any_limits gives blocks") };
                larger.cache = CacheBudget::Blocks(blocks + more);
            }
        }
        let (small, large) = (MsaPlan::new(&shape, &limits).unwrap().arena, MsaPlan::new(&shape, &larger).unwrap().arena);
        prop_assert!(device_bytes(&small) <= device_bytes(&large));
        for (small, large) in small.buffers.iter().zip(&large.buffers) {
            prop_assert!(small.spec.name == large.spec.name && small.bytes <= large.bytes, "{} shrank", small.spec.name);
        }
    }

    #[test]
    fn a_score_row_holds_every_block_in_whole_strips(len in 1u32..=1 << 24, block in prop::sample::select(vec![16u32, 64, 128])) {
        let width = score_width(len, block);
        prop_assert!(width >= len.div_ceil(block) && width.is_multiple_of(64) && (width / 64).is_power_of_two());
        prop_assert!(width == 64 || width / 2 < len.div_ceil(block), "twice as wide as needed");
    }
}

#[test]
fn sizes_that_overflow_name_the_buffer() {
    let overflow = |shape: Vec<u64>| -> Error {
        let mut builder = PlanBuilder::default();
        builder.add(spec("layer3.kv_cache".into(), shape, DType::U64, MemoryKind::Device));
        builder.finish().unwrap_err()
    };
    for shape in [vec![1 << 62], vec![1 << 32, 1 << 32], vec![u64::MAX / 8]] {
        let error = overflow(shape);
        assert_eq!(error.kind(), ErrorKind::Config);
        assert!(error.message().contains("layer3.kv_cache") && error.help_line().is_some(), "{error}");
    }
}

#[test]
fn the_full_model_plans_in_well_under_50_ms() {
    let limits = Limits { max_model_len: 1 << 20, world: 4, ..Limits::default() };
    let best = (0..5)
        .map(|_| {
            let start = std::time::Instant::now();
            std::hint::black_box(MsaPlan::new(&ModelShape::minimax_m3(), &limits).unwrap());
            start.elapsed()
        })
        .min()
        .unwrap();
    assert!(best.as_millis() < 50, "{best:?}");
}
