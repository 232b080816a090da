// One-instruction wrappers for Hopper (sm_90a): the only inline assembly of the kernels in this folder besides
// cuda/ptx.cuh, and the seam at which tests run the same kernels on a CPU.
//
// clang-format off
// Barriers: 8 bytes of shared memory at `bar`. A phase completes when `count` arrivals and all expected bytes have come.
//   barrier_init(bar, count)      by one thread, once; then barrier_init_fence() by it and sync_threads() by all
//   barrier_expect(bar, bytes)    one arrival that also adds `bytes` to what the current phase waits for
//   barrier_arrive(bar)           one arrival
//   barrier_arrive_in(bar, cta)   one arrival at the barrier of the same place in that CTA of the cluster
//   barrier_wait(bar, parity)     returns when the phase of that parity is complete. A fresh barrier is in phase 0, so
//                                 wait(0) waits for the first completion and wait(1) returns at once
// Copies by the TMA unit: issued by one thread, asynchronous, credited to `bar`.
//   load_tensor(to, map, bar, column, row, head, batch)
//                                 the box {64 columns, R rows, 1, 1} of a rank-4 map {columns, rows, heads, batches} to
//                                 shared memory `to`, 1024-byte aligned: 128 bytes a row, 16-byte chunk c of row r at
//                                 chunk c ^ (r & 7). What lies outside the map, at negative coordinates too, is zero and
//                                 is not read; R·128 bytes are credited in every case
//   load_tensor_multicast(to, map, bar, column, row, head, batch, ctas)
//                                 the same to the same place in the first `ctas` CTAs of the cluster, credited to the
//                                 barrier of the same place in each
//   load_bulk(to, from, bytes, bar)
//                                 a multiple of 16 bytes of global memory to shared memory
// proxy_fence()                   makes this thread's ordinary stores to shared memory visible to wgmma and TMA; a
//                                 barrier must still follow
// Clusters: CTAs that run side by side and reach each other's shared memory, as long as it is there.
//   cluster_arrive(), cluster_wait()
//                                 a barrier of all threads of the cluster that have not ended
// registers_grow<n>(), registers_shrink<n>()
//                                 the whole warpgroup changes how many registers a thread has
// uniform(x)                      x of lane 0, which tells the compiler that it is the same in the whole warp
// Tensor cores: a warpgroup of 128 threads executes wgmma together. A is 64 x 16, B is 16 x N; d += A B in fp32 when
// `accumulate`, else d = A B. d[4b + 2h + j] of warp w, lane l is row 16w + l/4 + 8h, column 8b + 2(l%4) + j.
//   wgmma<N, TA, TB>(d, a, b, accumulate)
//                                 A and B by descriptors of shared memory (tiles.cuh); TA, TB 0: K-major, 1: M-/N-major
//   wgmma<N, TB>(d, fragment, b, accumulate)
//                                 A from registers: u32 j holds row 16w + l/4 + 8(j%2), columns 2(l%4) + 8(j/2) + {0, 1}
//   wgmma_fence()                 before the first wgmma, and after other instructions wrote registers it reads or adds to
//   wgmma_commit(), wgmma_wait<n>()
//                                 closes a group of wgmmas; waits until all but the last n groups are complete
//   settle(d)                     names an accumulator right after the wait that completes it, or arithmetic on it may be
//                                 moved above the wait
//   keep(fragments)               names A fragments after the wait of the group that read them, or their registers may be
//                                 reused before
// clang-format on
#pragma once
#include "ptx.cuh"

struct alignas(64) TensorMap {
    u64 w[16];
};

