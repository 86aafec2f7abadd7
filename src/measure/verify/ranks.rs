//! Recorded cases under context parallelism: what each rank selects and attends to is what one rank alone does, bit for bit.

use std::path::Path;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::run::{Bench, refused, share};
use super::{Case, Mode, Verified, compare};
use crate::error::{Error, Result};
use crate::hal::Device;
use crate::peers::Group;

/// A case on one rank.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RankCase {
    /// The file.
    pub file: String,
    /// This rank.
    pub rank: u32,
    /// Ranks.
    pub world: u32,
    /// Why the ranks cannot share it; empty if they did.
    pub refused: Vec<String>,
    /// (row, head) pairs that are this rank's and were compared, over both modes.
    pub compared: u64,
}

/// Runs a case as one rank of `group` and alone, in both modes, and compares; what ran alone is compared with the file. Ranks wait
/// up to `timeout_ms` for each other.
///
/// Errors: as of [`verify_case`](super::verify_case); a rank is missing or runs another case; a selection, a length or an output
/// is not that of one rank alone: names the file, the row and the head.
pub fn verify_case_as_rank(device: &Arc<dyn Device>, path: &Path, group: &Arc<dyn Group>, timeout_ms: u32) -> Result<RankCase> {
    let case = Case::read(path)?;
    let (file, rank, world) = (path.display().to_string(), group.rank(), group.world());
    let why: Vec<String> = refused(&case, &**group).iter().map(ToString::to_string).collect();
    if !why.is_empty() {
        return Ok(RankCase { file, rank, world, refused: why, compared: 0 });
    }
    let whole = Bench::new(device, &case)?;
    let ours = Bench::join(device, &case, &**group, timeout_ms)?;
    let mut compared = 0;
    for mode in [Mode::Eager, Mode::Replayed] {
        whole.run(&case, mode)?;
        let mut comparisons = Vec::new();
        compare(&case, &whole, mode, &mut comparisons)?;
        if let Some(difference) = (Verified { file: file.clone(), comparisons }).first_difference() {
            return Err(
                Error::invariant("PAD-3", difference).help("one rank alone differs from the file: verify it without --ranks")
            );
        }
        group.all_gather(&format!("{file} {mode}"), b"")?;
        ours.run(&case, mode)?;
        compared += same(&case, &ours, &whole, &format!("{file} ({mode}), rank {rank} of {world}"))?;
    }
    // Nobody gives its memory back while another still reads it.
    group.all_gather("case done", b"")?;
    Ok(RankCase { file, rank, world, refused: Vec::new(), compared })
}

/// (row, head) pairs compared; an error, in `place`, names the first that is another.
fn same(case: &Case, ours: &Bench, whole: &Bench, place: &str) -> Result<u64> {
    let (rows, heads, own) = (case.row_count() as usize, case.heads as usize, ours.heads());
    let differs = |head: usize, row: usize, what: String| {
        Error::invariant("PAD-3", format!("{place}, head {}, row {row}: {what}", own.start + head))
            .help("the ranks exchanged wrong candidates: audit the chain")
    };
    let topk = case.topk as usize;
    let (found, expected) = (ours.topk_idx()?, share(&whole.topk_idx()?, heads, own.clone(), rows * topk));
    if let Some(at) = first_other(&found, &expected) {
        let what = format!("selected block {}, one rank alone {}", found[at], expected[at]);
        return Err(differs(at / topk / rows, at / topk % rows, what));
    }
    let (found, expected) = (ours.page_len()?, share(&whole.page_len()?, heads, own.clone(), 1));
    if let Some(at) = first_other(&found, &expected) {
        let what = format!("reads {} tokens, one rank alone {}", found[at], expected[at]);
        return Err(differs(at % own.len(), at / own.len(), what));
    }
    if let Some(attend) = &case.attend {
        let width = (case.group * attend.head_dim) as usize;
        let bits = |values: Vec<f32>| values.into_iter().map(f32::to_bits).collect::<Vec<_>>();
        let (found, expected) = (bits(ours.out()?), share(&bits(whole.out()?), heads, own.clone(), width));
        if let Some(at) = first_other(&found, &expected) {
            let [found, expected] = [found[at], expected[at]].map(f32::from_bits);
            let what = format!("the attention's output is {found}, one rank alone {expected}");
            return Err(differs(at / width % own.len(), at / width / own.len(), what));
        }
    }
    Ok((rows * own.len()) as u64)
}

fn first_other<T: PartialEq>(found: &[T], expected: &[T]) -> Option<usize> {
    assert_eq!(found.len(), expected.len(), "invariant: a rank's share is of one size on both sides");
    found.iter().zip(expected).position(|(found, expected)| found != expected)
}
