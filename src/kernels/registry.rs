//! The kernels of this crate: source, symbol, argument struct and CPU op of each.
//!
//! Chains name a kernel by its static here; devices load its op or the compiled source. A kernel that a user brings
//! is a [`KernelSpec`] of their own beside these.

use super::cpu::ops;
use super::exchange::{AgreeArgs, TopkExchangeArgs};
use super::m3::{LinearArgs, MoeCombineArgs, MoeLinearArgs, MoeSortArgs, RmsNormArgs, RouteArgs, SelectLastArgs, SwigluArgs};
use super::msa::{AttendDenseArgs, AttendSparseArgs, NormRopeInsertArgs, ScoreDecodeArgs, ScorePrefillArgs, TopkEmitArgs};
use super::probe::ProbeArgs;
use super::step::{EmbedArgs, IngestArgs, PublishArgs, SampleArgs};
use super::{KernelArgs, KernelSpec};
use crate::hal::CpuKernel;

macro_rules! registry {
    ($LIST:ident: $($NAME:ident: $symbol:ident, $source:literal, $Args:ident, $summary:literal;)*) => {
        $(
            #[doc = $summary]
            pub static $NAME: KernelSpec = KernelSpec {
                symbol: stringify!($symbol),
                source: $source,
                args: &<$Args as KernelArgs>::LAYOUT,
                cpu: ops::$symbol,
                summary: $summary,
            };
        )*
        static $LIST: &[&KernelSpec] = &[$(&$NAME),*];
    };
}

registry! {
    ALL:
    INGEST: ingest, "step.hip", IngestArgs, "Takes the next slot of the step ring and spreads it over the persistent buffers.";
    EMBED: embed, "step.hip", EmbedArgs, "Looks the rows' tokens up in the embedding table.";
    SAMPLE: sample, "sample.hip", SampleArgs, "Draws a token of each row's logits by its sequence's parameters.";
    PUBLISH: publish, "step.hip", PublishArgs, "Writes the step's tokens and sequence number to the result ring.";
    NORM_ROPE_INSERT: norm_rope_insert, "norm_rope.hip", NormRopeInsertArgs, "Norms and rotates queries and keys and inserts keys and values into the caches.";
    SCORE_DECODE: score_decode, "score.hip", ScoreDecodeArgs, "Scores the visible blocks of uniform decode rows, any shape.";
    SCORE_DECODE_M3: score_decode_m3, "score.hip", ScoreDecodeArgs, "Scores the visible blocks of uniform decode rows of the M3 contract.";
    SCORE_PREFILL: score_prefill, "score.hip", ScorePrefillArgs, "Scores the visible blocks of ragged rows.";
    TOPK_EMIT: topk_emit, "topk.hip", TopkEmitArgs, "Selects each row's best blocks and emits the page table its attend reads.";
    ATTEND_SPARSE: attend_sparse, "attend.hip", AttendSparseArgs, "Softmax attention over the emitted page table.";
    ATTEND_DENSE: attend_dense, "attend.hip", AttendDenseArgs, "Causal softmax attention over all of a row's tokens.";
    RMS_NORM: rms_norm, "norm.hip", RmsNormArgs, "Gemma RMSNorm of rows, or of the rows of a list.";
    SELECT_LAST: select_last, "norm.hip", SelectLastArgs, "Step row of the last token of each sequence.";
    LINEAR: linear, "linear.hip", LinearArgs, "Matrix product with row-major weights, overwriting or accumulating.";
    ROUTE: route, "moe.hip", RouteArgs, "Sigmoid router with a correction bias.";
    MOE_SORT: moe_sort, "moe.hip", MoeSortArgs, "Sorts (row, expert) pairs by expert and cuts them into tiles.";
    MOE_LINEAR: moe_linear, "moe.hip", MoeLinearArgs, "Matrix products of gathered rows, each pair with its expert's weights.";
    MOE_COMBINE: moe_combine, "moe.hip", MoeCombineArgs, "Adds the weighted outputs of the experts to the residual.";
    SWIGLU: swiglu, "swiglu.hip", SwigluArgs, "SwiGLU-OAI of gate and up.";
}

registry! {
    PEERS:
    AGREE: agree, "exchange.hip", AgreeArgs, "Compares with every rank what this step is about to run.";
    TOPK_EXCHANGE: topk_exchange, "exchange.hip", TopkExchangeArgs, "Selects from the scores of all ranks: nominates, exchanges candidates and merges in one launch.";
}

/// Maps words by x * mul + add: for the self-test and the conformance suite, in no chain and not in [`all`].
pub static PROBE: KernelSpec = KernelSpec {
    symbol: "probe",
    source: "probe.hip",
    args: &ProbeArgs::LAYOUT,
    cpu: ops::probe,
    summary: "Maps words by x * mul + add: for the self-test and the conformance suite.",
};

impl KernelSpec {
    /// The kernel as the CPU device loads it.
    pub const fn cpu_kernel(&self) -> CpuKernel {
        CpuKernel { symbol: self.symbol, args_bytes: self.args.bytes, op: self.cpu }
    }
}

/// Every kernel that a chain of one rank may launch.
pub fn all() -> &'static [&'static KernelSpec] {
    ALL
}

/// What a context-parallel chain launches beside [`all`].
pub fn peers() -> &'static [&'static KernelSpec] {
    PEERS
}

/// Every kernel there is: those of [`all`], of [`peers`] and [`PROBE`].
pub fn built() -> impl Iterator<Item = &'static KernelSpec> {
    ALL.iter().chain(PEERS).copied().chain([&PROBE])
}

/// Finds a kernel by its symbol.
pub fn find(symbol: &str) -> Option<&'static KernelSpec> {
    built().find(|kernel| kernel.symbol == symbol)
}
