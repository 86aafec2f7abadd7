// A libcuda of a machine whose device cannot be used: it answers what the driver would, by the environment's ABSENT.
//
// `no_device`: the driver finds none. `old`: a device older than the kernels are written for. `no_memory`: a fine device whose
// memory is all taken.
#include <stdlib.h>
#include <string.h>

static int is(const char *what) {
    const char *given = getenv("ABSENT");
    return given && !strcmp(given, what);
}

int cuInit(unsigned flags) { return flags == 0 && is("no_device") ? 100 : 0; }
int cuGetErrorString(int status, const char **text) {
    *text = status == 100 ? "no CUDA-capable device is detected" : status == 2 ? "out of memory" : 0;
    return *text ? 0 : 1;
}
int cuDriverGetVersion(int *version) { return *version = 13010, 0; }
int cuDeviceGet(int *device, int ordinal) { return *device = ordinal, 0; }
int cuDeviceGetName(char *name, int bytes, int device) { return strncpy(name, "Old Card", bytes), 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    *value = attribute == 75 ? (is("old") ? 6 : 9) : attribute == 10 ? 32 : attribute == 97 ? 232448 : 1;
    return 0;
}
int cuDevicePrimaryCtxRetain(void **context, int device) { return *context = (void *)8, 0; }
int cuDevicePrimaryCtxRelease_v2(int device) { return 0; }
int cuCtxSetCurrent(void *context) { return context == (void *)8 ? 0 : 201; }
int cuMemGetInfo_v2(size_t *free, size_t *total) { return *free = 0, *total = 1 << 20, 0; }
int cuMemAlloc_v2(unsigned long long *pointer, size_t bytes) { return 2; }
int cuMemHostAlloc(void **host, size_t bytes, unsigned flags) { return 2; }

// The rest is there, and is never to be reached.
#define UNREACHED(name) int name(void) { abort(); }
UNREACHED(cuCtxSynchronize) UNREACHED(cuMemFree_v2) UNREACHED(cuMemHostGetDevicePointer_v2) UNREACHED(cuMemFreeHost)
UNREACHED(cuIpcGetMemHandle) UNREACHED(cuIpcOpenMemHandle_v2) UNREACHED(cuIpcCloseMemHandle)
UNREACHED(cuStreamCreate) UNREACHED(cuStreamDestroy_v2) UNREACHED(cuStreamSynchronize) UNREACHED(cuStreamQuery)
UNREACHED(cuStreamWaitEvent) UNREACHED(cuStreamBeginCapture_v2) UNREACHED(cuStreamEndCapture)
UNREACHED(cuStreamIsCapturing) UNREACHED(cuMemcpyAsync) UNREACHED(cuMemsetD8Async) UNREACHED(cuLaunchKernel)
UNREACHED(cuEventCreate) UNREACHED(cuEventDestroy_v2) UNREACHED(cuEventRecord) UNREACHED(cuEventQuery)
UNREACHED(cuEventSynchronize) UNREACHED(cuEventElapsedTime) UNREACHED(cuModuleLoadData) UNREACHED(cuModuleUnload)
UNREACHED(cuModuleGetFunction) UNREACHED(cuFuncGetAttribute) UNREACHED(cuFuncSetAttribute) UNREACHED(cuGraphGetNodes)
UNREACHED(cuGraphGetEdges) UNREACHED(cuGraphNodeGetType) UNREACHED(cuGraphKernelNodeGetParams_v2)
UNREACHED(cuGraphMemcpyNodeGetParams) UNREACHED(cuGraphMemsetNodeGetParams) UNREACHED(cuGraphInstantiateWithFlags)
UNREACHED(cuGraphLaunch) UNREACHED(cuGraphExecDestroy) UNREACHED(cuGraphDestroy)
