//! Memory budgets: how many cache blocks fit, and what to lower when nothing does.

use crate::arena::{ArenaPlan, Purpose};
use crate::config::{CacheBudget, Limits};
use crate::error::{Error, Result};
use crate::hal::MemoryKind;

/// The number of cache blocks: as many as the limits say, or as many as fit their budget beside everything else.
///
/// `with_blocks` makes the whole plan for a number of blocks; `block_bytes` is the cost of one more.
pub fn cache_blocks(
    limits: &Limits,
    block_size: u32,
    block_bytes: u64,
    with_blocks: impl Fn(u32) -> Result<ArenaPlan>,
) -> Result<u32> {
    let bytes = match limits.cache {
        CacheBudget::Blocks(blocks) => return Ok(blocks),
        CacheBudget::Bytes(bytes) => bytes,
    };
    let one = with_blocks(1)?;
    check_fit(&one, bytes)?;
    let most = u64::from(limits.max_num_seqs) * u64::from(limits.max_model_len.div_ceil(block_size));
    // The first block is in `one`; alignment of two caches a layer may round up to a page each.
    let mut blocks = (1 + (bytes - device_bytes(&one)) / block_bytes.max(1)).min(most).min(u64::from(u32::MAX)) as u32;
    while blocks > 1 && device_bytes(&with_blocks(blocks)?) > bytes {
        blocks -= 1;
    }
    Ok(blocks)
}

/// Refuses a plan that does not fit `bytes` of device memory: names the largest buffers and the limits to lower.
pub fn check_fit(plan: &ArenaPlan, bytes: u64) -> Result<()> {
    let needed = device_bytes(plan);
    if needed <= bytes {
        return Ok(());
    }
    let mut buffers: Vec<_> = plan.buffers.iter().filter(|buffer| buffer.spec.memory != MemoryKind::Pinned).collect();
    buffers.sort_by_key(|buffer| std::cmp::Reverse(buffer.bytes));
    let largest: Vec<String> = buffers
        .iter()
        .take(3)
        .map(|buffer| format!("{} {} ({})", buffer.spec.name, buffer.spec.formula, human(buffer.bytes)))
        .collect();
    let rows =
        |purpose| -> u64 { plan.buffers.iter().filter(|buffer| buffer.spec.purpose == purpose).map(|buffer| buffer.bytes).sum() };
    let by_rows = rows(Purpose::Selection) + rows(Purpose::Activations);
    let rest = needed - by_rows;
    let help = match (bytes.checked_sub(rest), by_rows) {
        // What grows with the rows is what is too much: say to which share of the rows to go.
        (Some(room), 1..) => format!(
            "lower max_num_batched_tokens to {:.0} % of its value, or max_model_len",
            (room as f64 / by_rows as f64 * 100.0).floor()
        ),
        _ => format!(
            "{} are needed for weights and tables alone: raise --memory, lower max_model_len, or use more ranks",
            human(rest)
        ),
    };
    Err(Error::memory(format!(
        "the plan needs {} of device memory, the budget is {}; the largest buffers are {}",
        human(needed),
        human(bytes),
        largest.join(", ")
    ))
    .help(help))
}

fn device_bytes(plan: &ArenaPlan) -> u64 {
    plan.slabs.iter().filter(|slab| slab.memory != MemoryKind::Pinned).map(|slab| slab.bytes).sum()
}

/// Bytes in words, binary units.
pub fn human(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let unit = (bytes.max(1).ilog2() / 10).min(4);
    match unit {
        0 => format!("{bytes} B"),
        unit => format!("{:.1} {}", bytes as f64 / (1u64 << (10 * unit)) as f64, UNITS[unit as usize]),
    }
}
