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
    /// Rows added by padding, over all replays.
    pub pad_rows: u64,
    /// Eager decode steps by [`Fallback::ALL`].
    pub fallbacks: [u64; 3],
    /// Steps that only carried block-table changes.
    pub table_flushes: u64,
}

impl Metrics {
    pub(super) fn replayed(&mut self, capture_rows: u32, live_rows: u32) {
        self.decode_steps += 1;
        self.live_rows += u64::from(live_rows);
        self.pad_rows += u64::from(capture_rows - live_rows);
        if let Some(count) = self.replays.iter_mut().find(|count| count.rows == capture_rows) {
            count.replays += 1;
        }
    }

    pub(super) fn fell_back(&mut self, why: Fallback, live_rows: u32) {
        self.decode_steps += 1;
        self.live_rows += u64::from(live_rows);
        let at = Fallback::ALL.iter().position(|&reason| reason == why).unwrap_or(0);
        self.fallbacks[at] += 1;
    }

    /// Padded rows as a share of all replayed rows.
    pub fn padding_waste(&self) -> f64 {
        match self.live_rows + self.pad_rows {
            0 => 0.0,
            all => self.pad_rows as f64 / all as f64,
        }
    }
}
