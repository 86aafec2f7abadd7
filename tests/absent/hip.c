// A libamdhip64 of a machine whose device cannot be used: it answers what the runtime would, by the environment's ABSENT.
//
// `no_device`: the runtime finds none. `old_runtime`: a version before 5.2. `old`: a device older than the kernels are written
// for. `no_memory`: a fine device whose memory is all taken. `legacy`: `old` of a runtime before 6.0, with its layout of the
// properties.
#include <stdlib.h>
#include <string.h>

static int is(const char *what) {
    const char *given = getenv("ABSENT");
    return given && !strcmp(given, what);
}

int hipInit(unsigned flags) { return is("no_device") ? 101 : 0; }
const char *hipGetErrorString(int status) {
    return status == 100 ? "no ROCm-capable device is detected" : status == 2 ? "out of memory" : "unknown error";
}
int hipRuntimeGetVersion(int *version) {
    return *version = is("old_runtime") ? 50120532 : is("legacy") ? 50422804 : 60342134, 0;
}
int hipGetDeviceCount(int *count) { return *count = 0, is("no_device") ? 100 : 0; }
int hipDeviceGet(int *device, int ordinal) { return *device = ordinal, 0; }
int hipDeviceGetName(char *name, int bytes, int device) { return strncpy(name, "Some Card", bytes), 0; }
int hipDeviceGetAttribute(int *value, int attribute, int device) {
    return *value = attribute == 87 ? 64 : attribute == 74 ? 65536 : 1, 0;
}
#ifndef LEGACY
int hipGetDevicePropertiesR0600(char *properties, int device) {
    return strcpy(properties + 1160, is("old") ? "gfx803" : "gfx942:sramecc+:xnack-"), 0;
}
#endif
int hipGetDeviceProperties(char *properties, int device) { return strcpy(properties + 396, "gfx701"), 0; }
int hipSetDevice(int device) { return 0; }
int hipMemGetInfo(size_t *free, size_t *total) { return *free = 0, *total = 1 << 20, 0; }
int hipMalloc(void **pointer, size_t bytes) { return 2; }
int hipHostMalloc(void **host, size_t bytes, unsigned flags) { return 2; }

// The rest is there, and is never to be reached.
#define UNREACHED(name) int name(void) { abort(); }
UNREACHED(hipDeviceSynchronize) UNREACHED(hipExtMallocWithFlags) UNREACHED(hipFree) UNREACHED(hipHostGetDevicePointer)
UNREACHED(hipHostFree) UNREACHED(hipIpcGetMemHandle) UNREACHED(hipIpcOpenMemHandle) UNREACHED(hipIpcCloseMemHandle)
UNREACHED(hipStreamCreateWithFlags) UNREACHED(hipStreamDestroy) UNREACHED(hipStreamSynchronize) UNREACHED(hipStreamQuery)
UNREACHED(hipStreamWaitEvent) UNREACHED(hipStreamBeginCapture) UNREACHED(hipStreamEndCapture) UNREACHED(hipStreamIsCapturing)
UNREACHED(hipMemcpyAsync) UNREACHED(hipMemsetAsync) UNREACHED(hipModuleLaunchKernel) UNREACHED(hipEventCreateWithFlags)
UNREACHED(hipEventDestroy) UNREACHED(hipEventRecord) UNREACHED(hipEventQuery) UNREACHED(hipEventSynchronize)
UNREACHED(hipEventElapsedTime) UNREACHED(hipModuleLoadData) UNREACHED(hipModuleUnload) UNREACHED(hipModuleGetFunction)
UNREACHED(hipGraphGetNodes) UNREACHED(hipGraphGetEdges) UNREACHED(hipGraphNodeGetType) UNREACHED(hipGraphKernelNodeGetParams)
UNREACHED(hipGraphMemcpyNodeGetParams) UNREACHED(hipGraphMemsetNodeGetParams) UNREACHED(hipGraphInstantiate)
UNREACHED(hipGraphLaunch) UNREACHED(hipGraphExecDestroy) UNREACHED(hipGraphDestroy)
