//! Ladder advice: the capture sizes that cost recorded traffic least, in padded rows and in graph memory.
//!
//! Padded rows and bytes are put in one currency by what one percent of padded rows is worth. [`advise`] is exact: it finds the
//! best of all ladders, not the best of a policy's.

use std::collections::BTreeMap;

use serde::Serialize;
use serde_json::Value;

use super::{GraphCost, Ladder};
use crate::config::Limits;
use crate::error::{Error, Result};

/// How many decode steps had how many live rows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BatchHistogram(BTreeMap<u32, u64>);

/// What a ladder costs recorded traffic.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LadderCost {
    /// Capture sizes, rows, ascending.
    pub sizes: Vec<u32>,
    /// Rows added by padding, over all steps.
    pub pad_rows: u64,
    /// Steps of more rows than the largest size: they would run eagerly.
    pub eager_steps: u64,
    /// Device memory of the graphs, an estimate, bytes.
    pub graph_bytes: u64,
}

/// What a graph more costs and has to save.
#[derive(Clone, Copy, Debug)]
pub struct Terms {
    /// Cost of a graph.
    pub cost: GraphCost,
    /// Its nodes.
    pub nodes: u64,
    /// Graph memory that one percent of padded rows is worth, bytes.
    pub percent_worth_bytes: u64,
}

impl Terms {
    /// Graph memory that one percent of padded rows is worth unless somebody says otherwise: a percent of a step's work against a
    /// few thousandths of what a large card holds.
    pub const PERCENT_WORTH_BYTES: u64 = 64 << 20;

    fn graph_bytes(&self) -> u64 {
        self.cost.estimate(1, self.nodes)
    }

    /// Padded rows that a graph has to save to be worth its memory, of `live_rows`; rounded up.
    fn rows_a_graph(&self, live_rows: u64) -> u64 {
        let worth = 100 * u128::from(self.percent_worth_bytes.max(1));
        let rows = (u128::from(self.graph_bytes()) * u128::from(live_rows)).div_ceil(worth);
        u64::try_from(rows).unwrap_or(u64::MAX)
    }
}

/// The ladder of `limits` that costs `histogram` least. The step of all sequences at once is always among its sizes: a full batch
/// must not fall off the ladder.
///
/// Errors: a recorded step has more rows than `limits` allow.
pub fn advise(histogram: &BatchHistogram, limits: &Limits, terms: &Terms) -> Result<LadderCost> {
    let query_len = 1 + limits.num_speculative_tokens;
    let most = limits.max_num_seqs.saturating_mul(query_len);
    if let Some((&rows, &steps)) = histogram.0.range(most + 1..).next_back() {
        return Err(Error::config(format!("the histogram has {steps} steps of {rows} rows, these limits allow {most}"))
            .help(format!("raise max_num_seqs to {}", rows.div_ceil(query_len))));
    }
    // A best ladder only has sizes that some step fills: lowering any other to the next such size pads less.
    let mut filled: BTreeMap<u32, u64> = BTreeMap::from([(most, 0)]);
    for (&rows, &steps) in histogram.0.range(1..) {
        *filled.entry(rows.next_multiple_of(query_len)).or_default() += steps;
    }
    let filled: Vec<(u32, u64)> = filled.into_iter().collect();
    let sizes = best(&filled, terms.rows_a_graph(histogram.live_rows()));
    Ok(price(histogram, &sizes, terms))
}

/// What the ladder `sizes` (ascending) costs recorded traffic.
pub fn price(histogram: &BatchHistogram, sizes: &[u32], terms: &Terms) -> LadderCost {
    let mut priced = LadderCost {
        sizes: sizes.to_vec(),
        pad_rows: 0,
        eager_steps: 0,
        graph_bytes: terms.graph_bytes().saturating_mul(sizes.len() as u64),
    };
    for (&rows, &steps) in histogram.0.range(1..) {
        match sizes.get(sizes.partition_point(|&size| size < rows)) {
            Some(&size) => priced.pad_rows += u64::from(size - rows) * steps,
            None => priced.eager_steps += steps,
        }
    }
    priced
}

/// What the policy's own ladder for `limits` costs.
pub fn price_ladder(histogram: &BatchHistogram, limits: &Limits, terms: &Terms) -> Result<LadderCost> {
    Ok(price(histogram, Ladder::new(limits)?.sizes(), terms))
}

