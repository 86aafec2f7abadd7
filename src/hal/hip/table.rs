//! The functions and structs of the HIP runtime API that this device uses, by the names and layouts of hip_runtime_api.h.
//!
//! What is here has kept its signature and layout from 5.2 to 7.x; what changed with the version is in `version`. The feature
//! `hip-abi` checks all of it against bindings made from AMD's headers.

use std::ffi::{c_char, c_int, c_uint, c_void};

use super::status::Status;
use crate::hal::loader::{function_table, handles};

handles! {
    /// A stream.
    StreamHandle;
    /// An event.
    EventHandle;
    /// A module.
    ModuleHandle;
    /// A kernel.
    Function;
    /// A graph.
    GraphHandle;
    /// A node of a graph.
    NodeHandle;
    /// An instantiated graph.
    ExecHandle;
}

/// A device's ordinal.
pub(super) type Ordinal = c_int;
/// An address in the device's memory space.
pub(super) type Pointer = *mut c_void;

/// Bytes that name an allocation to another process.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct IpcMemory(pub [u8; 64]);

/// What a kernel node holds (`hipKernelNodeParams`).
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct KernelNodeParams {
    pub block: [c_uint; 3],
    pub extra: *mut *mut c_void,
    pub function: Function,
    pub grid: [c_uint; 3],
    pub params: *mut *mut c_void,
    pub shared_bytes: c_uint,
}

/// What a copy node holds (`hipMemcpy3DParms`).
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct CopyNodeParams {
    pub src: CopySide,
    pub dst: CopySide,
    pub width_bytes: usize,
    pub height: usize,
    pub depth: usize,
    pub kind: c_int,
}

/// One side of a copy: an array or else a pitched range, and where in it.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct CopySide {
    pub array: *mut c_void,
    pub x_bytes: usize,
    pub y: usize,
    pub z: usize,
    pub pointer: Pointer,
    pub pitch: usize,
    pub width: usize,
    pub height: usize,
}

/// What a fill node holds (`hipMemsetParams`).
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct FillNodeParams {
    pub dst: Pointer,
    pub element_bytes: c_uint,
    pub height: usize,
    pub pitch: usize,
    pub value: c_uint,
    /// In elements.
    pub width: usize,
}

/// Values of `hipDeviceAttribute_t`.
pub(super) mod attribute {
    pub const MULTIPROCESSORS: i32 = 63;
    pub const SHARED_BYTES: i32 = 74;
    pub const WAVE_LANES: i32 = 87;
}

/// Flags of the calls below, and the copy kind that goes by the addresses.
pub(super) mod flag {
    pub const STREAM_NON_BLOCKING: u32 = 1;
    pub const EVENT_DISABLE_TIMING: u32 = 2;
    pub const HOST_PORTABLE: u32 = 1;
    pub const HOST_MAPPED: u32 = 2;
    pub const HOST_COHERENT: u32 = 0x4000_0000;
    pub const DEVICE_UNCACHED: u32 = 3;
    pub const COPY_DEFAULT: i32 = 4;
}

