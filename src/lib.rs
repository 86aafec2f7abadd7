//! Capstan: a graph-capture-first execution runtime for LLM decode. *Capture once, replay every token.*
//!
//! Every persistent buffer is planned from limits and a model's shape before the first step ([`arena`]), a decode step is
//! described as data ([`chain`]), recorded once per padded batch size ([`capture`]) on any [`hal::Device`], and replayed
//! with one launch a step ([`runtime`]). The checker ([`invariant`]) proves that every address a graph holds is the buffer
//! it was recorded against; [`dump`] shows a graph by buffer names.
//!
//! Start with `examples/embed.rs`; `ARCHITECTURE.md` tells the life of a step.

#![deny(unsafe_code)]

pub mod arena;
pub mod capture;
pub mod chain;
#[cfg(feature = "cli")]
pub mod cli;
pub mod config;
pub mod dtype;
pub mod dump;
pub mod engine;
pub mod error;
pub mod gates;
pub mod hal;
pub mod invariant;
pub mod kernels;
pub mod measure;
pub mod model;
pub mod peers;
pub mod planning;
pub mod random;
pub mod runtime;

pub use dtype::DType;
pub use error::{Error, Result};
