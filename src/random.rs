//! A small seeded generator for workloads and tests: the same seed gives the same run on every machine.

/// SplitMix64 (Steele, Lea, Flood 2014).
#[derive(Clone, Debug)]
pub struct Random(u64);

/// What the state grows by a draw: the golden ratio's odd 64 bits.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

impl Random {
    /// Starts at `seed`.
    pub fn new(seed: u64) -> Random {
        Random(seed)
    }

    /// The generator as it is `draws` draws from now: several threads can draw parts of one sequence.
    pub fn after(&self, draws: u64) -> Random {
        Random(self.0.wrapping_add(STEP.wrapping_mul(draws)))
    }

    /// The next 64 bits.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(STEP);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform in `low..=high` (the bias of the multiplication is below 2^-32 for ranges below 2^32).
    pub fn range(&mut self, low: u32, high: u32) -> u32 {
        let span = u64::from(high - low) + 1;
        low + (((self.next_u64() >> 32) * span) >> 32) as u32
    }

    /// Uniform in [0, 1).
    pub fn unit(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Standard normal, by Box-Muller.
    pub fn normal(&mut self) -> f64 {
        let (u, v) = (1.0 - self.unit(), self.unit());
        (-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * v).cos()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn skipped_draws_are_the_drawn_ones() {
        let mut random = Random::new(11);
        let mut later = random.after(1000);
        let drawn = (0..1001).map(|_| random.next_u64()).last();
        assert_eq!(drawn, Some(later.next_u64()));
    }
}