function_table! {
    /// libamdhip64's functions.
    Table -> Status;
    required {
        fn hipInit(flags: c_uint);
        fn hipGetErrorString(status: Status) -> *const c_char;
        fn hipRuntimeGetVersion(version: *mut c_int);
        fn hipDeviceGet(device: *mut Ordinal, ordinal: c_int);
        fn hipDeviceGetName(name: *mut c_char, bytes: c_int, device: Ordinal);
        fn hipDeviceGetAttribute(value: *mut c_int, attribute: c_int, device: Ordinal);
        fn hipGetDeviceCount(count: *mut c_int);
        fn hipSetDevice(device: Ordinal);
        fn hipDeviceSynchronize();
        fn hipMemGetInfo(free: *mut usize, total: *mut usize);
        fn hipMalloc(pointer: *mut Pointer, bytes: usize);
        fn hipExtMallocWithFlags(pointer: *mut Pointer, bytes: usize, flags: c_uint);
        fn hipFree(pointer: Pointer);
        fn hipHostMalloc(host: *mut *mut c_void, bytes: usize, flags: c_uint);
        fn hipHostGetDevicePointer(pointer: *mut Pointer, host: *mut c_void, flags: c_uint);
        fn hipHostFree(host: *mut c_void);
        fn hipIpcGetMemHandle(handle: *mut IpcMemory, pointer: Pointer);
        fn hipIpcOpenMemHandle(pointer: *mut Pointer, handle: IpcMemory, flags: c_uint);
        fn hipIpcCloseMemHandle(pointer: Pointer);
        fn hipStreamCreateWithFlags(stream: *mut StreamHandle, flags: c_uint);
        fn hipStreamDestroy(stream: StreamHandle);
        fn hipStreamSynchronize(stream: StreamHandle);
        fn hipStreamQuery(stream: StreamHandle);
        fn hipStreamWaitEvent(stream: StreamHandle, event: EventHandle, flags: c_uint);
        fn hipStreamBeginCapture(stream: StreamHandle, mode: c_int);
        fn hipStreamEndCapture(stream: StreamHandle, graph: *mut GraphHandle);
        fn hipStreamIsCapturing(stream: StreamHandle, status: *mut c_int);
        fn hipMemcpyAsync(dst: Pointer, src: *const c_void, bytes: usize, kind: c_int, stream: StreamHandle);
        fn hipMemsetAsync(dst: Pointer, byte: c_int, bytes: usize, stream: StreamHandle);
        fn hipModuleLaunchKernel(
            function: Function, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint,
            block_x: c_uint, block_y: c_uint, block_z: c_uint,
            shared_bytes: c_uint, stream: StreamHandle, params: *mut *mut c_void, extra: *mut *mut c_void,
        );
        fn hipEventCreateWithFlags(event: *mut EventHandle, flags: c_uint);
        fn hipEventDestroy(event: EventHandle);
        fn hipEventRecord(event: EventHandle, stream: StreamHandle);
        fn hipEventQuery(event: EventHandle);
        fn hipEventSynchronize(event: EventHandle);
        fn hipEventElapsedTime(milliseconds: *mut f32, start: EventHandle, end: EventHandle);
        fn hipModuleLoadData(module: *mut ModuleHandle, image: *const c_void);
        fn hipModuleUnload(module: ModuleHandle);
        fn hipModuleGetFunction(function: *mut Function, module: ModuleHandle, symbol: *const c_char);
        fn hipGraphGetNodes(graph: GraphHandle, nodes: *mut NodeHandle, count: *mut usize);
        fn hipGraphGetEdges(graph: GraphHandle, from: *mut NodeHandle, to: *mut NodeHandle, count: *mut usize);
        fn hipGraphNodeGetType(node: NodeHandle, kind: *mut c_int);
        fn hipGraphKernelNodeGetParams(node: NodeHandle, params: *mut KernelNodeParams);
        fn hipGraphMemcpyNodeGetParams(node: NodeHandle, params: *mut CopyNodeParams);
        fn hipGraphMemsetNodeGetParams(node: NodeHandle, params: *mut FillNodeParams);
        fn hipGraphInstantiate(exec: *mut ExecHandle, graph: GraphHandle, node: *mut NodeHandle, log: *mut c_char, bytes: usize);
        fn hipGraphLaunch(exec: ExecHandle, stream: StreamHandle);
        fn hipGraphExecDestroy(exec: ExecHandle);
        fn hipGraphDestroy(graph: GraphHandle);
    }
    optional {
        "before 5.3: the first launch of a graph uploads it"
        fn hipGraphUpload(exec: ExecHandle, stream: StreamHandle);
        "not in 5.2: no native DOT"
        fn hipGraphDebugDotPrint(graph: GraphHandle, path: *const c_char, flags: c_uint);
        "before 6.0: the older layout of the properties names the architecture"
        fn hipGetDevicePropertiesR0600(properties: *mut c_void, device: Ordinal);
        "kept for older programs only: the layout of 6.0 names the architecture"
        fn hipGetDeviceProperties(properties: *mut c_void, device: Ordinal);
    }
}
