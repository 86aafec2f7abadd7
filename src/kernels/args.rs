//! Argument structs with named, typed fields.
//!
//! A kernel takes one `#[repr(C)]` struct by value. [`kernel_args!`](crate::kernel_args) writes the struct and its
//! [`ArgsLayout`]: for a pointer the access, element type and extent, for a scalar its type. Extents are computed from the
//! struct's own scalars, so what a captured node may touch follows from the node alone.

pub use bytemuck::{Pod, Zeroable};

use crate::dtype::DType;

/// A pointer field of an argument struct.
///
/// In a [`Chain`](crate::chain::Chain) it is symbolic, a buffer and an offset ([`Ptr::symbol`]); lowering replaces it by a
/// device address, as a linker relocates.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Pod, Zeroable)]
#[repr(transparent)]
pub struct Ptr(pub u64);

impl Ptr {
    /// No buffer; legal where the kernel declares the field optional (its extent is then 0).
    pub const NULL: Ptr = Ptr(0);
    const SYMBOL: u64 = 1 << 63;
    const OFFSET_BITS: u32 = 40;

    /// A symbolic pointer: `offset` bytes into buffer number `buffer` of the plan. Offsets below 1 TiB.
    pub fn symbol(buffer: u32, offset: u64) -> Ptr {
        assert!(offset < 1 << Self::OFFSET_BITS, "offset {offset} does not fit a symbolic pointer");
        assert!(buffer < 1 << 22, "buffer {buffer} does not fit a symbolic pointer");
        Ptr(Self::SYMBOL | u64::from(buffer) << Self::OFFSET_BITS | offset)
    }

    /// The buffer and offset of a symbolic pointer; `None` for null or an address.
    pub fn as_symbol(self) -> Option<(u32, u64)> {
        (self.0 & Self::SYMBOL != 0)
            .then_some((((self.0 & !Self::SYMBOL) >> Self::OFFSET_BITS) as u32, self.0 & ((1 << Self::OFFSET_BITS) - 1)))
    }
}

/// What a kernel does with the memory behind a pointer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Access {
    /// Reads only.
    Read,
    /// Writes every element of the extent that a live or pad row owns; reads nothing.
    Write,
    /// Reads and writes, or writes parts.
    ReadWrite,
}

impl Access {
    /// True for [`Access::Write`] and [`Access::ReadWrite`].
    pub fn writes(self) -> bool {
        self != Access::Read
    }

    /// True for [`Access::Read`] and [`Access::ReadWrite`].
    pub fn reads(self) -> bool {
        self != Access::Write
    }
}

/// Type of a scalar field.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ScalarKind {
    /// Unsigned 32-bit.
    U32,
    /// Signed 32-bit.
    I32,
    /// Unsigned 64-bit.
    U64,
    /// binary32.
    F32,
}

/// Maps a Rust type to its [`ScalarKind`]; used by [`kernel_args!`](crate::kernel_args).
pub trait Scalar: Pod {
    /// The kind.
    const KIND: ScalarKind;
}
impl Scalar for u32 {
    const KIND: ScalarKind = ScalarKind::U32;
}
impl Scalar for i32 {
    const KIND: ScalarKind = ScalarKind::I32;
}
impl Scalar for u64 {
    const KIND: ScalarKind = ScalarKind::U64;
}
impl Scalar for f32 {
    const KIND: ScalarKind = ScalarKind::F32;
}

/// Pointer or scalar.
#[derive(Clone, Copy, Debug)]
pub enum FieldKind {
    /// A pointer.
    Pointer {
        /// What the kernel does behind it.
        access: Access,
        /// Element type, from the struct's bytes.
        dtype: fn(&[u8]) -> DType,
        /// Elements the kernel may touch, from the struct's bytes. 0 where the pointer is unused (then it may be null).
        elements: fn(&[u8]) -> u64,
    },
    /// A scalar.
    Scalar(ScalarKind),
}

