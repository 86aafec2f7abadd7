//! What everything is sized from: limits and a model's shape; and the gates that pick an implementation.

mod input;
mod limits;
mod model;

pub use input::{ByteCount, KEYS, LimitsInput};
pub use limits::{CacheBudget, CaptureSizes, Limits};
pub use model::ModelShape;

/// Rows of the largest capture size the policy may choose (msa-spec section 8).
pub fn max_capture_rows(limits: &Limits) -> u32 {
    let query_len = 1 + limits.num_speculative_tokens;
    let listed = match &limits.capture {
        CaptureSizes::List(sizes) => sizes.iter().copied().max().unwrap_or(0),
        CaptureSizes::Max(max) => *max,
        CaptureSizes::Default => limits.max_num_batched_tokens,
    };
    listed.max(query_len).next_multiple_of(query_len).min(limits.max_num_seqs.saturating_mul(query_len))
}
