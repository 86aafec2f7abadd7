//! Eight f32 lanes, the same bits on every CPU.
//!
//! An op is written once over [`Lanes`] and run through [`dispatch`], which picks AVX2 with FMA and F16C where the CPU has
//! them and plain arrays elsewhere. Both round alike: every multiply-add is fused, every sum uses the one tree of [`Lanes::sum`].
//! So results never depend on the machine, and a test can hold one against the other.

#![expect(unsafe_code, reason = "calls vector instructions after asking the CPU for them")]

use half::bf16;

use super::fp8::F8E4M3;

/// Work that is generic over the lanes it runs on.
///
/// Mark `run` `#[inline(always)]`, and everything it calls with lanes; and let no closure touch lanes (`for`, not `map`): a
/// function that is not inlined is compiled without the CPU's features, and each instruction in it becomes a call.
pub trait LaneOp {
    /// What it gives.
    type Output;
    /// Does it.
    fn run<L: Lanes>(self) -> Self::Output;
}

/// Runs `op` on the best lanes of this CPU.
pub fn dispatch<O: LaneOp>(op: O) -> O::Output {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c") {
        // SAFETY: the CPU has the three features.
        return unsafe { x86::run(op) };
    }
    op.run::<Portable>()
}

/// e^x for x <= 0 with the bits of [`Lanes::exp`], which the device sources compute too: no library's exponential is the same
/// everywhere.
pub fn exp(x: f32) -> f32 {
    struct Exp(f32);
    impl LaneOp for Exp {
        type Output = f32;

        #[inline(always)]
        fn run<L: Lanes>(self) -> f32 {
            let mut lanes = [0.0; 8];
            L::splat(self.0).exp().store(&mut lanes);
            lanes[0]
        }
    }
    dispatch(Exp(x))
}

/// Asks the CPU to load the cache line that `data` starts in.
#[inline(always)]
pub fn prefetch<T>(data: &[T]) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch has no effect on memory and accepts any address; SSE is part of x86_64.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(data.as_ptr().cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = data;
}

/// Eight f32.
pub trait Lanes: Copy {
    /// Collects bytes to look for NaN codes in.
    type Codes: Copy;

    /// The same value in every lane.
    fn splat(value: f32) -> Self;
    /// Loads.
    fn load(from: &[f32; 8]) -> Self;
    /// Stores.
    fn store(self, to: &mut [f32; 8]);
    /// Widens.
    fn from_bf16(from: &[bf16; 8]) -> Self;
    /// E4M3FN values times 2^-8, exactly; wrong for NaN codes (±1.875), which the caller looks for with [`Lanes::codes`].
    fn from_f8(from: &[F8E4M3; 8]) -> Self;
    /// No codes yet.
    fn no_codes() -> Self::Codes;
    /// Adds 32 codes to a collection.
    fn codes(seen: Self::Codes, from: &[F8E4M3; 32]) -> Self::Codes;
    /// True if one of the collected codes is NaN.
    fn nan_seen(seen: Self::Codes) -> bool;
    /// self * b + c with one rounding.
    fn mul_add(self, b: Self, c: Self) -> Self;
    /// self + b.
    fn add(self, b: Self) -> Self;
    /// self - b.
    fn sub(self, b: Self) -> Self;
    /// self * b.
    fn mul(self, b: Self) -> Self;
    /// self where self > b, else b: a NaN of `self` is skipped, a NaN of `b` is kept.
    fn max(self, b: Self) -> Self;
    /// Rounds to an integer, ties to even.
    fn round(self) -> Self;
    /// 2^self for integers in -126..=127.
    fn exp2_integer(self) -> Self;
    /// Four sums at once; each is ((x0+x4)+(x1+x5)) + ((x2+x6)+(x3+x7)) + 0, so that a sum of zeros is +0.
    fn sum4(all: [Self; 4]) -> [f32; 4];
    /// Swaps rows and columns.
    fn transpose(rows: &mut [Self; 8]);
    /// Loads four lanes twice.
    fn load_twice(from: &[f32; 4]) -> Self;
    /// Loads the lower and the upper four lanes.
    fn load_halves(low: &[f32; 4], high: &[f32; 4]) -> Self;
    /// The lower halves of both side by side, and the upper halves.
    fn halves(self, b: Self) -> [Self; 2];
    /// Swaps rows and columns in the lower and in the upper four lanes.
    fn transpose_halves(rows: &mut [Self; 4]);

