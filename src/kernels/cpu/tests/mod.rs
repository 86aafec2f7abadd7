//! Tests of the ops: independent f64 references on random inputs, run through a small driver that loops over the grid.
//!
//! Random inputs come from [`Rng`]; its seed is printed, and `CAPSTAN_SEED` takes it back.

mod m3;

/// splitmix64, enough for test inputs.
pub(crate) struct Rng(u64);

impl Rng {
    /// Seeded by `CAPSTAN_SEED` or the clock; prints the seed under the test's name.
    pub(crate) fn seeded(test: &str) -> Rng {
        let clock = || std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("after 1970").as_nanos() as u64;
        let seed = std::env::var("CAPSTAN_SEED").ok().map_or_else(clock, |seed| seed.parse().expect("CAPSTAN_SEED is a u64"));
        eprintln!("{test}: CAPSTAN_SEED={seed}");
        Rng(seed)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    /// In 0..limit.
    pub(crate) fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit as u64) as usize
    }

    /// In [0, 1).
    pub(crate) fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Normal, mean 0, deviation 1.
    pub(crate) fn normal(&mut self) -> f32 {
        let radius = (-2.0 * (1.0 - self.unit()).ln()).sqrt();
        (radius * (2.0 * std::f64::consts::PI * self.unit()).cos()) as f32
    }
}
