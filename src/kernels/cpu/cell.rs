//! The element types of caches, and how each becomes f32 lanes.

use half::bf16;

use super::fp8::F8E4M3;
use super::simd::Lanes;
use super::view::Element;

/// An element of a KV or index cache.
///
/// Lanes hold the value divided by [`Cell::UNIT`], a power of two, so whoever multiplies by it is exact.
pub trait Cell: Element {
    /// What lanes must be multiplied by.
    const UNIT: f32;
    /// True if lanes may hold a wrong value for a NaN unless loaded with [`Cell::load_exact`].
    const HIDES_NAN: bool;

    /// The nearest value of this type; E4M3FN saturates.
    fn encode(value: f32) -> Self;
    /// The value.
    fn decode(self) -> f32;
    /// Eight values as lanes.
    fn load<L: Lanes>(from: &[Self; 8]) -> L;
    /// Adds 32 values to a collection of codes.
    fn codes<L: Lanes>(seen: L::Codes, from: &[Self; 32]) -> L::Codes;

    /// The values themselves, if they are f32.
    fn as_f32(_: &[Self]) -> Option<&[f32]> {
        None
    }

    /// Eight values as lanes, NaN included.
    #[inline(always)]
    fn load_exact<L: Lanes>(from: &[Self; 8]) -> L {
        let mut values = [0.0; 8];
        for (to, from) in values.iter_mut().zip(from) {
            *to = from.decode() / Self::UNIT;
        }
        L::load(&values)
    }

    /// [`Cell::load_exact`] if `exact`, else [`Cell::load`].
    #[inline(always)]
    fn load_as<L: Lanes>(from: &[Self; 8], exact: bool) -> L {
        if exact { Self::load_exact(from) } else { Self::load(from) }
    }

    /// True if a NaN of `from` would be lost by [`Cell::load`].
    #[inline(always)]
    fn nan_hidden<L: Lanes>(from: &[Self]) -> bool {
        if !Self::HIDES_NAN {
            return false;
        }
        let (whole, rest) = from.as_chunks::<32>();
        let mut seen = L::no_codes();
        for chunk in whole {
            seen = Self::codes::<L>(seen, chunk);
        }
        L::nan_seen(seen) || rest.iter().any(|x| x.decode().is_nan())
    }
}

impl Cell for f32 {
    const UNIT: f32 = 1.0;
    const HIDES_NAN: bool = false;

    #[inline(always)]
    fn encode(value: f32) -> f32 {
        value
    }
    #[inline(always)]
    fn decode(self) -> f32 {
        self
    }
    #[inline(always)]
    fn as_f32(values: &[f32]) -> Option<&[f32]> {
        Some(values)
    }
    #[inline(always)]
    fn load<L: Lanes>(from: &[f32; 8]) -> L {
        L::load(from)
    }
    #[inline(always)]
    fn codes<L: Lanes>(seen: L::Codes, _: &[f32; 32]) -> L::Codes {
        seen
    }
}

impl Cell for bf16 {
    const UNIT: f32 = 1.0;
    const HIDES_NAN: bool = false;

    #[inline(always)]
    fn encode(value: f32) -> bf16 {
        bf16::from_f32(value)
    }
    #[inline(always)]
    fn decode(self) -> f32 {
        self.to_f32()
    }
    #[inline(always)]
    fn load<L: Lanes>(from: &[bf16; 8]) -> L {
        L::from_bf16(from)
    }
    #[inline(always)]
    fn codes<L: Lanes>(seen: L::Codes, _: &[bf16; 32]) -> L::Codes {
        seen
    }
}

impl Cell for F8E4M3 {
    const UNIT: f32 = 256.0;
    const HIDES_NAN: bool = true;

    #[inline(always)]
    fn encode(value: f32) -> F8E4M3 {
        F8E4M3::from_f32(value)
    }
    #[inline(always)]
    fn decode(self) -> f32 {
        self.to_f32()
    }
    #[inline(always)]
    fn load<L: Lanes>(from: &[F8E4M3; 8]) -> L {
        L::from_f8(from)
    }
    #[inline(always)]
    fn codes<L: Lanes>(seen: L::Codes, from: &[F8E4M3; 32]) -> L::Codes {
        L::codes(seen, from)
    }
}

/// Runs `$call` with `$T` as the cell type of a dtype code; panics for a type no cache has.
macro_rules! with_cell {
    ($code:expr, $T:ident => $call:expr) => {
        match $crate::DType::from_code($code) {
            $crate::DType::F32 => {
                type $T = f32;
                $call
            }
            $crate::DType::Bf16 => {
                type $T = half::bf16;
                $call
            }
            $crate::DType::F8E4M3 => {
                type $T = $crate::kernels::cpu::fp8::F8E4M3;
                $call
            }
            other => panic!("no cache holds {other}"),
        }
    };
}
pub(super) use with_cell;
