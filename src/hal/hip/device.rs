//! The device: its runtime, what it is.

#![expect(unsafe_code, reason = "calls the runtime; the Device trait has an unsafe method")]

use std::any::Any;
use std::ffi::{CStr, c_char};
use std::fmt;
use std::sync::Arc;

use super::event::HipEvent;
use super::memory::Memory;
use super::module::{HipModule, Kernels};
use super::status::{NO_RUNTIME, Status, call};
use super::stream::HipStream;
use super::table::{Ordinal, Table, attribute};
use super::version::{self, Version};
use crate::error::{Error, Result};
use crate::hal::loader::Library;
use crate::hal::{
    Allocation, Device, DeviceInfo, Event, IpcHandle, MemoryInfo, MemoryKind, Module, ModuleImage, Platform, Stream,
};

/// Names of the runtime's library, newest first.
const LIBRARIES: [&str; 4] = ["libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so.5", "libamdhip64.so"];
/// The least generation that the kernels are written for.
const GENERATION_MIN: u32 = 9;

/// The HIP device; make one with [`HipDevice::open`].
pub struct HipDevice {
    info: DeviceInfo,
    core: Arc<Core>,
}

/// What streams, events, modules and graphs of one device share.
pub(super) struct Core {
    pub table: Table,
    pub memory: Memory,
    pub kernels: Kernels,
    pub version: Version,
    device: Ordinal,
}

impl Core {
    /// Makes the device the calling thread's. Every call that needs one comes after this: a thread may be any.
    pub fn enter(&self) -> Result<()> {
        // SAFETY: the device was found when this value was made.
        unsafe { call!(self.table, "device", hipSetDevice(self.device)) }
    }

    /// Runs a destructor of the runtime; a failure is logged, as a drop has nobody to tell.
    pub fn destroy(&self, what: &str, destructor: impl FnOnce(&Table) -> Status) {
        let status = match self.enter() {
            Ok(()) => destructor(&self.table),
            Err(error) => return tracing::warn!(%error, what, "the device is lost"),
        };
        // At the end of a process the runtime may be gone first.
        if status != Status::SUCCESS && status != Status::DEINITIALIZED {
            tracing::warn!(what, code = status.0, "{}", status.text(&self.table));
        }
    }
}

impl HipDevice {
    /// Opens a visible device; ranks beyond the number of devices share them in turn, which is logged.
    ///
    /// Errors, all [`Unavailable`](crate::error::ErrorKind::Unavailable): no library, an old one, no device, a device that
    /// the kernels are not written for.
    pub fn open(ordinal: u32) -> Result<Arc<HipDevice>> {
        let library = Library::open("CAPSTAN_HIP_LIBRARY", &LIBRARIES, NO_RUNTIME)?;
        let table = Table::load(&library)?;
        for (symbol, reason) in table.missing() {
            tracing::info!(symbol, reason, "not in this runtime");
        }
        let version = version(&table)?;
        let (mut count, mut device) = (0, 0);
        // Asked first: without a device older runtimes answer `hipInit` with another code.
        // SAFETY: the result has a place.
        let status = unsafe { (table.hipGetDeviceCount)(&mut count) };
        if status != Status::SUCCESS {
            return Err(unavailable(status, &table, "hipGetDeviceCount"));
        }
        // SAFETY: takes no flags.
        let status = unsafe { (table.hipInit)(0) };
        if status != Status::SUCCESS {
            return Err(unavailable(status, &table, "hipInit"));
        }
        let devices = count.max(1) as u32;
        if devices <= ordinal {
            tracing::warn!(ordinal, devices, "fewer devices than ranks of this host: some share one");
        }
        // SAFETY: the result has a place.
        let status = unsafe { (table.hipDeviceGet)(&mut device, (ordinal % devices) as i32) };
        if status != Status::SUCCESS {
            return Err(unavailable(status, &table, "hipDeviceGet"));
        }
        let info = describe(&table, version, device)?;
        let (memory, kernels) = (Memory::default(), Kernels::default());
        Ok(Arc::new(HipDevice { info, core: Arc::new(Core { table, memory, kernels, version, device }) }))
    }
}

/// The runtime's version.
fn version(table: &Table) -> Result<Version> {
    let mut version = Version(0);
    // SAFETY: the result has a place.
    unsafe { call!(table, "version", hipRuntimeGetVersion(&mut version.0)) }?;
    if version < Version::OLDEST {
        return Err(
            Error::unavailable(format!("{version} is too old: {} is the oldest that fits", Version::OLDEST)).help(NO_RUNTIME)
        );
    }
    Ok(version)
}

/// Why there is no device.
fn unavailable(status: Status, table: &Table, call: &'static str) -> Error {
    let none = [Status::NO_DEVICE, Status::INVALID_DEVICE].contains(&status);
    let what = if none { "no HIP device is visible" } else { "the HIP runtime does not start" };
    Error::unavailable(format!("{what}: {}", status.text(table)))
        .call(call, status.0, "")
        .help("check `rocminfo`, HIP_VISIBLE_DEVICES and the access to /dev/kfd and /dev/dri, or use --device cpu")
}

