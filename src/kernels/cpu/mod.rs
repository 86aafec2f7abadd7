//! The kernels as ops of the CPU device: same symbols, argument structs, grids and results as the GPU sources in `/kernels`.
//!
//! Each op runs one workgroup. It allocates nothing, keeps its scratch on the stack (`moe_sort` alone needs LDS), reads and writes only
//! what its argument struct declares, and trusts no table: an index out of range is skipped, never followed. The bits of a
//! result depend on that row's data alone: not on the batch, the padding, the chunking, the shard or the CPU.
//!
//! [`view`] and [`simd`] hold the `unsafe`; start with `score.rs` or `attend.rs`.

pub mod agree;
mod attend;
mod attend_f32;
mod attend_tile;
mod cell;
mod dots;
pub mod exchange;
pub mod fp8;
mod linear;
mod moe;
mod norm;
mod norm_rope;
mod probe;
pub mod sample;
mod score;
pub mod simd;
mod step;
mod swiglu;
pub mod topk;
pub mod view;

#[cfg(test)]
pub(crate) mod tests;

/// Writes a [`CpuOp`](crate::hal::CpuOp) for a function over a bound argument struct.
macro_rules! ops {
    ($($name:ident: $module:ident, $Args:path;)*) => {
        /// The ops as the CPU device calls them.
        #[expect(unsafe_code, reason = "every op is unsafe to call: its arguments are raw")]
        pub mod ops {
            $(
                #[doc = concat!("`", stringify!($name), "`; see its argument struct.")]
                ///
                /// # Safety
                /// See [`CpuOp`](crate::hal::CpuOp).
                pub unsafe fn $name(args: &[u8], workgroup: &mut crate::hal::Workgroup<'_>) {
                    // SAFETY: the caller keeps the contract of `CpuOp`, and the op that of `bind`.
                    let args = unsafe { super::view::bind::<$Args>(args) };
                    super::$module::$name(&args, workgroup);
                }
            )*
        }
    };
}

ops! {
    ingest: step, crate::kernels::step::IngestArgs;
    embed: step, crate::kernels::step::EmbedArgs;
    sample: sample, crate::kernels::step::SampleArgs;
    publish: step, crate::kernels::step::PublishArgs;
    norm_rope_insert: norm_rope, crate::kernels::msa::NormRopeInsertArgs;
    score_decode: score, crate::kernels::msa::ScoreDecodeArgs;
    score_decode_m3: score, crate::kernels::msa::ScoreDecodeArgs;
    score_prefill: score, crate::kernels::msa::ScorePrefillArgs;
    topk_emit: topk, crate::kernels::msa::TopkEmitArgs;
    agree: agree, crate::kernels::exchange::AgreeArgs;
    topk_exchange: exchange, crate::kernels::exchange::TopkExchangeArgs;
    attend_sparse: attend, crate::kernels::msa::AttendSparseArgs;
    attend_dense: attend, crate::kernels::msa::AttendDenseArgs;
    rms_norm: norm, crate::kernels::m3::RmsNormArgs;
    select_last: norm, crate::kernels::m3::SelectLastArgs;
    linear: linear, crate::kernels::m3::LinearArgs;
    route: moe, crate::kernels::m3::RouteArgs;
    moe_sort: moe, crate::kernels::m3::MoeSortArgs;
    moe_linear: moe, crate::kernels::m3::MoeLinearArgs;
    moe_combine: moe, crate::kernels::m3::MoeCombineArgs;
    swiglu: swiglu, crate::kernels::m3::SwigluArgs;
    probe: probe, crate::kernels::probe::ProbeArgs;
}
