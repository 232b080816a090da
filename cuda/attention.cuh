// What every kernel is given: the problem, a view of each array, and the two workspaces.
//
// Symbols are those of cuda/README.md: Q K V the inputs, dO the cotangent of O, UQ UK UV the cotangents of dQ dK dV, L
// the log-sum-exp of a row. The host fills one Attention per call (flashbob_cupy/kernels.py packs the same fields in
// the same order) and every launch of that call reads the same one.
//
// Specialisation macros, all set by the planner (flashbob_cupy/plan.py):
//   HEAD_DIM, VALUE_DIM   D and Dv rounded up to the granularity of the kernel family; columns past the true D are zero
//   in shared memory BFLOAT16              1: bfloat16, 0: float16 MASK_LEFT, MASK_RIGHT 1 where the band is bounded on
//   that side (causal is MASK_RIGHT with right = 0) HAS_UQ HAS_UK HAS_UV  0 where that cotangent is exactly zero: its
//   products and loads are gone QUERIES, KEYS, STAGES the tile of one CTA and the depth of its pipeline
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define DEVICE __device__ __forceinline__

// Strides count elements and are 64-bit: batches of long sequences pass 2^31 elements. data is null where the array is
// absent.
struct View {
    void* data;
    i64 batch, head, row;
};

struct Attention {
    View q, k, v, d, uq, uk, uv, o;           // inputs; d is dO
    View lse, dlse;                           // float32, one number per query
    View out_q, out_k, out_v, out_o, out_lse; // dQ/gQ, dK/gK, dV/gV, O/gdO/tO, L/alpha; null where not wanted
    float4* statistics; // (batch·query head, padded_queries): L·log2(e), D, alpha, epsilon of each query; L = +inf past
                        // the end
    float* accumulator; // fp32 sums of dQ/gQ in fragment order, (batch·query head, padded_queries, HEAD_DIM)
    int batches, query_heads, key_heads, group; // group = query heads per key head
    int queries, keys, dim, value_dim;          // M, N, D, Dv
    int padded_queries;                         // M rounded up so that no tile of any kernel leaves the workspaces
    int first_query,
        first_key;   // queries before the first see no key; keys before the first are seen by no query: never read
    int shift;       // N - M: aligns the diagonal bottom-right
    int left, right; // the band: i+shift-left <= j <= i+shift+right
    float scale;     // tau
};

constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;
#define INFINITY_F __int_as_float(0x7f800000)

template <class T>
DEVICE T* at(const View& view, int batch, int head, i64 row = 0) {
    return static_cast<T*>(view.data) + batch * view.batch + head * view.head + row * view.row;
}