fn describe(table: &Table, version: Version, device: Ordinal) -> Result<DeviceInfo> {
    let attribute = |attribute| {
        let mut value = 0;
        // SAFETY: the device exists and the result has a place.
        unsafe { call!(table, "attribute", hipDeviceGetAttribute(&mut value, attribute, device)) }.map(|()| value)
    };
    let mut name = [0 as c_char; 256];
    // SAFETY: the buffer has the size that is given; the runtime ends the text with a zero.
    unsafe { call!(table, "name", hipDeviceGetName(name.as_mut_ptr(), name.len() as i32, device)) }?;
    // SAFETY: as above.
    let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();
    let arch = arch(table, device)?;
    if generation(&arch).is_some_and(|generation| generation < GENERATION_MIN) {
        return Err(Error::unavailable(format!("{name} is {arch}; the kernels need gfx{GENERATION_MIN}00 or later"))
            .help("use --device cpu, or set HIP_VISIBLE_DEVICES to a newer device"));
    }
    Ok(DeviceInfo {
        platform: Platform::Hip,
        name,
        arch,
        driver: version.to_string(),
        wave_lanes: attribute(attribute::WAVE_LANES)? as u32,
        compute_units: attribute(attribute::MULTIPROCESSORS)? as u32,
        lds_bytes_max: attribute(attribute::SHARED_BYTES)? as u32,
        executes: true,
    })
}

/// The generation of one of AMD's devices: 9 of gfx90a, 12 of gfx1201.
fn generation(arch: &str) -> Option<u32> {
    let base = arch.strip_prefix("gfx")?.split(':').next()?;
    base.get(..base.len().checked_sub(2)?)?.parse().ok()
}

/// The compiler's target, e.g. `gfx942:sramecc+:xnack-`, from the properties of whichever layout the runtime has.
fn arch(table: &Table, device: Ordinal) -> Result<String> {
    let (get, call, offset) = match (table.hipGetDevicePropertiesR0600, table.hipGetDeviceProperties) {
        (Some(get), _) => (get, "hipGetDevicePropertiesR0600", version::ARCH_R0600),
        (None, Some(get)) => (get, "hipGetDeviceProperties", version::ARCH_LEGACY),
        (None, None) => {
            return Err(Error::unavailable("the HIP runtime has neither layout of the device's properties").help(NO_RUNTIME));
        }
    };
    let mut properties = [0u64; version::PROPERTIES_BYTES / 8];
    // SAFETY: the device exists; the buffer is larger than either layout and aligned as they are.
    unsafe { get(properties.as_mut_ptr().cast(), device) }.check(table, "properties", call)?;
    let arch = &bytemuck::cast_slice::<u64, u8>(&properties)[offset..][..version::ARCH_BYTES];
    let end = arch.iter().position(|&byte| byte == 0).unwrap_or(arch.len());
    Ok(String::from_utf8_lossy(&arch[..end]).into_owned())
}

impl Device for HipDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn memory(&self) -> Result<MemoryInfo> {
        self.core.enter()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: the results have places.
        unsafe { call!(self.core.table, "memory", hipMemGetInfo(&mut free, &mut total)) }?;
        Ok(MemoryInfo { free_bytes: free as u64, total_bytes: total as u64 })
    }

    fn allocate(&self, kind: MemoryKind, bytes: u64) -> Result<Allocation> {
        self.core.memory.allocate(&self.core, kind, bytes)
    }

    unsafe fn free(&self, allocation: Allocation) -> Result<()> {
        self.core.memory.free(&self.core, &allocation)
    }

    fn create_stream(&self) -> Result<Arc<dyn Stream>> {
        Ok(Arc::new(HipStream::new(self.core.clone())?))
    }

    fn create_event(&self, timing: bool) -> Result<Arc<dyn Event>> {
        Ok(Arc::new(HipEvent::new(self.core.clone(), timing)?))
    }

    fn load_module(&self, image: ModuleImage<'_>) -> Result<Arc<dyn Module>> {
        Ok(Arc::new(HipModule::load(self.core.clone(), image, &self.info.arch)?))
    }

    fn synchronize(&self) -> Result<()> {
        self.core.enter()?;
        // SAFETY: waits; needs only the device.
        unsafe { call!(self.core.table, "device synchronize", hipDeviceSynchronize()) }
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

impl fmt::Debug for HipDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HipDevice").field("name", &self.info.name).field("arch", &self.info.arch).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::generation;

    #[test]
    fn generations_are_read_off_the_target() {
        let read = ["gfx803", "gfx90a:sramecc+", "gfx950", "gfx1201", "sm_90", "gfx", "gfx9"].map(generation);
        assert_eq!(read, [Some(8), Some(9), Some(9), Some(12), None, None, None]);
    }
}