// ---- barriers ------------------------------------------------------------------------------------------------------
DEVICE void barrier_init(u32 bar, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}
DEVICE void barrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
DEVICE void barrier_expect(u32 bar, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
DEVICE void barrier_arrive(u32 bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
DEVICE void barrier_arrive_in(u32 bar, u32 cta) {
    asm volatile("{ .reg .b32 there;\n"
                 "mapa.shared::cluster.u32 there, %0, %1;\n"
                 "mbarrier.arrive.shared::cluster.b64 _, [there]; }" ::"r"(bar),
                 "r"(cta)
                 : "memory");
}
DEVICE void barrier_wait(u32 bar, u32 parity) {
    asm volatile("{ .reg .pred p;\n"
                 "AGAIN: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
                 "@p bra DONE;\n"
                 "bra AGAIN;\n"
                 "DONE: }" ::"r"(bar),
                 "r"(parity)
                 : "memory");
}

// ---- copies by the TMA unit ----------------------------------------------------------------------------------------
DEVICE void load_tensor(u32 to, const TensorMap& map, u32 bar, int column, int row, int head, int batch) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(to),
                 "l"(&map), "r"(column), "r"(row), "r"(head), "r"(batch), "r"(bar)
                 : "memory");
}
DEVICE void load_tensor_multicast(u32 to, const TensorMap& map, u32 bar, int column, int row, int head, int batch,
                                  int ctas) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(to),
                 "l"(&map), "r"(column), "r"(row), "r"(head), "r"(batch), "r"(bar), "h"(u16((1 << ctas) - 1))
                 : "memory");
}
DEVICE void load_bulk(u32 to, const void* from, u32 bytes, u32 bar) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(bar)
                 : "memory");
}
DEVICE void proxy_fence() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---- clusters ------------------------------------------------------------------------------------------------------
DEVICE void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
DEVICE void cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// ---- warps, registers, grids ---------------------------------------------------------------------------------------
template <int n>
DEVICE void registers_grow() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(n));
}
template <int n>
DEVICE void registers_shrink() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(n));
}
DEVICE int uniform(int x) {
    return __shfl_sync(0xffffffffu, x, 0);
}
DEVICE u32 fresh(u32 x) {
    asm volatile("" : "+r"(x));
    return x;
}
// Whether x holds in any lane of the warp.
DEVICE bool any(bool x) {
    return __any_sync(0xffffffffu, x);
}
// Every lane's accesses to memory before it are ordered before every lane's after it.
DEVICE void sync_warp() {
    __syncwarp();
}
// Arrival without waiting at a barrier that sync_named(id, threads) of the other warps waits at.
DEVICE void arrive_named(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ---- tensor cores --------------------------------------------------------------------------------------------------
DEVICE void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
DEVICE void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int pending>
DEVICE void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}
template <int n>
DEVICE void settle(float (&d)[n]) {
#pragma unroll
    for (int i = 0; i < n; i++)
        asm volatile("" : "+f"(d[i])::"memory");
}
template <int n>
DEVICE void keep(u32 (&a)[n][4]) {
#pragma unroll
    for (int t = 0; t < n; t++)
        asm volatile("" : "+r"(a[t][0]), "+r"(a[t][1]), "+r"(a[t][2]), "+r"(a[t][3])::"memory");
}

