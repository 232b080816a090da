// The frame of the kernels that own queries and stream keys: forward, bob_rows, bob_queries, backward_rows.
// A CTA of WARPS warps owns QUERIES queries of one head, 16·MT to a warp; tiles of KEYS keys pass through a ring of
// STAGES.
#pragma once
#include "mask.cuh"
#include "tiles.cuh"

constexpr int THREADS = 32 * WARPS, MT = QUERIES / (16 * WARPS), KEY_BLOCKS = KEYS / 8;
static_assert(QUERIES == 16 * MT * WARPS && MT >= 1, "a warp owns a whole number of 16-query blocks");
static_assert(KEYS % 16 == 0, "the second products sum over keys 16 at a time");

struct RowTile {
    int batch, head, key_head, m; // m: first query
    int row;                      // first query of this lane; it also owns row + 8, + 16, ...
    int begin, steps;             // tiles of keys: n = (begin + step) * KEYS
    Range queries, keys;          // those that may be read
};

// Heads follow each other so that the CTAs running together read the same keys; under a causal mask the longest tiles
// of a head come first.
DEVICE RowTile row_tile(const Attention& a, const Band& band) {
    RowTile t;
    int tiles = (a.queries + QUERIES - 1) / QUERIES, index = blockIdx.x % tiles, rest = blockIdx.x / tiles;
    t.head = rest % a.query_heads;
    t.batch = rest / a.query_heads;
    t.key_head = t.head / a.group;
    t.m = (MASK_RIGHT ? tiles - 1 - index : index) * QUERIES;
    t.row = t.m + warp_id() * 16 * MT + lane_id() / 4;
    Range seen = band.keys_of(t.m, QUERIES);
    t.begin = seen.begin / KEYS;
    t.steps = t.m + QUERIES > a.first_query ? max(0, (seen.end + KEYS - 1) / KEYS - t.begin) : 0;
    t.queries = {a.first_query, a.queries};
    t.keys = {a.first_key, a.keys};
    return t;
}

// Start loading a tile of an array, `dim` columns wide: the queries of the CTA, or the keys from n on.
template <int COLUMNS>
DEVICE void load_queries(u32 tile, const View& view, const RowTile& t, int dim) {
    load_tile<QUERIES, COLUMNS, THREADS>(tile, view, t.batch, t.head, t.m, t.queries, dim);
}
template <int COLUMNS>
DEVICE void load_keys(u32 tile, const View& view, const RowTile& t, int n, int dim) {
    load_tile<KEYS, COLUMNS, THREADS>(tile, view, t.batch, t.key_head, n, t.keys, dim);
}

typedef float Score[MT][KEY_BLOCKS][4];

// Calls f(m, b, j) for every element that a lane has of a score; it is of the lane's row 2m + j / 2.
template <class F>
DEVICE void for_elements(F f) {
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int b = 0; b < KEY_BLOCKS; b++)
#pragma unroll
            for (int j = 0; j < 4; j++)
                f(m, b, j);
}
// S → P: l2 is L·log2(e) of the lane's rows, c = τ·log2(e).
DEVICE void exponential(Score& s, float c, const float (&l2)[2 * MT]) {
    for_elements([&](int m, int b, int j) { s[m][b][j] = exp2_approx(s[m][b][j] * c - l2[2 * m + j / 2]); });
}
// Select `value` but for the range `kept(query)` of keys. row: the first query of this lane, n: the tile's first key.
template <class Kept>
DEVICE void drop(Score& s, int row, int n, float value, Kept kept) {
#pragma unroll
    for (int h = 0; h < 2 * MT; h++) {
        Range keys = kept(row + 8 * h);
        int first = n + lane_id() % 4 * 2 - keys.begin;
        u32 count = u32(max(keys.end - keys.begin, 0));
#pragma unroll
        for (int b = 0; b < KEY_BLOCKS; b++)
#pragma unroll
            for (int j = 0; j < 2; j++)
                if (u32(first + 8 * b + j) >= count)
                    s[h / 2][b][h % 2 * 2 + j] = value;
    }
}
