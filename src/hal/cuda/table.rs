//! The functions and structs of the CUDA driver API that this device uses, by the names and layouts of cuda.h.

use std::ffi::{c_char, c_int, c_uint, c_ulonglong, c_void};

use super::status::Status;
use crate::hal::loader::{function_table, handles};

handles! {
    /// A context.
    Context;
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

/// Bytes that name an allocation to another process.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct IpcMemory(pub [u8; 64]);

/// What a kernel node holds (`CUDA_KERNEL_NODE_PARAMS_v2`).
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct KernelNodeParams {
    pub function: Function,
    pub grid: [c_uint; 3],
    pub block: [c_uint; 3],
    pub shared_bytes: c_uint,
    pub params: *mut *mut c_void,
    pub extra: *mut *mut c_void,
    pub kernel: *mut c_void,
    pub context: Context,
}

/// What a copy node holds (`CUDA_MEMCPY3D_v2`).
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct CopyNodeParams {
    pub src: CopySide,
    pub dst: CopySide,
    pub width_bytes: usize,
    pub height: usize,
    pub depth: usize,
}

/// One side of a copy.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct CopySide {
    pub x_bytes: usize,
    pub y: usize,
    pub z: usize,
    pub level: usize,
    /// `CU_MEMORYTYPE_HOST` is 1.
    pub memory: c_uint,
    pub host: *mut c_void,
    pub device: u64,
    pub array: *mut c_void,
    pub reserved: *mut c_void,
    pub pitch: usize,
    pub height: usize,
}

/// What a fill node holds (`CUDA_MEMSET_NODE_PARAMS_v1`).
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct FillNodeParams {
    pub dst: u64,
    pub pitch: usize,
    pub value: c_uint,
    pub element_bytes: c_uint,
    /// In elements.
    pub width: usize,
    pub height: usize,
}

/// Values of `CUdevice_attribute`.
pub(super) mod attribute {
    pub const WARP_SIZE: i32 = 10;
    pub const MULTIPROCESSORS: i32 = 16;
    pub const COMPUTE_MAJOR: i32 = 75;
    pub const COMPUTE_MINOR: i32 = 76;
    pub const SHARED_BYTES_OPTIN: i32 = 97;
}

/// Values of `CUfunction_attribute`.
pub(super) mod function_attribute {
    pub const SHARED_BYTES: i32 = 1;
    pub const DYNAMIC_SHARED_BYTES_MAX: i32 = 8;
}

/// Flags of the calls below.
pub(super) mod flag {
    pub const STREAM_NON_BLOCKING: u32 = 1;
    pub const EVENT_DISABLE_TIMING: u32 = 2;
    pub const HOST_PORTABLE: u32 = 1;
    pub const HOST_DEVICE_MAP: u32 = 2;
    pub const IPC_LAZY_PEER_ACCESS: u32 = 1;
}