// m64nNk16 for every N that is a multiple of 16, and half of an odd one: the operand lists of the instruction, eight
// accumulators at a time.
template <int N>
struct Wgmma;
#if BFLOAT16
#    define WGMMA_TYPES ".f32.bf16.bf16 "
#else
#    define WGMMA_TYPES ".f32.f16.f16 "
#endif
// clang-format off
#define WGMMA_BIND(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define WGMMA_BIND_HALF(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define WGMMA_NAMES_0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define WGMMA_NAMES_1 "%8, %9, %10, %11, %12, %13, %14, %15"
#define WGMMA_NAMES_2 "%16, %17, %18, %19, %20, %21, %22, %23"
#define WGMMA_NAMES_3 "%24, %25, %26, %27, %28, %29, %30, %31"
#define WGMMA_NAMES_4 "%32, %33, %34, %35, %36, %37, %38, %39"
#define WGMMA_NAMES_5 "%40, %41, %42, %43, %44, %45, %46, %47"
#define WGMMA_NAMES_6 "%48, %49, %50, %51, %52, %53, %54, %55"
#define WGMMA_NAMES_7 "%56, %57, %58, %59, %60, %61, %62, %63"
#define WGMMA_NAMES_8 "%64, %65, %66, %67, %68, %69, %70, %71"
#define WGMMA_NAMES_9 "%72, %73, %74, %75, %76, %77, %78, %79"
#define WGMMA_NAMES_10 "%80, %81, %82, %83, %84, %85, %86, %87"
#define WGMMA_NAMES_11 "%88, %89, %90, %91, %92, %93, %94, %95"
#define WGMMA_NAMES_12 "%96, %97, %98, %99, %100, %101, %102, %103"
#define WGMMA_NAMES_13 "%104, %105, %106, %107, %108, %109, %110, %111"
#define WGMMA_NAMES_14 "%112, %113, %114, %115, %116, %117, %118, %119"
#define WGMMA_NAMES_15 "%120, %121, %122, %123, %124, %125, %126, %127"
#define WGMMA_LIST_16 WGMMA_NAMES_0
#define WGMMA_LIST_24 WGMMA_LIST_16 ", %8, %9, %10, %11"
#define WGMMA_LIST_32 WGMMA_LIST_16 ", " WGMMA_NAMES_1
#define WGMMA_LIST_40 WGMMA_LIST_32 ", %16, %17, %18, %19"
#define WGMMA_LIST_48 WGMMA_LIST_32 ", " WGMMA_NAMES_2
#define WGMMA_LIST_64 WGMMA_LIST_48 ", " WGMMA_NAMES_3
#define WGMMA_LIST_80 WGMMA_LIST_64 ", " WGMMA_NAMES_4
#define WGMMA_LIST_96 WGMMA_LIST_80 ", " WGMMA_NAMES_5
#define WGMMA_LIST_112 WGMMA_LIST_96 ", " WGMMA_NAMES_6
#define WGMMA_LIST_128 WGMMA_LIST_112 ", " WGMMA_NAMES_7
#define WGMMA_LIST_144 WGMMA_LIST_128 ", " WGMMA_NAMES_8
#define WGMMA_LIST_160 WGMMA_LIST_144 ", " WGMMA_NAMES_9
#define WGMMA_LIST_176 WGMMA_LIST_160 ", " WGMMA_NAMES_10
#define WGMMA_LIST_192 WGMMA_LIST_176 ", " WGMMA_NAMES_11
#define WGMMA_LIST_208 WGMMA_LIST_192 ", " WGMMA_NAMES_12
#define WGMMA_LIST_224 WGMMA_LIST_208 ", " WGMMA_NAMES_13
#define WGMMA_LIST_240 WGMMA_LIST_224 ", " WGMMA_NAMES_14
#define WGMMA_LIST_256 WGMMA_LIST_240 ", " WGMMA_NAMES_15
#define WGMMA_BIND_16 WGMMA_BIND(0)
#define WGMMA_BIND_24 WGMMA_BIND_16, WGMMA_BIND_HALF(8)
#define WGMMA_BIND_32 WGMMA_BIND_16, WGMMA_BIND(8)
#define WGMMA_BIND_40 WGMMA_BIND_32, WGMMA_BIND_HALF(16)
#define WGMMA_BIND_48 WGMMA_BIND_32, WGMMA_BIND(16)
#define WGMMA_BIND_64 WGMMA_BIND_48, WGMMA_BIND(24)
#define WGMMA_BIND_80 WGMMA_BIND_64, WGMMA_BIND(32)
#define WGMMA_BIND_96 WGMMA_BIND_80, WGMMA_BIND(40)
#define WGMMA_BIND_112 WGMMA_BIND_96, WGMMA_BIND(48)
#define WGMMA_BIND_128 WGMMA_BIND_112, WGMMA_BIND(56)
#define WGMMA_BIND_144 WGMMA_BIND_128, WGMMA_BIND(64)
#define WGMMA_BIND_160 WGMMA_BIND_144, WGMMA_BIND(72)
#define WGMMA_BIND_176 WGMMA_BIND_160, WGMMA_BIND(80)
#define WGMMA_BIND_192 WGMMA_BIND_176, WGMMA_BIND(88)
#define WGMMA_BIND_208 WGMMA_BIND_192, WGMMA_BIND(96)
#define WGMMA_BIND_224 WGMMA_BIND_208, WGMMA_BIND(104)
#define WGMMA_BIND_240 WGMMA_BIND_224, WGMMA_BIND(112)
#define WGMMA_BIND_256 WGMMA_BIND_240, WGMMA_BIND(120)

