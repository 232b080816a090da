// What the Hopper kernels share: tiles in shared memory as TMA writes and wgmma reads them, the products on them, the
// pipeline, and the order of the grid.
//
// A tile of R rows and C columns is stored in panels of 64 columns, [panel][row][128 bytes], chunk c (8 columns, 16
// bytes) of row r at chunk c ^ (r & 7): the 128-byte swizzle of TMA and wgmma. One copy serves both roles of an
// operand: summed over its columns (K-major) and summed over its rows (MN-major).
//
// A CTA is WARPGROUPS math warpgroups of 64 result rows each, then one warpgroup whose first thread feeds the pipeline
// (its registers go to the others).
//
// Tensor maps are based at the first row that is ever read (first_query or first_key) and end at the last: a tile that
// sticks out is filled with zeros, and rows that must not be read cannot be. A coordinate is therefore `row - first`,
// which may be negative. Heads and batches are those of the array.
#pragma once
#include "hopper.cuh"
#include "mask.cuh"

static_assert(HEAD_DIM % 16 == 0 && HEAD_DIM >= 16 && HEAD_DIM <= 128,
              "HEAD_DIM is D rounded up to a multiple of 16, at most 128");
static_assert(VALUE_DIM % 16 == 0 && VALUE_DIM >= 16 && VALUE_DIM <= 128,
              "VALUE_DIM is Dv rounded up to a multiple of 16, at most 128");

DEVICE constexpr int panels(int columns) {
    return (columns + 63) / 64;
}
DEVICE constexpr u32 tile_bytes(int rows, int columns) {
    return panels(columns) * rows * 128;
}
DEVICE constexpr u32 round_up(u32 n, u32 unit) {
    return (n + unit - 1) / unit * unit;
}

// ---- threads -------------------------------------------------------------------------------------------------------
DEVICE int lane_id() {
    return threadIdx.x % 32;
}
DEVICE int warp_id() {
    return threadIdx.x / 32 % 4;
} // within the warpgroup
DEVICE int warpgroup_id() {
    return uniform(threadIdx.x / 128);
} // descriptors are computed from it: better once a warp than once a thread
// Sum over the four lanes that hold one row of an accumulator.
DEVICE float row_sum(float x) {
    x += shuffle_xor(x, 1);
    return x + shuffle_xor(x, 2);
}
DEVICE float row_max(float x) {
    x = fmaxf(x, shuffle_xor(x, 1));
    return fmaxf(x, shuffle_xor(x, 2));
}

// ---- pipeline ------------------------------------------------------------------------------------------------------
// A ring of stages with a `full` and an `empty` barrier each, eight bytes apart. The reader's first phase is 0; the
// writer starts a phase ahead: all is empty. Where the writers of several CTAs of a cluster write to all of them, a
// stage is empty when the readers of all are done with it.
template <int DEPTH, int CTAS = 1>
struct Ring {
    u32 full, empty, turn = 0; // turn of 2·DEPTH: stage and phase in one register
    DEVICE explicit Ring(u32 barriers) : full(barriers), empty(barriers + 8 * DEPTH) {}
    static constexpr u32 BYTES = 16 * DEPTH;
    DEVICE void init(u32 readers, u32 writers = 1) const {
        for (int s = 0; s < DEPTH; s++) {
            barrier_init(full + 8 * s, writers);
            barrier_init(empty + 8 * s, CTAS * readers);
        }
    }
    DEVICE u32 stage() const { return turn < DEPTH ? turn : turn - DEPTH; }
    DEVICE u32 phase() const { return turn >= DEPTH; }
    DEVICE void advance() { turn = turn == 2 * DEPTH - 1 ? 0 : turn + 1; }
    // The writer's side: wait until the stage is free; announce its bytes, and give the barrier to load onto.
    DEVICE void wait_empty() const { barrier_wait(empty + 8 * stage(), phase() ^ 1); }
    DEVICE u32 announce(u32 bytes) const {
        barrier_expect(full + 8 * stage(), bytes);
        return full + 8 * stage();
    }
    DEVICE u32 fill(u32 bytes) const {
        wait_empty();
        return announce(bytes);
    }
    // The same where every lane of some warps has stored its part for wgmma to read.
    DEVICE void fill_by_warps() const {
        proxy_fence();
        sync_warp();
        if (lane_id() == 0)
            barrier_arrive(full + 8 * stage());
    }
    // The reader's side, once its reads are complete. A stage that only wgmma reads is released by every warp; one that
    // lanes read with loads of their own, by every lane.
    DEVICE void wait() const { barrier_wait(full + 8 * stage(), phase()); }
    DEVICE void release() const {
        if (CTAS == 1 && lane_id() == 0)
            barrier_arrive(empty + 8 * stage());
        if (CTAS > 1 && lane_id() < CTAS)
            barrier_arrive_in(empty + 8 * stage(), lane_id());
    }
    DEVICE void release_by_lanes() const {
        static_assert(CTAS == 1, "too many arrivals to make in every CTA");
        barrier_arrive(empty + 8 * stage());
    }
};

