//! The device: its driver, its primary context, what it is.

#![expect(unsafe_code, reason = "calls the driver; the Device trait has an unsafe method")]

use std::any::Any;
use std::ffi::{CStr, c_char};
use std::fmt;
use std::sync::Arc;

use super::event::CudaEvent;
use super::memory::Memory;
use super::module::{CudaModule, Kernels};
use super::status::{NO_DRIVER, Status, call};
use super::stream::CudaStream;
use super::table::{Context, Ordinal, Table, attribute};
use crate::error::{Error, Result};
use crate::hal::loader::Library;
use crate::hal::{
    Allocation, Device, DeviceInfo, Event, IpcHandle, MemoryInfo, MemoryKind, Module, ModuleImage, Platform, Stream,
};

/// Names of the driver's library.
const LIBRARIES: [&str; 2] = ["libcuda.so.1", "libcuda.so"];
/// The least compute capability that the kernels are written for (BF16 and asynchronous copies).
const COMPUTE_MAJOR_MIN: i32 = 8;

/// The CUDA device; make one with [`CudaDevice::open`].
pub struct CudaDevice {
    info: DeviceInfo,
    core: Arc<Core>,
}

/// What streams, events, modules and graphs of one device share.
pub(super) struct Core {
    pub table: Table,
    pub memory: Memory,
    pub kernels: Kernels,
    /// Shared memory a kernel may ask for, bytes.
    pub lds_bytes_max: u32,
    device: Ordinal,
    context: Context,
}

impl Core {
    /// Makes the device's context the calling thread's. Every call that needs one comes after this: a thread may be any.
    pub fn enter(&self) -> Result<()> {
        // SAFETY: the context is retained as long as this value lives.
        unsafe { call!(self.table, "context", cuCtxSetCurrent(self.context)) }
    }

    /// Runs a destructor of the driver; a failure is logged, as a drop has nobody to tell.
    pub fn destroy(&self, what: &str, destructor: impl FnOnce(&Table) -> Status) {
        let status = match self.enter() {
            Ok(()) => destructor(&self.table),
            Err(error) => return tracing::warn!(%error, what, "the context is lost"),
        };
        // At the end of a process the driver may be gone first.
        if status != Status::SUCCESS && status != Status::DEINITIALIZED {
            tracing::warn!(what, code = status.0, "{}", status.text(&self.table));
        }
    }
}

impl Drop for Core {
    fn drop(&mut self) {
        // SAFETY: retained once in `open`; streams, graphs and modules hold this value, so none is left.
        let status = unsafe { (self.table.cuDevicePrimaryCtxRelease_v2)(self.device) };
        if status != Status::SUCCESS && status != Status::DEINITIALIZED {
            tracing::warn!(code = status.0, "the primary context was not released");
        }
    }
}

impl CudaDevice {
    /// Opens a visible device; ranks beyond the number of devices share them in turn, which is logged.
    ///
    /// Errors, all [`Unavailable`](crate::error::ErrorKind::Unavailable): no library, an old one, no device, a device older
    /// than the kernels are written for.
    pub fn open(ordinal: u32) -> Result<Arc<CudaDevice>> {
        let library = Library::open("CAPSTAN_CUDA", &LIBRARIES, NO_DRIVER)?;
        let table = Table::load(&library)?;
        for (symbol, reason) in table.missing() {
            tracing::info!(symbol, reason, "not in this driver");
        }
        // SAFETY: the first call to the driver; takes no flags.
        let status = unsafe { (table.cuInit)(0) };
        if status != Status::SUCCESS {
            return Err(unavailable(status, &table, "cuInit"));
        }
        let mut device = 0;
        // SAFETY: the result has a place; an ordinal that is not there is refused.
        let mut get = |ordinal: u32| unsafe { (table.cuDeviceGet)(&mut device, ordinal as i32) };
        let devices = (0..=ordinal).take_while(|&at| get(at) == Status::SUCCESS).count().max(1) as u32;
        if devices <= ordinal {
            tracing::warn!(ordinal, devices, "fewer devices than ranks of this host: some share one");
        }
        let status = get(ordinal % devices);
        if status != Status::SUCCESS {
            return Err(unavailable(status, &table, "cuDeviceGet"));
        }
        let info = describe(&table, device)?;
        let mut context = Context::NULL;
        // SAFETY: the device was found above; `Core` releases the context.
        unsafe { call!(table, "open", cuDevicePrimaryCtxRetain(&mut context, device)) }?;
        let lds_bytes_max = info.lds_bytes_max;
        let (memory, kernels) = (Memory::default(), Kernels::default());
        Ok(Arc::new(CudaDevice { info, core: Arc::new(Core { table, memory, kernels, lds_bytes_max, device, context }) }))
    }
}

