//! Turns the pointer fields of an argument struct into bounds-checked views, so that the ops hold no `unsafe`.
//!
//! [`bind`] is the one place where an op's contract (ADDR-1: every pointer is valid for its declared extent; RACE-1: nothing
//! unordered touches what it writes) is taken on trust. From there every access is checked against the extent that the
//! struct's layout declares; one outside panics, and the device reports that as an error of the launch.
//!
//! Workgroups of one launch run at the same time on several threads. Each takes the views it needs once and writes the
//! elements that the argument struct gives to it; [`ViewMut`] hands out slices of those elements only.

#![expect(unsafe_code, reason = "reads and writes device memory behind the pointers of a launch")]

use std::marker::PhantomData;
use std::ops::Deref;
use std::sync::atomic::{AtomicU64, Ordering};

use bytemuck::Pod;
use half::bf16;

use super::fp8::F8E4M3;
use crate::DType;
use crate::kernels::{FieldKind, KernelArgs, Ptr};

/// A type that buffers hold.
pub trait Element: Pod {
    /// Its dtype.
    const DTYPE: DType;
}

macro_rules! elements {
    ($($Type:ty => $dtype:ident),*) => {$(
        impl Element for $Type {
            const DTYPE: DType = DType::$dtype;
        }
    )*};
}
elements!(f32 => F32, bf16 => Bf16, F8E4M3 => F8E4M3, i32 => I32, u32 => U32, u64 => U64, u8 => U8);

/// An argument struct whose pointers may be followed.
pub struct Bound<'a, A> {
    args: A,
    bytes: &'a [u8],
}

/// Reads an argument struct.
///
/// # Safety
/// The contract of [`CpuOp`](crate::hal::CpuOp) holds for `bytes` while the result lives, and the op writes only the elements
/// that the struct's documentation gives to its workgroup, through one view a field.
pub unsafe fn bind<A: KernelArgs>(bytes: &[u8]) -> Bound<'_, A> {
    assert_eq!(bytes.len(), A::LAYOUT.bytes, "{}: wrong size of the argument struct", A::LAYOUT.name);
    Bound { args: bytemuck::pod_read_unaligned(bytes), bytes }
}

impl<A> Deref for Bound<'_, A> {
    type Target = A;
    fn deref(&self) -> &A {
        &self.args
    }
}

impl<A: KernelArgs> Bound<'_, A> {
    /// A view to read from the buffer behind a pointer field.
    pub fn read<T: Element>(&self, field: impl Fn(&A) -> &Ptr) -> View<'_, T> {
        let (at, len) = self.locate::<T>(field);
        View { at, len, life: PhantomData }
    }

    /// A view to write to the buffer behind a pointer field.
    pub fn write<T: Element>(&self, field: impl Fn(&A) -> &Ptr) -> ViewMut<'_, T> {
        let (at, len) = self.locate::<T>(field);
        ViewMut { at: at.cast_mut(), len, life: PhantomData }
    }

    fn locate<T: Element>(&self, field: impl Fn(&A) -> &Ptr) -> (*const T, usize) {
        let pointer = field(&self.args);
        let offset = std::ptr::from_ref(pointer).addr() - std::ptr::from_ref(&self.args).addr();
        // Pointers come first in every argument struct, 8 bytes each.
        let field = &A::LAYOUT.fields[offset / size_of::<Ptr>()];
        let FieldKind::Pointer { dtype, elements, .. } = field.kind else {
            panic!("{}.{} is no pointer", A::LAYOUT.name, field.name)
        };
        let (dtype, len) = (dtype(self.bytes), elements(self.bytes) as usize);
        assert_eq!(dtype, T::DTYPE, "{}.{} does not hold this type", A::LAYOUT.name, field.name);
        if len == 0 {
            return (std::ptr::NonNull::dangling().as_ptr(), 0);
        }
        assert_ne!(pointer.0, 0, "{}.{} is null", A::LAYOUT.name, field.name);
        let at = std::ptr::with_exposed_provenance::<T>(pointer.0 as usize);
        assert!(at.is_aligned(), "{}.{} is not aligned to {dtype}", A::LAYOUT.name, field.name);
        (at, len)
    }
}

/// A buffer that the op reads.
#[derive(Clone, Copy)]
pub struct View<'a, T> {
    at: *const T,
    len: usize,
    life: PhantomData<&'a T>,
}

impl<'a, T: Element> View<'a, T> {
    /// One element.
    pub fn get(&self, index: usize) -> T {
        self.slice(index, 1)[0]
    }

    /// `len` elements from `start`.
    pub fn slice(&self, start: usize, len: usize) -> &'a [T] {
        check(start, len, self.len);
        // SAFETY: inside the extent, which is valid and not written by anything unordered with this launch (`bind`).
        unsafe { std::slice::from_raw_parts(self.at.add(start), len) }
    }
}

