//! Memory budgets: how many cache blocks fit, and which limit to lower to what when a plan does not.
//!
//! A plan is pure and cheap, so the advice is found by planning again with other limits: what it says fits, fits.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use crate::arena::ArenaPlan;
use crate::config::{ByteCount, CacheBudget, Limits};
use crate::error::{Error, Result};
use crate::hal::MemoryKind;

/// The number of cache blocks: as many as the limits say, or as many as fit their budget beside everything else.
///
/// `plan` makes the whole plan for limits and a number of blocks.
///
/// Errors: the budget does not even hold the blocks of one longest sequence; names the largest buffers and what to lower.
pub fn cache_blocks(limits: &Limits, block_size: u32, plan: impl Fn(&Limits, u32) -> Result<ArenaPlan>) -> Result<u32> {
    let bytes = match limits.cache {
        CacheBudget::Blocks(blocks) => return Ok(blocks),
        CacheBudget::Bytes(bytes) => bytes,
    };
    let least = longest_blocks(limits, block_size);
    check_fit(limits, block_size, bytes, &plan)?;
    let most = u64::from(limits.max_num_seqs) * u64::from(least);
    let fits = |blocks: u32| plan(limits, blocks).is_ok_and(|plan| needed_bytes(limits, &plan) <= bytes);
    Ok(largest(least, most.min(i32::MAX as u64) as u32, fits).unwrap_or(least))
}

/// Refuses limits whose plan does not fit `bytes` of device memory.
///
/// With a budget in place of a number of blocks, the cache of one longest sequence must fit. The error names the largest
/// buffers, and each limit that would make it fit by being lowered alone, with the value it would have to be lowered to.
pub fn check_fit(limits: &Limits, block_size: u32, bytes: u64, plan: impl Fn(&Limits, u32) -> Result<ArenaPlan>) -> Result<()> {
    let whole = |limits: &Limits| match limits.cache {
        CacheBudget::Blocks(blocks) => plan(limits, blocks),
        CacheBudget::Bytes(_) => plan(limits, longest_blocks(limits, block_size)),
    };
    let arena = whole(limits)?;
    let needed = needed_bytes(limits, &arena);
    if needed <= bytes {
        return Ok(());
    }
    let named: Vec<String> = largest_buffers(&arena).into_iter().take(4).collect();
    let fits =
        |limits: &Limits| limits.validate().is_ok() && whole(limits).is_ok_and(|plan| needed_bytes(limits, &plan) <= bytes);
    let graphs = match limits.graph_bytes {
        0 => String::new(),
        graphs => format!(", {} for captured graphs included", ByteCount(graphs)),
    };
    let message = format!(
        "the plan needs {} of device memory{graphs}, {} are there; the largest buffers are {}",
        ByteCount(needed),
        ByteCount(bytes),
        named.join(", ")
    );
    Err(Error::memory(message).help(advice(limits, fits).unwrap_or_else(|| {
        format!(
            "no single limit is enough: raise memory to {}, use more ranks, or lower several limits together",
            ByteCount(needed)
        )
    })))
}

/// Each limit that makes `fits` true by being lowered alone, and to what.
fn advice(limits: &Limits, fits: impl Fn(&Limits) -> bool) -> Option<String> {
    let mut lower = Vec::new();
    let mut consider = |key: &str, value: u32, with: &dyn Fn(u32) -> Limits| {
        if let Some(to) = largest(1, value.saturating_sub(1), |value| fits(&with(value))) {
            lower.push(format!("{key} from {value} to {to}"));
        }
    };
    if let CacheBudget::Blocks(blocks) = limits.cache {
        consider("cache_blocks", blocks, &|blocks| Limits { cache: CacheBudget::Blocks(blocks), ..limits.clone() });
    }
    let decode_rows = limits.max_num_seqs * (1 + limits.num_speculative_tokens);
    consider("max_num_batched_tokens", limits.max_num_batched_tokens, &|tokens| {
        // Below a decode step of all sequences the limit contradicts max_num_seqs; the plan is the same size from there on.
        Limits { max_num_batched_tokens: tokens.max(decode_rows), ..limits.clone() }
    });
    consider("max_model_len", limits.max_model_len, &|max_model_len| Limits { max_model_len, ..limits.clone() });
    consider("max_num_seqs", limits.max_num_seqs, &|max_num_seqs| Limits { max_num_seqs, ..limits.clone() });
    (!lower.is_empty()).then(|| format!("lower {}", lower.join(", or ")))
}

/// The largest value of `low..=high` that `fits`, if `low` does; `fits` is true up to some value and false from there on.
fn largest(low: u32, high: u32, fits: impl Fn(u32) -> bool) -> Option<u32> {
    if low > high || !fits(low) {
        return None;
    }
    let (mut good, mut bad) = (low, high + 1);
    while bad - good > 1 {
        let middle = good + (bad - good) / 2;
        if fits(middle) {
            good = middle;
        } else {
            bad = middle;
        }
    }
    Some(good)
}

/// Device buffers by size, largest first; those that every layer has count together.
fn largest_buffers(arena: &ArenaPlan) -> Vec<String> {
    let mut sums: BTreeMap<(&str, &str), (u64, u64)> = BTreeMap::new();
    for buffer in arena.own().filter(|buffer| buffer.spec.memory != MemoryKind::Pinned) {
        let name = buffer.spec.name.as_str();
        let kind = if name.starts_with("layer") { name.split_once('.').map_or(name, |(_, kind)| kind) } else { name };
        let (count, bytes) = sums.entry((kind, &buffer.spec.formula)).or_default();
        (*count, *bytes) = (*count + 1, *bytes + buffer.bytes);
    }
    let mut sums: Vec<_> = sums.into_iter().collect();
    sums.sort_by_key(|&(_, (_, bytes))| Reverse(bytes));
    let show = |((kind, formula), (count, bytes)): ((&str, &str), (u64, u64))| match count {
        1 => format!("{kind} {formula} {}", ByteCount(bytes)),
        _ => format!("{count} x {kind} {formula} {}", ByteCount(bytes)),
    };
    sums.into_iter().map(show).collect()
}

