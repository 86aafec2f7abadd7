//! The loaded kernels of a device: symbol to function handle.

use std::collections::HashMap;
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::hal::{CpuKernel, Device, FunctionHandle, Module, ModuleImage, Platform};
use crate::kernels::{KernelSpec, build};

/// Every kernel a chain may launch, loaded. Captured graphs hold an `Arc` of it, so code outlives its graphs.
#[derive(Debug)]
pub struct Modules {
    functions: HashMap<&'static str, (FunctionHandle, &'static KernelSpec)>,
    symbols: HashMap<FunctionHandle, &'static KernelSpec>,
    // Function handles are raw; these keep them valid.
    _modules: Vec<Arc<dyn Module>>,
}

impl Modules {
    /// Loads `kernels` on `device`: ops on the CPU and null devices, code compiled for the exact architecture elsewhere.
    ///
    /// Errors: two kernels of one symbol ([`State`](crate::error::ErrorKind::State)), a compiler that is not there, a kernel
    /// the code does not have.
    pub fn load(device: &dyn Device, kernels: &[&'static KernelSpec]) -> Result<Modules> {
        for (at, kernel) in kernels.iter().enumerate() {
            if kernels[..at].iter().any(|other| other.symbol == kernel.symbol) {
                return Err(Error::state(format!("two kernels are called {}", kernel.symbol)).help("rename one of them"));
            }
        }
        let modules = match device.info().platform {
            Platform::Cpu | Platform::Null => vec![(load_ops(device, kernels)?, kernels.to_vec())],
            Platform::Hip | Platform::Cuda => load_objects(device, kernels)?,
        };
        let mut loaded = Modules { functions: HashMap::new(), symbols: HashMap::new(), _modules: vec![] };
        for (module, kernels) in &modules {
            for kernel in kernels {
                let function = module.function(kernel.symbol, kernel.args.bytes)?;
                loaded.functions.insert(kernel.symbol, (function, kernel));
                loaded.symbols.insert(function, kernel);
            }
        }
        loaded._modules = modules.into_iter().map(|(module, _)| module).collect();
        Ok(loaded)
    }

    /// The handle of a kernel. Errors: nobody declared it, or another kernel of its name was.
    pub fn function(&self, kernel: &KernelSpec) -> Result<FunctionHandle> {
        match self.functions.get(kernel.symbol) {
            Some(&(function, declared)) if std::ptr::eq(declared, kernel) => Ok(function),
            Some(_) => Err(Error::state(format!("another kernel called {} was declared", kernel.symbol))
                .help("keep one static KernelSpec a kernel, list that one among the chain's kernels, and launch that one")),
            None => Err(Error::state(format!("kernel {} was not declared", kernel.symbol))
                .help("list it among the chain's kernels, so that its arguments are declared and checked")),
        }
    }

    /// The kernel behind a handle read back from a graph; `None` for code nobody declared.
    pub fn kernel(&self, function: FunctionHandle) -> Option<&'static KernelSpec> {
        self.symbols.get(&function).copied()
    }
}

fn load_ops(device: &dyn Device, kernels: &[&'static KernelSpec]) -> Result<Arc<dyn Module>> {
    let ops: Vec<CpuKernel> =
        kernels.iter().map(|kernel| CpuKernel { symbol: kernel.symbol, args_bytes: kernel.args.bytes, op: kernel.cpu }).collect();
    device.load_module(ModuleImage::Ops(&ops))
}

/// A module and the kernels that are in it.
type Loaded = (Arc<dyn Module>, Vec<&'static KernelSpec>);

/// One module a source.
fn load_objects(device: &dyn Device, kernels: &[&'static KernelSpec]) -> Result<Vec<Loaded>> {
    let mut sources: Vec<&'static str> = Vec::new();
    for kernel in kernels {
        if !sources.contains(&kernel.source) {
            sources.push(kernel.source);
        }
    }
    let objects = build::load(&device.info().arch, &sources)?;
    let mut modules = Vec::new();
    for (source, object) in sources.into_iter().zip(objects) {
        tracing::debug!(source, origin = %object.origin, bytes = object.bytes.len(), "kernels loaded");
        let module = device.load_module(ModuleImage::Object(&object.bytes))?;
        modules.push((module, kernels.iter().copied().filter(|kernel| kernel.source == source).collect()));
    }
    Ok(modules)
}
