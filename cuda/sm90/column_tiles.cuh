// The frame of the Hopper kernels that own keys and stream queries: backward_columns, bob_columns.
// A CTA owns KEYS keys of one key head, 64 a math warpgroup. Its rows of K and the like are loaded once; tiles of
// QUERIES queries, with their statistics, pass through one ring: all that see the keys, of all query heads of the
// group.
#pragma once
#include "tiles.cuh"

static_assert(KEYS <= 128 && KEYS % 64 == 0 && QUERIES % 16 == 0, "64 keys a warpgroup, 16 queries an A fragment");

constexpr int WARPGROUPS = KEYS / 64, MATH_THREADS = 128 * WARPGROUPS, THREADS = MATH_THREADS + 128;
constexpr u32 K_BYTES = tile_bytes(KEYS, HEAD_DIM), V_BYTES = tile_bytes(KEYS, VALUE_DIM);
constexpr u32 Q_BYTES = tile_bytes(QUERIES, HEAD_DIM), D_BYTES = tile_bytes(QUERIES, VALUE_DIM),
              STATISTICS = QUERIES * STATISTICS_BYTES, PANEL = QUERIES * 128;

typedef float Score[QUERIES / 2];
typedef u32 Fragments[QUERIES / 16][4];

// streamed: bytes that are read and added of one query, in all arrays. Under a causal mask the first keys are seen by
// the most queries: the longest tiles come first as they are.
DEVICE Place column_tile(const Attention& a, int streamed) {
    return place(blockIdx.x, (a.keys + KEYS - 1) / KEYS, a.key_heads, a.batches, i64(a.queries) * a.group * streamed);
}

// The queries of the tiles that see the keys from n on. The last tile ends with the queries and what is too much is at
// the beginning, but not before query 0. The accumulator knows tiles of 8 queries, the statistics pairs.
DEVICE Range tiles_of_queries(const Band& band, int n) {
    Range r = band.queries_of(n, KEYS);
    int end = (r.end + 7) / 8 * 8, tiles = (end - r.begin + QUERIES - 1) / QUERIES;
    return {max(end - tiles * QUERIES, 0), r.end};
}

// How many of the first tiles of a head end before any query that sees a warpgroup's keys, the 64 from n on. (The last
// tiles of a window that its first warpgroup does not see are computed all the same.)
DEVICE int tiles_before(const Band& band, Range queries, int n) {
    int all = queries.end + QUERIES - 1, begin = n < band.keys ? min(band.queries_of(n, 64).begin, all) : all;
    return WARPGROUPS == 1 ? 0 : max(begin - queries.begin, 0) / QUERIES;
}
// Zeros in place of what a warpgroup would store of a tile: PANELS panels.
template <int PANELS>
DEVICE void store_zeros(u32 to) {
#pragma unroll
    for (int i = 0; i < PANELS * QUERIES / 16; i++)
        store_shared_4(to + i * 2048 + threadIdx.x % 128 * 16, 0.f, 0.f, 0.f, 0.f);
}

// The tiles in their order: the query heads of the group, and of each its queries.
struct QueryTiles {
    int head, end_head, begin, end, m;
    DEVICE QueryTiles(const Attention& a, Place here, Range queries)
        : head(here.head * a.group), end_head(head + a.group), begin(queries.begin), end(queries.end), m(begin) {}
    DEVICE bool more() const { return m < end && head < end_head; }
    DEVICE bool last() const { return m + QUERIES >= end && head + 1 == end_head; }
    DEVICE void advance() {
        m = int(fresh(m + QUERIES)); // fresh: or everything made of m is a counter too
        if (m >= end && head + 1 < end_head) {
            head++;
            m = begin;
        }
    }
};

// Load the statistics of a tile; credits STATISTICS bytes to the barrier.
DEVICE void stream_statistics(const Attention& a, u32 to, u32 bar, const QueryTiles& tile, int batch) {
    const float4* head = a.statistics + i64(batch * a.query_heads + tile.head) * a.padded_queries;
    load_bulk(to, head + tile.m, STATISTICS, bar);
}

// Write τ·gK and gV of this thread's keys.
DEVICE void store_results(const Attention& a, Place here, const float (&acc_k)[HEAD_DIM / 2],
                          const float (&acc_v)[VALUE_DIM / 2]) {
    int key = here.tile * KEYS + threadIdx.x / 32 * 16 + lane_id() / 4;
    store_rows(a.out_k, here.batch, here.head, key, a.keys, a.dim, acc_k, a.scale);
    store_rows(a.out_v, here.batch, here.head, key, a.keys, a.value_dim, acc_v, 1.f);
}
