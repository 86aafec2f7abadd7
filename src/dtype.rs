//! Element types of buffers, and the codes kernels see them by.

use serde::{Deserialize, Serialize};

/// An element type. Kernels receive it as [`DType::code`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DType {
    /// IEEE 754 binary32.
    F32,
    /// bfloat16.
    Bf16,
    /// OCP E4M3FN: no infinities, NaN is 0x7f and 0xff, largest finite 448.
    #[serde(rename = "fp8_e4m3")]
    F8E4M3,
    /// Signed 32-bit integer.
    I32,
    /// Unsigned 32-bit integer.
    U32,
    /// Unsigned 64-bit integer.
    U64,
    /// Raw bytes.
    U8,
}

impl DType {
    /// All types, in the order of their codes.
    pub const ALL: [DType; 7] = [DType::F32, DType::Bf16, DType::F8E4M3, DType::I32, DType::U32, DType::U64, DType::U8];

    /// Bytes of one element.
    pub const fn bytes(self) -> u64 {
        match self {
            DType::F32 | DType::I32 | DType::U32 => 4,
            DType::Bf16 => 2,
            DType::F8E4M3 | DType::U8 => 1,
            DType::U64 => 8,
        }
    }

    /// The number a kernel argument carries for this type (`kernels/include/args.h` has the same list).
    pub const fn code(self) -> u32 {
        self as u32
    }

    /// The type behind a kernel argument; a code nobody assigned reads as raw bytes.
    pub fn from_code(code: u32) -> DType {
        DType::ALL.get(code as usize).copied().unwrap_or(DType::U8)
    }

    /// The name in plans and dumps.
    pub const fn name(self) -> &'static str {
        match self {
            DType::F32 => "f32",
            DType::Bf16 => "bf16",
            DType::F8E4M3 => "fp8_e4m3",
            DType::I32 => "i32",
            DType::U32 => "u32",
            DType::U64 => "u64",
            DType::U8 => "u8",
        }
    }
}

impl std::fmt::Display for DType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_round_trip() {
        for dtype in DType::ALL {
            assert_eq!(DType::from_code(dtype.code()), dtype);
        }
        assert_eq!(DType::from_code(99), DType::U8);
    }
}
