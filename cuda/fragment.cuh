// The fp32 sums of dQ / gQ that many CTAs add to: kept in the order in which tensor cores hand out results, so that
// each lane adds four neighbouring numbers. Unit: 16 queries x 8 columns, 128 floats; units of one head lie [16-query
// row][8-column block]. finish_queries puts them back into rows.
#pragma once
#include "ptx.cuh"

#if __CUDA_ARCH__ >= 900
// One 16-byte reduction a lane.
DEVICE i64 fragment_offset(int row16, int d8, int lane, int j) {
    return (i64(row16) * (HEAD_DIM / 8) + d8) * 128 + lane * 4 + j;
}
#else
// Four 4-byte reductions, each over 128 contiguous bytes a warp.
DEVICE i64 fragment_offset(int row16, int d8, int lane, int j) {
    return (i64(row16) * (HEAD_DIM / 8) + d8) * 128 + j * 32 + lane;
}
#endif

DEVICE void reduce_add_fragment(float* head, int row16, int d8, int lane, const float (&c)[4]) {
#if __CUDA_ARCH__ >= 900
    reduce_add_4(head + fragment_offset(row16, d8, lane, 0), c[0], c[1], c[2], c[3]);
#else
#    pragma unroll
    for (int j = 0; j < 4; j++)
        reduce_add(head + fragment_offset(row16, d8, lane, j), c[j]);
#endif
}