    /// One sum, by the tree of [`Lanes::sum4`].
    #[inline(always)]
    fn sum(self) -> f32 {
        Self::sum4([self; 4])[0]
    }

    /// The largest lane; -inf if all are NaN.
    #[inline(always)]
    fn max_lane(self) -> f32 {
        let mut all = [0.0; 8];
        self.store(&mut all);
        all.iter().fold(f32::NEG_INFINITY, |most, &x| if x > most { x } else { most })
    }

    /// e^self for self <= 0 (any value up to 88 works), within 2 units in the last place; below -87 it gives e^-87, NaN stays.
    ///
    /// e^x = 2^n e^r with n = round(x / ln 2) and |r| <= ln(2)/2, where the Taylor series to r^7 is exact to f32.
    #[inline(always)]
    fn exp(self) -> Self {
        const INVERSE_FACTORIALS: [f32; 7] = [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0];
        let x = Self::splat(-87.0).max(self);
        let n = x.mul(Self::splat(std::f32::consts::LOG2_E)).round();
        // ln 2 in two parts: the first has few enough bits that n times it is exact.
        let r = n.mul_add(Self::splat(-0.693_359_4), x);
        let r = n.mul_add(Self::splat(2.121_944_4e-4), r);
        let mut y = Self::splat(1.0 / 5040.0);
        for c in INVERSE_FACTORIALS {
            y = y.mul_add(r, Self::splat(c));
        }
        y.mul(n.exp2_integer())
    }
}

/// Lanes in an array, for CPUs without AVX2 and as the reference of the tests.
#[derive(Clone, Copy)]
pub struct Portable([f32; 8]);

impl Portable {
    #[inline(always)]
    fn zip(self, b: Portable, f: impl Fn(f32, f32) -> f32) -> Portable {
        Portable(std::array::from_fn(|i| f(self.0[i], b.0[i])))
    }
}

impl Lanes for Portable {
    type Codes = bool;

