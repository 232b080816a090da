// dQ / gQ: the fp32 sums that the column kernel added up, transposed and in the order of its accumulators, times τ,
// rounded, into rows of out_q. The sums lie in blocks of 8 queries x 64 columns, 512 floats each, [query /
// 8][panel][thread of 128][4] (reduce_queries in tiles.cuh): thread t holds columns 16·(t / 32) + t % 32 / 4 and 8
// more, of queries 2·(t % 4) and one more. A thread here takes 16 columns of such a pair of queries.
#include "ptx.cuh"

constexpr int PANELS = (HEAD_DIM + 63) / 64;

extern "C" __global__ void __launch_bounds__(THREADS) finish_queries(const __grid_constant__ Attention a) {
    int per_head = a.padded_queries * PANELS * 2, tiles = (per_head + THREADS - 1) / THREADS;
    int line = blockIdx.x / tiles, index = blockIdx.x % tiles * THREADS + threadIdx.x;
    int pair = index % 4, warp = index / 4 % 4, panel = index / 16 % PANELS, block = index / 16 / PANELS;
    if (index >= per_head)
        return;
    int row = block * 8 + pair * 2, column = panel * 64 + warp * 16;
    if (row >= a.queries || column >= a.dim)
        return;

    i64 head = i64(line) * a.padded_queries * PANELS * 64;
    const float4* from =
        reinterpret_cast<const float4*>(a.accumulator + head) + (i64(block) * PANELS + panel) * 128 + warp * 32 + pair;
    float x[2][2][8]; // columns below and from 8 on, query, column
#pragma unroll
    for (int i = 0; i < 8; i++) {
        float4 sums = from[4 * i];
        x[0][0][i] = sums.x;
        x[0][1][i] = sums.y;
        x[1][0][i] = sums.z;
        x[1][1][i] = sums.w;
    }
#pragma unroll
    for (int q = 0; q < 2; q++) {
        if (row + q >= a.queries)
            continue;
        u16* out = at<u16>(a.out_q, line / a.query_heads, line % a.query_heads, row + q) + column;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            if (column + 8 * h >= a.dim)
                continue;
            u32 y[4];
#pragma unroll
            for (int i = 0; i < 4; i++)
                y[i] = pack(a.scale * x[h][q][2 * i], a.scale * x[h][q][2 * i + 1]);
            reinterpret_cast<uint4*>(out)[h] = make_uint4(y[0], y[1], y[2], y[3]);
        }
    }
}
