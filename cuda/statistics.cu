// What the column and row kernels of the first backward need of each query: (L·log2 e, D, 0, 0) with D = dO·O - dL; L =
// +inf, which makes P = 0, where the query sees no key and past the end. Also zeroes the fp32 accumulator that dQ is
// added to, where there is one. PAIRS 1: laid out as the Hopper kernels read them, queries 2i and 2i + 1 together, {L,
// L', 0, 0, D, D', 0, 0}. LANES lanes share a query, 8 columns each; a CTA takes 32·WARPS / LANES queries of one head.
#include "ptx.cuh"

constexpr int LANES = VALUE_DIM > 64 ? 16 : 8, THREADS = 32 * WARPS, ROWS = THREADS / LANES;
static_assert(VALUE_DIM <= 128 && ACCUMULATOR_DIM % 4 == 0, "8 columns a lane, 16 lanes a query at most");

extern "C" __global__ void __launch_bounds__(THREADS) statistics(const __grid_constant__ Attention a) {
    int tiles = (a.padded_queries + ROWS - 1) / ROWS, line = blockIdx.x / tiles, m = blockIdx.x % tiles * ROWS;
    int batch = line / a.query_heads, head = line % a.query_heads;
    int row = m + threadIdx.x / LANES, column = threadIdx.x % LANES * 8;
    bool real = row >= a.first_query && row < a.queries;

    float sum = 0.f;
    if (real && column < a.value_dim) {
        uint4 o = *reinterpret_cast<const uint4*>(at<const u16>(a.o, batch, head, row) + column);
        uint4 d = *reinterpret_cast<const uint4*>(at<const u16>(a.d, batch, head, row) + column);
        const u32 x[4] = {o.x, o.y, o.z, o.w}, y[4] = {d.x, d.y, d.z, d.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float2 value = unpack(x[i]), cotangent = unpack(y[i]);
            sum += value.x * cotangent.x + value.y * cotangent.y;
        }
    }
#pragma unroll
    for (int i = 1; i < LANES; i *= 2)
        sum += shuffle_xor(sum, i);

    if (threadIdx.x % LANES == 0 && row < a.padded_queries) {
        float l2 = INFINITY_F;
        if (real) {
            l2 = *at<const float>(a.lse, batch, head, row) * LOG2E;
            if (l2 == -INFINITY_F)
                l2 = INFINITY_F;
            if (a.dlse.data)
                sum -= *at<const float>(a.dlse, batch, head, row);
        }
        float4* rows = a.statistics + i64(line) * a.padded_queries;
        if (PAIRS) {
            float* out = reinterpret_cast<float*>(rows + row / 2 * 2) + row % 2;
            out[0] = l2;
            out[2] = 0.f;
            out[4] = sum;
            out[6] = 0.f;
        } else {
            rows[row] = make_float4(l2, sum, 0.f, 0.f);
        }
    }
    if (a.accumulator) {
        int rows = min(ROWS, a.padded_queries - m);
        float4* first = reinterpret_cast<float4*>(a.accumulator + (i64(line) * a.padded_queries + m) * ACCUMULATOR_DIM);
        for (int i = threadIdx.x; i < rows * (ACCUMULATOR_DIM / 4); i += THREADS)
            first[i] = make_float4(0.f, 0.f, 0.f, 0.f);
    }
}
