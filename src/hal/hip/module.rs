//! Code objects and their kernels.

#![expect(unsafe_code, reason = "calls the runtime")]

use std::any::Any;
use std::collections::HashMap;
use std::ffi::CString;
use std::fmt;
use std::sync::{Arc, PoisonError, RwLock};

use super::device::Core;
use super::status::Status;
use super::table::{Function, ModuleHandle};
use crate::error::{Error, Result};
use crate::hal::{FunctionHandle, Module, ModuleImage};

/// Kernels that were looked up, by the runtime's handle. A graph's node gives the handle alone: symbol and size are known here.
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

/// A loaded code object.
pub(super) struct HipModule {
    core: Arc<Core>,
    module: ModuleHandle,
    /// What was looked up in it.
    functions: RwLock<HashMap<String, FunctionHandle>>,
}

impl HipModule {
    pub fn load(core: Arc<Core>, image: ModuleImage<'_>, arch: &str) -> Result<HipModule> {
        let ModuleImage::Object(object) = image else {
            return Err(Error::unavailable("the hip device cannot load CPU ops")
                .help("give it ModuleImage::Object, a code object of kernels::build"));
        };
        if !object.starts_with(b"\x7fELF") {
            return Err(Error::input("the object is no code object: it does not begin as an ELF file")
                .help(format!("give it the bytes of a code object for {arch}")));
        }
        core.enter()?;
        let mut module = ModuleHandle::NULL;
        // SAFETY: an ELF image carries its own extent; the runtime copies it.
        let status = unsafe { (core.table.hipModuleLoadData)(&mut module, object.as_ptr().cast()) };
        if status == Status::NO_BINARY_FOR_GPU {
            return Err(Error::device(format!("load_module: the code object is not for {arch}"))
                .call("hipModuleLoadData", status.0, "")
                .help(format!("build it for this device: `capstan kernels build --arch {arch}`")));
        }
        status.check(&core.table, "load_module", "hipModuleLoadData")?;
        Ok(HipModule { core, module, functions: RwLock::default() })
    }

    /// Finds a kernel. The runtime loads code with its module and gives every kernel the LDS that a workgroup may have; it does
    /// not tell how many bytes of arguments a kernel takes, so the size is taken on trust.
    fn look_up(&self, symbol: &str) -> Result<Function> {
        let table = &self.core.table;
        let name = CString::new(symbol).map_err(|_| Error::input(format!("kernel {symbol:?} has a zero byte in its name")))?;
        let mut function = Function::NULL;
        // SAFETY: the module is loaded; the name ends with a zero; the result has a place.
        let status = unsafe { (table.hipModuleGetFunction)(&mut function, self.module, name.as_ptr()) };
        if status == Status::NOT_FOUND {
            return Err(Error::unavailable(format!("kernel {symbol} is not in the module"))
                .call("hipModuleGetFunction", status.0, "")
                .help("load a module that holds it, or check the symbol's spelling"));
        }
        status.check(table, "function", "hipModuleGetFunction")?;
        Ok(function)
    }
}

impl Module for HipModule {
    fn function(&self, symbol: &str, args_bytes: usize) -> Result<FunctionHandle> {
        self.core.enter()?;
        let function = self.look_up(symbol)?;
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

impl Drop for HipModule {
    fn drop(&mut self) {
        let mut kernels = self.core.kernels.0.write().unwrap_or_else(PoisonError::into_inner);
        for handle in self.functions.get_mut().unwrap_or_else(PoisonError::into_inner).values() {
            kernels.remove(&handle.0);
        }
        drop(kernels);
        // SAFETY: loaded once, unloaded once; who holds graphs of its kernels holds the module too.
        self.core.destroy("module", |table| unsafe { (table.hipModuleUnload)(self.module) });
    }
}

impl fmt::Debug for HipModule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let functions = self.functions.read().unwrap_or_else(PoisonError::into_inner);
        f.debug_list().entries(functions.keys()).finish()
    }
}
