// The frame of the Hopper kernels that own queries and stream keys: forward, backward_rows, bob_rows, bob_queries.
// A CTA owns QUERIES queries of one head, 64 a math warpgroup. Its rows of Q and the like are loaded once; tiles of
// KEYS keys pass through two rings, K and the like through one, V and the like through the other, last keys first.
#pragma once
#include "tiles.cuh"

static_assert(QUERIES % 64 == 0 && KEYS % 16 == 0, "64 queries a warpgroup, 16 keys an A fragment");

constexpr int WARPGROUPS = QUERIES / 64, MATH_THREADS = 128 * WARPGROUPS, THREADS = MATH_THREADS + 128;
constexpr int MATH_REGISTERS = WARPGROUPS <= 2 ? 240 : 160, LOAD_REGISTERS = WARPGROUPS <= 2 ? 24 : 32;

typedef float Score[KEYS / 2];
typedef u32 Fragments[KEYS / 16][4];

struct RowTile {
    int batch, head, m; // m: first query
};

// streamed: bytes that are read of one key, in all arrays.
DEVICE RowTile row_tile(const Attention& a, int streamed) {
    int tiles = (a.queries + QUERIES - 1) / QUERIES;
    Place here = place(blockIdx.x, tiles, a.query_heads, a.batches, i64(a.keys) * streamed / a.group);
    return {here.batch, here.head, (MASK_RIGHT ? tiles - 1 - here.tile : here.tile) * QUERIES}; // the longest first
}

struct KeyTiles {
    int n, count; // n: first key of the last tile
};
DEVICE KeyTiles key_tiles(const Band& band, const RowTile& t) {
    Range keys = band.keys_of(t.m, QUERIES);
    int count = keys.end > keys.begin ? (keys.end - keys.begin + KEYS - 1) / KEYS : 0;
    return {keys.begin + (count - 1) * KEYS, count};
}

// Of the CTA's tiles those that a warpgroup's own queries see, the ones from `first` on: it passes `before` tiles, has
// `count` from the one at n on, and passes `after` more.
struct OwnTiles {
    int before, n, count, after;
};
DEVICE OwnTiles own_tiles(const Band& band, KeyTiles keys, int first) {
    Range seen = band.keys_of(first, 64);
    int before = seen.end > keys.n ? 0 : (keys.n - seen.end) / KEYS + 1, end = keys.count;
    if (MASK_LEFT)
        end = min(end, (keys.n - seen.begin + 2 * KEYS - 1) / KEYS);
    if (first >= band.queries || before >= end)
        before = end = keys.count;
    return {before, keys.n - before * KEYS, end - before, keys.count - end};
}
template <int K_STAGES, int V_STAGES>
DEVICE void pass_tile(Ring<K_STAGES>& ks, Ring<V_STAGES>& vs) {
    ks.wait();
    ks.release();
    ks.advance();
    vs.wait();
    vs.release();
    vs.advance();
}
template <int K_STAGES, int V_STAGES>
DEVICE void pass_tiles(Ring<K_STAGES>& ks, Ring<V_STAGES>& vs, int count) {
#pragma unroll 1
    for (int i = 0; i < count; i++)
        pass_tile(ks, vs);
}

// held_full: the barrier of what is loaded once.
template <int K_STAGES, int V_STAGES>
DEVICE void init_barriers(u32 held_full, Ring<K_STAGES> ks, Ring<V_STAGES> vs) {
    if (threadIdx.x == 0) {
        barrier_init(held_full, 1);
        ks.init(4 * WARPGROUPS);
        vs.init(4 * WARPGROUPS);
        barrier_init_fence();
    }
    sync_threads();
}

// Whether this is the loading warpgroup, which gives its registers to the others here.
DEVICE bool loading_warpgroup() {
    if (threadIdx.x >= MATH_THREADS) {
        registers_shrink<LOAD_REGISTERS>();
        return true;
    }
    registers_grow<MATH_REGISTERS>();
    return false;
}

// Load the CTA's rows of an array.
template <int COLUMNS>
DEVICE void load_queries(const Attention& a, const RowTile& t, u32 to, const TensorMap& map, u32 full) {
    load_tile<QUERIES, COLUMNS>(to, map, full, t.m - a.first_query, t.head, t.batch);
}

// What passes through a ring. A stage has room for a tile of each of ARRAYS arrays of COLUMNS columns, one behind the
// other; the map of an absent array is null.
template <int COLUMNS, int ARRAYS, int DEPTH>
struct Stream {
    Ring<DEPTH> ring;
    u32 at; // the first stage
    const TensorMap* maps[ARRAYS];

    DEVICE void load(int row, int head, int batch) {
        constexpr u32 BYTES = tile_bytes(KEYS, COLUMNS);
        u32 to = at + ring.stage() * ARRAYS * BYTES, bytes = 0;
#pragma unroll
        for (int i = 0; i < ARRAYS; i++)
            bytes += maps[i] ? BYTES : 0;
        u32 full = ring.fill(bytes);
#pragma unroll
        for (int i = 0; i < ARRAYS; i++)
            if (maps[i])
                load_tile<KEYS, COLUMNS>(to + i * BYTES, *maps[i], full, row, head, batch);
        ring.advance();
    }
};
template <class Ks, class Vs>
DEVICE void load_keys(const Attention& a, const RowTile& t, KeyTiles keys, Ks ks, Vs vs) {
    int key_head = t.head / a.group, n = keys.n;
#pragma unroll 1 // few registers
    for (int i = 0; i < keys.count; i++, n -= KEYS) {
        ks.load(n - a.first_key, key_head, t.batch);
        vs.load(n - a.first_key, key_head, t.batch);
    }
}
