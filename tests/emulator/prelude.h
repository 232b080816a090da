// The part of CUDA C++ that the kernels use, for a host compiler: qualifiers, built-in variables, vector types and a few intrinsics.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#define __device__
#define __global__
#define __host__
#define __constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))
#ifdef __restrict__
#undef __restrict__
#endif

struct uint3 {
    unsigned x, y, z;
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(8) int2 {
    int x, y;
};
struct alignas(16) int4 {
    int x, y, z, w;
};
struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

// Set by the runtime at every switch of fibers.
extern "C" uint3 emu_thread_index, emu_block_index, emu_grid_size, emu_block_size;
#define threadIdx emu_thread_index
#define blockIdx emu_block_index
#define gridDim emu_grid_size
#define blockDim emu_block_size
constexpr int warpSize = 32;

#define EMU_MIN_MAX(T)                                                                                                 \
    inline constexpr T min(T a, T b) { return b < a ? b : a; }                                                         \
    inline constexpr T max(T a, T b) { return a < b ? b : a; }
EMU_MIN_MAX(int)
EMU_MIN_MAX(unsigned)
EMU_MIN_MAX(long)
EMU_MIN_MAX(unsigned long)
EMU_MIN_MAX(long long)
EMU_MIN_MAX(unsigned long long)
#undef EMU_MIN_MAX
inline constexpr unsigned min(int a, unsigned b) { return min((unsigned)a, b); }
inline constexpr unsigned min(unsigned a, int b) { return min(a, (unsigned)b); }
inline constexpr unsigned max(int a, unsigned b) { return max((unsigned)a, b); }
inline constexpr unsigned max(unsigned a, int b) { return max(a, (unsigned)b); }
inline constexpr long long min(int a, long long b) { return min((long long)a, b); }
inline constexpr long long min(long long a, int b) { return min(a, (long long)b); }
inline constexpr long long max(int a, long long b) { return max((long long)a, b); }
inline constexpr long long max(long long a, int b) { return max(a, (long long)b); }
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }

template <class To, class From>
inline To emu_bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "a change of type keeps the size");
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}
inline float __int_as_float(int x) { return emu_bits<float>(x); }
inline float __uint_as_float(unsigned x) { return emu_bits<float>(x); }
inline int __float_as_int(float x) { return emu_bits<int>(x); }
inline unsigned __float_as_uint(float x) { return emu_bits<unsigned>(x); }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fdividef(float x, float y) { return x / y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __saturatef(float x) { return fminf(fmaxf(x, 0.0f), 1.0f); }
template <class T>
inline T __ldg(const T* p) {
    return *p;
}

// ---- the runtime (runtime.cpp) ---------------------------------------------------------------------------------------
// Every call carries the kernel's file and line, for reports.
struct Site {
    const char* file;
    int line;
};
#define EMU_SITE const char* emu_file = __builtin_FILE(), int emu_line = __builtin_LINE()
#define SITE (Site{emu_file, emu_line})
extern "C" {
unsigned emu_shared_base();
void emu_shared_load(unsigned a, void* to, int bytes, Site);
void emu_shared_store(unsigned a, const void* from, int bytes, Site);
void emu_copy_async(unsigned to, const void* from, int valid, Site);
void emu_copy_async_commit();
void emu_copy_async_wait(int pending, Site);
void emu_load_matrices(unsigned* r, unsigned a, int transposed, Site);
void emu_store_matrices(unsigned a, const unsigned* r, int transposed, Site);
void emu_mma(float* d, const unsigned* a, unsigned b0, unsigned b1, int bfloat16, Site);
unsigned emu_shuffle_xor(unsigned x, int mask, Site);
unsigned emu_shuffle_first(unsigned x, Site);
void emu_sync(int id, int threads, Site);
void emu_arrive(int id, int threads, Site);
void emu_sync_warp(Site);
void emu_reduce_add(float* p, const float* x, int count, Site);
unsigned short emu_half(float x, int bfloat16);
float emu_float(unsigned short x, int bfloat16);
void emu_fail(const char* message, Site);
// Hopper
void emu_mbarrier_init(unsigned bar, unsigned count, Site);
void emu_mbarrier_arrive(unsigned bar, unsigned bytes, Site);
void emu_mbarrier_arrive_in(unsigned bar, unsigned cta, Site);
void emu_mbarrier_wait(unsigned bar, unsigned parity, Site);
void emu_cluster_arrive(Site);
void emu_cluster_wait(Site);
void emu_tensor_load(unsigned to, const void* map, unsigned bar, int column, int row, int head, int batch, Site);
void emu_tensor_load_multicast(unsigned to, const void* map, unsigned bar, int column, int row, int head, int batch,
                               int ctas, Site);
void emu_bulk_load(unsigned to, const void* from, unsigned bytes, unsigned bar, Site);
void emu_proxy_fence();
void emu_wgmma_fence();
void emu_wgmma(float* d, int n, const unsigned* a, unsigned long long desc_a, unsigned long long desc_b, int ta, int tb,
               int accumulate, int bfloat16, Site);
void emu_wgmma_commit();
void emu_wgmma_wait(int pending, Site);
void emu_name(void*);
void emu_registers(int count, Site);
void emu_bulk_reduce(float* to, unsigned from, unsigned bytes, Site);
void emu_bulk_commit();
void emu_bulk_wait(int pending, int only_read, Site);
}
template <class... A, size_t... I>
inline void emu_call(void (*kernel)(A...), void** arguments, std::index_sequence<I...>) {
    kernel(*static_cast<std::remove_const_t<A>*>(arguments[I])...);
}
template <class... A>
inline void emu_call(void (*kernel)(A...), void** arguments) {
    emu_call(kernel, arguments, std::index_sequence_for<A...>());
}