fn longest_blocks(limits: &Limits, block_size: u32) -> u32 {
    limits.max_model_len.div_ceil(block_size)
}

/// Device memory of a plan and of the graphs that will be captured over it.
fn needed_bytes(limits: &Limits, plan: &ArenaPlan) -> u64 {
    device_bytes(plan).saturating_add(limits.graph_bytes)
}

/// Bytes of a plan that count against device memory: all but pinned host memory.
pub fn device_bytes(plan: &ArenaPlan) -> u64 {
    plan.slabs.iter().filter(|slab| slab.memory != MemoryKind::Pinned).map(|slab| slab.bytes).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::ModelShape;
    use crate::error::ErrorKind;
    use crate::planning::MsaPlan;

    fn full(cache: CacheBudget) -> Limits {
        Limits { max_model_len: 1 << 20, world: 4, cache, ..Limits::default() }
    }

    #[test]
    fn a_budget_is_used_to_the_last_block_and_never_exceeded() {
        let shape = ModelShape::minimax_m3();
        for gib in [40u64, 100, 250] {
            let limits = full(CacheBudget::Bytes(gib << 30));
            let plan = MsaPlan::new(&shape, &limits).unwrap();
            let blocks = plan.layout.cache_blocks;
            assert!(blocks >= 8192 && device_bytes(&plan.arena) <= gib << 30);
            let more = Limits { cache: CacheBudget::Blocks(blocks + 1), ..limits };
            assert!(
                device_bytes(&MsaPlan::new(&shape, &more).unwrap().arena) > gib << 30,
                "{gib} GiB hold more than {blocks} blocks"
            );
        }
        // Past what all sequences can use, memory is left alone.
        let nano = Limits { max_model_len: 1024, max_num_seqs: 2, cache: CacheBudget::Bytes(1 << 40), ..Limits::default() };
        assert_eq!(MsaPlan::new(&ModelShape::nano(), &nano).unwrap().layout.cache_blocks, 128);
    }

    #[test]
    fn a_plan_that_does_not_fit_says_what_to_lower_to_what() {
        let shape = ModelShape::minimax_m3();
        let limits = full(CacheBudget::Bytes(20 << 30));
        let error = MsaPlan::new(&shape, &limits).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Memory);
        assert!(error.message().contains("kv_cache") && error.message().contains("20.0 GiB"), "{error}");
        // The advice is true: at the value it names the plan fits, one above it does not.
        let help = error.help_line().unwrap();
        let after = help.split("max_model_len from 1048576 to ").nth(1).unwrap_or_else(|| panic!("{help}"));
        let to: u32 = after.split(|c: char| !c.is_ascii_digit()).next().unwrap().parse().unwrap();
        MsaPlan::new(&shape, &Limits { max_model_len: to, ..limits.clone() }).unwrap();
        MsaPlan::new(&shape, &Limits { max_model_len: to + 1, ..limits }).unwrap_err();

        let error = MsaPlan::new(&shape, &full(CacheBudget::Bytes(1 << 20))).unwrap_err();
        assert!(error.help_line().unwrap().contains("no single limit"), "{error}");
    }

    #[test]
    fn blocks_that_do_not_fit_are_lowered_to_what_does() {
        let shape = ModelShape::minimax_m3();
        let limits = full(CacheBudget::Blocks(100_000));
        let error = MsaPlan::new(&shape, &limits).unwrap().check_fit(100 << 30).unwrap_err();
        let help = error.help_line().unwrap();
        let after = help.split("cache_blocks from 100000 to ").nth(1).unwrap_or_else(|| panic!("{help}"));
        let to: u32 = after.split(|c: char| !c.is_ascii_digit()).next().unwrap().parse().unwrap();
        MsaPlan::new(&shape, &full(CacheBudget::Blocks(to))).unwrap().check_fit(100 << 30).unwrap();
        MsaPlan::new(&shape, &full(CacheBudget::Blocks(to + 1))).unwrap().check_fit(100 << 30).unwrap_err();
    }

    #[test]
    fn blocks_leave_room_for_graphs() {
        let shape = ModelShape::minimax_m3();
        let limits = full(CacheBudget::Bytes(40 << 30));
        let without = MsaPlan::new(&shape, &limits).unwrap();
        let with = MsaPlan::new(&shape, &Limits { graph_bytes: 2 << 30, ..limits.clone() }).unwrap();
        assert!(with.layout.cache_blocks < without.layout.cache_blocks);
        let left = (40u64 << 30) - device_bytes(&with.arena);
        // The graphs fit, and less than one block more is left over.
        let block_bytes = device_bytes(&without.arena) / u64::from(without.layout.cache_blocks);
        assert!(left >= 2 << 30 && left < (2 << 30) + 2 * block_bytes, "{left}");
        let error = MsaPlan::new(&shape, &Limits { graph_bytes: 39 << 30, ..limits }).unwrap_err();
        assert!(error.message().contains("39.0 GiB for captured graphs"), "{error}");
    }

    #[test]
    fn largest_finds_the_edge() {
        for edge in 0..40 {
            assert_eq!(largest(1, 32, |value| value <= edge), (edge > 0).then_some(edge.min(32)), "{edge}");
        }
        assert_eq!(largest(5, 4, |_| true), None);
        assert_eq!(largest(1, u32::MAX - 1, |_| true), Some(u32::MAX - 1));
    }
}
