//! Recorded cases: the sparse-attention chain against what public implementations computed.
//!
//! [`verify_case`] runs a case through the chain's own ops, once launched one by one and once captured and replayed, and
//! compares scores, selected blocks, page tables, lengths and attention. Bounds are those of msa-spec section 9.

mod case;
mod pages;
mod ranks;
mod run;

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use serde::Serialize;

pub use case::{Attend, Case, Rows};
pub use ranks::{RankCase, verify_case_as_rank};

use crate::error::Result;
use crate::hal::Device;

use run::Bench;

/// Largest deviation of a score, absolute and relative.
pub const SCORE_BOUND: f64 = 1e-2;
/// Scores this close may come in either order: each of the two may deviate by [`SCORE_BOUND`].
pub const NEAR_TIE: f64 = 2.0 * SCORE_BOUND;
/// Largest deviation of the attend's output, absolute and relative.
pub const ATTEND_BOUND: f64 = 2e-2;
/// Value of score places that no kernel may touch.
pub const UNTOUCHED: f32 = 12345.0;

/// How the chain was run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// Launched op by op.
    Eager,
    /// Captured and replayed with one launch.
    Replayed,
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Mode::Eager => "eager",
            Mode::Replayed => "replayed",
        })
    }
}

/// One tensor of a case, compared.
#[derive(Clone, Debug, Serialize)]
pub struct Comparison {
    /// The recorded tensor.
    pub tensor: &'static str,
    /// How it was run.
    pub mode: Mode,
    /// Elements compared.
    pub elements: usize,
    /// Places where two blocks of nearly equal score came in the other order.
    pub near_ties: usize,
    /// Largest deviation; 0 for tensors that must be equal and are.
    pub largest: f64,
    /// Largest that is allowed, absolute and relative; 0 where it must be equal.
    pub bound: f64,
    /// The first element past the bound.
    pub first: Option<String>,
}

/// A case and how it went.
#[derive(Clone, Debug, Serialize)]
pub struct Verified {
    /// The file.
    pub file: String,
    /// Tensors by mode.
    pub comparisons: Vec<Comparison>,
}

impl Verified {
    /// The first difference of all.
    pub fn first_difference(&self) -> Option<String> {
        let first = self.comparisons.iter().find_map(|found| Some((found, found.first.as_ref()?)));
        first.map(|(found, first)| format!("{}: {} ({}): {first}", self.file, found.tensor, found.mode))
    }
}

/// Reads a file and compares it in both modes.
///
/// Errors: a file that is no recorded case; a device that runs nothing; whatever the device reports.
pub fn verify_case(device: &Arc<dyn Device>, path: &Path) -> Result<Verified> {
    let case = Case::read(path)?;
    let bench = Bench::new(device, &case)?;
    let mut comparisons = Vec::new();
    for mode in [Mode::Eager, Mode::Replayed] {
        bench.run(&case, mode)?;
        compare(&case, &bench, mode, &mut comparisons)?;
    }
    Ok(Verified { file: path.display().to_string(), comparisons })
}

fn compare(case: &Case, bench: &Bench, mode: Mode, into: &mut Vec<Comparison>) -> Result<()> {
    let mut add = |tensor, bound, Compared { count, near_ties, largest, first }: Compared| {
        into.push(Comparison { tensor, mode, elements: count, near_ties, largest, bound, first });
    };
    let scores = bench.score()?;
    if let Some((recorded, width)) = &case.score {
        add("score", SCORE_BOUND, compare_scores(case, &scores, recorded, *width as usize));
    }
    let ids = bench.topk_idx()?;
    let (compared, rows) = compare_ids(case, &scores, &ids);
    add("topk_idx", 0.0, compared);
    if let Some((recorded, pages)) = &case.page_table {
        let expected = pages::expected(case, &ids, &rows, recorded, *pages as usize);
        let (pages, heads) = (*pages as usize, case.heads as usize);
        let at = |at: usize| format!("row {}, KV head {}, page {}", at / pages / heads, at / pages % heads, at % pages);
        add("sparse_block_table", 0.0, Compared::equal(&bench.page_table()?, &expected, at));
    }
    if let Some(recorded) = &case.page_len {
        let at = |at: usize| format!("row {}, KV head {}", at / case.heads as usize, at % case.heads as usize);
        add("sparse_context_lens", 0.0, Compared::equal(&bench.page_len()?, recorded, at));
    }
    if let Some(attend) = &case.attend {
        add("attend_output", ATTEND_BOUND, compare_attend(case, attend, &bench.out()?, &rows));
    }
    Ok(())
}

fn compare_scores(case: &Case, (found, found_width): &(Vec<f32>, usize), recorded: &[f32], width: usize) -> Compared {
    let rows = case.row_count() as usize;
    let mut compared = Compared::default();
    for plane_row in 0..case.heads as usize * rows {
        for block in 0..width.min(*found_width) {
            let expected = recorded[plane_row * width + block];
            // What was not touched must stay so, exactly.
            let bound = if expected == UNTOUCHED { 0.0 } else { SCORE_BOUND };
            let place = || format!("head {}, row {}, block {block}", plane_row / rows, plane_row % rows);
            compared.value(found[plane_row * found_width + block], expected, bound, place);
        }
    }
    compared
}

