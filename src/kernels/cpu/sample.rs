//! `sample`: greedy, temperature, top-k, top-p, min-p.
//!
//! A token is drawn in three steps, none of which sorts or stores the vocabulary:
//! 1. Candidates are ordered by logit, the lower id first among equals. Top-k keeps the first k; top-p then keeps the shortest
//!    run of them whose probabilities, renormalised over what top-k kept, sum to p; min-p then drops what has less than its
//!    share of the largest probability. The cut is found by narrowing the logit's bits from the top, one byte a pass.
//! 2. u in [0, 1) is a counter-based random number: the splitmix64 finaliser of seed and position (Steele, Lea and Flood 2014).
//! 3. The draw is the first kept token, by id, whose running sum of weights exceeds u times the sum of all.

use super::simd::exp;
use super::view::Bound;
use crate::hal::Workgroup;
use crate::kernels::step::{SampleArgs, SequenceRecord};

/// Draws one logits row's token.
pub fn sample(args: &Bound<'_, SampleArgs>, workgroup: &mut Workgroup<'_>) {
    let i = workgroup.id[0] as usize;
    if workgroup.id[0] >= args.rows {
        return;
    }
    let mut out = args.write::<i32>(|a| &a.out);
    out.set(i, 0);
    let row = if args.indexed != 0 { args.read::<i32>(|a| &a.rows_index).get(i) } else { i as i32 };
    let Some(row) = usize::try_from(row).ok().filter(|&row| row < args.step_rows as usize) else { return };
    let len = args.read::<i32>(|a| &a.row_len).get(row);
    let sequence = args.read::<i32>(|a| &a.row_seq).get(row);
    if len <= 0 || sequence < 0 || sequence as u32 >= args.sequences {
        return;
    }
    let record: SequenceRecord = args.read::<u8>(|a| &a.records).read_pod(sequence as usize * size_of::<SequenceRecord>());
    let vocab = args.vocab as usize;
    let token = draw(args.read::<f32>(|a| &a.logits).slice(i * vocab, vocab), &record, len as u64);
    out.set(i, token);
    // Only the last row of a sequence sees all of its tokens.
    let slot = args.read::<i32>(|a| &a.row_slot).get(row);
    if len as u32 == record.kv_len && slot >= 0 && (slot as u32) < args.slots {
        args.write::<i32>(|a| &a.last_token).set(slot as usize, token);
    }
}

/// The token that follows `position` tokens.
pub fn draw(logits: &[f32], record: &SequenceRecord, position: u64) -> i32 {
    let (best, most) = largest(logits);
    if record.temperature.is_nan() || record.temperature <= 0.0 || most == f32::NEG_INFINITY {
        return best;
    }
    let weights = Weights { most, inverse_temperature: 1.0 / record.temperature };
    let mut cut = Cut { key: 0, equals: u32::MAX };
    if record.top_k > 0 && (record.top_k as usize) < logits.len() {
        cut = narrow(logits, &cut, f64::from(record.top_k), |_| 1.0);
    }
    if record.top_p < 1.0 {
        let target = f64::from(record.top_p.max(0.0)) * kept_weight(logits, &cut, 0.0, &weights);
        cut = narrow(logits, &cut, target, |logit| weights.of(logit));
    }
    let min_p = f64::from(record.min_p);
    let target = uniform(record.seed, position) * kept_weight(logits, &cut, min_p, &weights);
    let (mut sum, mut last) = (0.0, best);
    for (id, weight) in kept(logits, &cut).map(|(id, logit)| (id, weights.of(logit))) {
        if weight >= min_p && weight > 0.0 {
            sum += weight;
            last = id as i32;
            if sum > target {
                break;
            }
        }
    }
    last
}

/// A number in [0, 1) with 53 bits from (seed, position).
pub fn uniform(seed: u64, position: u64) -> f64 {
    let mix = |mut z: u64| {
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    };
    let golden = 0x9e37_79b9_7f4a_7c15u64;
    let bits = mix(mix(seed.wrapping_add(golden)).wrapping_add(position.wrapping_mul(golden)));
    (bits >> 11) as f64 / (1u64 << 53) as f64
}

/// The first id with the largest logit, and that logit.
fn largest(logits: &[f32]) -> (i32, f32) {
    let mut best = (0, f32::NEG_INFINITY);
    for (id, &logit) in logits.iter().enumerate() {
        if logit > best.1 {
            best = (id as i32, logit);
        }
    }
    best
}

struct Weights {
    most: f32,
    inverse_temperature: f32,
}

impl Weights {
    /// Probability relative to the most likely token, in [0, 1].
    fn of(&self, logit: f32) -> f64 {
        if logit == self.most {
            1.0
        } else if logit < self.most {
            // The difference of two infinities cannot occur: `most` is larger, and of -inf the weight is 0.
            let x = (logit - self.most) * self.inverse_temperature;
            // Below the range of `exp` nothing is left of it.
            if x < -87.0 { 0.0 } else { f64::from(exp(x)) }
        } else {
            0.0 // NaN
        }
    }
}

/// The candidates kept: all whose key is above `key`, and the first `equals` ids of those that have it.
struct Cut {
    key: u32,
    equals: u32,
}

/// Orders logits as integers; NaN counts as minus infinity, -0 equals +0.
fn key(logit: f32) -> u32 {
    let bits = if logit.is_nan() { f32::NEG_INFINITY.to_bits() } else { (logit + 0.0).to_bits() };
    if bits >> 31 == 0 { bits | 0x8000_0000 } else { !bits }
}

/// The kept candidates in order of id.
fn kept<'a>(logits: &'a [f32], cut: &Cut) -> impl Iterator<Item = (usize, f32)> + 'a {
    let Cut { key: at, equals } = *cut;
    let mut seen = 0;
    logits.iter().copied().enumerate().filter(move |&(_, logit)| {
        let key = key(logit);
        if key == at {
            seen += 1;
        }
        key > at || (key == at && seen <= equals)
    })
}

fn kept_weight(logits: &[f32], cut: &Cut, min_p: f64, weights: &Weights) -> f64 {
    kept(logits, cut).map(|(_, logit)| weights.of(logit)).filter(|&weight| weight >= min_p).sum()
}

/// The shortest prefix, in order, of what `cut` keeps whose `measure` sums to at least `target` (at least one candidate).
fn narrow(logits: &[f32], cut: &Cut, target: f64, measure: impl Fn(f32) -> f64) -> Cut {
    let (mut prefix, mut above, mut each) = (0u32, 0.0, 0.0);
    for shift in [24, 16, 8, 0] {
        let mut digits = [0.0f64; 256];
        for (_, logit) in kept(logits, cut) {
            let key = key(logit);
            if shift == 24 || key >> (shift + 8) == prefix >> (shift + 8) {
                digits[(key >> shift & 255) as usize] += measure(logit);
            }
        }
        // The last digit that counts anything, should rounding leave the target out of reach.
        let lowest = digits.iter().position(|&sum| sum > 0.0).unwrap_or(255);
        let mut digit = 255;
        while digit > lowest && above + digits[digit] < target {
            above += digits[digit];
            digit -= 1;
        }
        prefix |= (digit as u32) << shift;
        each = digits[digit];
    }
    // All of the last digit's candidates have the same logit: take as many as are needed.
    let count = kept(logits, cut).filter(|&(_, logit)| key(logit) == prefix).count() as f64;
    let needed = if each > 0.0 { ((target - above) / (each / count)).ceil().clamp(1.0, count) } else { 1.0 };
    Cut { key: prefix, equals: needed as u32 }
}
