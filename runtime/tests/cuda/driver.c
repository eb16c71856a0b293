/* A driver without GPUs, for tests. It is compiled with
     VERSION    what cuDriverGetVersion says
     INIT       what cuInit returns
     DEVICES    how many GPUs there are, each with 80 GiB, of which 64 are free
     MAJOR      of their architecture
   Memory is the process's own, streams do everything at once, and kernels do nothing. */
#include <stdlib.h>
#include <string.h>

typedef int status;
typedef unsigned long long address;

status cuInit(unsigned flags) { return flags ? 1 : INIT; }
status cuDriverGetVersion(int *version) { *version = VERSION; return 0; }
status cuGetErrorName(status code, const char **name) {
    *name = code == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : code == 3 ? "CUDA_ERROR_NOT_INITIALIZED"
        : code == 100 ? "CUDA_ERROR_NO_DEVICE" : code == 999 ? "CUDA_ERROR_UNKNOWN" : 0;
    return *name ? 0 : 1;
}
status cuGetErrorString(status code, const char **text) { *text = code == 2 ? "out of memory" : "it is a fake"; return 0; }

#ifndef OLD
status cuDeviceGetCount(int *count) { *count = DEVICES; return 0; }
status cuDeviceGet(int *device, int index) { *device = index; return index < DEVICES ? 0 : 101; }
status cuDeviceGetName(char *name, int size, int device) { (void)device; strncpy(name, "NVIDIA Fake 80GB", size); return 0; }
status cuDeviceTotalMem_v2(size_t *bytes, int device) { (void)device; *bytes = 80ull << 30; return 0; }
status cuDeviceGetAttribute(int *value, int attribute, int device) {
    (void)device;
    *value = attribute == 75 ? MAJOR : attribute == 16 ? 132 : 0;
    return 0;
}
status cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)(size_t)(device + 1); return 0; }
status cuDevicePrimaryCtxRelease_v2(int device) { (void)device; return 0; }
status cuCtxSetCurrent(void *context) { (void)context; return 0; }
status cuMemGetInfo_v2(size_t *free_bytes, size_t *total) { *free_bytes = 64ull << 30; *total = 80ull << 30; return 0; }
status cuMemAlloc_v2(address *memory, size_t bytes) {
    if (bytes > (64ull << 30)) return 2;
    *memory = (address)(size_t)calloc(1, bytes);
    return *memory ? 0 : 2;
}
status cuMemFree_v2(address memory) { free((void *)(size_t)memory); return 0; }
status cuMemHostAlloc(void **memory, size_t bytes, unsigned flags) { (void)flags; return (*memory = calloc(1, bytes)) ? 0 : 2; }
status cuMemFreeHost(void *memory) { free(memory); return 0; }
status cuMemcpyHtoDAsync_v2(address to, const void *from, size_t n, void *s) { (void)s; memcpy((void *)(size_t)to, from, n); return 0; }
status cuMemcpyDtoHAsync_v2(void *to, address from, size_t n, void *s) { (void)s; memcpy(to, (void *)(size_t)from, n); return 0; }
status cuMemcpyDtoDAsync_v2(address to, address from, size_t n, void *s) {
    (void)s;
    memmove((void *)(size_t)to, (void *)(size_t)from, n);
    return 0;
}
status cuMemsetD8Async(address to, unsigned char byte, size_t n, void *s) { (void)s; memset((void *)(size_t)to, byte, n); return 0; }
status cuStreamCreate(void **stream, unsigned flags) { (void)flags; *stream = malloc(1); return 0; }
status cuStreamDestroy_v2(void *stream) { free(stream); return 0; }
status cuStreamSynchronize(void *stream) { (void)stream; return 0; }
status cuStreamWaitEvent(void *stream, void *event, unsigned flags) { (void)stream; (void)event; (void)flags; return 0; }
status cuEventCreate(void **event, unsigned flags) { (void)flags; *event = malloc(1); return 0; }
status cuEventRecord(void *event, void *stream) { (void)event; (void)stream; return 0; }
status cuEventDestroy_v2(void *event) { free(event); return 0; }
status cuModuleLoadData(void **module, const void *image) { (void)image; *module = malloc(1); return 0; }
status cuModuleUnload(void *module) { free(module); return 0; }
status cuModuleGetFunction(void **function, void *module, const char *name) {
    *function = module;
    return strcmp(name, "absent") ? 0 : 500;
}
status cuFuncSetAttribute(void *function, int attribute, int value) { (void)function; return attribute == 8 && value > 0 ? 0 : 1; }
status cuLaunchKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned x, unsigned y, unsigned z, unsigned shared,
                      void *stream, void **parameters, void **extra) {
    (void)f; (void)gy; (void)gz; (void)y; (void)z; (void)shared; (void)stream; (void)parameters; (void)extra;
    return gx && x <= 1024 ? 0 : 1;
}
status cuStreamBeginCapture_v2(void *stream, int mode) { (void)stream; (void)mode; return 0; }
status cuStreamEndCapture(void *stream, void **graph) { (void)stream; *graph = malloc(1); return 0; }
status cuGraphInstantiateWithFlags(void **ready, void *graph, unsigned long long flags) {
    (void)graph; (void)flags;
    *ready = malloc(1);
    return 0;
}
status cuGraphLaunch(void *graph, void *stream) { (void)graph; (void)stream; return 0; }
status cuGraphExecDestroy(void *graph) { free(graph); return 0; }
status cuGraphDestroy(void *graph) { free(graph); return 0; }
#endif
