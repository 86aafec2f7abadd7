//! OCP E4M3FN: the 8-bit floats of index and KV caches.
//!
//! 1 sign, 4 exponent (bias 7), 3 mantissa bits; no infinities; NaN is 0x7f and 0xff; the largest finite value is 448 (OCP
//! 8-bit floating point specification 1.0). Encoding saturates, as both the index cache and the KV cache want it (`msa-spec`
//! 2.3): infinities become ±448, NaN stays NaN.

use bytemuck::{Pod, Zeroable};

/// One E4M3FN value by its code.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(transparent)]
pub struct F8E4M3(pub u8);

impl F8E4M3 {
    /// The largest finite value.
    pub const MAX: f32 = 448.0;

    /// The nearest value, ties to the even code, saturating at ±448; NaN gives NaN of the same sign.
    pub fn from_f32(value: f32) -> F8E4M3 {
        let bits = value.to_bits();
        let sign = ((bits >> 24) & 0x80) as u8;
        let magnitude = bits & 0x7fff_ffff;
        if magnitude > 0x7f80_0000 {
            return F8E4M3(sign | 0x7f);
        }
        if magnitude >= 448f32.to_bits() {
            return F8E4M3(sign | 0x7e);
        }
        let code = if magnitude < 0x3c80_0000 {
            // Below 2^-6 values are multiples of 2^-9; 8 of them are the first normal code, as they should be.
            (f32::from_bits(magnitude) * 512.0).round_ties_even() as u32
        } else {
            // Round the 20 bits that go, let a carry run into the exponent, and move the bias from 127 to 7.
            ((magnitude + 0x7_ffff + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
        };
        F8E4M3(sign | code as u8)
    }

    /// The value, exactly.
    pub const fn to_f32(self) -> f32 {
        if self.0 & 0x7f == 0x7f {
            return f32::from_bits((self.0 as u32 & 0x80) << 24 | 0x7fc0_0000);
        }
        // Read as f32 bits the code is the value times 2^-120, subnormals included; 2^120 is a power of two, so this is exact.
        f32::from_bits((self.0 as u32 & 0x80) << 24 | (self.0 as u32 & 0x7f) << 20) * f32::from_bits((120 + 127) << 23)
    }

    /// True for the two NaN codes.
    pub const fn is_nan(self) -> bool {
        self.0 & 0x7f == 0x7f
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The definition in f64, code by code.
    fn defined(code: u8) -> f64 {
        let (exponent, mantissa) = (i32::from(code >> 3 & 15), f64::from(code & 7));
        let value = match (exponent, code & 7) {
            (15, 7) => f64::NAN,
            (0, _) => mantissa / 8.0 * 2f64.powi(-6),
            _ => (1.0 + mantissa / 8.0) * 2f64.powi(exponent - 7),
        };
        if code & 0x80 != 0 { -value } else { value }
    }

    /// The nearest finite code by looking at all of them; of two equally near, the even one.
    fn nearest(value: f64) -> u8 {
        let sign = if value.is_sign_negative() { 0x80 } else { 0 };
        let best = |a: &u8, b: &u8| {
            let (da, db) = ((defined(*a) - value.abs()).abs(), (defined(*b) - value.abs()).abs());
            da.partial_cmp(&db).expect("finite").then((a & 1).cmp(&(b & 1)))
        };
        sign | (0..0x7f_u8).min_by(best).expect("codes")
    }

    #[test]
    fn every_code_decodes_as_defined_and_encodes_to_itself() {
        for code in 0..=255u8 {
            let (value, expected) = (F8E4M3(code).to_f32(), defined(code));
            assert_eq!(value.is_nan(), expected.is_nan(), "{code:#x}");
            assert_eq!(F8E4M3(code).is_nan(), expected.is_nan());
            if !value.is_nan() {
                assert_eq!(f64::from(value), expected, "{code:#x}");
                assert_eq!(value.is_sign_negative(), code & 0x80 != 0);
            }
            assert_eq!(F8E4M3::from_f32(value).0, code);
        }
    }

    #[test]
    fn encoding_finds_the_nearest_code() {
        // Every code's neighbourhood: the value, the midpoint to the next, and one step of f32 to either side of both.
        for code in 0..0x7e_u8 {
            let (low, high) = (defined(code) as f32, defined(code + 1) as f32);
            for centre in [low, (low + high) / 2.0, high, low * 0.75 + high * 0.25] {
                for value in [centre.next_down(), centre, centre.next_up(), -centre] {
                    assert_eq!(F8E4M3::from_f32(value).0, nearest(f64::from(value)), "{value:?}");
                }
            }
        }
        // A stride through all bit patterns of f32.
        for bits in (0..0x7f80_0000u32).step_by(65_521) {
            for value in [f32::from_bits(bits), -f32::from_bits(bits)] {
                let expected = if value.abs() >= 448.0 { value.signum() * 448.0 } else { value };
                assert_eq!(F8E4M3::from_f32(value).0, nearest(f64::from(expected)), "{value:?}");
            }
        }
    }

    #[test]
    fn saturates_and_keeps_nan() {
        for (value, code) in [(464.0, 0x7e), (1e30, 0x7e), (f32::INFINITY, 0x7e), (f32::NEG_INFINITY, 0xfe), (-449.0, 0xfe)] {
            assert_eq!(F8E4M3::from_f32(value).0, code, "{value}");
        }
        assert!(F8E4M3::from_f32(f32::NAN).is_nan());
        assert_eq!(F8E4M3::from_f32(-0.0).0, 0x80);
    }
}
