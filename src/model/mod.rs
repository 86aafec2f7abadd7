//! MiniMax-M3 text models: weights, checkpoints, the plan and the chains of the whole decode step.
//!
//! [`Checkpoint`] opens a directory; [`M3Chains`] plans it under limits and gives an executor its chains; [`make`] writes
//! random checkpoints. Start with `chain.rs`.

mod chain;
mod checkpoint;
pub mod make;
mod plan;
mod weights;

pub use chain::M3Chains;
pub use checkpoint::{Checkpoint, PackedWeight};
pub use plan::{Activations, M3Plan, WeightBuffer};
pub use weights::{LayerWeight, Naming, Source, Weight, WeightSpec, weights};