// x0 .. x6: the numbers of the operands that follow the N / 2 accumulators.
#define WGMMA_SHAPE(N, x0, x1, x2, x3, x4, x5, x6)                                                                               \
    template <>                                                                                                                  \
    struct Wgmma<N> {                                                                                                            \
        template <int TA, int TB>                                                                                                \
        static DEVICE void shared(float (&d)[N / 2], u64 a, u64 b, int accumulate) {                                             \
            asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #x2 ", 0;\n"                                                         \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16" WGMMA_TYPES "{" WGMMA_LIST_##N "}, %" #x0 ", %" #x1        \
                         ", p, 1, 1, %" #x3 ", %" #x4 "; }"                                                                      \
                         : WGMMA_BIND_##N                                                                                        \
                         : "l"(a), "l"(b), "r"(accumulate), "n"(TA), "n"(TB));                                                   \
        }                                                                                                                        \
        template <int TB>                                                                                                        \
        static DEVICE void registers(float (&d)[N / 2], const u32 (&a)[4], u64 b, int accumulate) {                              \
            asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #x5 ", 0;\n"                                                         \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16" WGMMA_TYPES "{" WGMMA_LIST_##N "}, {%" #x0 ", %" #x1       \
                         ", %" #x2 ", %" #x3 "}, %" #x4 ", p, 1, 1, %" #x6 "; }"                                                 \
                         : WGMMA_BIND_##N                                                                                        \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(TB));                        \
        }                                                                                                                        \
    };
WGMMA_SHAPE(16, 8, 9, 10, 11, 12, 13, 14)
WGMMA_SHAPE(24, 12, 13, 14, 15, 16, 17, 18)
WGMMA_SHAPE(32, 16, 17, 18, 19, 20, 21, 22)
WGMMA_SHAPE(40, 20, 21, 22, 23, 24, 25, 26)
WGMMA_SHAPE(48, 24, 25, 26, 27, 28, 29, 30)
WGMMA_SHAPE(64, 32, 33, 34, 35, 36, 37, 38)
WGMMA_SHAPE(80, 40, 41, 42, 43, 44, 45, 46)
WGMMA_SHAPE(96, 48, 49, 50, 51, 52, 53, 54)
WGMMA_SHAPE(112, 56, 57, 58, 59, 60, 61, 62)
WGMMA_SHAPE(128, 64, 65, 66, 67, 68, 69, 70)
WGMMA_SHAPE(144, 72, 73, 74, 75, 76, 77, 78)
WGMMA_SHAPE(160, 80, 81, 82, 83, 84, 85, 86)
WGMMA_SHAPE(176, 88, 89, 90, 91, 92, 93, 94)
WGMMA_SHAPE(192, 96, 97, 98, 99, 100, 101, 102)
WGMMA_SHAPE(208, 104, 105, 106, 107, 108, 109, 110)
WGMMA_SHAPE(224, 112, 113, 114, 115, 116, 117, 118)
WGMMA_SHAPE(240, 120, 121, 122, 123, 124, 125, 126)
WGMMA_SHAPE(256, 128, 129, 130, 131, 132, 133, 134)
// clang-format on

template <int N, int TA, int TB>
DEVICE void wgmma(float (&d)[N / 2], u64 a, u64 b, bool accumulate) {
    Wgmma<N>::template shared<TA, TB>(d, a, b, accumulate);
}
template <int N, int TB>
DEVICE void wgmma(float (&d)[N / 2], const u32 (&a)[4], u64 b, bool accumulate) {
    Wgmma<N>::template registers<TB>(d, a, b, accumulate);
}
