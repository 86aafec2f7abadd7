//! Cubins and their kernels.

#![expect(unsafe_code, reason = "calls the driver")]

use std::any::Any;
use std::collections::HashMap;
use std::ffi::CString;
use std::fmt;
use std::sync::{Arc, PoisonError, RwLock};

use super::device::Core;
use super::status::{Status, call};
use super::table::{Function, ModuleHandle, function_attribute};
use crate::error::{Error, Result};
use crate::hal::{FunctionHandle, Module, ModuleImage};

/// Kernels that were looked up, by the driver's handle. A graph's node gives the handle alone: symbol and size are known here.
#[derive(Default)]
pub(super) struct Kernels(RwLock<HashMap<u64, Kernel>>);

/// A kernel.
#[derive(Clone)]
pub(super) struct Kernel {
    pub symbol: Arc<str>,
    pub args_bytes: usize,
}

impl Kernels {
    /// The kernel behind a handle; `None` once its module was unloaded, and for code that others loaded.
    pub fn find(&self, function: Function) -> Option<Kernel> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).get(&(function.0 as u64)).cloned()
    }
}

/// A loaded cubin.
pub(super) struct CudaModule {
    core: Arc<Core>,
    module: ModuleHandle,
    /// What was looked up in it.
    functions: RwLock<HashMap<String, FunctionHandle>>,
}

impl CudaModule {
    pub fn load(core: Arc<Core>, image: ModuleImage<'_>, arch: &str) -> Result<CudaModule> {
        let ModuleImage::Object(object) = image else {
            return Err(Error::unavailable("the cuda device cannot load CPU ops")
                .help("give it ModuleImage::Object, a cubin of kernels::build"));
        };
        if !object.starts_with(b"\x7fELF") {
            return Err(Error::input("the object is no cubin: it does not begin as an ELF file")
                .help(format!("give it the bytes of a cubin for {arch}")));
        }
        core.enter()?;
        let mut module = ModuleHandle::NULL;
        // SAFETY: an ELF image carries its own extent; the driver copies it.
        let status = unsafe { (core.table.cuModuleLoadData)(&mut module, object.as_ptr().cast()) };
        if status == Status::NO_BINARY_FOR_GPU {
            return Err(Error::device(format!("load_module: the cubin is not for {arch}"))
                .call("cuModuleLoadData", status.0, "")
                .help(format!("build it for this device: `capstan kernels build --arch {arch}`")));
        }
        status.check(&core.table, "load_module", "cuModuleLoadData")?;
        Ok(CudaModule { core, module, functions: RwLock::default() })
    }

    /// Finds a kernel, lets it use all the shared memory that the device gives a workgroup, and loads its code, so that a first
    /// launch inside a capture loads nothing.
    fn look_up(&self, symbol: &str, args_bytes: usize) -> Result<Function> {
        let core = &*self.core;
        let table = &core.table;
        let name = CString::new(symbol).map_err(|_| Error::input(format!("kernel {symbol:?} has a zero byte in its name")))?;
        let mut function = Function::NULL;
        // SAFETY: the module is loaded; the name ends with a zero; the result has a place.
        let status = unsafe { (table.cuModuleGetFunction)(&mut function, self.module, name.as_ptr()) };
        if status == Status::NOT_FOUND {
            return Err(Error::unavailable(format!("kernel {symbol} is not in the module"))
                .call("cuModuleGetFunction", status.0, "")
                .help("load a module that holds it, or check the symbol's spelling"));
        }
        status.check(table, "function", "cuModuleGetFunction")?;
        if let Some(found) = self.declared_args(function)?
            && found != args_bytes
        {
            return Err(Error::device(format!("kernel {symbol} takes {found} bytes of arguments, asked for with {args_bytes}"))
                .help("the argument struct and the source must be of the same version"));
        }
        let mut used = 0;
        // SAFETY: the function is of a loaded module; the result has a place.
        unsafe {
            call!(table, "function", cuFuncGetAttribute(&mut used, function_attribute::SHARED_BYTES, function))?;
            let left = core.lds_bytes_max as i32 - used;
            call!(table, "function", cuFuncSetAttribute(function, function_attribute::DYNAMIC_SHARED_BYTES_MAX, left))?;
        }
        if let Some(load) = table.cuFuncLoad {
            // SAFETY: as above.
            unsafe { load(function) }.check(table, "function", "cuFuncLoad")?;
        }
        Ok(function)
    }

    /// Bytes of the kernel's one argument, if the driver tells.
    fn declared_args(&self, function: Function) -> Result<Option<usize>> {
        let table = &self.core.table;
        let Some(parameter) = table.cuFuncGetParamInfo else { return Ok(None) };
        let (mut offset, mut bytes) = (0, 0);
        // SAFETY: the function is of a loaded module; the results have places.
        unsafe { parameter(function, 0, &mut offset, &mut bytes) }.check(table, "function", "cuFuncGetParamInfo")?;
        Ok(Some(bytes))
    }
}

impl Module for CudaModule {
    fn function(&self, symbol: &str, args_bytes: usize) -> Result<FunctionHandle> {
        self.core.enter()?;
        let function = self.look_up(symbol, args_bytes)?;
        let handle = FunctionHandle(function.0 as u64);
        let kernel = Kernel { symbol: symbol.into(), args_bytes };
        self.core.kernels.0.write().unwrap_or_else(PoisonError::into_inner).insert(handle.0, kernel);
        self.functions.write().unwrap_or_else(PoisonError::into_inner).insert(symbol.to_owned(), handle);
        Ok(handle)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Drop for CudaModule {
    fn drop(&mut self) {
        let mut kernels = self.core.kernels.0.write().unwrap_or_else(PoisonError::into_inner);
        for handle in self.functions.get_mut().unwrap_or_else(PoisonError::into_inner).values() {
            kernels.remove(&handle.0);
        }
        drop(kernels);
        // SAFETY: loaded once, unloaded once; who holds graphs of its kernels holds the module too.
        self.core.destroy("module", |table| unsafe { (table.cuModuleUnload)(self.module) });
    }
}

impl fmt::Debug for CudaModule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let functions = self.functions.read().unwrap_or_else(PoisonError::into_inner);
        f.debug_list().entries(functions.keys()).finish()
    }
}