    #[inline(always)]
    fn splat(value: f32) -> Portable {
        Portable([value; 8])
    }
    #[inline(always)]
    fn load(from: &[f32; 8]) -> Portable {
        Portable(*from)
    }
    #[inline(always)]
    fn store(self, to: &mut [f32; 8]) {
        *to = self.0;
    }
    #[inline(always)]
    fn from_bf16(from: &[bf16; 8]) -> Portable {
        Portable(from.map(|x| f32::from_bits(u32::from(x.to_bits()) << 16)))
    }
    #[inline(always)]
    fn from_f8(from: &[F8E4M3; 8]) -> Portable {
        // As f32 bits a code is its value times 2^-120.
        let scale = f32::from_bits((112 + 127) << 23);
        Portable(from.map(|x| f32::from_bits((u32::from(x.0) & 0x80) << 24 | (u32::from(x.0) & 0x7f) << 20) * scale))
    }
    #[inline(always)]
    fn no_codes() -> bool {
        false
    }
    #[inline(always)]
    fn codes(seen: bool, from: &[F8E4M3; 32]) -> bool {
        seen | from.iter().any(|x| x.is_nan())
    }
    #[inline(always)]
    fn nan_seen(seen: bool) -> bool {
        seen
    }
    #[inline(always)]
    fn mul_add(self, b: Portable, c: Portable) -> Portable {
        Portable(std::array::from_fn(|i| self.0[i].mul_add(b.0[i], c.0[i])))
    }
    #[inline(always)]
    fn add(self, b: Portable) -> Portable {
        self.zip(b, |x, y| x + y)
    }
    #[inline(always)]
    fn sub(self, b: Portable) -> Portable {
        self.zip(b, |x, y| x - y)
    }
    #[inline(always)]
    fn mul(self, b: Portable) -> Portable {
        self.zip(b, |x, y| x * y)
    }
    #[inline(always)]
    fn max(self, b: Portable) -> Portable {
        self.zip(b, |x, y| if x > y { x } else { y })
    }
    #[inline(always)]
    fn round(self) -> Portable {
        Portable(self.0.map(f32::round_ties_even))
    }
    #[inline(always)]
    fn exp2_integer(self) -> Portable {
        Portable(self.0.map(|n| f32::from_bits(((n as i32 + 127) as u32) << 23)))
    }
    #[inline(always)]
    fn sum4(all: [Portable; 4]) -> [f32; 4] {
        all.map(|Portable(x)| ((x[0] + x[4]) + (x[1] + x[5])) + ((x[2] + x[6]) + (x[3] + x[7])) + 0.0)
    }
    #[inline(always)]
    fn transpose(rows: &mut [Portable; 8]) {
        let old = *rows;
        *rows = std::array::from_fn(|i| Portable(std::array::from_fn(|j| old[j].0[i])));
    }
    #[inline(always)]
    fn load_twice(from: &[f32; 4]) -> Portable {
        Self::load_halves(from, from)
    }
    #[inline(always)]
    fn load_halves(low: &[f32; 4], high: &[f32; 4]) -> Portable {
        Portable(std::array::from_fn(|i| if i < 4 { low[i] } else { high[i - 4] }))
    }
    #[inline(always)]
    fn halves(self, b: Portable) -> [Portable; 2] {
        [0, 4].map(|from| Portable(std::array::from_fn(|i| if i < 4 { self.0[from + i] } else { b.0[from + i - 4] })))
    }
    #[inline(always)]
    fn transpose_halves(rows: &mut [Portable; 4]) {
        let old = *rows;
        *rows = std::array::from_fn(|i| Portable(std::array::from_fn(|j| old[j % 4].0[j / 4 * 4 + i])));
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::{F8E4M3, LaneOp, Lanes, bf16};

    /// Lanes in an AVX register.
    #[derive(Clone, Copy)]
    pub(super) struct Avx2(__m256);

    /// # Safety
    /// The CPU has AVX2, FMA and F16C.
    #[target_feature(enable = "avx2,fma,f16c")]
    pub(super) unsafe fn run<O: LaneOp>(op: O) -> O::Output {
        op.run::<Avx2>()
    }

    // `Avx2` is private to this module and only `run` uses it, so every method below runs on a CPU with the three features.

    /// The upper four lanes added to the lower four.
    #[inline(always)]
    fn fold(x: __m256) -> __m128 {
        // SAFETY: AVX is there (see above).
        unsafe { _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x)) }
    }

    /// Transposes both 4 x 4 halves of four rows.
    #[inline(always)]
    fn quarter(a: __m256, b: __m256, c: __m256, d: __m256) -> [__m256; 4] {
        // SAFETY: AVX is there (see above).
        unsafe {
            let (ab_low, ab_high) = (_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
            let (cd_low, cd_high) = (_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
            [
                _mm256_shuffle_ps::<0x44>(ab_low, cd_low),
                _mm256_shuffle_ps::<0xee>(ab_low, cd_low),
                _mm256_shuffle_ps::<0x44>(ab_high, cd_high),
                _mm256_shuffle_ps::<0xee>(ab_high, cd_high),
            ]
        }
    }

    impl Lanes for Avx2 {
        type Codes = __m256i;

        #[inline(always)]
        fn splat(value: f32) -> Avx2 {
            // SAFETY: AVX is there (see above).
            Avx2(unsafe { _mm256_set1_ps(value) })
        }
        #[inline(always)]
        fn load(from: &[f32; 8]) -> Avx2 {
            // SAFETY: AVX is there; the array has the 32 bytes.
            Avx2(unsafe { _mm256_loadu_ps(from.as_ptr()) })
        }
        #[inline(always)]
        fn store(self, to: &mut [f32; 8]) {
            // SAFETY: AVX is there; the array has the 32 bytes.
            unsafe { _mm256_storeu_ps(to.as_mut_ptr(), self.0) }
        }
        #[inline(always)]
        fn from_bf16(from: &[bf16; 8]) -> Avx2 {
            // SAFETY: AVX2 is there; the array has the 16 bytes.
            Avx2(unsafe {
                let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.as_ptr().cast()));
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
            })
        }
        #[inline(always)]
        fn from_f8(from: &[F8E4M3; 8]) -> Avx2 {
            // Sign-extended to 16 bits and shifted by 7, a code is the f16 of its value times 2^-8, but for bit 14, a copy of
            // the sign. F16C widens subnormals at full speed, which a shift into f32 would not on every CPU.
            // SAFETY: F16C and SSE4.1 are there; the array has the 8 bytes.
            Avx2(unsafe {
                let wide = _mm_slli_epi16::<7>(_mm_cvtepi8_epi16(_mm_loadl_epi64(from.as_ptr().cast())));
                _mm256_cvtph_ps(_mm_and_si128(wide, _mm_set1_epi16(0xbf80_u16 as i16)))
            })
        }
        #[inline(always)]
        fn no_codes() -> __m256i {
            // SAFETY: AVX is there.
            unsafe { _mm256_setzero_si256() }
        }
        #[inline(always)]
        fn codes(seen: __m256i, from: &[F8E4M3; 32]) -> __m256i {
            // The largest magnitude of each byte so far; NaN is the largest there is.
            // SAFETY: AVX2 is there; the array has the 32 bytes.
            unsafe {
                let codes = _mm256_loadu_si256(from.as_ptr().cast());
                _mm256_max_epu8(seen, _mm256_and_si256(codes, _mm256_set1_epi8(0x7f)))
            }
        }
        #[inline(always)]
        fn nan_seen(seen: __m256i) -> bool {
            // SAFETY: AVX2 is there.
            unsafe { _mm256_movemask_epi8(_mm256_cmpeq_epi8(seen, _mm256_set1_epi8(0x7f))) != 0 }
        }
        #[inline(always)]
        fn mul_add(self, b: Avx2, c: Avx2) -> Avx2 {
            // SAFETY: FMA is there.
            Avx2(unsafe { _mm256_fmadd_ps(self.0, b.0, c.0) })
        }
        #[inline(always)]
        fn add(self, b: Avx2) -> Avx2 {
            // SAFETY: AVX is there.
            Avx2(unsafe { _mm256_add_ps(self.0, b.0) })
        }
        #[inline(always)]
        fn sub(self, b: Avx2) -> Avx2 {
            // SAFETY: AVX is there.
            Avx2(unsafe { _mm256_sub_ps(self.0, b.0) })
        }
        #[inline(always)]
        fn mul(self, b: Avx2) -> Avx2 {
            // SAFETY: AVX is there.
            Avx2(unsafe { _mm256_mul_ps(self.0, b.0) })
        }
        #[inline(always)]
        fn max(self, b: Avx2) -> Avx2 {
            // The instruction gives its second operand unless the first is greater.
            // SAFETY: AVX is there.
            Avx2(unsafe { _mm256_max_ps(self.0, b.0) })
        }
        #[inline(always)]
        fn round(self) -> Avx2 {
            // SAFETY: AVX is there.
            Avx2(unsafe { _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(self.0) })
        }
        #[inline(always)]
        fn exp2_integer(self) -> Avx2 {
            // SAFETY: AVX2 is there.
            Avx2(unsafe {
                let biased = _mm256_add_epi32(_mm256_cvtps_epi32(self.0), _mm256_set1_epi32(127));
                _mm256_castsi256_ps(_mm256_slli_epi32::<23>(biased))
            })
        }
        #[inline(always)]
        fn sum4(all: [Avx2; 4]) -> [f32; 4] {
            // SAFETY: AVX is there; the array has the 16 bytes that are stored.
            unsafe {
                let [a, b, c, d] = all;
                let low = _mm_hadd_ps(fold(a.0), fold(b.0));
                let sums = _mm_add_ps(_mm_hadd_ps(low, _mm_hadd_ps(fold(c.0), fold(d.0))), _mm_setzero_ps());
                let mut out = [0.0; 4];
                _mm_storeu_ps(out.as_mut_ptr(), sums);
                out
            }
        }
        #[inline(always)]
        fn transpose(rows: &mut [Avx2; 8]) {
            // SAFETY: AVX is there.
            unsafe {
                let [a, b, c, d, e, f, g, h] = *rows;
                let top = quarter(a.0, b.0, c.0, d.0);
                let end = quarter(e.0, f.0, g.0, h.0);
                for i in 0..4 {
                    rows[i] = Avx2(_mm256_permute2f128_ps::<0x20>(top[i], end[i]));
                    rows[i + 4] = Avx2(_mm256_permute2f128_ps::<0x31>(top[i], end[i]));
                }
            }
        }
        #[inline(always)]
        fn load_twice(from: &[f32; 4]) -> Avx2 {
            // SAFETY: AVX is there; the array has the 16 bytes.
            Avx2(unsafe {
                let four = _mm_loadu_ps(from.as_ptr());
                _mm256_set_m128(four, four)
            })
        }
        #[inline(always)]
        fn load_halves(low: &[f32; 4], high: &[f32; 4]) -> Avx2 {
            // SAFETY: AVX is there; each array has the 16 bytes.
            Avx2(unsafe { _mm256_loadu2_m128(high.as_ptr(), low.as_ptr()) })
        }
        #[inline(always)]
        fn halves(self, b: Avx2) -> [Avx2; 2] {
            // SAFETY: AVX is there.
            unsafe { [Avx2(_mm256_permute2f128_ps::<0x20>(self.0, b.0)), Avx2(_mm256_permute2f128_ps::<0x31>(self.0, b.0))] }
        }
        #[inline(always)]
        fn transpose_halves(rows: &mut [Avx2; 4]) {
            let [a, b, c, d] = *rows;
            *rows = quarter(a.0, b.0, c.0, d.0).map(Avx2);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::cpu::tests::Rng;

    /// Everything the lanes can do, on one input.
    struct Everything<'a>(&'a [f32; 64], &'a [F8E4M3; 32], &'a [bf16; 8]);

    impl LaneOp for Everything<'_> {
        type Output = Vec<u32>;
        #[inline(always)]
        fn run<L: Lanes>(self) -> Vec<u32> {
            let Everything(values, codes, halves) = self;
            let (rows, _) = values.as_chunks::<8>();
            let mut rows: [L; 8] = std::array::from_fn(|i| L::load(&rows[i]));
            let sums = L::sum4([rows[0], rows[1], rows[2], rows[3]]);
            let [a, b, c, ..] = rows;
            let mut all = vec![a.mul_add(b, c), a.add(b), a.sub(b), a.mul(b), a.max(b), a.round(), L::from_bf16(halves)];
            all.extend([a.exp(), b.exp(), L::splat(-100.0).exp(), L::splat(f32::NAN).max(a)]);
            all.extend(codes.as_chunks::<8>().0.iter().map(L::from_f8));
            let (fours, _) = values.as_chunks::<4>();
            all.extend([L::load_twice(&fours[1]), L::load_halves(&fours[5], &fours[2])]);
            all.extend(a.halves(b));
            let mut four = [a, b, c, rows[3]];
            L::transpose_halves(&mut four);
            all.extend(four);
            L::transpose(&mut rows);
            all.extend(rows);
            let mut out = Vec::new();
            for lanes in all {
                let mut stored = [0.0; 8];
                lanes.store(&mut stored);
                out.extend(stored.map(f32::to_bits));
            }
            out.extend(sums.map(f32::to_bits));
            out.push(u32::from(L::nan_seen(L::codes(L::no_codes(), codes))));
            out
        }
    }

    #[test]
    fn both_kinds_of_lanes_give_the_same_bits() {
        let mut rng = Rng::seeded("simd");
        for round in 0..500 {
            let values: [f32; 64] = std::array::from_fn(|_| -rng.normal().abs() * 10.0);
            let codes = std::array::from_fn(|_| F8E4M3(rng.below(if round % 2 == 0 { 256 } else { 127 }) as u8));
            let halves = std::array::from_fn(|_| bf16::from_f32(rng.normal()));
            let best = dispatch(Everything(&values, &codes, &halves));
            assert_eq!(best, Everything(&values, &codes, &halves).run::<Portable>());
        }
    }

    #[test]
    fn exp_is_close_to_the_standard_one() {
        for i in 0..870 {
            let x = -(i as f32) * 0.1;
            let mut got = [0.0; 8];
            Portable::splat(x).exp().store(&mut got);
            let expected = f64::from(x).exp();
            assert!((f64::from(got[0]) - expected).abs() <= 3e-7 * expected, "{x}: {} {expected}", got[0]);
        }
        assert_eq!(Portable::splat(0.0).exp().0[0], 1.0);
        assert!(Portable::splat(f32::NAN).exp().0[0].is_nan());
    }

    #[test]
    fn f8_lanes_are_values_by_256() {
        for code in (0..=255u8).filter(|code| code & 0x7f != 0x7f) {
            let lanes = Portable::from_f8(&[F8E4M3(code); 8]);
            assert_eq!(lanes.0[0] * 256.0, F8E4M3(code).to_f32());
        }
    }
}