// Load the map's rows from `row` on (a coordinate of the map) into the first rows of a tile of ROWS rows, which are all
// of them unless operands are stacked; credits the bytes of what the map's box has to the barrier.
template <int ROWS, int COLUMNS>
DEVICE void load_tile(u32 to, const TensorMap& map, u32 bar, int row, int head, int batch) {
#pragma unroll
    for (int p = 0; p < panels(COLUMNS); p++)
        load_tensor(to + p * ROWS * 128, map, bar, 64 * p, row, head, batch);
}

// ---- operands ------------------------------------------------------------------------------------------------------
// Byte offset of chunk c of row r in a panel.
DEVICE u32 swizzled(u32 row, u32 chunk) {
    return row * 128 + ((chunk ^ (row & 7)) << 4);
}

// A wgmma descriptor: start, leading and stride offsets in units of 16 bytes, 128-byte swizzle. The start is split so
// that the descriptors of a product differ from one another by one addition: shared memory ends below 2^18 and tiles
// are aligned to 16 bytes, so nothing carries.
DEVICE u64 descriptor(u32 tile, u32 offset, u32 leading, u32 stride) {
    return u64(stride >> 4 | 1u << 30) << 32 | ((tile >> 4) + ((offset >> 4) + (leading >> 4 << 16)));
}
// Summed over columns 16·step … +15 of a tile of ROWS rows (K-major); the operand's rows are those from `tile` on.
template <int ROWS>
DEVICE u64 by_columns(u32 tile, int step) {
    return descriptor(tile, step / 4 * ROWS * 128 + step % 4 * 32, 16, 1024);
}
// Summed over rows 16·step … +15 of a tile of ROWS rows (MN-major); the operand's rows are the tile's columns.
template <int ROWS>
DEVICE u64 by_rows(u32 tile, int step) {
    return descriptor(tile, step * 2048, ROWS * 128, 1024);
}

// s (64 x N) = A Bᵀ, or += when `onto`: both summed over COLUMNS columns. A: 64 rows of a tile of A_ROWS rows, B: a
// tile of N rows.
template <int COLUMNS, int A_ROWS, int N>
DEVICE void score_into(float (&s)[N], u32 a, u32 b, bool onto) {
#pragma unroll
    for (int k = 0; k < COLUMNS / 16; k++)
        wgmma<2 * N, 0, 0>(s, by_columns<A_ROWS>(a, k), by_columns<2 * N>(b, k), onto || k > 0);
}
// acc (64 x C) += P B, summed over the 16·T rows of B.
template <int T, int N>
DEVICE void gather(float (&acc)[N], const u32 (&p)[T][4], u32 b) {
#pragma unroll
    for (int t = 0; t < T; t++)
        wgmma<2 * N, 1>(acc, p[t], by_rows<16 * T>(b, t), true);
}
// The accumulator of a score, rounded, is the A fragment of the next product as it stands.
template <int N>
DEVICE void to_fragments(u32 (&a)[N / 8][4], const float (&s)[N]) {
#pragma unroll
    for (int t = 0; t < N / 8; t++)
#pragma unroll
        for (int j = 0; j < 4; j++)
            a[t][j] = pack(s[8 * t + 2 * j], s[8 * t + 2 * j + 1]);
}
// Store the fragments of 64 rows x 16·T columns transposed, as 16·T rows of 64 columns: one panel.
template <int T>
DEVICE void store_transposed(u32 panel, const u32 (&a)[T][4]) {
    // Matrices 0 and 1 of a fragment are rows 0-7 and 8-15 of columns 0-7, matrices 2 and 3 of columns 8-15.
    int lane = lane_id();
    u32 to = panel + swizzled((lane & 7) + (lane >> 4) * 8, 2 * warp_id() + (lane >> 3 & 1));
#pragma unroll
    for (int t = 0; t < T; t++)
        store_matrices_transposed(to + t * 2048, a[t][0], a[t][1], a[t][2], a[t][3]);
}

// S -> P of queries x keys: l2 is L·log2(e) of this thread's two rows, c = τ·log2(e).
template <int N>
DEVICE void exponential(float (&s)[N], float c, const float (&l2)[2]) {
#pragma unroll
    for (int i = 0; i < N; i++)
        s[i] = exp2_approx(s[i] * c - l2[i / 2 % 2]);
}
// Entries become `value` but for the range `kept(row)` of columns: this thread's rows are `row` and row + 8, the
// columns those from `first` on. BEGIN, END: which of the range's ends is looked at; with one, a comparison with a
// constant will do for an entry.
template <bool BEGIN, bool END, int N, class Kept>
DEVICE void drop_outside(float (&s)[N], int row, int first, float value, Kept kept) {
    first += lane_id() % 4 * 2;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        Range range = kept(row + 8 * h);
        int begin = range.begin - first, end = range.end - first;
#pragma unroll
        for (int i = 2 * h; i < N; i += 4)
#pragma unroll
            for (int j = 0; j < 2; j++)
                if ((END && i / 4 * 8 + j >= end) || (BEGIN && i / 4 * 8 + j < begin))
                    s[i + j] = value;
    }
}
// Queries x keys: no tile begins before the first key, so only a left edge needs the range's beginning.
template <int N, class Kept>
DEVICE void drop(float (&s)[N], int query, int n, float value, Kept kept) {
    drop_outside<MASK_LEFT, true>(s, query, n, value, kept);
}
// Keys x queries: past the last query P is 0 as it is, so only a left edge needs the range's end.
template <int N, class Kept>
DEVICE void drop_transposed(float (&s)[N], int m, int key, Kept kept) {
    drop_outside<true, MASK_LEFT>(s, key, m, 0.f, kept);
}

