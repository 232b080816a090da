// The frame of the Hopper kernels that own queries and stream keys: forward, backward_rows, bob_rows, bob_queries.
// A CTA owns QUERIES queries of one head, 64 a math warpgroup. Its rows of Q and the like are loaded once; tiles of
// KEYS keys pass through two rings, K and the like through one, V and the like through the other, last keys first.
// CLUSTER: the CTAs of so many neighbouring tiles of queries form a cluster. Each loads its part of the rows of every
// tile of keys for all of them, so that a cluster reads from the L2 cache what a CTA would, and they go in step. All
// tiles that any of them sees pass through each.
#pragma once
#include "tiles.cuh"

static_assert(QUERIES % 64 == 0 && KEYS % 16 == 0, "64 queries a warpgroup, 16 keys an A fragment");
static_assert(KEYS % (8 * CLUSTER) == 0, "a part of a tile is made of the 8 rows that the swizzle repeats after");

constexpr int WARPGROUPS = QUERIES / 64, MATH_THREADS = 128 * WARPGROUPS, THREADS = MATH_THREADS + 128;
constexpr int MATH_REGISTERS = WARPGROUPS <= 2 ? 240 : 160, LOAD_REGISTERS = WARPGROUPS <= 2 ? 24 : 32;

typedef float Score[KEYS / 2];
typedef u32 Fragments[KEYS / 16][4];

#if CLUSTER > 1
#    define CLUSTERED __cluster_dims__(CLUSTER, 1, 1)
#else
#    define CLUSTERED
#endif
template <int DEPTH>
using KeyRing = Ring<DEPTH, CLUSTER>;
DEVICE int cluster_rank() {
    return blockIdx.x % CLUSTER;
}
DEVICE void sync_cluster() {
    cluster_arrive();
    cluster_wait();
}
// Where wgmma finds shared memory: a descriptor holds 18 bits of an address, and in a cluster the CTA's number is
// above.
DEVICE u32 operands(u32 base) {
    return CLUSTER > 1 ? base & 0x3ffff : base;
}
// The end of a kernel: a CTA of a cluster stays until the others arrive at its barriers no more.
DEVICE void leave() {
    if (CLUSTER > 1)
        sync_cluster();
}

struct RowTile {
    int batch, head, m, cluster_m; // first query of the CTA's share and of the cluster; see first_query
};

// streamed: bytes that are read of one key, in all arrays.
DEVICE RowTile row_tile(const Attention& a, int streamed) {
    constexpr int ROWS = CLUSTER * QUERIES;
    int tiles = (a.queries + ROWS - 1) / ROWS;
    Place here = place(blockIdx.x / CLUSTER, tiles, a.query_heads, a.batches, i64(a.keys) * streamed / a.group);
    int m = (MASK_RIGHT ? tiles - 1 - here.tile : here.tile) * ROWS; // the longest first
    return {here.batch, here.head, m + cluster_rank() * QUERIES, m};
}

// The first of a warpgroup's 64 queries. Under a mask with one edge they see the more keys the later they are (or the
// earlier): the warpgroups of a cluster own them to and fro, so that its CTAs have the same to do.
DEVICE int first_query(const RowTile& t, int wg) {
    int rank = cluster_rank();
    return t.cluster_m + 64 * (wg * CLUSTER + (wg % 2 ? CLUSTER - 1 - rank : rank));
}

struct KeyTiles {
    int n, count; // n: first key of the last tile
};
DEVICE KeyTiles key_tiles(const Band& band, const RowTile& t) {
    Range keys = band.keys_of(t.cluster_m, CLUSTER * QUERIES);
    int count = keys.end > keys.begin ? (keys.end - keys.begin + KEYS - 1) / KEYS : 0;
    return {keys.begin + (count - 1) * KEYS, count};
}

// Of these tiles those that a warpgroup's own queries see, the ones from `first` on: it passes `before` tiles, has
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
DEVICE void pass_tile(KeyRing<K_STAGES>& ks, KeyRing<V_STAGES>& vs) {
    ks.wait();
    vs.wait();
    sync_warp(); // or a lane that looks late finds the stages filled again, and waits for ever
    ks.release();
    ks.advance();
    vs.release();
    vs.advance();
}
template <int K_STAGES, int V_STAGES>
DEVICE void pass_tiles(KeyRing<K_STAGES>& ks, KeyRing<V_STAGES>& vs, int count) {
#pragma unroll 1
    for (int i = 0; i < count; i++)
        pass_tile(ks, vs);
}

// held_full: the barrier of what is loaded once.
template <int K_STAGES, int V_STAGES>
DEVICE void init_barriers(u32 held_full, KeyRing<K_STAGES> ks, KeyRing<V_STAGES> vs) {
    if (threadIdx.x == 0) {
        barrier_init(held_full, 1);
        ks.init(4 * WARPGROUPS);
        vs.init(4 * WARPGROUPS);
        barrier_init_fence();
    }
    if (CLUSTER > 1)
        sync_cluster();
    else
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

// Load the rows of an array that the CTA's warpgroups own. The map's box has those that lie together.
template <int COLUMNS>
DEVICE void load_queries(const Attention& a, const RowTile& t, u32 to, const TensorMap& map, u32 full) {
    for (int wg = 0; wg < (CLUSTER > 1 ? WARPGROUPS : 1); wg++)
        load_tile<QUERIES, COLUMNS>(to + wg * 8192, map, full, first_query(t, wg) - a.first_query, t.head, t.batch);
}

// Wait for what is loaded once. By all, whether they have tiles of their own or not: a CTA ends with no load in flight.
DEVICE void wait_held(u32 full, KeyTiles keys) {
    if (keys.count > 0)
        barrier_wait(full, 0);
}

// What passes through a ring. A stage has room for a tile of each of ARRAYS arrays of COLUMNS columns, one behind the
// other; the map of an absent array is null.
template <int COLUMNS, int ARRAYS, int DEPTH>
struct Stream {
    KeyRing<DEPTH> ring;
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
                load_part(to + i * BYTES, *maps[i], full, row, head, batch);
        ring.advance();
    }
    // This CTA's part of a tile, for the cluster: KEYS / CLUSTER rows, which the map's box has.
    DEVICE static void load_part(u32 to, const TensorMap& map, u32 full, int row, int head, int batch) {
        if (CLUSTER == 1) {
            load_tile<KEYS, COLUMNS>(to, map, full, row, head, batch);
            return;
        }
        int first = cluster_rank() * (KEYS / CLUSTER);
#pragma unroll
        for (int p = 0; p < panels(COLUMNS); p++)
            load_tensor_multicast(to + (p * KEYS + first) * 128, map, full, 64 * p, row + first, head, batch, CLUSTER);
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