/// One field of an argument struct.
#[derive(Clone, Copy, Debug)]
pub struct Field {
    /// Name.
    pub name: &'static str,
    /// Byte offset in the struct.
    pub offset: usize,
    /// Pointer or scalar.
    pub kind: FieldKind,
    /// Shape and meaning, from the field's doc comment.
    pub doc: &'static str,
}

impl Field {
    /// The field's 8 bytes as a pointer. Panics if it is a scalar.
    pub fn pointer(&self, args: &[u8]) -> Ptr {
        assert!(matches!(self.kind, FieldKind::Pointer { .. }), "{} is no pointer", self.name);
        bytemuck::pod_read_unaligned(&args[self.offset..self.offset + 8])
    }

    /// Replaces the pointer. Panics if the field is a scalar.
    pub fn set_pointer(&self, args: &mut [u8], value: Ptr) {
        assert!(matches!(self.kind, FieldKind::Pointer { .. }), "{} is no pointer", self.name);
        args[self.offset..self.offset + 8].copy_from_slice(bytemuck::bytes_of(&value));
    }

    /// Bytes the kernel may touch behind this pointer; 0 for a scalar.
    pub fn extent_bytes(&self, args: &[u8]) -> u64 {
        match self.kind {
            FieldKind::Pointer { dtype, elements, .. } => elements(args) * dtype(args).bytes(),
            FieldKind::Scalar(_) => 0,
        }
    }

    /// A scalar's value as text; floats in Rust's shortest form.
    pub fn scalar_text(&self, args: &[u8]) -> Option<String> {
        let at = &args[self.offset..];
        match self.kind {
            FieldKind::Pointer { .. } => None,
            FieldKind::Scalar(ScalarKind::U32) => Some(bytemuck::pod_read_unaligned::<u32>(&at[..4]).to_string()),
            FieldKind::Scalar(ScalarKind::I32) => Some(bytemuck::pod_read_unaligned::<i32>(&at[..4]).to_string()),
            FieldKind::Scalar(ScalarKind::U64) => Some(bytemuck::pod_read_unaligned::<u64>(&at[..8]).to_string()),
            FieldKind::Scalar(ScalarKind::F32) => Some(format!("{:?}", bytemuck::pod_read_unaligned::<f32>(&at[..4]))),
        }
    }
}

/// Name, size and fields of an argument struct.
#[derive(Debug)]
pub struct ArgsLayout {
    /// Name of the Rust struct.
    pub name: &'static str,
    /// Its size.
    pub bytes: usize,
    /// Its fields in memory order; padding does not exist.
    pub fields: &'static [Field],
}

impl ArgsLayout {
    /// Finds a field by name.
    pub fn field(&self, name: &str) -> Option<&'static Field> {
        self.fields.iter().find(|field| field.name == name)
    }

    /// The pointer fields.
    pub fn pointers(&self) -> impl Iterator<Item = &'static Field> {
        self.fields.iter().filter(|field| matches!(field.kind, FieldKind::Pointer { .. }))
    }
}

/// The product of dimensions, in 64 bits.
pub const fn product<const N: usize>(dims: [u32; N]) -> u64 {
    let (mut all, mut i) = (1, 0);
    while i < N {
        all *= dims[i] as u64;
        i += 1;
    }
    all
}

/// An argument struct written by [`kernel_args!`](crate::kernel_args).
pub trait KernelArgs: Pod {
    /// Its layout.
    const LAYOUT: ArgsLayout;
}

