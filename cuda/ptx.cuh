// One-instruction wrappers: the only inline assembly of the portable kernels, and the seam at which tests run the same
// kernels on a CPU (tests/emulator). Shared memory is addressed by 32-bit offsets throughout. Half-precision pairs
// travel as u32, the lower half first.
#pragma once
#include "attention.cuh"

// ---- shared memory -------------------------------------------------------------------------------------------------
DEVICE u32 shared_base() {
    extern __shared__ __align__(1024) u8 dynamic_shared[];
    return (u32)__cvta_generic_to_shared(dynamic_shared);
}
DEVICE float load_shared(u32 a) {
    float x;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(a));
    return x;
}
DEVICE float2 load_shared_2(u32 a) {
    float2 x;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(a));
    return x;
}
DEVICE float4 load_shared_4(u32 a) {
    float4 x;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "r"(a));
    return x;
}
DEVICE void store_shared(u32 a, float x) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(a), "f"(x) : "memory");
}
DEVICE void store_shared(u32 a, u32 x) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(a), "r"(x) : "memory");
}
DEVICE void store_shared_4(u32 a, float x, float y, float z, float w) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(a), "f"(x), "f"(y), "f"(z), "f"(w) : "memory");
}

// ---- global memory -> shared memory --------------------------------------------------------------------------------
// 16 bytes; zeros where not valid, and then the source is not read.
DEVICE void copy_async(u32 to, const void* from, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0) : "memory");
}
DEVICE void copy_async_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int pending>
DEVICE void copy_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

// ---- 8x8 matrices of halves between shared memory and registers ----------------------------------------------------
DEVICE void load_matrices(u32 (&r)[4], u32 a) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(a));
}
DEVICE void load_matrices_transposed(u32 (&r)[4], u32 a) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(a));
}
// sm_90 and later.
DEVICE void store_matrices_transposed(u32 a, u32 r0, u32 r1, u32 r2, u32 r3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(a), "r"(r0), "r"(r1),
                 "r"(r2), "r"(r3)
                 : "memory");
}

// ---- tensor cores: d (16x8, fp32) += a (16x16) b (16x8) ------------------------------------------------------------
DEVICE void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if BFLOAT16
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, "
                 "%1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

// ---- arithmetic ----------------------------------------------------------------------------------------------------
DEVICE float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
DEVICE float log2_approx(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
DEVICE u32 pack(float low, float high) {
    u32 r;
#if BFLOAT16
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
#else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
#endif
    return r;
}
DEVICE float2 unpack(u32 x) {
#if BFLOAT16
    return make_float2(__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u));
#else
    float2 r;
    asm("{ .reg .f16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b; }"
        : "=f"(r.x), "=f"(r.y)
        : "r"(x));
    return r;
#endif
}

// ---- threads of a warp and of a CTA --------------------------------------------------------------------------------
DEVICE float shuffle_xor(float x, int mask) {
    return __shfl_xor_sync(0xffffffffu, x, mask);
}
DEVICE void sync_threads() {
    __syncthreads();
}
DEVICE void sync_named(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ---- fp32 sums in global memory ------------------------------------------------------------------------------------
DEVICE void reduce_add(float* p, float x) {
    asm volatile("red.global.add.f32 [%0], %1;" ::"l"(p), "f"(x) : "memory");
}
// sm_90 and later; p is 16-byte aligned.
DEVICE void reduce_add_4(float* p, float x, float y, float z, float w) {
    asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(p), "f"(x), "f"(y), "f"(z), "f"(w) : "memory");
}
