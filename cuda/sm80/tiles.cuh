// Tiles of the portable family: shared memory filled by cp.async, read by ldmatrix, multiplied by mma.sync m16n8k16.
//
// A tile of R rows and D columns is stored in panels of 64 columns, [panel][row][128 bytes]; chunk c (8 columns, 16
// bytes) of row r lies at chunk c ^ (r & 7), so that the eight rows an ldmatrix phase reads fall into different banks.
// One lane pattern reads every 16x16 block, whichever role the block has in a product:
//   block of rows = output rows     A fragment             load_matrices             {r0, r1, r2, r3}
//   block of rows = output columns  B fragments of 2 x n8  load_matrices             {r0, r2}, {r1, r3}
//   block of rows = summed index    B fragments of 2 x n8  load_matrices_transposed  {r0, r1}, {r2, r3}
//   block of rows = summed index    A fragment             load_matrices_transposed  {r0, r2, r1, r3}
// A product's fp32 result over 16 rows is float[n8][4] a lane: rows lane/4 and lane/4 + 8 (elements 2, 3), columns 8·n8
// + 2(lane%4) + {0, 1}. Packed to halves, two neighbouring n8 blocks are an A fragment as they stand: P and dS never
// pass through memory on their way into the second products of the warp that made them.
#pragma once
#include "attention.cuh"
#include "ptx.cuh"

static_assert(HEAD_DIM % 16 == 0 && HEAD_DIM >= 16 && HEAD_DIM <= 128,
              "HEAD_DIM is D rounded up to a multiple of 16, at most 128");
static_assert(VALUE_DIM % 16 == 0 && VALUE_DIM >= 16 && VALUE_DIM <= 128,
              "VALUE_DIM is Dv rounded up to a multiple of 16, at most 128");

DEVICE constexpr u32 panel_bytes(int rows) {
    return rows * 128;
}
DEVICE constexpr u32 tile_bytes(int rows, int columns) {
    return (columns + 63) / 64 * panel_bytes(rows);
}

DEVICE int lane_id() {
    return threadIdx.x % 32;
}
DEVICE int warp_id() {
    return threadIdx.x / 32;
}

// Where this lane reads in the first 16x16 block of a tile; tiles start at multiples of 128 bytes, so the other blocks
// are an XOR and an offset away.
DEVICE u32 lane_offset() {
    return lane_id() % 16 * 128 + ((lane_id() / 16 ^ (lane_id() & 7)) << 4);
}
template <int ROWS>
DEVICE u32 block(u32 tile, int i, int j) {
    return (tile ^ (j % 4 * 32)) + j / 4 * panel_bytes(ROWS) + i * 2048;
}

DEVICE constexpr int power_of_two_from(int n) {
    int p = 1;
    while (p < n)
        p *= 2;
    return p;
}

// Start loading rows [row, row + ROWS) of one head. Rows outside `valid` and columns from `dim` on become zeros and are
// not read. A thread keeps its column and goes down the rows in strides of a multiple of 8, so that its place under the
// swizzle is one constant.
template <int ROWS, int COLUMNS, int THREADS>
DEVICE void load_tile(u32 tile, const View& view, int batch, int head, int row, Range valid, int dim) {
    constexpr int CHUNKS = power_of_two_from(COLUMNS / 8), STRIDE = THREADS / CHUNKS;
    static_assert(STRIDE % 8 == 0, "a CTA covers whole groups of 8 rows at once");
    int r = threadIdx.x / CHUNKS, c = threadIdx.x % CHUNKS;
    if (c >= COLUMNS / 8)
        return;
    const u16* from = at<const u16>(view, batch, head) + c * 8;
    u32 to = tile + c / 8 * panel_bytes(ROWS) + r * 128 + ((c % 8 ^ (r & 7)) << 4);
    int stride = static_cast<int>(view.row); // one wide multiply a chunk; larger strides are copied by the host
#pragma unroll
    for (int i = 0; i < ROWS; i += STRIDE) {
        if (i + STRIDE > ROWS && r + i >= ROWS)
            break;
        int at_row = row + r + i;
        copy_async(to + i * 128, from + static_cast<i64>(at_row) * stride,
                   at_row >= valid.begin && at_row < valid.end && c * 8 < dim);
    }
}

// Write 16·MT rows x D columns of fp32 results, rounded, to rows [row, row + 16·MT) of one head.
template <int MT, int N8>
DEVICE void store_rows(const View& view, int batch, int head, int row, int rows, int dim, const float (&c)[MT][N8][4],
                       float factor) {
    int lane = lane_id();
#pragma unroll
    for (int h = 0; h < 2 * MT; h++) {
        int r = row + lane / 4 + 8 * h;
        if (r >= rows)
            continue;
        u16* out = at<u16>(view, batch, head, r) + 2 * (lane % 4);
#pragma unroll
        for (int b = 0; b < N8; b++)
            if (8 * b < dim)
                *reinterpret_cast<u32*>(out + 8 * b) =
                    pack(factor * c[h / 2][b][2 * (h % 2)], factor * c[h / 2][b][2 * (h % 2) + 1]);
    }
}

template <int MT, int N8>
DEVICE void zero(float (&c)[MT][N8][4]) {
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int b = 0; b < N8; b++)
#pragma unroll
            for (int j = 0; j < 4; j++)
                c[m][b][j] = 0.f;
}

