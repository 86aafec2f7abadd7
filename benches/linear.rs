//! Matrix products of the CPU device on one core: GFLOP/s and GB/s of weights, beside what this core can do at most.
//!
//! `cargo bench --bench linear` prints a table first (peaks, then each shape's share of them), then criterion's own figures.

#![expect(unsafe_code, reason = "launches an op on buffers of the bench")]

use std::hint::black_box;
use std::time::Instant;

use bytemuck::bytes_of;
use capstan::DType;
use capstan::hal::{LaunchShape, Workgroup};
use capstan::kernels::Ptr;
use capstan::kernels::m3::LinearArgs;
use capstan::kernels::registry::LINEAR;
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};

/// One product: [rows, k] x [n, k] bf16.
struct Product {
    rows: usize,
    n: usize,
    k: usize,
    x: Vec<f32>,
    weight: Vec<u16>,
    row_len: Vec<i32>,
    out: Vec<f32>,
}

impl Product {
    fn new(rows: usize, n: usize, k: usize) -> Product {
        let x = (0..rows * k).map(|i| (i % 17) as f32 / 17.0 - 0.5).collect();
        let weight = (0..n * k).map(|i| 0x3c00 + (i % 251) as u16).collect();
        Product { rows, n, k, x, weight, row_len: vec![1; rows], out: vec![0.0; rows * n] }
    }

    fn run(&mut self) {
        let (tile_cols, tile_rows) = (self.n.min(48), 64);
        let grid = [self.n.div_ceil(tile_cols) as u32, self.rows.div_ceil(tile_rows) as u32, 1];
        let args = LinearArgs {
            x: Ptr(self.x.as_ptr() as u64),
            weight: Ptr(self.weight.as_ptr() as u64),
            row_len: Ptr(self.row_len.as_ptr() as u64),
            out: Ptr(self.out.as_mut_ptr() as u64),
            rows: self.rows as u32,
            n: self.n as u32,
            k: self.k as u32,
            x_stride: self.k as u32,
            out_stride: self.n as u32,
            weight_dtype: DType::Bf16.code(),
            accumulate: 0,
            tile_cols: tile_cols as u32,
            tile_rows: tile_rows as u32,
            reserved: 0,
        };
        let shape = LaunchShape { grid, workgroup: [256, 1, 1], lds_bytes: 0 };
        for y in 0..grid[1] {
            for x in 0..grid[0] {
                // SAFETY: the pointers are those of this product's own vectors, of the extents the arguments say.
                unsafe { (LINEAR.cpu)(bytes_of(&args), &mut Workgroup { id: [x, y, 0], shape, lds: &mut [] }) }
            }
        }
        black_box(&self.out);
    }

    fn flops(&self) -> f64 {
        2.0 * self.rows as f64 * self.n as f64 * self.k as f64
    }

    fn weight_bytes(&self) -> f64 {
        2.0 * self.n as f64 * self.k as f64
    }
}

/// Best of a few timings of `work`, in seconds.
fn best(mut work: impl FnMut()) -> f64 {
    (0..5)
        .map(|_| {
            let start = Instant::now();
            work();
            start.elapsed().as_secs_f64()
        })
        .fold(f64::INFINITY, f64::min)
}

/// Fused multiply-adds a second on registers alone, in GFLOP/s.
fn fma_peak() -> f64 {
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma")]
    fn spin(rounds: usize) -> f32 {
        let mut sums = [[0.5f32; 8]; 12];
        let (a, b) = (black_box([0.999f32; 8]), black_box([0.001f32; 8]));
        for _ in 0..rounds {
            for sum in &mut sums {
                for lane in 0..8 {
                    sum[lane] = sum[lane].mul_add(a[lane], b[lane]);
                }
            }
        }
        sums.as_flattened().iter().sum()
    }
    #[cfg(not(target_arch = "x86_64"))]
    fn spin(rounds: usize) -> f32 {
        (0..rounds * 96).fold(black_box(0.5f32), |sum, _| sum.mul_add(0.999, 0.001))
    }
    const ROUNDS: usize = 2_000_000;
    #[cfg(target_arch = "x86_64")]
    let run = || {
        assert!(std::arch::is_x86_feature_detected!("avx2") && std::arch::is_x86_feature_detected!("fma"));
        // SAFETY: the line above saw both features.
        unsafe { spin(ROUNDS) }
    };
    #[cfg(not(target_arch = "x86_64"))]
    let run = || spin(ROUNDS);
    2.0 * 96.0 * ROUNDS as f64
        / best(|| {
            black_box(run());
        })
        / 1e9
}

/// Bytes a second read from memory, in GB/s.
fn read_peak() -> f64 {
    let data = vec![1u64; 32 << 20];
    let seconds = best(|| {
        let sums = data.chunks_exact(16).fold([0u64; 16], |mut sums, chunk| {
            sums.iter_mut().zip(chunk).for_each(|(sum, x)| *sum = sum.wrapping_add(*x));
            sums
        });
        black_box(sums);
    });
    (data.len() * 8) as f64 / seconds / 1e9
}

const SHAPES: [(usize, usize, usize); 9] = [
    (1, 1920, 256),
    (1, 6144, 6144),
    (4, 6144, 6144),
    (8, 1920, 256),
    (8, 6144, 6144),
    (64, 1920, 256),
    (64, 256, 1024),
    (512, 1920, 256),
    (512, 3072, 3072),
];

fn linear(criterion: &mut Criterion) {
    let (fma, read) = (fma_peak(), read_peak());
    println!("one core: {fma:.1} GFLOP/s in registers, {read:.1} GB/s read from memory");
    println!("{:>5} {:>6} {:>6} {:>9} {:>6} {:>8} {:>6}", "rows", "n", "k", "GFLOP/s", "%", "GB/s", "%");
    for (rows, n, k) in SHAPES {
        let mut product = Product::new(rows, n, k);
        let seconds = best(|| product.run());
        let (flops, bytes) = (product.flops() / seconds / 1e9, product.weight_bytes() / seconds / 1e9);
        println!("{rows:>5} {n:>6} {k:>6} {flops:>9.1} {:>6.0} {bytes:>8.2} {:>6.0}", 100.0 * flops / fma, 100.0 * bytes / read);
    }
    let mut group = criterion.benchmark_group("linear");
    group.sample_size(10);
    for (rows, n, k) in SHAPES {
        let mut product = Product::new(rows, n, k);
        group.throughput(Throughput::Elements(product.flops() as u64 / 2));
        group.bench_function(BenchmarkId::from_parameter(format!("{rows}x{n}x{k}")), |bencher| bencher.iter(|| product.run()));
    }
    group.finish();
}

criterion_group!(benches, linear);
criterion_main!(benches);
