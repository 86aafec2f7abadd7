//! Counters of an executor: what replayed, what was padded, what fell back and why.

use serde::Serialize;

/// Why a decode batch ran eagerly instead of by replay. Counted, never silent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Fallback {
    /// Nothing was captured (yet).
    NotCaptured,
    /// More rows than the largest capture size.
    BeyondLadder,
    /// A query length no graph was captured for.
    QueryLength,
}

impl Fallback {
    /// All reasons, in the order of [`Metrics::fallbacks`].
    pub const ALL: [Fallback; 3] = [Fallback::NotCaptured, Fallback::BeyondLadder, Fallback::QueryLength];

    /// The reason in words, and what would avoid it.
    pub fn reason(self) -> &'static str {
        match self {
            Fallback::NotCaptured => "nothing is captured: call capture() first",
            Fallback::BeyondLadder => "more rows than the largest capture size: raise --capture-sizes",
            Fallback::QueryLength => "no graph has this query length: set --num-speculative-tokens to match",
        }
    }
}

/// Replays of one capture size.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct SizeCount {
    /// Capture size, rows.
    pub rows: u32,
    /// Replays.
    pub replays: u64,
}

/// A count of steps for each number of rows that the limits allow. As JSON: `[rows, steps]` of those that happened, what
/// `capstan plan --batch-histogram` reads.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BatchRows(Vec<u64>);

impl BatchRows {
    /// Zeros up to `most` rows: nothing allocates from here on.
    pub(super) fn new(most: u32) -> BatchRows {
        BatchRows(vec![0; most as usize + 1])
    }

    fn count(&mut self, rows: u32) {
        if let Some(steps) = self.0.get_mut(rows as usize) {
            *steps += 1;
        }
    }

    /// Rows and steps, of each number of rows that happened, ascending.
    pub fn iter(&self) -> impl Iterator<Item = (u32, u64)> {
        self.0.iter().enumerate().filter(|&(_, &steps)| steps > 0).map(|(rows, &steps)| (rows as u32, steps))
    }
}

impl Serialize for BatchRows {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.iter())
    }
}

/// What an executor did so far.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Metrics {
    /// Decode steps, replayed and eager.
    pub decode_steps: u64,
    /// Prefill steps.
    pub prefill_steps: u64,
    /// Replays by capture size.
    pub replays: Vec<SizeCount>,
    /// Rows with a sequence, over all decode steps.
    pub live_rows: u64,
    /// Decode steps, replayed and eager, by their number of rows.
    pub batch_rows: BatchRows,
    /// Rows added by padding, over all replays.
    pub pad_rows: u64,
    /// Eager decode steps by [`Fallback::ALL`].
    pub fallbacks: [u64; 3],
    /// Steps that only carried block-table changes.
    pub table_flushes: u64,
    /// Replays that were repeated eagerly and compared.
    pub shadowed: u64,
    /// Decode steps of one of several ranks that scored alone, as
    /// [`StepChains::parallel_refused`](crate::chain::StepChains::parallel_refused) says why.
    pub scored_alone: u64,
    /// True if every decode step of this executor is one of those.
    #[serde(skip)]
    pub(super) alone: bool,
}

impl Metrics {
    pub(super) fn replayed(&mut self, capture_rows: u32, live_rows: u32) {
        self.decoded(live_rows);
        self.pad_rows += u64::from(capture_rows - live_rows);
        if let Some(count) = self.replays.iter_mut().find(|count| count.rows == capture_rows) {
            count.replays += 1;
        }
    }

    pub(super) fn fell_back(&mut self, why: Fallback, live_rows: u32) {
        self.decoded(live_rows);
        let at = Fallback::ALL.iter().position(|&reason| reason == why).unwrap_or(0);
        self.fallbacks[at] += 1;
    }

    fn decoded(&mut self, live_rows: u32) {
        self.decode_steps += 1;
        self.live_rows += u64::from(live_rows);
        self.batch_rows.count(live_rows);
        self.scored_alone += u64::from(self.alone);
    }

    /// Padded rows as a share of all replayed rows.
    pub fn padding_waste(&self) -> f64 {
        match self.live_rows + self.pad_rows {
            0 => 0.0,
            all => self.pad_rows as f64 / all as f64,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batch_rows_count_replays_and_fallbacks_and_read_back_as_a_histogram() {
        let mut metrics = Metrics { batch_rows: BatchRows::new(16), ..Metrics::default() };
        for rows in [3, 3, 16] {
            metrics.replayed(16, rows);
        }
        metrics.fell_back(Fallback::NotCaptured, 5);
        // A fallback of a longer query than the limits' own may have more rows; there is nothing to capture for it.
        metrics.fell_back(Fallback::QueryLength, 17);
        assert_eq!(metrics.batch_rows.iter().collect::<Vec<_>>(), [(3, 2), (5, 1), (16, 1)]);
        let text = serde_json::to_string(&serde_json::json!({ "metrics": metrics })).unwrap();
        let read = crate::capture::advice::BatchHistogram::parse(&text).unwrap();
        assert_eq!(read, crate::capture::advice::BatchHistogram::new([(3, 2), (5, 1), (16, 1)]));
    }
}
