//! The CUDA device: NVIDIA's driver API, found at run time.
//!
//! Mirrors `hal::hip` file by file. Thin: every method is a driver call or two, and an error carries the driver's own words.
//! The driver does not tell what a wrong pointer did until later; `hal::checked` refuses it before.
//!
//! One device a process: the first that `CUDA_VISIBLE_DEVICES` leaves visible, in its primary context. `CAPSTAN_CUDA` names
//! another library than libcuda.so.1.

mod device;
mod dot;
mod event;
mod graph;
mod memory;
mod module;
mod nodes;
mod status;
mod stream;
mod table;

pub use device::CudaDevice;