/// Writes a kernel's argument struct and its [`ArgsLayout`].
///
/// ```
/// capstan::kernel_args! {
///     /// Doubles a vector.
///     pub struct DoubleArgs |a| {
///         pointers {
///             /// [n] input.
///             x: Read, F32, u64::from(a.n);
///             /// [n] output.
///             y: Write, F32, u64::from(a.n);
///         }
///         scalars {
///             /// Elements.
///             n: u32;
///             /// Keeps the size a multiple of 8.
///             reserved: u32;
///         }
///     }
/// }
/// # use capstan::kernels::KernelArgs;
/// assert_eq!(DoubleArgs::LAYOUT.bytes, 24);
/// ```
///
/// A pointer's type is a [`DType`](crate::DType) variant, or an expression in parentheses that gives one; its extent is
/// a `u64` expression over the struct, in elements ([`product`](crate::kernels::args::product) multiplies without overflow).
#[macro_export]
macro_rules! kernel_args {
    ($(#[doc = $doc:literal])* $vis:vis struct $Name:ident |$a:ident| {
        pointers { $( $(#[doc = $pdoc:literal])* $p:ident : $access:ident, $dtype:tt, $extent:expr; )* }
        scalars { $( $(#[doc = $sdoc:literal])* $s:ident : $ty:ty; )* }
    }) => {
        $(#[doc = $doc])*
        #[repr(C)]
        #[derive(Clone, Copy, Debug, Default)]
        $vis struct $Name {
            $( $(#[doc = $pdoc])* pub $p: $crate::kernels::Ptr, )*
            $( $(#[doc = $sdoc])* pub $s: $ty, )*
        }
        const _: () = assert!(
            size_of::<$Name>() == 0 $( + { let _ = stringify!($p); 8 } )* $( + size_of::<$ty>() )*,
            "argument struct has padding: add a reserved field"
        );
        #[expect(unsafe_code, reason = "the assertion above shows that there is no padding")]
        // SAFETY: repr(C), every field is Pod, and the size equals the sum of the fields' sizes (asserted above).
        unsafe impl $crate::kernels::args::Zeroable for $Name {}
        #[expect(unsafe_code, reason = "the assertion above shows that there is no padding")]
        // SAFETY: as above.
        unsafe impl $crate::kernels::args::Pod for $Name {}
        impl $crate::kernels::KernelArgs for $Name {
            const LAYOUT: $crate::kernels::ArgsLayout = $crate::kernels::ArgsLayout {
                name: stringify!($Name),
                bytes: size_of::<$Name>(),
                fields: &[
                    $( $crate::kernels::Field {
                        name: stringify!($p),
                        offset: std::mem::offset_of!($Name, $p),
                        kind: $crate::kernels::FieldKind::Pointer {
                            access: $crate::kernels::Access::$access,
                            dtype: {
                                #[allow(unused_variables, clippy::allow_attributes, reason = "a fixed type does not look at the struct")]
                                fn dtype(bytes: &[u8]) -> $crate::DType {
                                    let $a: $Name = $crate::kernels::args::pod_read_unaligned(bytes);
                                    $crate::kernel_args!(@dtype $dtype)
                                }
                                dtype
                            },
                            elements: {
                                #[allow(unused_variables, clippy::allow_attributes, reason = "constants need neither")]
                                fn elements(bytes: &[u8]) -> u64 {
                                    let $a: $Name = $crate::kernels::args::pod_read_unaligned(bytes);
                                    $extent
                                }
                                elements
                            },
                        },
                        doc: concat!($($pdoc),*),
                    }, )*
                    $( $crate::kernels::Field {
                        name: stringify!($s),
                        offset: std::mem::offset_of!($Name, $s),
                        kind: $crate::kernels::FieldKind::Scalar(<$ty as $crate::kernels::args::Scalar>::KIND),
                        doc: concat!($($sdoc),*),
                    }, )*
                ],
            };
        }
    };
    (@dtype ($dtype:expr)) => { $dtype };
    (@dtype $dtype:ident) => { $crate::DType::$dtype };
}

#[doc(hidden)]
pub use bytemuck::pod_read_unaligned;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn symbols_round_trip_and_null_is_none() {
        assert_eq!(Ptr::symbol(77, 1 << 39).as_symbol(), Some((77, 1 << 39)));
        assert_eq!(Ptr::NULL.as_symbol(), None);
        assert_eq!(Ptr(0x7fff_0000_0000).as_symbol(), None);
    }
}
