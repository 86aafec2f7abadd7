//! What two runs of one node left behind, compared (PAD-3).

use half::bf16;
use serde::Serialize;

use super::Finding;
use super::ranges::NodeRange;
use crate::arena::ArenaPlan;
use crate::chain::Chain;
use crate::dtype::DType;
use crate::kernels::cpu::fp8::F8E4M3;

/// The first element in which two runs differ.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Difference {
    /// Node of the graph, in recording order.
    pub node: u32,
    /// Label of its op.
    pub op: String,
    /// Kernel.
    pub kernel: String,
    /// The field that points at the output.
    pub field: &'static str,
    /// The buffer.
    pub buffer: String,
    /// Element type.
    pub dtype: DType,
    /// First differing element, counted from the buffer's start.
    pub element: u64,
    /// What the first run left there.
    pub left: String,
    /// What the second run left there.
    pub right: String,
    /// Differing elements, of all that were compared in this output.
    pub differing: u64,
    /// Elements that were compared in this output.
    pub elements: u64,
}

impl Difference {
    /// Compares what two runs left in `range`.
    ///
    /// `tolerance` is for floats: the share of the output's largest finite magnitude by which elements may differ; 0 asks for
    /// equal bits. Integers must always be equal.
    pub fn between(
        chain: &Chain,
        plan: &ArenaPlan,
        range: &NodeRange,
        left: &[u8],
        right: &[u8],
        tolerance: f64,
    ) -> Option<Difference> {
        assert!(left.len() == right.len() && left.len() as u64 == range.bytes, "both runs were read from this range");
        if left == right {
            return None;
        }
        let size = range.dtype.bytes() as usize;
        let allowed = tolerance * largest(range.dtype, left).max(largest(range.dtype, right));
        let pairs = left.chunks(size).zip(right.chunks(size));
        let differs = |(left, right): (&[u8], &[u8])| left != right && !within(range.dtype, left, right, allowed);
        let mut differing = pairs.clone().enumerate().filter(|(_, pair)| differs(*pair)).map(|(at, _)| at);
        let first = differing.next()?;
        let op = &chain.ops[range.op];
        Some(Difference {
            node: range.op as u32,
            op: op.label.to_string(),
            kernel: op.kernel.symbol.to_string(),
            field: range.field,
            buffer: plan.buffer(range.buffer).spec.name.to_string(),
            dtype: range.dtype,
            element: range.offset / range.dtype.bytes() + first as u64,
            left: text(range.dtype, &left[first * size..][..size]),
            right: text(range.dtype, &right[first * size..][..size]),
            differing: 1 + differing.count() as u64,
            elements: range.bytes / range.dtype.bytes(),
        })
    }

    /// As a broken promise; `left` and `right` say what the two runs were.
    pub fn finding(&self, left: &str, right: &str) -> Finding {
        let Difference { differing, elements, element, .. } = self;
        let expected = format!("{} at element {element} as in {right}", self.right);
        let found = format!("{} in {left}, {differing} of {elements} {} elements differ", self.left, self.dtype);
        let help = "`capstan bisect --out FILE` saves this node's inputs and both outputs";
        Finding::new("PAD-3", expected, found, help).at(self.node, &self.op).field(self.field).buffer(&*self.buffer)
    }
}

/// An element as a number; `None` for types that are no floats.
fn float(dtype: DType, bytes: &[u8]) -> Option<f64> {
    match dtype {
        DType::F32 => Some(f64::from(bytemuck::pod_read_unaligned::<f32>(bytes))),
        DType::Bf16 => Some(bytemuck::pod_read_unaligned::<bf16>(bytes).to_f64()),
        DType::F8E4M3 => Some(f64::from(F8E4M3(bytes[0]).to_f32())),
        DType::I32 | DType::U32 | DType::U64 | DType::U8 => None,
    }
}

fn largest(dtype: DType, bytes: &[u8]) -> f64 {
    let values = bytes.chunks(dtype.bytes() as usize).filter_map(|element| float(dtype, element));
    values.filter(|value| value.is_finite()).fold(0.0, |largest, value| largest.max(value.abs()))
}

/// NaN is within reach of NaN alone, an infinity of itself alone.
fn within(dtype: DType, left: &[u8], right: &[u8], allowed: f64) -> bool {
    match (float(dtype, left), float(dtype, right)) {
        (Some(left), Some(right)) if allowed > 0.0 => {
            left == right || (left.is_nan() && right.is_nan()) || (left - right).abs() <= allowed
        }
        _ => false,
    }
}

/// An element as text, in full precision.
fn text(dtype: DType, bytes: &[u8]) -> String {
    match dtype {
        DType::F32 => format!("{:?}", bytemuck::pod_read_unaligned::<f32>(bytes)),
        DType::Bf16 | DType::F8E4M3 => float(dtype, bytes).map_or_else(String::new, |value| format!("{value:?}")),
        DType::I32 => bytemuck::pod_read_unaligned::<i32>(bytes).to_string(),
        DType::U32 => bytemuck::pod_read_unaligned::<u32>(bytes).to_string(),
        DType::U64 => bytemuck::pod_read_unaligned::<u64>(bytes).to_string(),
        DType::U8 => bytes[0].to_string(),
    }
}
