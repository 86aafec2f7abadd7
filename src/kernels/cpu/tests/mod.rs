//! Tests of the ops: independent f64 references on random inputs, run through a small driver that loops over the grid.
//!
//! Random inputs come from [`Rng`]; its seed is printed, and `CAPSTAN_SEED` takes it back.

#![expect(unsafe_code, reason = "calls the ops, as a device does")]

mod attend;
mod exchange;
mod m3;
mod norm_rope;
mod sample;
mod score;
mod step;
mod topk;

use crate::hal::{CpuOp, LaunchShape, Workgroup};
use crate::kernels::{KernelArgs, Ptr};

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

    /// `0..count` in random order.
    pub(crate) fn permutation(&mut self, count: usize) -> Vec<i32> {
        let mut all: Vec<i32> = (0..count as i32).collect();
        (1..count).rev().for_each(|i| all.swap(i, self.below(i + 1)));
        all
    }
}

/// A pointer to a test's buffer, which must outlive every launch that takes it.
fn ptr<T>(buffer: &mut [T]) -> Ptr {
    Ptr(buffer.as_mut_ptr().expose_provenance() as u64)
}

/// Runs every workgroup of a grid, every other one on a second thread.
fn run<A: KernelArgs + Sync>(op: CpuOp, grid: [u32; 3], args: &A) {
    let shape = LaunchShape { grid, workgroup: [256, 1, 1], lds_bytes: 0 };
    let all = grid.iter().product::<u32>();
    let part = |parity: u32| {
        for at in (0..all).filter(|at| at % 2 == parity) {
            let id = [at % grid[0], at / grid[0] % grid[1], at / grid[0] / grid[1]];
            let mut workgroup = Workgroup { id, shape, lds: &mut [] };
            // SAFETY: tests point arguments at buffers of the declared extents; the views check every access against them.
            unsafe { op(bytemuck::bytes_of(args), &mut workgroup) }
        }
    };
    std::thread::scope(|scope| {
        let second = scope.spawn(|| part(1));
        part(0);
        if let Err(panic) = second.join() {
            std::panic::resume_unwind(panic);
        }
    });
}
