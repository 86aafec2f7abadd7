//! Kernels as a user brings them: declared like the crate's own, some of them wrong.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use capstan::hal::Workgroup;
use capstan::kernel_args;
use capstan::kernels::{KernelArgs, KernelSpec, Ptr};

kernel_args! {
    /// `double`, grid [1]: y = 2 x.
    pub struct DoubleArgs |a| {
        pointers {
            /// [n].
            x: Read, F32, u64::from(a.n);
            /// [n].
            y: Write, F32, u64::from(a.n);
        }
        scalars {
            /// Elements.
            n: u32;
            /// Zero.
            reserved: u32;
        }
    }
}

kernel_args! {
    /// `double` as somebody else declares it: a field too many.
    pub struct DoubleFactorArgs |a| {
        pointers {
            /// [n].
            x: Read, F32, u64::from(a.n);
            /// [n].
            y: Write, F32, u64::from(a.n);
        }
        scalars {
            /// Elements.
            n: u32;
            /// Zero.
            reserved: u32;
            /// The field too many.
            factor: u64;
        }
    }
}

kernel_args! {
    /// Kernels that change [n] elements in place.
    pub struct PokeArgs |a| {
        pointers {
            /// [n].
            y: ReadWrite, F32, u64::from(a.n);
        }
        scalars {
            /// Elements.
            n: u32;
            /// What to multiply by; 0 zeroes what was NaN, too.
            factor: u32;
        }
    }
}

kernel_args! {
    /// `live_rows`, grid [1]: ones in rows whose `row_len` is not 0; forgets the pads.
    pub struct LiveRowsArgs |a| {
        pointers {
            /// [rows] causal lengths.
            row_len: Read, I32, u64::from(a.rows);
            /// [rows].
            y: Write, F32, u64::from(a.rows);
        }
        scalars {
            /// Rows.
            rows: u32;
            /// Zero.
            reserved: u32;
        }
    }
}

kernel_args! {
    /// `observe`, grid [1]: remembers the longest sequence on the host; what a chain then makes of it is its mistake.
    pub struct ObserveArgs |a| {
        pointers {
            /// [sequences] KV lengths.
            seq_len: Read, I32, u64::from(a.sequences);
        }
        scalars {
            /// Sequences.
            sequences: u32;
            /// What the chain believes.
            longest: u32;
        }
    }
}

/// Longest sequence that `observe` saw in the last step.
pub static SEEN: AtomicU32 = AtomicU32::new(0);
/// The faulty kernels do as they should until this is set.
pub static ARMED: AtomicBool = AtomicBool::new(false);

fn at<T>(pointer: Ptr) -> *mut T {
    std::ptr::with_exposed_provenance_mut(pointer.0 as usize)
}

/// y[i] = 2 x[i] over a range, which may be a wrong one.
///
/// # Safety
/// As of `CpuOp`, and the device's memory reaches as far as the range.
unsafe fn double_range(args: &[u8], range: impl Fn(isize) -> Range<isize>) {
    let args: DoubleArgs = bytemuck::pod_read_unaligned(args);
    let n = args.n as isize;
    for i in if ARMED.load(Ordering::Relaxed) { range(n) } else { 0..n } {
        // SAFETY: ADDR-1, or the damage that the test wants, inside a guard band of 256 bytes.
        unsafe { *at::<f32>(args.y).offset(i) = 2.0 * *at::<f32>(args.x).offset(i.clamp(0, n - 1)) };
    }
}

unsafe fn double(args: &[u8], _: &mut Workgroup<'_>) {
    // SAFETY: the contract of `CpuOp`.
    unsafe { double_range(args, |n| 0..n) }
}
unsafe fn overrun(args: &[u8], _: &mut Workgroup<'_>) {
    // SAFETY: one element past the end is in the guard band.
    unsafe { double_range(args, |n| 0..n + 1) }
}
unsafe fn underrun(args: &[u8], _: &mut Workgroup<'_>) {
    // SAFETY: one element before the start is in the guard band.
    unsafe { double_range(args, |n| -1..n) }
}
unsafe fn short(args: &[u8], _: &mut Workgroup<'_>) {
    // SAFETY: the contract of `CpuOp`.
    unsafe { double_range(args, |n| 0..n - 1) }
}
unsafe fn idle(args: &[u8], _: &mut Workgroup<'_>) {
    // SAFETY: the contract of `CpuOp`.
    unsafe { double_range(args, |_| 0..0) }
}
unsafe fn poke(args: &[u8], _: &mut Workgroup<'_>) {
    let args: PokeArgs = bytemuck::pod_read_unaligned(args);
    for i in 0..args.n as usize {
        // SAFETY: the contract of `CpuOp`.
        let element = unsafe { &mut *at::<f32>(args.y).add(i) };
        *element = if args.factor == 0 { 0.0 } else { *element * args.factor as f32 };
    }
}
unsafe fn live_rows(args: &[u8], _: &mut Workgroup<'_>) {
    let args: LiveRowsArgs = bytemuck::pod_read_unaligned(args);
    for row in 0..args.rows as usize {
        // SAFETY: the contract of `CpuOp`.
        unsafe {
            if *at::<i32>(args.row_len).add(row) > 0 {
                *at::<f32>(args.y).add(row) = 1.0;
            }
        }
    }
}
unsafe fn observe(args: &[u8], _: &mut Workgroup<'_>) {
    let args: ObserveArgs = bytemuck::pod_read_unaligned(args);
    // SAFETY: the contract of `CpuOp`.
    let lens = (0..args.sequences as usize).map(|s| unsafe { *at::<i32>(args.seq_len).add(s) });
    SEEN.store(lens.max().unwrap_or(0) as u32, Ordering::Relaxed);
}
unsafe fn misdeclared(args: &[u8], workgroup: &mut Workgroup<'_>) {
    assert_eq!(args.len(), size_of::<DoubleArgs>(), "this code was compiled for another argument struct");
    // SAFETY: the contract of `CpuOp`.
    unsafe { double(args, workgroup) }
}

macro_rules! kernels {
    ($($NAME:ident: $symbol:literal, $op:ident, $Args:ident;)*) => {
        $(pub static $NAME: KernelSpec = KernelSpec {
            symbol: $symbol,
            source: "user.hip",
            args: &<$Args as KernelArgs>::LAYOUT,
            cpu: $op,
            summary: "A kernel of the test.",
        };)*
    };
}

kernels! {
    DOUBLE: "double", double, DoubleArgs;
    DOUBLE_AGAIN: "double", double, DoubleArgs;
    OVERRUN: "overrun", overrun, DoubleArgs;
    UNDERRUN: "underrun", underrun, DoubleArgs;
    SHORT: "short", short, DoubleArgs;
    IDLE: "idle", idle, DoubleArgs;
    POKE: "poke", poke, PokeArgs;
    LIVE_ROWS: "live_rows", live_rows, LiveRowsArgs;
    OBSERVE: "observe", observe, ObserveArgs;
    MISDECLARED: "misdeclared", misdeclared, DoubleFactorArgs;
}
