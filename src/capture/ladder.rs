//! The ladder: which capture sizes there are, and which one a batch pads to.

use crate::config::{CaptureSizes, Limits};
use crate::error::{Error, Result};

/// Largest size the default list goes to (msa-spec section 8).
const DEFAULT_MAX: u32 = 512;

/// Capture sizes in rows, ascending; all are multiples of the query length 1 + `num_speculative_tokens`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ladder {
    all: Vec<u32>,
    decode: usize,
}

impl Ladder {
    /// The sizes of msa-spec section 8: {1, 2, 4}, multiples of 8 below 256, multiples of 16 up to the maximum, the maximum
    /// itself and the rows of all sequences at once; or the user's list. Rounded up to multiples of the query length, those past the maximum dropped.
    ///
    /// Errors: no size is left, a user's size past `max_num_batched_tokens`.
    pub fn new(limits: &Limits) -> Result<Ladder> {
        let query_len = 1 + limits.num_speculative_tokens;
        let decode_max = limits.max_num_seqs.saturating_mul(query_len);
        let default_max =
            (limits.max_num_seqs.saturating_mul(query_len).saturating_mul(2)).min(DEFAULT_MAX).min(limits.max_num_batched_tokens);
        let (listed, max) = match &limits.capture {
            CaptureSizes::List(sizes) => {
                if let Some(size) = sizes.iter().find(|&&size| size == 0 || size > limits.max_num_batched_tokens) {
                    return Err(Error::config(format!(
                        "capture_sizes: {size} is not between 1 and max_num_batched_tokens = {}",
                        limits.max_num_batched_tokens
                    ))
                    .help("drop that size or raise max_num_batched_tokens"));
                }
                (sizes.clone(), sizes.iter().copied().max().unwrap_or(0))
            }
            CaptureSizes::Max(max) => (default_sizes(*max, decode_max), *max),
            CaptureSizes::Default => (default_sizes(default_max, decode_max), default_max),
        };
        let mut all: Vec<u32> = listed.iter().map(|size| size.next_multiple_of(query_len)).filter(|&size| size <= max).collect();
        all.sort_unstable();
        all.dedup();
        if all.is_empty() && max >= query_len {
            all.push(query_len);
        }
        let decode = all.iter().take_while(|&&size| size <= decode_max).count();
        if decode == 0 {
            return Err(Error::config(format!(
                "no capture size fits: a step of one sequence has {query_len} rows, the largest size is {max}"
            ))
            .help(format!("raise the capture sizes or max_num_batched_tokens to {query_len} at least")));
        }
        Ok(Ladder { all, decode })
    }

    /// The sizes that uniform decode can use: at most `max_num_seqs` sequences. These are captured.
    pub fn sizes(&self) -> &[u32] {
        &self.all[..self.decode]
    }

    /// Every size of the policy, those past uniform decode included.
    pub fn all(&self) -> &[u32] {
        &self.all
    }

    /// The largest captured size.
    pub fn max(&self) -> u32 {
        self.all[self.decode - 1]
    }

    /// The size `rows` pads to; `None` past the largest.
    pub fn pick(&self, rows: u32) -> Option<u32> {
        let sizes = self.sizes();
        sizes.get(sizes.partition_point(|&size| size < rows)).copied()
    }
}

fn default_sizes(max: u32, decode_max: u32) -> Vec<u32> {
    let small = [1, 2, 4].into_iter();
    let middle = (8..256).step_by(8);
    let large = (256..=max).step_by(16);
    // The exact maximum and the step of all sequences are always among them: a full batch must not fall off the ladder.
    let exact = [decode_max, max].into_iter().filter(|&size| size > 0);
    small.chain(middle).chain(large).chain(exact).filter(|&size| size <= max).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits(seqs: u32, speculative: u32, capture: CaptureSizes) -> Limits {
        Limits { max_num_seqs: seqs, num_speculative_tokens: speculative, capture, ..Limits::default() }
    }

    #[test]
    fn the_examples_of_the_specification() {
        let ladder = Ladder::new(&limits(256, 0, CaptureSizes::Default)).unwrap();
        assert_eq!((ladder.all().len(), ladder.all().last(), ladder.sizes().len(), ladder.max()), (51, Some(&512), 35, 256));
        let ladder = Ladder::new(&limits(64, 3, CaptureSizes::Default)).unwrap();
        assert_eq!((ladder.all().len(), &ladder.all()[..3], ladder.sizes().len(), ladder.max()), (49, &[4, 8, 16][..], 33, 256));
    }

    #[test]
    fn user_lists_maxima_and_their_errors() {
        let ladder = Ladder::new(&limits(100, 0, CaptureSizes::List(vec![7, 3, 7, 100]))).unwrap();
        assert_eq!(ladder.sizes(), [3, 7, 100]);
        assert_eq!((ladder.pick(1), ladder.pick(4), ladder.pick(100), ladder.pick(101)), (Some(3), Some(7), Some(100), None));
        assert_eq!(Ladder::new(&limits(100, 0, CaptureSizes::Default)).unwrap().max(), 100, "all sequences at once replay");
        assert_eq!(Ladder::new(&limits(100, 0, CaptureSizes::Max(13))).unwrap().sizes(), [1, 2, 4, 8, 13]);
        assert!(Ladder::new(&limits(100, 0, CaptureSizes::List(vec![0]))).is_err());
        assert!(Ladder::new(&limits(100, 3, CaptureSizes::Max(2))).unwrap_err().to_string().contains("no capture size fits"));
    }
}
