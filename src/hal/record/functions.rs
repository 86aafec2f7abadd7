//! The table of loaded kernels: handles to ops, and which of them went stale.

use std::any::Any;
use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use super::LDS_BYTES_MAX;
use crate::error::{Error, Result};
use crate::hal::{CpuKernel, FunctionHandle, LaunchShape, Module, ModuleImage};

/// Handles are drawn from one counter of the process: none is ever reused, none is valid on two devices.
static NEXT_HANDLE: AtomicU64 = AtomicU64::new(1);

/// Kernels loaded on one device.
#[derive(Default)]
pub(crate) struct Functions {
    table: RwLock<HashMap<u64, Function>>,
}

/// A loaded kernel, and whether its module still is.
#[derive(Clone)]
pub(crate) struct Function {
    pub kernel: CpuKernel,
    pub loaded: Arc<AtomicBool>,
}

impl Functions {
    /// Loads the ops of an image; `device` names the device in errors.
    pub fn load(self: &Arc<Functions>, device: &str, image: ModuleImage<'_>) -> Result<LoadedModule> {
        let ModuleImage::Ops(kernels) = image else {
            return Err(Error::unavailable(format!("the {device} device cannot load a code object"))
                .help("give it ModuleImage::Ops, the CPU ops of the kernels"));
        };
        for (at, kernel) in kernels.iter().enumerate() {
            if kernels[..at].iter().any(|other| other.symbol == kernel.symbol) {
                return Err(Error::device(format!("kernel {} is in the module twice", kernel.symbol))
                    .help("give each kernel its own symbol"));
            }
        }
        let loaded = Arc::new(AtomicBool::new(true));
        let mut table = self.table.write().unwrap_or_else(PoisonError::into_inner);
        let kernels = kernels
            .iter()
            .map(|&kernel| {
                let handle = NEXT_HANDLE.fetch_add(1, Ordering::Relaxed);
                table.insert(handle, Function { kernel, loaded: loaded.clone() });
                (kernel, FunctionHandle(handle))
            })
            .collect();
        Ok(LoadedModule { functions: self.clone(), kernels, loaded })
    }

    /// The kernel behind a handle, if the handle is live and the launch fits it.
    pub fn resolve(&self, handle: FunctionHandle, shape: &LaunchShape, args: &[u8]) -> Result<Function> {
        let table = self.table.read().unwrap_or_else(PoisonError::into_inner);
        let function = table.get(&handle.0).ok_or_else(|| {
            Error::device(format!("launch: function handle {:#x} is unknown or its module was unloaded", handle.0))
                .call("launch", 98, "")
                .help("keep the module alive and take handles from this device's own modules")
        })?;
        let CpuKernel { symbol, args_bytes, .. } = function.kernel;
        if args.len() != args_bytes {
            return Err(Error::device(format!(
                "launch of {symbol}: got {} bytes of arguments, it takes {args_bytes}",
                args.len()
            ))
            .call("launch", 1, "")
            .help("pass the kernel's own argument struct, whole"));
        }
        if shape.lds_bytes > LDS_BYTES_MAX {
            return Err(Error::device(format!("launch of {symbol}: {} bytes of LDS, at most {LDS_BYTES_MAX}", shape.lds_bytes))
                .call("launch", 9, "")
                .help("lower the launch's lds_bytes"));
        }
        if shape.grid.contains(&0) || shape.workgroup.contains(&0) || workgroups(shape).is_none() {
            return Err(Error::device(format!(
                "launch of {symbol}: grid {:?} of workgroups {:?} is empty or too large",
                shape.grid, shape.workgroup
            ))
            .call("launch", 9, "")
            .help("make every dimension at least 1"));
        }
        Ok(function.clone())
    }
}

/// Workgroups of a launch, if 64 bits hold them.
fn workgroups(shape: &LaunchShape) -> Option<u64> {
    shape.grid.iter().try_fold(1u64, |product, &dim| product.checked_mul(u64::from(dim)))
}

/// A module: its kernels stay in the device's table until it is dropped.
pub(crate) struct LoadedModule {
    functions: Arc<Functions>,
    kernels: Vec<(CpuKernel, FunctionHandle)>,
    loaded: Arc<AtomicBool>,
}

impl Module for LoadedModule {
    fn function(&self, symbol: &str, args_bytes: usize) -> Result<FunctionHandle> {
        let Some((kernel, handle)) = self.kernels.iter().find(|(kernel, _)| kernel.symbol == symbol) else {
            return Err(Error::unavailable(format!("kernel {symbol} is not in the module"))
                .help("load a module that holds it, or check the symbol's spelling"));
        };
        if kernel.args_bytes != args_bytes {
            return Err(Error::device(format!(
                "kernel {symbol} takes {} bytes of arguments, asked for with {args_bytes}",
                kernel.args_bytes
            ))
            .help("the argument struct and the op must be of the same version"));
        }
        Ok(*handle)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Drop for LoadedModule {
    fn drop(&mut self) {
        self.loaded.store(false, Ordering::Release);
        let mut table = self.functions.table.write().unwrap_or_else(PoisonError::into_inner);
        for (_, handle) in &self.kernels {
            table.remove(&handle.0);
        }
    }
}

impl fmt::Debug for LoadedModule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.kernels.iter().map(|(kernel, _)| kernel.symbol)).finish()
    }
}
