// Arrays that no kernel can use in place (columns not adjacent, odd alignment, a width that is no multiple of 8) to and
// from padded contiguous rows. GATHER 1: caller's array -> padded rows, zeros past its columns; 0: padded rows ->
// caller's array. Elements are 2 bytes and are not interpreted. A thread moves 8 columns of one row. Neighbouring
// threads follow the axis that is adjacent in the caller's array.
#include "attention.cuh"

struct Copy {
    View from, to;
    i64 column;                      // stride of the columns of the caller's array
    int heads, rows, columns, width; // width: columns of the padded rows, a multiple of 8
};

extern "C" __global__ void __launch_bounds__(THREADS) copy_rows(const __grid_constant__ Copy c) {
    int chunks = c.width / 8, per_head = c.rows * chunks, tiles = (per_head + THREADS - 1) / THREADS;
    int line = blockIdx.x / tiles, index = blockIdx.x % tiles * THREADS + threadIdx.x;
    if (index >= per_head)
        return;
    bool down = (GATHER ? c.from : c.to).row == 1;
    int row = down ? index % c.rows : index / chunks, first = (down ? index / c.rows : index % chunks) * 8;
    const u16* from = at<const u16>(c.from, line / c.heads, line % c.heads, row) + first * (GATHER ? c.column : 1);
    u16* to = at<u16>(c.to, line / c.heads, line % c.heads, row) + first * (GATHER ? 1 : c.column);

    if (GATHER) {
        u32 x[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u32 low = first + 2 * i < c.columns ? from[2 * i * c.column] : 0,
                high = first + 2 * i + 1 < c.columns ? from[(2 * i + 1) * c.column] : 0;
            x[i] = low | high << 16;
        }
        *reinterpret_cast<uint4*>(to) = make_uint4(x[0], x[1], x[2], x[3]);
    } else {
        uint4 x = *reinterpret_cast<const uint4*>(from);
        const u32 halves[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int i = 0; i < 8; i++)
            if (first + i < c.columns)
                to[i * c.column] = u16(halves[i / 2] >> (i % 2 * 16));
    }
}
