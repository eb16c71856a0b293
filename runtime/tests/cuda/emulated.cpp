// NVIDIA's driver, NVRTC, cuBLASLt and NCCL in one library that runs everything on the host, for tests of the executor.
// GPUS is the number of devices, 1 by default.
//
// g++ compiles kernels from the text for NVRTC, and one thread runs them. Those over tiles have 128 threads that take
// turns, with the matrix products of their warps as PTX describes them. Work stays in its stream until a thread waits
// for it. Among all work that streams and events allow to run, a random choice decides what is next, so a result that
// depends on it reveals a missing event. Each thread of the process has its own streams. Written for tests only:
// handles are leaked, and only what is used is here.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <dlfcn.h>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <unistd.h>
#include <vector>

typedef int status;
typedef unsigned long long address;
enum { INVALID = 1, NOT_FOUND = 500, ILLEGAL = 900 };

struct Event { uint64_t asked = 0, done = 0; };
struct Op {
    std::function<void()> run;
    // Work that waits for other threads: it is tried repeatedly while it is first in its stream, until it is done.
    std::function<bool()> attempt;
    Event *waits = nullptr, *records = nullptr;
    uint64_t ticket = 0;
};
struct Stream { std::deque<Op> queue; };
struct Recorded { Stream *stream; std::function<void(Stream *)> issue; };
struct Graph { std::vector<Recorded> work; };
struct Capture { Graph *graph = nullptr; Stream *origin = nullptr; std::set<Stream *> joined; std::set<Event *> events; };

static thread_local std::vector<Stream *> streams;
static thread_local Capture capture;
static thread_local uint64_t chance = 88172645463325252ull;

static void put(Stream *stream, Op op) { stream->queue.push_back(std::move(op)); }

// Records work for a stream that takes part in a capture, and enqueues it otherwise.
static status issue(void *raw, std::function<void(Stream *)> work) {
    Stream *stream = (Stream *)raw;
    if (capture.graph && capture.joined.count(stream)) capture.graph->work.push_back({stream, std::move(work)});
    else work(stream);
    return 0;
}
static status issue_run(void *stream, std::function<void()> run) {
    return issue(stream, [run](Stream *s) { put(s, Op{run}); });
}

// Messages between the members of groups, from all threads.
static std::mutex said;
static std::condition_variable news;

// Runs work until a stream is empty. Returns false if no work may run, or if other threads do not arrive for a long
// time.
static bool run_until_empty(Stream *wanted) {
    auto patience = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (!wanted->queue.empty()) {
        std::vector<Stream *> ready;
        bool waits_for_others = false;
        for (Stream *s : streams) {
            if (s->queue.empty() || s->queue.front().waits && s->queue.front().waits->done < s->queue.front().ticket) continue;
            if (s->queue.front().attempt && !s->queue.front().attempt()) waits_for_others = true;
            else ready.push_back(s);
        }
        if (ready.empty()) {
            if (!waits_for_others || std::chrono::steady_clock::now() > patience) return false;
            std::unique_lock<std::mutex> lock(said);
            news.wait_for(lock, std::chrono::milliseconds(1));
            continue;
        }
        chance ^= chance << 13, chance ^= chance >> 7, chance ^= chance << 17;
        Stream *s = ready[chance % ready.size()];
        Op op = std::move(s->queue.front());
        s->queue.pop_front();
        if (op.run) op.run();
        if (op.records) op.records->done = op.ticket;
    }
    return true;
}