impl View<'_, u8> {
    /// The `u64` at a byte offset, with acquire order: what its writer stored before is visible afterwards.
    pub fn load_acquire(&self, offset: usize) -> u64 {
        check(offset, 8, self.len);
        // SAFETY: inside the extent; `from_ptr` wants alignment, which the assertion in `atomic` holds.
        unsafe { atomic(self.at.add(offset)) }.load(Ordering::Acquire)
    }

    /// A value of `P` at a byte offset.
    pub fn read_pod<P: Pod>(&self, offset: usize) -> P {
        bytemuck::pod_read_unaligned(self.slice(offset, size_of::<P>()))
    }
}

/// A buffer that the op writes.
pub struct ViewMut<'a, T> {
    at: *mut T,
    len: usize,
    life: PhantomData<&'a mut T>,
}

impl<T: Element> ViewMut<'_, T> {
    /// Reads one element.
    pub fn get(&self, index: usize) -> T {
        check(index, 1, self.len);
        // SAFETY: inside the extent, which is valid (`bind`).
        unsafe { self.at.add(index).read() }
    }

    /// Writes one element.
    pub fn set(&mut self, index: usize, value: T) {
        check(index, 1, self.len);
        // SAFETY: inside the extent, and this workgroup's to write (`bind`).
        unsafe { self.at.add(index).write(value) }
    }

    /// `len` elements from `start`, all of which belong to this workgroup.
    pub fn slice_mut(&mut self, start: usize, len: usize) -> &mut [T] {
        check(start, len, self.len);
        // SAFETY: inside the extent, this workgroup's alone (`bind`), and borrowed from the one view of the field.
        unsafe { std::slice::from_raw_parts_mut(self.at.add(start), len) }
    }
}

impl ViewMut<'_, u64> {
    /// Loads one element with acquire order; others may store it.
    pub fn load_acquire(&self, index: usize) -> u64 {
        self.word(index).load(Ordering::Acquire)
    }

    /// Stores one element with release order; others may load it.
    pub fn store_release(&self, index: usize, value: u64) {
        self.word(index).store(value, Ordering::Release);
    }

    /// Stores one element if it is 0; true if it was.
    pub fn claim(&self, index: usize, value: u64) -> bool {
        self.word(index).compare_exchange(0, value, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    fn word(&self, index: usize) -> &AtomicU64 {
        check(index, 1, self.len);
        // SAFETY: inside the extent; aligned (asserted in `atomic`).
        unsafe { atomic(self.at.add(index).cast()) }
    }
}

impl ViewMut<'_, u8> {
    /// The `u64` at a byte offset, with acquire order.
    pub fn load_acquire(&self, offset: usize) -> u64 {
        check(offset, 8, self.len);
        // SAFETY: inside the extent; aligned (asserted in `atomic`).
        unsafe { atomic(self.at.add(offset)) }.load(Ordering::Acquire)
    }

    /// Stores the `u64` at a byte offset if its low half is 0; true if it was.
    pub fn claim(&mut self, offset: usize, value: u64) -> bool {
        check(offset, 8, self.len);
        // SAFETY: inside the extent; aligned (asserted in `atomic`).
        let word = unsafe { atomic(self.at.add(offset)) };
        let taken = word.load(Ordering::Acquire);
        taken as u32 == 0 && word.compare_exchange(taken, value, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// Stores a `u64` at a byte offset with release order: who sees it sees everything this op wrote before.
    pub fn store_release(&mut self, offset: usize, value: u64) {
        check(offset, 8, self.len);
        // SAFETY: inside the extent; aligned (asserted in `atomic`).
        unsafe { atomic(self.at.add(offset)) }.store(value, Ordering::Release);
    }

    /// Writes a value of `P` at a byte offset.
    pub fn write_pod<P: Pod>(&mut self, offset: usize, value: &P) {
        self.slice_mut(offset, size_of::<P>()).copy_from_slice(bytemuck::bytes_of(value));
    }
}

/// The 8 bytes at `at` as an atomic.
///
/// # Safety
/// `at` is valid for reads and writes of 8 bytes; others access them atomically.
unsafe fn atomic<'a>(at: *const u8) -> &'a AtomicU64 {
    let at = at.cast_mut().cast::<u64>();
    assert!(at.is_aligned(), "sequence numbers are 8-byte aligned");
    // SAFETY: valid by the caller's word, aligned by the assertion.
    unsafe { AtomicU64::from_ptr(at) }
}

#[inline(always)]
fn check(start: usize, len: usize, extent: usize) {
    if start.checked_add(len).is_none_or(|end| end > extent) {
        outside(start, len, extent);
    }
}

#[cold]
#[inline(never)]
fn outside(start: usize, len: usize, extent: usize) -> ! {
    panic!("access to elements {start}..+{len} of an extent of {extent}")
}