// Two scores in one accumulator.
template <int H, int N>
DEVICE float (&half(float (&x)[N])) [N / 2] { return reinterpret_cast<float (&)[N / 2]>(x[H * (N / 2)]); }

template <int N>
DEVICE void clear(float (&x)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++)
        x[i] = 0.f;
}

// ---- results -------------------------------------------------------------------------------------------------------
// Write factor · acc, rounded: this thread's rows are `row` and row + 8, those from `rows` on and columns from
// `columns` on are dropped.
template <int N>
DEVICE void store_rows(const View& view, int batch, int head, int row, int rows, int columns, const float (&acc)[N],
                       float factor) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
        if (row + 8 * h >= rows)
            continue;
        u16* out = at<u16>(view, batch, head, row + 8 * h) + 2 * (lane_id() % 4);
#pragma unroll
        for (int b = 0; b < N / 4; b++)
            if (8 * b < columns)
                *reinterpret_cast<u32*>(out + 8 * b) =
                    pack(factor * acc[4 * b + 2 * h], factor * acc[4 * b + 2 * h + 1]);
    }
}

// The statistics of queries 2i and 2i + 1 lie together, {L, L', α, α', D, D', ε, ε'}: a thread of the column pass holds
// neighbouring queries and needs L, then α, then the rest, so that each is one load. L is in units of log2 and +inf
// where P is 0.
constexpr int STATISTICS_BYTES = 16; // a query
// Where a query's L is. In bits, so that the compiler sees those of query + 8 to be 32 numbers further.
DEVICE int statistics_of(int query) {
    return (query & ~1) * 4 + (query & 1);
}
DEVICE void store_statistics(float* statistics, int query, float l, float d, float alpha, float epsilon) {
    float* out = statistics + statistics_of(query);
    out[0] = l;
    out[2] = alpha;
    out[4] = d;
    out[6] = epsilon;
}

DEVICE void load_statistics(const float* statistics, int query, float& l, float& d, float& alpha, float& epsilon) {
    const float* in = statistics + statistics_of(query);
    l = in[0];
    alpha = in[2];
    d = in[4];
    epsilon = in[6];
}

// fp32 sums of dQ and gQ: computed transposed (64 of a panel's columns as rows, queries as columns) and added where a
// thread holds four of them, [query / 8][panel][thread of 128][4], the same for every tile size.
constexpr int ACCUMULATOR_DIM = panels(HEAD_DIM) * 64;
template <int N>
DEVICE void reduce_queries(float* accumulator, int query, int panel, const float (&g)[N]) {
    float* to = accumulator + i64(query / 8 * panels(HEAD_DIM) + panel) * 512 + threadIdx.x % 128 * 4;
#pragma unroll
    for (int b = 0; b < N / 4; b++)
        reduce_add_4(to + b * panels(HEAD_DIM) * 512, g[4 * b], g[4 * b + 1], g[4 * b + 2], g[4 * b + 3]);
}

// ---- order of the grid ---------------------------------------------------------------------------------------------
// Block -> tile, head, batch. The heads whose streamed rows fit in the L2 cache together form a section; in a section
// all heads do their first tile, then their second, and so on: CTAs that run at the same time share what they stream,
// and with the longest tiles first only short ones are left at the end.
struct Place {
    int tile, head, batch;
};
DEVICE Place place(int block, int tiles, int heads, int batches, i64 streamed_bytes) {
    constexpr i64 CACHE = 32 << 20;
    int all = heads * batches, wide = int(min(max(CACHE / max(streamed_bytes, 1ll), 1ll), i64(all)));
    int section = int(block / (i64(wide) * tiles));
    block -= section * wide * tiles;
    int width = min(wide, all - section * wide), line = section * wide + block % width;
    return {uniform(block / width), uniform(line % heads), uniform(line / heads)};
}

DEVICE int load_shared_int(u32 a) {
    return __float_as_int(load_shared(a));
}
// A place kept in 12 bytes of shared memory across a loop that has no register to spare for it.
DEVICE void store_place(u32 to, Place p) {
    store_shared(to, u32(p.tile));
    store_shared(to + 4, u32(p.head));
    store_shared(to + 8, u32(p.batch));
}
DEVICE Place load_place(u32 from) {
    return {load_shared_int(from), load_shared_int(from + 4), load_shared_int(from + 8)};
}
