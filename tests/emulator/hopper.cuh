// Stands for cuda/sm90/hopper.cuh when kernels run on a CPU: the same functions, carried out by runtime.cpp.
#pragma once
#include "../ptx.cuh"

struct alignas(64) TensorMap {
    u64 w[16];
};

inline void barrier_init(u32 bar, u32 count, EMU_SITE) { emu_mbarrier_init(bar, count, SITE); }
inline void barrier_init_fence() {}
inline void barrier_expect(u32 bar, u32 bytes, EMU_SITE) { emu_mbarrier_arrive(bar, bytes, SITE); }
inline void barrier_arrive(u32 bar, EMU_SITE) { emu_mbarrier_arrive(bar, 0, SITE); }
inline void barrier_arrive_in(u32 bar, u32 cta, EMU_SITE) { emu_mbarrier_arrive_in(bar, cta, SITE); }
inline void barrier_wait(u32 bar, u32 parity, EMU_SITE) { emu_mbarrier_wait(bar, parity, SITE); }

inline void cluster_arrive(EMU_SITE) { emu_cluster_arrive(SITE); }
inline void cluster_wait(EMU_SITE) { emu_cluster_wait(SITE); }

inline void load_tensor(u32 to, const TensorMap& map, u32 bar, int column, int row, int head, int batch, EMU_SITE) {
    emu_tensor_load(to, &map, bar, column, row, head, batch, SITE);
}
inline void load_tensor_multicast(u32 to, const TensorMap& map, u32 bar, int column, int row, int head, int batch,
                                  int ctas, EMU_SITE) {
    emu_tensor_load_multicast(to, &map, bar, column, row, head, batch, ctas, SITE);
}
inline void load_bulk(u32 to, const void* from, u32 bytes, u32 bar, EMU_SITE) {
    emu_bulk_load(to, from, bytes, bar, SITE);
}
inline void proxy_fence() { emu_proxy_fence(); }

template <int n>
inline void registers_grow(EMU_SITE) {
    emu_registers(n, SITE);
}
template <int n>
inline void registers_shrink(EMU_SITE) {
    emu_registers(n, SITE);
}
inline int uniform(int x, EMU_SITE) { return (int)emu_shuffle_first((unsigned)x, SITE); }
inline u32 fresh(u32 x) { return x; }
inline bool any(bool x, EMU_SITE) {
    u32 found = x;
    for (int i = 1; i < 32; i *= 2) found |= emu_shuffle_xor(found, i, SITE);
    return found;
}
inline void sync_warp(EMU_SITE) { emu_sync_warp(SITE); }
inline void arrive_named(int id, int threads, EMU_SITE) { emu_arrive(id, threads, SITE); }

inline void wgmma_fence() { emu_wgmma_fence(); }
inline void wgmma_commit() { emu_wgmma_commit(); }
template <int pending>
inline void wgmma_wait(EMU_SITE) {
    emu_wgmma_wait(pending, SITE);
}
// Naming a register keeps its variable alive up to here.
template <int n>
inline void settle(float (&d)[n]) {
    emu_name(d);
}
template <int n>
inline void keep(u32 (&a)[n][4]) {
    emu_name(a);
}
template <int N, int TA, int TB>
inline void wgmma(float (&d)[N / 2], u64 a, u64 b, bool accumulate, EMU_SITE) {
    emu_wgmma(d, N, nullptr, a, b, TA, TB, accumulate, BFLOAT16, SITE);
}
template <int N, int TB>
inline void wgmma(float (&d)[N / 2], const u32 (&a)[4], u64 b, bool accumulate, EMU_SITE) {
    emu_wgmma(d, N, a, 0, b, 0, TB, accumulate, BFLOAT16, SITE);
}
