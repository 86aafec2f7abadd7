//! Writes `kernels/include/args.h`: the argument structs and dtype codes as the device sources see them.
//!
//! The header is generated from the structs' layouts and committed, so that a reader of a kernel sees its arguments; a test holds the
//! committed file against [`args_header`]. Every field's offset and every size is asserted again by the device compiler.

use std::collections::HashSet;
use std::fmt::Write;

use super::{Access, ArgsLayout, Field, FieldKind, ScalarKind, registry};
use crate::dtype::DType;

/// The text of `kernels/include/args.h`.
pub fn args_header() -> String {
    let mut text = String::from(
        "// Argument structs of the kernels and codes of element types. Generated from src/kernels by\n\
         // `CAPSTAN_BLESS=1 cargo test --lib header`; do not edit.\n\
         #pragma once\n\n\
         #include \"platform.h\"\n\n",
    );
    for dtype in DType::ALL {
        let _ = writeln!(text, "#define DTYPE_{} {}u", dtype.name().to_uppercase(), dtype.code());
    }
    let mut seen = HashSet::new();
    for kernel in registry::built() {
        if seen.insert(kernel.args.name) {
            text.push('\n');
            write_struct(&mut text, kernel.args);
        }
    }
    text
}

fn write_struct(text: &mut String, layout: &ArgsLayout) {
    let name = layout.name;
    let _ = writeln!(text, "struct {name} {{");
    for field in layout.fields {
        // Rustdoc needs shapes escaped, C does not.
        let doc = field.doc.trim().replace("\\[", "[").replace("\\]", "]");
        if !doc.is_empty() {
            let _ = writeln!(text, "    // {doc}");
        }
        let _ = writeln!(text, "    {}{};", c_type(layout, field), field.name);
    }
    let _ = writeln!(text, "}};");
    let _ = writeln!(text, "static_assert(sizeof({name}) == {}, \"{name}\");", layout.bytes);
    for field in layout.fields {
        let _ = writeln!(
            text,
            "static_assert(OFFSET_OF({name}, {field}) == {}, \"{name}.{field}\");",
            field.offset,
            field = field.name
        );
    }
}

/// The field's type, with what goes between it and the name.
fn c_type(layout: &ArgsLayout, field: &Field) -> String {
    match field.kind {
        FieldKind::Pointer { access, dtype, .. } => {
            let constant = if access == Access::Read { "const " } else { "" };
            // A type that changes with the struct's scalars is known to the kernel alone.
            let ones: Vec<u8> = (0..layout.bytes / 4).flat_map(|_| 1u32.to_le_bytes()).collect();
            let fixed = dtype(&vec![0; layout.bytes]);
            let element = if dtype(&ones) == fixed { c_element(fixed) } else { "void" };
            format!("{constant}{element}* ")
        }
        FieldKind::Scalar(kind) => match kind {
            ScalarKind::U32 => "unsigned int ",
            ScalarKind::I32 => "int ",
            ScalarKind::U64 => "unsigned long long ",
            ScalarKind::F32 => "float ",
        }
        .into(),
    }
}

const fn c_element(dtype: DType) -> &'static str {
    match dtype {
        DType::F32 => "float",
        DType::Bf16 => "unsigned short",
        DType::F8E4M3 | DType::U8 => "unsigned char",
        DType::I32 => "int",
        DType::U32 => "unsigned int",
        DType::U64 => "unsigned long long",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_committed_header_is_the_generated_one() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/kernels/include/args.h");
        let text = args_header();
        if std::env::var_os("CAPSTAN_BLESS").is_some() {
            std::fs::write(path, &text).expect("kernels/include is writable");
        }
        let committed = std::fs::read_to_string(path).expect("kernels/include/args.h");
        assert!(committed == text, "kernels/include/args.h is stale: run CAPSTAN_BLESS=1 cargo test --lib header");
    }

    #[test]
    fn pointer_types_say_what_is_known() {
        let text = args_header();
        assert!(text.contains("    const float* q_norm;") && text.contains("    void* kv_cache;"));
        assert!(text.contains("    unsigned char* state;") && text.contains("#define DTYPE_FP8_E4M3 2u"));
    }
}