function_table! {
    /// libcuda's functions.
    Table -> Status;
    required {
        fn cuInit(flags: c_uint);
        fn cuGetErrorString(status: Status, text: *mut *const c_char);
        fn cuDriverGetVersion(version: *mut c_int);
        fn cuDeviceGet(device: *mut Ordinal, ordinal: c_int);
        fn cuDeviceGetName(name: *mut c_char, bytes: c_int, device: Ordinal);
        fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_int, device: Ordinal);
        fn cuDevicePrimaryCtxRetain(context: *mut Context, device: Ordinal);
        fn cuDevicePrimaryCtxRelease_v2(device: Ordinal);
        fn cuCtxSetCurrent(context: Context);
        fn cuCtxSynchronize();
        fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize);
        fn cuMemAlloc_v2(pointer: *mut u64, bytes: usize);
        fn cuMemFree_v2(pointer: u64);
        fn cuMemHostAlloc(host: *mut *mut c_void, bytes: usize, flags: c_uint);
        fn cuMemHostGetDevicePointer_v2(pointer: *mut u64, host: *mut c_void, flags: c_uint);
        fn cuMemFreeHost(host: *mut c_void);
        fn cuIpcGetMemHandle(handle: *mut IpcMemory, pointer: u64);
        fn cuIpcOpenMemHandle_v2(pointer: *mut u64, handle: IpcMemory, flags: c_uint);
        fn cuIpcCloseMemHandle(pointer: u64);
        fn cuStreamCreate(stream: *mut StreamHandle, flags: c_uint);
        fn cuStreamDestroy_v2(stream: StreamHandle);
        fn cuStreamSynchronize(stream: StreamHandle);
        fn cuStreamQuery(stream: StreamHandle);
        fn cuStreamWaitEvent(stream: StreamHandle, event: EventHandle, flags: c_uint);
        fn cuStreamBeginCapture_v2(stream: StreamHandle, mode: c_int);
        fn cuStreamEndCapture(stream: StreamHandle, graph: *mut GraphHandle);
        fn cuStreamIsCapturing(stream: StreamHandle, status: *mut c_int);
        fn cuMemcpyAsync(dst: u64, src: u64, bytes: usize, stream: StreamHandle);
        fn cuMemsetD8Async(dst: u64, byte: u8, bytes: usize, stream: StreamHandle);
        fn cuLaunchKernel(
            function: Function, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint,
            block_x: c_uint, block_y: c_uint, block_z: c_uint,
            shared_bytes: c_uint, stream: StreamHandle, params: *mut *mut c_void, extra: *mut *mut c_void,
        );
        fn cuEventCreate(event: *mut EventHandle, flags: c_uint);
        fn cuEventDestroy_v2(event: EventHandle);
        fn cuEventRecord(event: EventHandle, stream: StreamHandle);
        fn cuEventQuery(event: EventHandle);
        fn cuEventSynchronize(event: EventHandle);
        fn cuEventElapsedTime(milliseconds: *mut f32, start: EventHandle, end: EventHandle);
        fn cuModuleLoadData(module: *mut ModuleHandle, image: *const c_void);
        fn cuModuleUnload(module: ModuleHandle);
        fn cuModuleGetFunction(function: *mut Function, module: ModuleHandle, symbol: *const c_char);
        fn cuFuncGetAttribute(value: *mut c_int, attribute: c_int, function: Function);
        fn cuFuncSetAttribute(function: Function, attribute: c_int, value: c_int);
        fn cuGraphGetNodes(graph: GraphHandle, nodes: *mut NodeHandle, count: *mut usize);
        fn cuGraphGetEdges(graph: GraphHandle, from: *mut NodeHandle, to: *mut NodeHandle, count: *mut usize);
        fn cuGraphNodeGetType(node: NodeHandle, kind: *mut c_int);
        fn cuGraphKernelNodeGetParams_v2(node: NodeHandle, params: *mut KernelNodeParams);
        fn cuGraphMemcpyNodeGetParams(node: NodeHandle, params: *mut CopyNodeParams);
        fn cuGraphMemsetNodeGetParams(node: NodeHandle, params: *mut FillNodeParams);
        fn cuGraphInstantiateWithFlags(exec: *mut ExecHandle, graph: GraphHandle, flags: c_ulonglong);
        fn cuGraphLaunch(exec: ExecHandle, stream: StreamHandle);
        fn cuGraphExecDestroy(exec: ExecHandle);
        fn cuGraphDestroy(graph: GraphHandle);
    }
    optional {
        "before 11.1: the first launch of a graph uploads it"
        fn cuGraphUpload(exec: ExecHandle, stream: StreamHandle);
        "before 11.3: no native DOT"
        fn cuGraphDebugDotPrint(graph: GraphHandle, path: *const c_char, flags: c_uint);
        "before 12.4: kernels are loaded when first launched"
        fn cuFuncLoad(function: Function);
        "before 12.4: the size of a kernel's arguments is taken on trust"
        fn cuFuncGetParamInfo(function: Function, index: usize, offset: *mut usize, bytes: *mut usize);
    }
}
