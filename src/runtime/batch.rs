//! What a caller asks for: rows of decode and prefill, and how to sample.

use super::SequenceId;
use crate::error::{Error, Result};
use crate::kernels::step::SequenceRecord;

/// How the next token of a sequence is chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// 0: the largest logit; otherwise the softmax temperature.
    pub temperature: f32,
    /// Keep this many of the largest logits; 0 keeps all.
    pub top_k: u32,
    /// Keep the smallest set of tokens whose probabilities reach this sum; 1 keeps all.
    pub top_p: f32,
    /// Keep tokens with at least this share of the largest probability; 0 keeps all.
    pub min_p: f32,
    /// Seed of the sequence's draws; each position draws its own number.
    pub seed: u64,
}

impl Sampling {
    /// Always the largest logit.
    pub const GREEDY: Sampling = Sampling { temperature: 0.0, top_k: 0, top_p: 1.0, min_p: 0.0, seed: 0 };

    /// Errors: values no distribution comes from.
    pub fn validate(&self) -> Result<()> {
        if self.temperature >= 0.0 && self.temperature.is_finite() && self.top_p > 0.0 && self.min_p >= 0.0 {
            return Ok(());
        }
        Err(Error::batch(format!("{self:?} is no way to sample")).help("temperature >= 0 and finite, top_p > 0, min_p >= 0"))
    }

    pub(super) fn record(&self, slot: u32, kv_len: u32, query_len: u32) -> SequenceRecord {
        SequenceRecord {
            slot,
            kv_len,
            query_len,
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            reserved: 0,
            seed: self.seed,
            reserved2: 0,
        }
    }
}

impl Default for Sampling {
    fn default() -> Sampling {
        Sampling::GREEDY
    }
}

/// One sequence of a step: its tokens, and its length once they are cached.
#[derive(Clone, Copy, Debug)]
pub struct SequenceStep<'a> {
    /// The sequence.
    pub sequence: SequenceId,
    /// This step's tokens (ids, or [`TOKEN_FROM_DEVICE`](crate::kernels::step::TOKEN_FROM_DEVICE) for the last sampled one).
    pub tokens: &'a [i32],
    /// Tokens the sequence holds after this step.
    pub kv_len: u32,
    /// How to sample after each of the step's tokens.
    pub sampling: Sampling,
}

/// Where a batch splits into decode and prefill (decode first): `decode` sequences of `query_len` rows each, then the rest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Split {
    /// Sequences of the decode part.
    pub decode: usize,
    /// Rows a decode sequence.
    pub query_len: usize,
}

/// Splits a batch by the uniform rule of msa-spec section 7: sequences up to the first whose query length differs from sequence
/// 0's are decodes, if that length is at most `threshold` (1 + speculative tokens); the rest are prefills.
pub fn split(batch: &[SequenceStep<'_>], threshold: usize) -> Split {
    let query_len = batch.first().map_or(0, |step| step.tokens.len());
    if query_len == 0 || query_len > threshold {
        return Split { decode: 0, query_len: 0 };
    }
    let decode = batch.iter().position(|step| step.tokens.len() != query_len).unwrap_or(batch.len());
    Split { decode, query_len }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lengths(lengths: &[usize]) -> Split {
        const TOKENS: [i32; 16] = [0; 16];
        let steps: Vec<_> = lengths
            .iter()
            .map(|&len| SequenceStep {
                sequence: SequenceId::default(),
                tokens: &TOKENS[..len],
                kv_len: 16,
                sampling: Sampling::GREEDY,
            })
            .collect();
        split(&steps, 4)
    }

    #[test]
    fn decodes_are_the_leading_run_of_one_length() {
        assert_eq!(lengths(&[1, 1, 1]), Split { decode: 3, query_len: 1 });
        assert_eq!(lengths(&[4, 4, 9, 4]), Split { decode: 2, query_len: 4 });
        assert_eq!(lengths(&[2, 1, 1]), Split { decode: 1, query_len: 2 });
        assert_eq!(lengths(&[9, 1]), Split { decode: 0, query_len: 0 });
        assert_eq!(lengths(&[]), Split { decode: 0, query_len: 0 });
    }
}
