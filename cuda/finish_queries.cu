// dQ / gQ: the fp32 sums that the column kernel added up in fragment order, times τ, rounded, into rows of out_q.
// A thread takes 8 columns of two queries 8 apart: the 16 numbers that four lanes of a fragment hold.
#include "fragment.cuh"

constexpr int BLOCKS = HEAD_DIM / 8; // of 8 columns
static_assert(HEAD_DIM % 8 == 0, "a fragment has 8 columns");

extern "C" __global__ void __launch_bounds__(THREADS) finish_queries(const __grid_constant__ Attention a) {
    int per_head = a.padded_queries / 16 * 8 * BLOCKS, tiles = (per_head + THREADS - 1) / THREADS;
    int line = blockIdx.x / tiles, index = blockIdx.x % tiles * THREADS + threadIdx.x;
    int d8 = index % BLOCKS, r = index / BLOCKS % 8, row16 = index / BLOCKS / 8;
    if (index >= per_head || 8 * d8 >= a.dim)
        return;

    const float* head = a.accumulator + i64(line) * a.padded_queries * HEAD_DIM;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        int row = 16 * row16 + r + 8 * h;
        if (row >= a.queries)
            continue;
        u32 x[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float low = head[fragment_offset(row16, d8, 4 * r + i, 2 * h)],
                  high = head[fragment_offset(row16, d8, 4 * r + i, 2 * h + 1)];
            x[i] = pack(a.scale * low, a.scale * high);
        }
        u16* out = at<u16>(a.out_q, line / a.query_heads, line % a.query_heads, row) + 8 * d8;
        *reinterpret_cast<uint4*>(out) = make_uint4(x[0], x[1], x[2], x[3]);
    }
}
