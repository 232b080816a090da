// Stands for cuda/ptx.cuh when kernels run on a CPU: the same functions, carried out by runtime.cpp.
#pragma once
#include "attention.cuh"

inline u32 shared_base() { return emu_shared_base(); }
inline float load_shared(u32 a, EMU_SITE) {
    float x;
    emu_shared_load(a, &x, 4, SITE);
    return x;
}
inline float2 load_shared_2(u32 a, EMU_SITE) {
    float2 x;
    emu_shared_load(a, &x, 8, SITE);
    return x;
}
inline float4 load_shared_4(u32 a, EMU_SITE) {
    float4 x;
    emu_shared_load(a, &x, 16, SITE);
    return x;
}
inline void store_shared(u32 a, float x, EMU_SITE) { emu_shared_store(a, &x, 4, SITE); }
inline void store_shared(u32 a, u32 x, EMU_SITE) { emu_shared_store(a, &x, 4, SITE); }
inline void store_shared_4(u32 a, float x, float y, float z, float w, EMU_SITE) {
    float4 v = {x, y, z, w};
    emu_shared_store(a, &v, 16, SITE);
}

inline void copy_async(u32 to, const void* from, bool valid, EMU_SITE) { emu_copy_async(to, from, valid, SITE); }
inline void copy_async_commit() { emu_copy_async_commit(); }
template <int pending>
inline void copy_async_wait(EMU_SITE) {
    emu_copy_async_wait(pending, SITE);
}

inline void load_matrices(u32 (&r)[4], u32 a, EMU_SITE) { emu_load_matrices(r, a, 0, SITE); }
inline void load_matrices_transposed(u32 (&r)[4], u32 a, EMU_SITE) { emu_load_matrices(r, a, 1, SITE); }
inline void store_matrices_transposed(u32 a, u32 r0, u32 r1, u32 r2, u32 r3, EMU_SITE) {
    u32 r[4] = {r0, r1, r2, r3};
    emu_store_matrices(a, r, 1, SITE);
}

inline void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, EMU_SITE) { emu_mma(d, a, b0, b1, BFLOAT16, SITE); }

// ex2.approx.ftz and lg2.approx.ftz: subnormal arguments and results are zero.
inline float emu_flush(float x) { return fabsf(x) < 1.17549435e-38f ? copysignf(0.0f, x) : x; }
inline float exp2_approx(float x) { return emu_flush(exp2f(emu_flush(x))); }
inline float log2_approx(float x) { return emu_flush(log2f(emu_flush(x))); }
inline u32 pack(float low, float high) { return emu_half(low, BFLOAT16) | (u32)emu_half(high, BFLOAT16) << 16; }
inline float2 unpack(u32 x) { return {emu_float((u16)x, BFLOAT16), emu_float((u16)(x >> 16), BFLOAT16)}; }

inline float shuffle_xor(float x, int mask, EMU_SITE) {
    return __uint_as_float(emu_shuffle_xor(__float_as_uint(x), mask, SITE));
}
inline void sync_threads(EMU_SITE) { emu_sync(0, 0, SITE); }
inline void sync_named(int id, int threads, EMU_SITE) { emu_sync(id, threads, SITE); }

inline void reduce_add(float* p, float x, EMU_SITE) { emu_reduce_add(p, &x, 1, SITE); }
inline void reduce_add_4(float* p, float x, float y, float z, float w, EMU_SITE) {
    float v[4] = {x, y, z, w};
    emu_reduce_add(p, v, 4, SITE);
}

inline u32 opaque(u32 x) { return x; }
