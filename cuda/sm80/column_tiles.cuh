// The frame of the kernels that own keys and stream queries: bob_columns, backward_columns.
// A CTA of WARPS warps owns KEYS keys of one key head, 16·MT to a warp, and walks the query tiles of every query head
// of the group, so that sums over the group stay in registers. Results are computed with keys as rows: P, dS and W
// leave the first products as A fragments of the second ones. For gQ = dS UK + W K, which sums over keys, dS and W also
// go to shared memory (FUSED), where all warps share the product and add their part of it to the fp32 accumulator in
// global memory.
#pragma once
#include "fragment.cuh"
#include "mask.cuh"
#include "tiles.cuh"

constexpr int THREADS = 32 * WARPS, MT = KEYS / (16 * WARPS), QUERY_BLOCKS = QUERIES / 8;
static_assert(KEYS == 16 * MT * WARPS && MT >= 1, "a warp owns a whole number of 16-key blocks");
static_assert(QUERIES % 16 == 0 && QUERIES <= 64, "a tile of dS or W is one panel: 16 to 64 queries");

constexpr u32 WEIGHT_BYTES = panel_bytes(KEYS), STATISTICS_BYTES = 16 * QUERIES;

struct ColumnTile {
    int batch, key_head, n; // n: first key
    int begin, end,
        steps; // queries [begin, end), in tiles from a multiple of QUERIES on, of every query head of the group
};

// Under a causal mask the first keys are seen by most queries, so the order within a head is already longest first.
DEVICE ColumnTile column_tile(const Attention& a, const Band& band) {
    ColumnTile t;
    int tiles = (a.keys + KEYS - 1) / KEYS, rest = blockIdx.x / tiles;
    t.n = blockIdx.x % tiles * KEYS;
    t.key_head = rest % a.key_heads;
    t.batch = rest / a.key_heads;
    Range queries = band.queries_of(t.n, KEYS);
    t.begin = queries.begin / QUERIES * QUERIES;
    t.end = queries.end;
    t.steps = t.n + KEYS > a.first_key ? max(0, (t.end - t.begin + QUERIES - 1) / QUERIES) * a.group : 0;
    return t;
}

// Walks the query tiles of the heads of the group, one after the other.
struct Cursor {
    int head, m;
    DEVICE Cursor(const ColumnTile& t, const Attention& a) : head(t.key_head * a.group), m(t.begin) {}
    DEVICE void advance(const ColumnTile& t) {
        m += QUERIES;
        if (m >= t.end) {
            m = t.begin;
            head++;
        }
    }
};

DEVICE void load_statistics(u32 to, const Attention& a, int batch, int head, int m) {
    const float4* rows = a.statistics + (i64(batch) * a.query_heads + head) * a.padded_queries + m;
    for (int i = threadIdx.x; i < QUERIES; i += THREADS)
        copy_async(to + 16 * i, rows + i, true);
}

// S → P with keys as rows. `rows`: the statistics of the two queries this lane has in each block of 8.
DEVICE void exponential(float (&s)[MT][QUERY_BLOCKS][4], float c, u32 rows) {
#pragma unroll
    for (int b = 0; b < QUERY_BLOCKS; b++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float l2 = load_shared(rows + b * 128 + i * 16);
#pragma unroll
            for (int h = 0; h < 2 * MT; h++) {
                float& e = s[h / 2][b][h % 2 * 2 + i];
                e = exp2_approx(e * c - l2);
            }
        }
}

// Select 0 wherever `keep(query, key)` is false. m: the first query of the tile, n: this warp's first key.
template <class Keep>
DEVICE void drop(float (&s)[MT][QUERY_BLOCKS][4], int m, int n, Keep keep) {
#pragma unroll
    for (int h = 0; h < 2 * MT; h++)
#pragma unroll
        for (int b = 0; b < QUERY_BLOCKS; b++)
#pragma unroll
            for (int i = 0; i < 2; i++)
                if (!keep(m + 8 * b + lane_id() % 4 * 2 + i, n + lane_id() / 4 + 8 * h))
                    s[h / 2][b][h % 2 * 2 + i] = 0.f;
}

// Store A fragments (this warp's 16·MT keys x QUERIES) to a tile of KEYS rows.
DEVICE void store_weights(u32 tile, const u32 (&p)[MT][QUERIES / 16][4]) {
    int lane = lane_id();
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int x = 0; x < QUERIES / 16; x++)
#pragma unroll
            for (int j = 0; j < 4; j++) {
                int row = (warp_id() * MT + m) * 16 + lane / 4 + j % 2 * 8, chunk = 2 * x + j / 2;
                store_shared(tile + row * 128 + ((chunk ^ (row & 7)) << 4) + lane % 4 * 4, p[m][x][j]);
            }
}

// This warp's part of a sum over keys: QUERIES x HEAD_DIM split into 16-query rows of WIDE 16-column blocks.
constexpr int DOWN = QUERIES / 16 < WARPS ? QUERIES / 16 : WARPS, ACROSS = WARPS / DOWN,
              WIDE = (HEAD_DIM / 16 + ACROSS - 1) / ACROSS;
static_assert(WARPS % DOWN == 0 && QUERIES / 16 % DOWN == 0, "warps cover the query blocks evenly");

// g += Wᵀ B: W stored keys x queries, B keys x HEAD_DIM, both KEYS rows.
DEVICE void multiply_over_keys(float (&g)[2 * WIDE][4], u32 weights, int i, u32 b) {
#pragma unroll UNROLL
    for (int k = 0; k < KEYS / 16; k++) {
        u32 r[4];
        load_matrices_transposed(r, block<KEYS>(weights, k, i));
        u32 x[4] = {r[0], r[2], r[1], r[3]};
#pragma unroll
        for (int w = 0; w < WIDE; w++) {
            int d = warp_id() / DOWN * WIDE + w;
            if (HEAD_DIM / 16 % (ACROSS * WIDE) != 0 && d >= HEAD_DIM / 16)
                break;
            u32 y[4];
            load_matrices_transposed(y, (b ^ (d % 4 * 32)) + d / 4 * panel_bytes(KEYS) + k * 2048);
            mma(g[2 * w], x, y[0], y[1]);
            mma(g[2 * w + 1], x, y[2], y[3]);
        }
    }
}

// Add the part to the accumulator of one query head. Tiles start at multiples of 16 queries: `row16` counts those.
DEVICE void reduce_queries(float* accumulator, int row16, const float (&g)[2 * WIDE][4]) {
#pragma unroll
    for (int w = 0; w < WIDE; w++) {
        int d = warp_id() / DOWN * WIDE + w;
        if (HEAD_DIM / 16 % (ACROSS * WIDE) != 0 && d >= HEAD_DIM / 16)
            break;
        reduce_add_fragment(accumulator, row16, 2 * d, lane_id(), g[2 * w]);
        reduce_add_fragment(accumulator, row16, 2 * d + 1, lane_id(), g[2 * w + 1]);
    }
}
