//! Argument struct of `probe`: the smallest kernel whose results tell which launch ran, in which order, on what data.
//!
//! No chain of a model uses it; the self-test and the device conformance suite do. Maps `x -> x * mul + add` with an odd `mul`
//! are bijections modulo 2^32 that do not commute, so a skipped, repeated, swapped or stale launch changes the result.

use crate::kernel_args;

kernel_args! {
    /// `probe`, grid [ceil(count / 256)], workgroup \[256\]: dst = src * mul + add, modulo 2^32.
    ///
    /// `dst` and `src` are the same range or do not overlap.
    pub struct ProbeArgs |a| {
        pointers {
            /// \[count\], 32-bit patterns without a sign.
            dst: Write, U32, u64::from(a.count);
            /// \[count\].
            src: Read, U32, u64::from(a.count);
        }
        scalars {
            /// Elements.
            count: u32;
            /// Factor.
            mul: u32;
            /// Summand.
            add: u32;
            /// Zero.
            reserved: u32;
        }
    }
}
