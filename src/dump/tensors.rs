//! Contents of buffers as safetensors files.

use std::collections::HashMap;
use std::fmt;
use std::path::Path;

use safetensors::Dtype;
use safetensors::tensor::TensorView;

use crate::arena::ArenaPlan;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::invariant::ranges::NodeRange;

/// Contents of a range of a buffer.
#[derive(Clone, PartialEq, Eq)]
pub struct Tensor {
    /// Its name in a file.
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// The buffer's own shape with as many rows as the range has, or one dimension where the range does not end with a row.
    pub shape: Vec<usize>,
    /// Contents, row-major.
    pub bytes: Vec<u8>,
}

impl fmt::Debug for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {:?}", self.name, self.dtype, self.shape)
    }
}

impl Tensor {
    /// Contents read from `range`.
    pub fn of_range(name: String, plan: &ArenaPlan, range: &NodeRange, bytes: &[u8]) -> Tensor {
        let (spec, elements) = (&plan.buffer(range.buffer).spec, range.bytes / range.dtype.bytes());
        let row: u64 = spec.shape.iter().skip(1).product();
        let rows = spec.dtype == range.dtype && row > 0 && elements.is_multiple_of(row);
        let shape = match spec.shape.split_first() {
            Some((_, inner)) if rows => std::iter::once(elements / row).chain(inner.iter().copied()).collect(),
            _ => vec![elements],
        };
        let shape = shape.into_iter().map(|length| length as usize).collect();
        Tensor { name, dtype: range.dtype, shape, bytes: bytes.to_vec() }
    }

    /// Contents of what one node touches, named `SIDE.FIELD`; of a field that was read in pieces, `SIDE.FIELD@ELEMENT`.
    pub fn of_ranges(side: &str, plan: &ArenaPlan, ranges: &[NodeRange], contents: &[Vec<u8>]) -> Vec<Tensor> {
        let named = ranges.iter().map(|range| {
            let pieces = ranges.iter().filter(|other| other.field == range.field).count();
            match pieces {
                1 => format!("{side}.{}", range.field),
                _ => format!("{side}.{}@{}", range.field, range.offset / range.dtype.bytes()),
            }
        });
        named.zip(ranges).zip(contents).map(|((name, range), bytes)| Tensor::of_range(name, plan, range, bytes)).collect()
    }
}

/// Writes tensors to a safetensors file; `about` becomes its metadata.
///
/// Errors: two tensors of one name, or the file cannot be written.
pub fn save(file: &Path, tensors: &[Tensor], about: HashMap<String, String>) -> Result<()> {
    let failed = |why: String| {
        Error::input(format!("{}: {why}", file.display())).help("name a file that can be written, and each tensor once")
    };
    let views = tensors.iter().map(|tensor| {
        let view = TensorView::new(dtype(tensor.dtype), tensor.shape.clone(), &tensor.bytes);
        view.map(|view| (&tensor.name, view)).map_err(|error| failed(format!("{}: {error}", tensor.name)))
    });
    let views = views.collect::<Result<Vec<_>>>()?;
    let mut names: Vec<&String> = views.iter().map(|(name, _)| *name).collect();
    names.sort_unstable();
    if let Some(twice) = names.windows(2).find(|pair| pair[0] == pair[1]) {
        return Err(failed(format!("{} twice", twice[0])));
    }
    safetensors::serialize_to_file(views, Some(about), file).map_err(|error| failed(error.to_string()))
}

fn dtype(dtype: DType) -> Dtype {
    match dtype {
        DType::F32 => Dtype::F32,
        DType::Bf16 => Dtype::BF16,
        DType::F8E4M3 => Dtype::F8_E4M3,
        DType::I32 => Dtype::I32,
        DType::U32 => Dtype::U32,
        DType::U64 => Dtype::U64,
        DType::U8 => Dtype::U8,
    }
}