extern "C" {
status cuInit(unsigned) { return 0; }
status cuDriverGetVersion(int *version) { *version = 13000; return 0; }
status cuGetErrorName(status, const char **name) { *name = "CUDA_ERROR_EMULATED"; return 0; }
status cuGetErrorString(status, const char **text) { *text = "the emulator refuses it"; return 0; }
#ifndef GPUS
#define GPUS 1
#endif
status cuDeviceGetCount(int *count) { *count = GPUS; return 0; }
status cuDeviceGet(int *device, int index) { *device = index; return 0; }
status cuDeviceGetName(char *name, int size, int) { strncpy(name, "Emulated", size); return 0; }
status cuDeviceTotalMem_v2(size_t *bytes, int) { *bytes = 1ull << 30; return 0; }
status cuDeviceGetAttribute(int *value, int attribute, int) { *value = attribute == 75 ? 9 : attribute == 16 ? 2 : 0; return 0; }
status cuDevicePrimaryCtxRetain(void **context, int) { *context = &streams; return 0; }
status cuDevicePrimaryCtxRelease_v2(int) { return 0; }
status cuCtxSetCurrent(void *) { return 0; }
status cuMemGetInfo_v2(size_t *free_bytes, size_t *total) { *free_bytes = *total = 1ull << 30; return 0; }
status cuMemAlloc_v2(address *memory, size_t bytes) {
    if (bytes > (1ull << 30)) return 2;
    void *found = aligned_alloc(256, (bytes + 255) / 256 * 256);
    memset(found, 0xff, bytes);
    *memory = (address)(size_t)found;
    return 0;
}
status cuMemFree_v2(address memory) { free((void *)(size_t)memory); return 0; }
status cuMemHostAlloc(void **memory, size_t bytes, unsigned) { *memory = malloc(bytes); return 0; }
status cuMemFreeHost(void *memory) { free(memory); return 0; }
status cuMemcpyHtoDAsync_v2(address to, const void *from, size_t n, void *s) { return issue_run(s, [=] { memcpy((void *)(size_t)to, from, n); }); }
status cuMemcpyDtoHAsync_v2(void *to, address from, size_t n, void *s) { return issue_run(s, [=] { memcpy(to, (void *)(size_t)from, n); }); }
status cuMemcpyDtoDAsync_v2(address to, address from, size_t n, void *s) {
    return issue_run(s, [=] { memcpy((void *)(size_t)to, (void *)(size_t)from, n); });
}
status cuMemsetD8Async(address to, unsigned char byte, size_t n, void *s) { return issue_run(s, [=] { memset((void *)(size_t)to, byte, n); }); }
status cuStreamCreate(void **stream, unsigned) { Stream *s = new Stream; streams.push_back(s); *stream = s; return 0; }
status cuStreamDestroy_v2(void *) { return 0; }
status cuStreamSynchronize(void *stream) { return capture.graph || !run_until_empty((Stream *)stream) ? ILLEGAL : 0; }
status cuStreamWaitEvent(void *raw, void *event, unsigned) {
    // A stream joins a capture by waiting for an event recorded in it.
    if (capture.graph && capture.events.count((Event *)event)) capture.joined.insert((Stream *)raw);
    return issue(raw, [event](Stream *s) { put(s, Op{nullptr, nullptr, (Event *)event, nullptr, ((Event *)event)->asked}); });
}
status cuEventCreate(void **event, unsigned) { *event = new Event; return 0; }
status cuEventRecord(void *event, void *raw) {
    if (capture.graph && capture.joined.count((Stream *)raw)) capture.events.insert((Event *)event);
    return issue(raw, [event](Stream *s) { put(s, Op{nullptr, nullptr, nullptr, (Event *)event, ++((Event *)event)->asked}); });
}
status cuEventDestroy_v2(void *) { return 0; }
status cuModuleLoadData(void **module, const void *image) { return (*module = dlopen((const char *)image, RTLD_NOW)) ? 0 : NOT_FOUND; }
status cuModuleUnload(void *) { return 0; }
status cuModuleGetFunction(void **function, void *module, const char *) { return (*function = dlsym(module, "emulated_run")) ? 0 : NOT_FOUND; }
status cuFuncSetAttribute(void *, int attribute, int value) { return attribute == 8 && value <= 163 << 10 ? 0 : INVALID; }
status cuLaunchKernel(void *function, unsigned gx, unsigned, unsigned, unsigned bx, unsigned by, unsigned, unsigned, void *stream,
                      void **parameters, void **) {
    if (!gx || !bx || !by || bx * by > 1024) return INVALID;
    // Called without parameters, the kernel returns their number.
    auto run = (int (*)(void **))function;
    std::vector<uint64_t> copies(run(nullptr));
    for (size_t i = 0; i < copies.size(); ++i) memcpy(&copies[i], parameters[i], 8);
    return issue_run(stream, [run, copies]() mutable {
        std::vector<void *> places;
        for (uint64_t &copy : copies) places.push_back(&copy);
        run(places.data());
    });
}
status cuStreamBeginCapture_v2(void *stream, int) {
    capture.graph = new Graph;
    capture.origin = (Stream *)stream;
    capture.joined = {capture.origin};
    capture.events.clear();
    return 0;
}
status cuStreamEndCapture(void *, void **graph) { *graph = capture.graph; capture.graph = nullptr; return 0; }
status cuGraphInstantiateWithFlags(void **ready, void *graph, unsigned long long) { *ready = graph; return 0; }
status cuGraphLaunch(void *graph, void *) {
    for (Recorded &one : ((Graph *)graph)->work) one.issue(one.stream);
    return 0;
}
status cuGraphExecDestroy(void *) { return 0; }
status cuGraphDestroy(void *) { return 0; }

// NVRTC: the machine code is the path of a library.
struct Program { std::string source, file; };
status nvrtcVersion(int *major, int *minor) { *major = 13, *minor = 0; return 0; }
status nvrtcCreateProgram(Program **made, const char *source, const char *, int, const char *const *, const char *const *) {
    *made = new Program{source, ""};
    return 0;
}
static const char *BEFORE = R"(
#include <stddef.h>
// Headers would take longer to compile than the kernel.
#define memcpy __builtin_memcpy
#define isfinite __builtin_isfinite
#define ONE(g) extern "C" double g(double); extern "C" float g##f(float);
#define TWO(g) extern "C" double g(double, double); extern "C" float g##f(float, float);
ONE(exp) ONE(expm1) ONE(log) ONE(log1p) ONE(tanh) ONE(sqrt)
ONE(cbrt) ONE(sin) ONE(cos) ONE(tan) ONE(erf) ONE(erfc)
ONE(fabs) ONE(floor) ONE(ceil) ONE(rint) ONE(round)
TWO(fmod) TWO(pow) TWO(atan2)
#define __device__
#define __global__
#define __shared__
#define __forceinline__ inline
#define __align__(n) alignas(n)
#define __launch_bounds__(n)
static inline size_t __cvta_generic_to_shared(const void *p) { return (size_t)p; }
extern "C" float fmaf(float, float, float);
struct Place { int x, y, z; };
static thread_local Place threadIdx, blockIdx, blockDim = {1, 1, 1}, gridDim = {1, 1, 1};
#ifdef TILES
#include <ucontext.h>
enum { ALL = 128, WARP = 32 };
static thread_local ucontext_t whole, threads[ALL];
static thread_local char stacks[ALL][1 << 16];
static thread_local bool ended[ALL];
static thread_local int left_of;
static thread_local unsigned int came[ALL / WARP + 1], turn[ALL / WARP + 1];
static thread_local unsigned long long said[2][ALL][6];
alignas(16) static thread_local unsigned char shared_memory[163 << 10];
static inline void next_thread() {
    int me = threadIdx.x, next = me;
    do next = (next + 1) % ALL; while (ended[next] && next != me);
    if (next == me) return;
    threadIdx.x = next;
    swapcontext(&threads[me], &threads[next]);
    threadIdx.x = me;
}
// Waits until all threads of a warp, or of the block, have arrived; returns the number of the turn that this ends.
static inline unsigned int meet(int group, int members) {
    unsigned int mine = turn[group];
    if (++came[group] == (unsigned int)members) came[group] = 0, ++turn[group];
    else while (turn[group] == mine) next_thread();
    return mine;
}
static inline void __syncthreads() { meet(ALL / WARP, ALL); }
static inline void __syncwarp() { meet(threadIdx.x / WARP, WARP); }
static inline int __syncthreads_or(int mine) {
    static thread_local bool all[ALL];
    all[threadIdx.x] = mine;
    __syncthreads();
    bool any = false;
    for (bool one : all) any = any || one;
    __syncthreads();
    return any;
}
// Exchanges words between the lanes of a warp. Consecutive turns use different memory, since a lane may be one turn
// ahead.
static inline unsigned long long (*told(int words, const unsigned long long *mine))[6] {
    unsigned int at = turn[threadIdx.x / WARP] % 2;
    for (int i = 0; i < words; ++i) said[at][threadIdx.x][i] = mine[i];
    meet(threadIdx.x / WARP, WARP);
    return &said[at][threadIdx.x / WARP * WARP];
}
static inline unsigned int __shfl_xor_sync(unsigned int, unsigned int x, int distance) {
    unsigned long long mine = x;
    auto all = told(1, &mine);
    return (unsigned int)all[threadIdx.x % WARP ^ distance][0];
}
template <typename M> static inline void loaded_matrices(M &m, int count, bool turned, const void *row) {
    unsigned long long mine = (size_t)row;
    auto all = told(1, &mine);
    int lane = threadIdx.x % WARP;
    for (int i = 0; i < count; ++i) {
        auto element = [&](int r, int c) { return (unsigned int)((const unsigned short *)(size_t)all[8 * i + r][0])[c]; };
        int a = lane / 4, b = lane % 4 * 2;
        m[i] = turned ? element(b, a) | element(b + 1, a) << 16 : element(a, b) | element(a, b + 1) << 16;
    }
}
template <typename Number> static inline void multiplied(float (&c)[4], const unsigned int (&a)[4], const unsigned int (&b)[2], Number number) {
    unsigned long long mine[6] = {a[0], a[1], a[2], a[3], b[0], b[1]};
    auto all = told(6, mine);
    int lane = threadIdx.x % WARP;
    for (int e = 0; e < 4; ++e) {
        int row = lane / 4, column = lane % 4 * 2 + e % 2;
        float sum = 0;
        for (int k = 0; k < 16; ++k) {
            int of = k % 8 / 2, high = k / 8, half = k % 2 * 16;
            sum += number((unsigned short)(all[4 * row + of][e / 2 + 2 * high] >> half)) * number((unsigned short)(all[4 * column + of][4 + high] >> half));
        }
        c[e] += sum;
    }
}
#else
static inline void __syncthreads() {}
static inline void __syncwarp() {}
static inline int __syncthreads_or(int mine) { return mine; }
template <typename T> static inline T __shfl_xor_sync(unsigned int, T x, int) { return x; }
template <typename M> static inline void loaded_matrices(M &, int, bool, const void *) {}
template <typename Number> static inline void multiplied(float (&)[4], const unsigned int (&)[4], const unsigned int (&)[2], Number) {}
#endif
static inline float __uint_as_float(unsigned int x) { float y; memcpy(&y, &x, 4); return y; }
static inline float __int_as_float(int x) { float y; memcpy(&y, &x, 4); return y; }
static inline unsigned int __float_as_uint(float x) { unsigned int y; memcpy(&y, &x, 4); return y; }
static inline double __longlong_as_double(long long x) { double y; memcpy(&y, &x, 8); return y; }
static inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
static inline int __clzll(long long x) { return x ? __builtin_clzll(x) : 64; }
static inline float rsqrtf(float x) { return 1 / sqrtf(x); }
static inline double rsqrt(double x) { return 1 / sqrt(x); }
template <typename T> static inline T atomicAdd(T *p, T x) { T old = *p; *p += x; return old; }
template <typename T> static inline T atomicCAS(T *p, T expected, T x) {
    T old = *p;
    if (old == expected) *p = x;
    return old;
}
)";
// A block has one thread or, for columns, one row of threads; so there is nothing to combine.
static const char *BETWEEN = R"(
template <typename T, typename F> static T alone(T value, double *) { return value; }
#define over_block alone
#define over_column alone
)";
static const char *AFTER = R"(
template <int... I> struct Numbers {};
#ifdef TILES
static thread_local void (*body)(void *), *given;
static void thread() {
    body(given);
    ended[threadIdx.x] = true;
    // The remaining threads continue; the last one returns.
    if (--left_of) next_thread();
    setcontext(&whole);
}
#endif
template <typename... A, int... I> static int call(void (*kernel)(A...), void **all, Numbers<I...>) {
#ifdef TILES
    if (all) {
        auto run = [&] { kernel(*(A *)all[I]...); };
        body = [](void *f) { (*(decltype(run) *)f)(); };
        given = &run;
        left_of = ALL;
        for (int t = 0; t < ALL; ++t) {
            ended[t] = false;
            getcontext(&threads[t]);
            threads[t].uc_stack.ss_sp = stacks[t];
            threads[t].uc_stack.ss_size = sizeof stacks[t];
            makecontext(&threads[t], thread, 0);
        }
        threadIdx.x = 0;
        swapcontext(&whole, &threads[0]);
    }
    return sizeof...(A);
#endif
    if (all) for (threadIdx.x = 0; threadIdx.x < blockDim.x; ++threadIdx.x) kernel(*(A *)all[I]...);
    return sizeof...(A);
}
template <typename... A> static int call(void (*kernel)(A...), void **all) { return call(kernel, all, Numbers<__integer_pack(sizeof...(A))...>()); }
)";
// Replaces every line from `start` to its end.
static void replace_lines(std::string &text, const std::string &start, const std::string &by) {
    for (size_t from; (from = text.find(start)) != std::string::npos;) text.replace(from, text.find('\n', from) - from, by);
}
status nvrtcCompileProgram(Program *program, int, const char *const *) {
    const std::string bounds = "__launch_bounds__(128) ", start = "extern \"C\" __global__ void ";
    bool tiles = program->source.rfind(bounds) != std::string::npos;
    if (tiles) program->source.erase(program->source.rfind(bounds), bounds.size());
    size_t at = program->source.rfind(start);
    if (at == std::string::npos) return 6;
    std::string prelude = program->source.substr(0, at), kernel = program->source.substr(at);
    std::string name = kernel.substr(start.size(), kernel.find('(') - start.size());
    // Instructions convert half precision on a GPU; the compiler does so here.
    replace_lines(prelude, "asm(\"cvt.f32.f16", "_Float16 h; memcpy(&h, &x.bits, 2); result = (float)h;");
    replace_lines(prelude, "asm(\"cvt.rn.f16.f32", "_Float16 h = (_Float16)x; memcpy(&result.bits, &h, 2);");
    // The same for matrices that the threads of a warp load and multiply.
    replace_lines(prelude, "asm volatile(\"ldmatrix.sync.aligned.m8n8.x4.shared", "loaded_matrices(m, 4, false, row);");
    replace_lines(prelude, "asm volatile(\"ldmatrix.sync.aligned.m8n8.x2.shared", "loaded_matrices(m, 2, false, row);");
    replace_lines(prelude, "asm volatile(\"ldmatrix.sync.aligned.m8n8.x2.trans", "loaded_matrices(m, 2, true, row);");
    replace_lines(prelude, "asm volatile(\"mma.sync.aligned.m16n8k16.row.col.f32.bf16", "multiplied(c, a, b, [](unsigned short x) { bf16 y; y.bits = x; return from_bf16(y); });");
    replace_lines(prelude, "asm volatile(\"mma.sync.aligned.m16n8k16.row.col.f32.f16", "multiplied(c, a, b, [](unsigned short x) { f16 y; y.bits = x; return from_f16(y); });");
    replace_lines(kernel, "extern __shared__", "unsigned char *const shared = shared_memory;");
    // Beside this library, so that they are removed together.
    Dl_info here;
    if (!dladdr((void *)&nvrtcVersion, &here)) return 6;
    std::string library = here.dli_fname, pattern = library.substr(0, library.rfind('/')) + "/kernel-XXXXXX";
    const char *folder = mkdtemp(&pattern[0]);
    if (!folder) return 6;
    std::string source = std::string(folder) + "/kernel.cpp";
    program->file = std::string(folder) + "/kernel.so";
    FILE *file = fopen(source.c_str(), "w");
    bool columns = kernel.find("is_row") != std::string::npos;
    std::string run = std::string("extern \"C\" int emulated_run(void **all) { blockDim.x = ") + (tiles ? "128" : columns ? "32" : "1") + "; return call(&" + name + ", all); }\n";
    fputs(((tiles ? "#define TILES\n" : "") + std::string(BEFORE) + prelude + BETWEEN + kernel + AFTER + run).c_str(), file);
    fclose(file);
    std::string command = "g++ -w -std=c++17 -O1 -ffp-contract=off -shared -fPIC -o " + program->file + " " + source + " 2>" + folder + "/log";
    bool failed = system(command.c_str()) != 0;
    return failed ? 6 : 0;
}
status nvrtcDestroyProgram(Program **program) { delete *program; *program = nullptr; return 0; }
status nvrtcGetCUBINSize(Program *program, size_t *size) { *size = program->file.size(); return 0; }
status nvrtcGetCUBIN(Program *program, char *code) { memcpy(code, program->file.data(), program->file.size()); return 0; }
static std::string log_of(Program *program) {
    std::string text(4000, 0);
    FILE *file = fopen((program->file.substr(0, program->file.rfind('/')) + "/log").c_str(), "r");
    if (file) text.resize(fread(&text[0], 1, text.size(), file)), fclose(file);
    return text;
}
status nvrtcGetProgramLogSize(Program *program, size_t *size) { *size = log_of(program).size() + 1; return 0; }
status nvrtcGetProgramLog(Program *program, char *log) { strcpy(log, log_of(program).c_str()); return 0; }
status nvrtcGetNumSupportedArchs(int *count) { *count = 1; return 0; }
status nvrtcGetSupportedArchs(int *numbers) { *numbers = 90; return 0; }
const char *nvrtcGetErrorString(status) { return "NVRTC_ERROR_COMPILATION"; }