/// How the selection of a (head, row) relates to the recorded one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Selection {
    /// The same blocks in the same order.
    Equal,
    /// The same blocks, neighbours of nearly equal score in another order.
    Reordered,
    /// Another block of nearly equal score at the edge of the selection.
    Exchanged,
}

/// Ids must be equal, place by place. One exception: the recorded implementation summed its dot products in another order and
/// precision, so where two blocks' scores are closer than [`NEAR_TIE`] either may come first; such places are counted.
fn compare_ids(case: &Case, (scores, width): &(Vec<f32>, usize), ids: &[i32]) -> (Compared, Vec<Selection>) {
    let (rows, topk) = (case.row_count() as usize, case.topk as usize);
    let mut compared = Compared { count: ids.len(), ..Compared::default() };
    let mut selections = Vec::with_capacity(ids.len() / topk);
    for (plane_row, (found, expected)) in ids.chunks(topk).zip(case.topk_idx.chunks(topk)).enumerate() {
        let score = |id: i32| usize::try_from(id).ok().filter(|id| id < width).map(|id| scores[plane_row * width + id]);
        for (place, (&found, &expected)) in found.iter().zip(expected).enumerate().filter(|(_, (a, b))| a != b) {
            let near = match (score(found), score(expected)) {
                (Some(a), Some(b)) => f64::from((a - b).abs()) <= NEAR_TIE,
                _ => false,
            };
            if near {
                compared.near_ties += 1;
            } else if compared.first.is_none() {
                let (head, row) = (plane_row / rows, plane_row % rows);
                compared.first = Some(format!(
                    "head {head}, row {row}, place {place}: expected block {expected} (score {:?}), found {found} (score {:?})",
                    score(expected),
                    score(found)
                ));
            }
        }
        let sorted = |ids: &[i32]| {
            let mut ids = ids.to_vec();
            ids.sort_unstable();
            ids
        };
        selections.push(match () {
            () if found == expected => Selection::Equal,
            () if sorted(found) == sorted(expected) => Selection::Reordered,
            () => Selection::Exchanged,
        });
    }
    (compared, selections)
}

fn compare_attend(case: &Case, attend: &Attend, found: &[f32], selections: &[Selection]) -> Compared {
    let (dim, group, rows) = (attend.head_dim as usize, case.group as usize, case.row_count() as usize);
    let q_heads = case.heads as usize * group;
    let causal = case.causal();
    let mut compared = Compared::default();
    for (at, (&found, &expected)) in found.iter().zip(&attend.output).enumerate() {
        let (row, head) = (at / dim / q_heads, at / dim % q_heads);
        if selections[head / group * rows + row] == Selection::Exchanged {
            continue;
        }
        let place = || format!("row {row}, head {head}, channel {}", at % dim);
        match causal[row].1 {
            // A row that sees nothing attends to zeros here; some implementations leave what they divide by zero.
            0 => compared.value(found, 0.0, 0.0, place),
            _ => compared.value(found, expected, ATTEND_BOUND, place),
        }
    }
    compared
}

/// A comparison under way.
#[derive(Default)]
struct Compared {
    count: usize,
    near_ties: usize,
    largest: f64,
    first: Option<String>,
}

impl Compared {
    /// Compares values that may deviate by `bound`, absolute and relative; 0 asks for equal ones.
    fn value(&mut self, found: f32, expected: f32, bound: f64, place: impl FnOnce() -> String) {
        self.count += 1;
        // Infinities of one sign, and NaN, are equal to themselves.
        if found.to_bits() == expected.to_bits() || (found.is_nan() && expected.is_nan()) {
            return;
        }
        let deviation = (f64::from(found) - f64::from(expected)).abs();
        let allowed = bound + bound * f64::from(expected).abs();
        if deviation.is_finite() {
            self.largest = self.largest.max(deviation);
        }
        // A NaN is past every bound.
        if (deviation.is_nan() || deviation > allowed) && self.first.is_none() {
            self.first = Some(format!("{}: expected {expected}, found {found}", place()));
        }
    }

    fn equal(found: &[i32], expected: &[i32], place: impl Fn(usize) -> String) -> Compared {
        assert_eq!(found.len(), expected.len(), "invariant: the case's shapes were checked");
        let first = found.iter().zip(expected).position(|(found, expected)| found != expected);
        Compared {
            count: expected.len(),
            near_ties: 0,
            largest: found.iter().zip(expected).map(|(&a, &b)| f64::from(a.abs_diff(b))).fold(0.0, f64::max),
            first: first.map(|at| format!("{}: expected {}, found {}", place(at), expected[at], found[at])),
        }
    }
}