/// The subset of `filled` (rows, steps; ascending, the last always taken) with the least padded rows plus `graph_rows` a size.
///
/// One size after the other: the best ladder that ends in size j is that of some smaller size i, and the steps between pad to j.
fn best(filled: &[(u32, u64)], graph_rows: u64) -> Vec<u32> {
    // Of the first n sizes: steps, and rows of those steps.
    let (mut steps, mut rows) = (vec![0u128], vec![0u128]);
    for &(size, count) in filled {
        steps.push(steps[steps.len() - 1] + u128::from(count));
        rows.push(rows[rows.len() - 1] + u128::from(count) * u128::from(size));
    }
    // Least cost of the steps up to size n, size n taken; and the size taken before it, counted from 1.
    let mut least: Vec<(u128, usize)> = vec![(0, 0)];
    for n in 1..=filled.len() {
        let size = u128::from(filled[n - 1].0);
        let cost = |before: usize| {
            let padded = size * (steps[n] - steps[before]) - (rows[n] - rows[before]);
            (least[before].0 + padded + u128::from(graph_rows), before)
        };
        least.push((0..n).map(cost).min().expect("invariant: at least the empty ladder stands before"));
    }
    let mut taken = Vec::new();
    let mut at = filled.len();
    while at > 0 {
        taken.push(filled[at - 1].0);
        at = least[at].1;
    }
    taken.reverse();
    taken
}

impl BatchHistogram {
    /// From (rows, steps) pairs; equal rows add up.
    pub fn new(pairs: impl IntoIterator<Item = (u32, u64)>) -> BatchHistogram {
        let mut all = BTreeMap::new();
        for (rows, steps) in pairs {
            let count: &mut u64 = all.entry(rows).or_default();
            *count = count.saturating_add(steps);
        }
        BatchHistogram(all)
    }

    /// Reads lines of `rows steps` (`#` starts a comment), or JSON: an array of `[rows, steps]`, or any object that holds one as
    /// `batch_rows` or `metrics.batch_rows`, as `capstan run --json` prints.
    ///
    /// Errors: neither, with the line or value that is wrong; no step at all.
    pub fn parse(text: &str) -> Result<BatchHistogram> {
        let histogram = if text.trim_start().starts_with(['{', '[']) { from_json(text)? } else { from_lines(text)? };
        if histogram.live_rows() == 0 {
            return Err(wrong("no step with a row is in it"));
        }
        Ok(histogram)
    }

    /// Rows of all steps.
    pub fn live_rows(&self) -> u64 {
        self.0.iter().fold(0u64, |all, (&rows, &steps)| all.saturating_add(u64::from(rows).saturating_mul(steps)))
    }

    /// Steps in all.
    pub fn steps(&self) -> u64 {
        self.0.values().fold(0, |all: u64, &steps| all.saturating_add(steps))
    }
}

fn from_lines(text: &str) -> Result<BatchHistogram> {
    let lines = text.lines().enumerate();
    let lines =
        lines.map(|(at, line)| (at + 1, line.split('#').next().unwrap_or_default().trim())).filter(|(_, line)| !line.is_empty());
    let pairs = lines.map(|(at, line)| {
        let pair = line.split_whitespace().collect::<Vec<_>>();
        match pair[..] {
            [rows, steps] => rows.parse().ok().zip(steps.parse().ok()),
            _ => None,
        }
        .ok_or_else(|| wrong(&format!("line {at} is {line:?}")))
    });
    Ok(BatchHistogram::new(pairs.collect::<Result<Vec<_>>>()?))
}

fn from_json(text: &str) -> Result<BatchHistogram> {
    let value: Value = serde_json::from_str(text).map_err(|error| wrong(&format!("it is no JSON: {error}")))?;
    let found = [&value, &value["batch_rows"], &value["metrics"]["batch_rows"]].into_iter().find_map(Value::as_array);
    let pairs = found.ok_or_else(|| wrong("its JSON has no batch_rows"))?.iter().map(|pair| {
        let both = pair.as_array().filter(|pair| pair.len() == 2);
        let both = both.and_then(|pair| Some((u32::try_from(pair[0].as_u64()?).ok()?, pair[1].as_u64()?)));
        both.ok_or_else(|| wrong(&format!("an entry is {pair}")))
    });
    Ok(BatchHistogram::new(pairs.collect::<Result<Vec<_>>>()?))
}

fn wrong(what: &str) -> Error {
    Error::input(format!("not a histogram of batch rows: {what}"))
        .help("write one `rows steps` a line, or pass the output of `capstan run --json`")
}

#[cfg(test)]
#[path = "advice_tests.rs"]
mod tests;