// cuBLASLt as documented: column-major matrices.
struct Desc { int transposed[2] = {0, 0}; };
struct Layout { int type; uint64_t rows, columns; int64_t leading; int32_t count = 1; int64_t stride = 0; };
size_t cublasLtGetVersion() { return 130000; }
const char *cublasLtGetStatusName(status) { return "CUBLAS_STATUS_EMULATED"; }
status cublasLtCreate(void **handle) { *handle = malloc(1); return 0; }
status cublasLtDestroy(void *) { return 0; }
status cublasLtMatmulDescCreate(Desc **desc, int, int) { *desc = new Desc; return 0; }
status cublasLtMatmulDescDestroy(Desc *) { return 0; }
status cublasLtMatmulDescSetAttribute(Desc *desc, int attribute, const void *value, size_t size) {
    if (attribute != 3 && attribute != 4 || size != 4) return 7;
    memcpy(&desc->transposed[attribute - 3], value, 4);
    return 0;
}
status cublasLtMatrixLayoutCreate(Layout **layout, int type, uint64_t rows, uint64_t columns, int64_t leading) {
    *layout = new Layout{type, rows, columns, leading};
    return leading >= (int64_t)rows ? 0 : 7;
}
status cublasLtMatrixLayoutDestroy(Layout *) { return 0; }
status cublasLtMatrixLayoutSetAttribute(Layout *layout, int attribute, const void *value, size_t size) {
    if (attribute == 5 && size == 4) memcpy(&layout->count, value, 4);
    else if (attribute == 6 && size == 8) memcpy(&layout->stride, value, 8);
    else return 7;
    return 0;
}
status cublasLtMatmulPreferenceCreate(void **preference) { *preference = malloc(1); return 0; }
status cublasLtMatmulPreferenceDestroy(void *) { return 0; }
status cublasLtMatmulPreferenceSetAttribute(void *, int attribute, const void *value, size_t size) {
    if (attribute == 1) return size == 8 ? 0 : 7;
    unsigned bytes;
    memcpy(&bytes, value, 4);
    return attribute >= 5 && attribute <= 8 && size == 4 && bytes && !(bytes & (bytes - 1)) ? 0 : 7;
}
status cublasLtMatmulAlgoGetHeuristic(void *, Desc *, Layout *, Layout *, Layout *, Layout *, void *, int, void *, int *count) { *count = 1; return 0; }
static double get(int type, const void *at, uint64_t i) {
    if (type == 0) return ((const float *)at)[i];
    if (type == 1) return ((const double *)at)[i];
    if (type == 2) return (double)((const _Float16 *)at)[i];
    uint32_t bits = (uint32_t)((const uint16_t *)at)[i] << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
static void set(int type, void *at, uint64_t i, double value) {
    if (type == 0) ((float *)at)[i] = (float)value;
    else if (type == 1) ((double *)at)[i] = value;
    else if (type == 2) ((_Float16 *)at)[i] = (_Float16)value;
    else {
        float single = (float)value;
        uint32_t bits;
        memcpy(&bits, &single, 4);
        ((uint16_t *)at)[i] = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    }
}
status cublasLtMatmul(void *, Desc *desc, const void *alpha, const void *a, Layout *la, const void *b, Layout *lb, const void *beta,
                      const void *c, Layout *lc, void *d, Layout *ld, const void *, void *workspace, size_t, void *stream) {
    bool twice = la->type == 1;
    double by = twice ? *(const double *)alpha : *(const float *)alpha, kept = twice ? *(const double *)beta : *(const float *)beta;
    bool ta = desc->transposed[0], tb = desc->transposed[1];
    uint64_t m = ta ? la->columns : la->rows, k = ta ? la->rows : la->columns, n = tb ? lb->rows : lb->columns;
    if (c != d || lc != ld || m != lc->rows || n != lc->columns || k != (tb ? lb->columns : lb->rows) || !workspace) return 7;
    return issue_run(stream, [=, A = *la, B = *lb, C = *lc] {
        for (int p = 0; p < C.count; ++p)
            for (uint64_t i = 0; i < m; ++i)
                for (uint64_t j = 0; j < n; ++j) {
                    double sum = 0;
                    for (uint64_t l = 0; l < k; ++l)
                        sum += get(A.type, a, p * A.stride + (ta ? l + i * A.leading : i + l * A.leading)) *
                               get(B.type, b, p * B.stride + (tb ? j + l * B.leading : l + j * B.leading));
                    uint64_t at = p * C.stride + i + j * C.leading;
                    set(C.type, d, at, by * sum + (kept ? kept * get(C.type, c, at) : 0));
                }
    });
}

// NCCL: members publish their data on their turn in a stream, and take their results once all have done so. Members
// that are processes publish it in files of the folder that EMULATED_NCCL names.
struct Group {
    int members = 0;
    // Prefix of its files; empty if all members are threads.
    std::string files;
    std::map<std::pair<int, int>, uint64_t> sent, received;
    // By the number of the collective in the group, and by sender, receiver and number of the message.
    std::map<uint64_t, std::map<int, std::vector<char>>> collectives;
    std::map<uint64_t, int> taken;
    std::map<std::pair<int, int>, std::deque<std::vector<char>>> messages;
    bool aborted = false;
};
struct Comm { std::shared_ptr<Group> group; int rank; uint64_t number = 0; };
struct Id { char bytes[128]; };
static std::map<std::string, std::shared_ptr<Group>> groups;
static uint64_t ids = 0;
// All calls between the start and the end of a group run together.
struct Parcel { Comm *comm; int peer; bool sends; char *at; size_t bytes; void *stream; };
static thread_local bool grouped = false;
static thread_local std::vector<Parcel> parcels;
static size_t width_of(int type) { const size_t widths[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2}; return widths[type]; }

status ncclGetVersion(int *version) { *version = 22809; return 0; }
const char *ncclGetErrorString(status) { return "the emulator refuses it"; }
status ncclGetUniqueId(Id *id) {
    std::lock_guard<std::mutex> lock(said);
    memset(id, 0, sizeof *id);
    snprintf(id->bytes, sizeof id->bytes, "group-%d-%llu", (int)getpid(), (unsigned long long)++ids);
    return 0;
}
// Writes a file atomically: a reader sees all of it or none.
static void say(const std::string &file, const char *from, size_t bytes) {
    std::string other = file + ".part";
    FILE *open = fopen(other.c_str(), "w");
    fwrite(from, 1, bytes, open);
    fclose(open);
    rename(other.c_str(), file.c_str());
}
static bool is_said(const std::string &file) { return access(file.c_str(), R_OK) == 0; }
static std::vector<char> heard(const std::string &file) {
    std::vector<char> bytes;
    FILE *open = fopen(file.c_str(), "r");
    if (!open) return bytes;
    for (int byte; (byte = fgetc(open)) != EOF;) bytes.push_back((char)byte);
    fclose(open);
    return bytes;
}
static std::string of_message(const Group &group, int from, int to, uint64_t number) {
    return group.files + "-" + std::to_string(from) + "-to-" + std::to_string(to) + "-" + std::to_string(number);
}
static std::string of_member(const Group &group, uint64_t number, int rank) {
    return group.files + "-" + std::to_string(number) + "-of-" + std::to_string(rank);
}
status ncclCommInitRank(Comm **comm, int members, Id id, int rank) {
    if (const char *folder = getenv("EMULATED_NCCL")) {
        auto group = std::make_shared<Group>();
        group->members = members;
        group->files = std::string(folder) + "/" + id.bytes;
        *comm = new Comm{group, rank};
        say(of_member(*group, 0, rank), "", 0);
        auto patience = std::chrono::steady_clock::now() + std::chrono::seconds(60);
        for (int other = 0; other < members; ++other)
            while (!is_said(of_member(*group, 0, other))) {
                if (std::chrono::steady_clock::now() > patience) return 3;
                usleep(1000);
            }
        (*comm)->number = 1;
        return 0;
    }
    std::unique_lock<std::mutex> lock(said);
    auto &group = groups[id.bytes];
    if (!group) group = std::make_shared<Group>();
    auto joined = group;
    *comm = new Comm{joined, rank};
    ++joined->members;
    news.notify_all();
    return news.wait_for(lock, std::chrono::seconds(60), [&] { return joined->members == members; }) ? 0 : 3;
}
status ncclCommAbort(Comm *comm) {
    std::lock_guard<std::mutex> lock(said);
    comm->group->aborted = true;
    news.notify_all();
    return 0;
}
status ncclCommGetAsyncError(Comm *, unsigned *status) { *status = 0; return 0; }
static double number_of(int type, const char *at, size_t i) {
    if (type == 2) return ((const int32_t *)at)[i];
    if (type == 4) return ((const int64_t *)at)[i];
    if (type == 0 || type == 1) return ((const unsigned char *)at)[i];
    return get(type == 6 ? 2 : type == 7 ? 0 : type == 8 ? 1 : 3, at, i);
}
static void put_number(int type, char *at, size_t i, double value) {
    if (type == 2) ((int32_t *)at)[i] = (int32_t)value;
    else if (type == 4) ((int64_t *)at)[i] = (int64_t)value;
    else if (type == 0 || type == 1) ((unsigned char *)at)[i] = (unsigned char)value;
    else set(type == 6 ? 2 : type == 7 ? 0 : type == 8 ? 1 : 3, at, i, value);
}
// Each member publishes `given` bytes; when all have, `take` gets them by rank.
static status collective(Comm *comm, const char *from, size_t given, void *stream, std::function<void(std::map<int, std::vector<char>> &)> take) {
    uint64_t number = comm->number++;
    auto posted = std::make_shared<bool>(false);
    auto attempt = [=] {
        std::lock_guard<std::mutex> lock(said);
        Group &group = *comm->group;
        if (!group.files.empty()) {
            if (!*posted) say(of_member(group, number, comm->rank), from, given);
            *posted = true;
            for (int other = 0; other < group.members; ++other)
                if (!group.aborted && !is_said(of_member(group, number, other))) return false;
            return true;
        }
        auto &all = group.collectives[number];
        if (!*posted) {
            all[comm->rank] = std::vector<char>(from, from + given);
            *posted = true;
            news.notify_all();
        }
        return group.aborted || (int)all.size() == group.members;
    };
    auto run = [=] {
        std::lock_guard<std::mutex> lock(said);
        Group &group = *comm->group;
        if (group.aborted) return;
        if (!group.files.empty()) {
            std::map<int, std::vector<char>> all;
            for (int other = 0; other < group.members; ++other) all[other] = heard(of_member(group, number, other));
            return take(all);
        }
        take(group.collectives[number]);
        if (++group.taken[number] == group.members) group.collectives.erase(number), group.taken.erase(number);
    };
    return issue(stream, [=](Stream *s) { put(s, Op{run, attempt}); });
}
static void reduce(int type, int reduction, std::map<int, std::vector<char>> &all, size_t from, size_t count, char *to) {
    for (size_t i = 0; i < count; ++i) {
        bool first = true;
        double sum = 0;
        for (auto &member : all) {
            double x = number_of(type, member.second.data(), from + i);
            sum = first ? x : reduction == 0 ? sum + x : reduction == 1 ? sum * x : reduction == 2 ? std::max(sum, x) : std::min(sum, x);
            first = false;
        }
        put_number(type, to, i, sum);
    }
}
status ncclAllReduce(const char *from, char *to, size_t count, int type, int reduction, Comm *comm, void *stream) {
    return collective(comm, from, count * width_of(type), stream, [=](auto &all) { reduce(type, reduction, all, 0, count, to); });
}
status ncclReduceScatter(const char *from, char *to, size_t count, int type, int reduction, Comm *comm, void *stream) {
    size_t given = count * width_of(type) * comm->group->members;
    return collective(comm, from, given, stream, [=](auto &all) { reduce(type, reduction, all, comm->rank * count, count, to); });
}
status ncclAllGather(const char *from, char *to, size_t count, int type, Comm *comm, void *stream) {
    size_t given = count * width_of(type);
    return collective(comm, from, given, stream, [=](auto &all) { for (auto &m : all) memcpy(to + m.first * given, m.second.data(), given); });
}
// A send and a receive outside a group would wait for each other.
status ncclGroupStart() { grouped = true; parcels.clear(); return 0; }
status ncclSend(const char *from, size_t count, int type, int peer, Comm *comm, void *stream) {
    if (!grouped) return 5;
    parcels.push_back({comm, peer, true, (char *)from, count * width_of(type), stream});
    return 0;
}
status ncclRecv(char *to, size_t count, int type, int peer, Comm *comm, void *stream) {
    if (!grouped) return 5;
    parcels.push_back({comm, peer, false, to, count * width_of(type), stream});
    return 0;
}
status ncclGroupEnd() {
    grouped = false;
    if (parcels.empty()) return 0;
    auto all = parcels;
    auto posted = std::make_shared<bool>(false);
    auto arrived = [=] {
        std::lock_guard<std::mutex> lock(said);
        Group &group = *all[0].comm->group;
        int me = all[0].comm->rank;
        if (!*posted) {
            for (const Parcel &p : all) {
                if (!p.sends) continue;
                if (group.files.empty()) group.messages[{me, p.peer}].emplace_back(p.at, p.at + p.bytes);
                else say(of_message(group, me, p.peer, group.sent[{me, p.peer}]++), p.at, p.bytes);
            }
            *posted = true;
            news.notify_all();
        }
        std::map<int, size_t> wanted;
        for (const Parcel &p : all) if (!p.sends) ++wanted[p.peer];
        bool there = true;
        for (auto &w : wanted) {
            std::pair<int, int> way{w.first, me};
            if (group.files.empty()) there = there && group.messages[way].size() >= w.second;
            else for (size_t i = 0; i < w.second; ++i) there = there && is_said(of_message(group, w.first, me, group.received[way] + i));
        }
        return group.aborted || there;
    };
    auto run = [=] {
        std::lock_guard<std::mutex> lock(said);
        Group &group = *all[0].comm->group;
        for (const Parcel &p : all) {
            if (p.sends || group.aborted) continue;
            if (!group.files.empty()) {
                auto bytes = heard(of_message(group, p.peer, p.comm->rank, group.received[{p.peer, p.comm->rank}]++));
                if (bytes.size() == p.bytes) memcpy(p.at, bytes.data(), p.bytes);
                continue;
            }
            auto &queue = group.messages[{p.peer, p.comm->rank}];
            if (queue.front().size() == p.bytes) memcpy(p.at, queue.front().data(), p.bytes);
            queue.pop_front();
        }
    };
    return issue(all[0].stream, [=](Stream *s) { put(s, Op{run, arrived}); });
}
}