/// Why there is no device.
fn unavailable(status: Status, table: &Table, call: &'static str) -> Error {
    let what = if status == Status::NO_DEVICE { "no CUDA device is visible" } else { "the CUDA driver does not start" };
    Error::unavailable(format!("{what}: {}", status.text(table)))
        .call(call, status.0, "")
        .help("check `nvidia-smi` and CUDA_VISIBLE_DEVICES, or use --device cpu")
}

fn describe(table: &Table, device: Ordinal) -> Result<DeviceInfo> {
    let attribute = |attribute| {
        let mut value = 0;
        // SAFETY: the device exists and the result has a place.
        unsafe { call!(table, "attribute", cuDeviceGetAttribute(&mut value, attribute, device)) }.map(|()| value)
    };
    let (major, minor) = (attribute(attribute::COMPUTE_MAJOR)?, attribute(attribute::COMPUTE_MINOR)?);
    let mut name = [0 as c_char; 256];
    // SAFETY: the buffer has the size that is given; the driver ends the text with a zero.
    unsafe { call!(table, "name", cuDeviceGetName(name.as_mut_ptr(), name.len() as i32, device)) }?;
    // SAFETY: as above.
    let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();
    if major < COMPUTE_MAJOR_MIN {
        return Err(Error::unavailable(format!(
            "{name} is sm_{major}{minor}; the kernels need sm_{COMPUTE_MAJOR_MIN}0 or later"
        ))
        .help("use --device cpu, or set CUDA_VISIBLE_DEVICES to a newer device"));
    }
    let mut version = 0;
    // SAFETY: the result has a place.
    unsafe { call!(table, "version", cuDriverGetVersion(&mut version)) }?;
    Ok(DeviceInfo {
        platform: Platform::Cuda,
        name,
        arch: format!("sm_{major}{minor}"),
        driver: format!("CUDA driver {}.{}", version / 1000, version % 1000 / 10),
        wave_lanes: attribute(attribute::WARP_SIZE)? as u32,
        compute_units: attribute(attribute::MULTIPROCESSORS)? as u32,
        lds_bytes_max: attribute(attribute::SHARED_BYTES_OPTIN)? as u32,
        executes: true,
    })
}

impl Device for CudaDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn memory(&self) -> Result<MemoryInfo> {
        self.core.enter()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: the results have places.
        unsafe { call!(self.core.table, "memory", cuMemGetInfo_v2(&mut free, &mut total)) }?;
        Ok(MemoryInfo { free_bytes: free as u64, total_bytes: total as u64 })
    }

    fn allocate(&self, kind: MemoryKind, bytes: u64) -> Result<Allocation> {
        self.core.memory.allocate(&self.core, kind, bytes)
    }

    unsafe fn free(&self, allocation: Allocation) -> Result<()> {
        self.core.memory.free(&self.core, &allocation)
    }

    fn create_stream(&self) -> Result<Arc<dyn Stream>> {
        Ok(Arc::new(CudaStream::new(self.core.clone())?))
    }

    fn create_event(&self, timing: bool) -> Result<Arc<dyn Event>> {
        Ok(Arc::new(CudaEvent::new(self.core.clone(), timing)?))
    }

    fn load_module(&self, image: ModuleImage<'_>) -> Result<Arc<dyn Module>> {
        Ok(Arc::new(CudaModule::load(self.core.clone(), image, &self.info.arch)?))
    }

    fn synchronize(&self) -> Result<()> {
        self.core.enter()?;
        // SAFETY: waits; needs only the context.
        unsafe { call!(self.core.table, "device synchronize", cuCtxSynchronize()) }
    }

    fn ipc_export(&self, allocation: &Allocation) -> Result<IpcHandle> {
        self.core.memory.export(&self.core, allocation)
    }

    fn ipc_open(&self, handle: &IpcHandle) -> Result<Allocation> {
        self.core.memory.open(&self.core, handle)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl fmt::Debug for CudaDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudaDevice").field("name", &self.info.name).field("arch", &self.info.arch).finish_non_exhaustive()
    }
}