// The loops over the summed index that read both operands from shared memory are not unrolled whole: so many fragments
// would be loaded ahead that ptxas spills.
#if __CUDA_ARCH__ >= 1000
constexpr int UNROLL = 1;
#else
constexpr int UNROLL = 2;
#endif

// c (16·MT rows x 8·N8) += A Bᵀ over K columns. A: rows 16·i... of a tile of A_ROWS rows, B: all rows of a tile of 8·N8
// rows.
template <int K, int A_ROWS, int MT, int N8>
DEVICE void multiply(float (&c)[MT][N8][4], u32 a, int i, u32 b) {
#pragma unroll UNROLL
    for (int k = 0; k < K / 16; k++) {
        u32 x[MT][4];
#pragma unroll
        for (int m = 0; m < MT; m++)
            load_matrices(x[m], block<A_ROWS>(a, i + m, k));
#pragma unroll
        for (int n = 0; n < N8 / 2; n++) {
            u32 y[4];
            load_matrices(y, block<8 * N8>(b, n, k));
#pragma unroll
            for (int m = 0; m < MT; m++) {
                mma(c[m][2 * n], x[m], y[0], y[2]);
                mma(c[m][2 * n + 1], x[m], y[1], y[3]);
            }
        }
    }
}

// s += A Bᵀ and f += UA Bᵀ + A UBᵀ in one sweep, each fragment read once: the scores and their tangent. (A, B) is (Q,
// K) by rows and (K, Q) by columns.
template <bool HAS_UA, bool HAS_UB, int K, int A_ROWS, int MT, int N8>
DEVICE void multiply_with_tangent(float (&s)[MT][N8][4], float (&f)[MT][N8][4], u32 a, u32 ua, int i, u32 b, u32 ub) {
#pragma unroll UNROLL
    for (int k = 0; k < K / 16; k++) {
        u32 x[MT][4], ux[MT][4];
#pragma unroll
        for (int m = 0; m < MT; m++) {
            load_matrices(x[m], block<A_ROWS>(a, i + m, k));
            if (HAS_UA)
                load_matrices(ux[m], block<A_ROWS>(ua, i + m, k));
        }
#pragma unroll
        for (int n = 0; n < N8 / 2; n++) {
            u32 y[4], uy[4];
            load_matrices(y, block<8 * N8>(b, n, k));
            if (HAS_UB)
                load_matrices(uy, block<8 * N8>(ub, n, k));
#pragma unroll
            for (int m = 0; m < MT; m++) {
                mma(s[m][2 * n], x[m], y[0], y[2]);
                mma(s[m][2 * n + 1], x[m], y[1], y[3]);
                if (HAS_UA) {
                    mma(f[m][2 * n], ux[m], y[0], y[2]);
                    mma(f[m][2 * n + 1], ux[m], y[1], y[3]);
                }
                if (HAS_UB) {
                    mma(f[m][2 * n], x[m], uy[0], uy[2]);
                    mma(f[m][2 * n + 1], x[m], uy[1], uy[3]);
                }
            }
        }
    }
}

// Round a result to halves: A fragments over its 8·N8 columns.
template <int MT, int N8>
DEVICE void to_fragments(u32 (&p)[MT][N8 / 2][4], const float (&c)[MT][N8][4]) {
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int t = 0; t < N8 / 2; t++)
#pragma unroll
            for (int j = 0; j < 4; j++)
                p[m][t][j] = pack(c[m][2 * t + j / 2][2 * (j % 2)], c[m][2 * t + j / 2][2 * (j % 2) + 1]);
}

// c (16·MT rows x 8·N8) += P B, with P in registers and B all 16·T rows of a tile.
template <int MT, int T, int N8>
DEVICE void gather(float (&c)[MT][N8][4], const u32 (&p)[MT][T][4], u32 b) {
#pragma unroll
    for (int t = 0; t < T; t++)
#pragma unroll
        for (int n = 0; n < N8 / 2; n++) {
            u32 y[4];
            load_matrices_transposed(y, block<16 * T>(b, t, n));
#pragma unroll
            for (int m = 0; m < MT; m++) {
                mma(c[m][2 * n], p[m][t], y[0], y[1]);
                mma(c[m][2 * n + 1], p[m][t], y[2], y[3]);
            }
        }
}

// Sum over the four lanes that share a row of a result.
DEVICE float row_sum(float x) {
    x += shuffle_xor(x, 1);
    return x + shuffle_xor(x, 2);
}

// Run `compute(step, stage)` for each step, with `fetch(step, stage)` issued STAGES - 1 steps ahead. The first wait
// also covers what was fetched before the call.
template <class Fetch, class Compute>
DEVICE void stream(int steps, Fetch fetch, Compute compute) {
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) {
        if (s < steps)
            fetch(s, s);
        copy_async_commit();
    }
    for (int s = 0; s < steps; s++) {
        if (STAGES == 1) {
            sync_threads();
            fetch(s, 0);
            copy_async_commit();
            copy_async_wait<0>();
            sync_threads();
        } else {
            copy_async_wait<STAGES == 1 ? 0 : STAGES - 2>();
            sync_threads();
            if (s + STAGES - 1 < steps)
                fetch(s + STAGES - 1, (s + STAGES - 1) % STAGES);
            copy_async_commit();
        }
        compute(s, s % STAGES);
    }
}
