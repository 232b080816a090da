// dQ by rows, for results that are bitwise the same in every run (3 products):
//     S = τQKᵀ, P = exp(S - L), dP = dO Vᵀ, dS = P∘(dP - D), dQ = τ dS K  -> out_q
// L·log2 e and D of each query come from statistics.
// A CTA owns QUERIES queries of one head, 64 a warpgroup. Q and dO stay in shared memory; K and V stream past on two
// rings, last keys first. The loop issues the scores of one tile, then the product dS K of the tile before it, whose A
// fragments come straight from accumulators: the element-wise work runs under it.
#include "tiles.cuh"

static_assert(QUERIES % 64 == 0 && KEYS % 16 == 0, "64 queries a warpgroup, 16 keys an A fragment");
static_assert(STAGES >= 2, "a tile of K is read again while the next one is");

constexpr int WARPGROUPS = QUERIES / 64, MATH_THREADS = 128 * WARPGROUPS, THREADS = MATH_THREADS + 128;
constexpr int MATH_REGISTERS = WARPGROUPS == 2 ? 240 : 160, LOAD_REGISTERS = WARPGROUPS == 2 ? 24 : 32;
constexpr u32 Q_BYTES = tile_bytes(QUERIES, HEAD_DIM), D_BYTES = tile_bytes(QUERIES, VALUE_DIM);
constexpr u32 K_BYTES = tile_bytes(KEYS, HEAD_DIM), V_BYTES = tile_bytes(KEYS, VALUE_DIM);
// Shared memory: Q, dO, then STAGES of K, then of V, then the barriers.
constexpr u32 K_RING = Q_BYTES + D_BYTES, V_RING = K_RING + STAGES * K_BYTES, BARRIERS = V_RING + STAGES * V_BYTES;

struct Maps {
    TensorMap q, d, k, v;
};

typedef float Score[KEYS / 2];
typedef u32 Fragments[KEYS / 16][4];

DEVICE void load(const Attention& a, const Maps& maps, u32 base, Ring<STAGES> ks, Ring<STAGES> vs, u32 held_full,
                 Place here, int m, int n, int tiles) {
    int key_head = here.head / a.group;
    barrier_expect(held_full, Q_BYTES + D_BYTES);
    load_tile<QUERIES, HEAD_DIM>(base, maps.q, held_full, m - a.first_query, here.head, here.batch);
    load_tile<QUERIES, VALUE_DIM>(base + Q_BYTES, maps.d, held_full, m - a.first_query, here.head, here.batch);
#pragma unroll 1 // few registers
    for (int t = 0; t < tiles; t++, n -= KEYS) {
        load_tile<KEYS, HEAD_DIM>(base + K_RING + ks.stage() * K_BYTES, maps.k, ks.fill(K_BYTES), n - a.first_key,
                                  key_head, here.batch);
        load_tile<KEYS, VALUE_DIM>(base + V_RING + vs.stage() * V_BYTES, maps.v, vs.fill(V_BYTES), n - a.first_key,
                                   key_head, here.batch);
        ks.advance();
        vs.advance();
    }
}

// Two groups: S; then dP. `held` is this warpgroup's rows of Q.
DEVICE void issue_scores(Score& s, Score& x, u32 base, u32 held, Ring<STAGES> ks, Ring<STAGES> vs) {
    ks.wait();
    wgmma_fence();
    score_into<HEAD_DIM, QUERIES>(s, held, base + K_RING + ks.stage() * K_BYTES, false);
    wgmma_commit();
    vs.wait();
    wgmma_fence();
    score_into<VALUE_DIM, QUERIES>(x, held + Q_BYTES, base + V_RING + vs.stage() * V_BYTES, false);
    wgmma_commit();
}
// One group.
DEVICE void issue_queries(float (&acc)[HEAD_DIM / 2], const Fragments& ds, u32 k) {
    wgmma_fence();
    gather(acc, ds, k);
    wgmma_commit();
}

struct Rows {
    Band band;
    Range inside;
    int row;
    float c, l2[2], delta[2]; // of rows `row` and row + 8

    // S -> P, of the keys from n on.
    DEVICE void exponential(Score& s, int n) const {
        ::exponential(s, c, l2);
        if (n < inside.begin || n >= inside.end)
            drop(s, row, n, 0.f, [&](int i, int j) { return band.flows(i, j); });
    }
    // dP -> dS.
    DEVICE void derivative(const Score& s, Score& x) const {
#pragma unroll
        for (int i = 0; i < KEYS / 2; i++)
            x[i] = s[i] * (x[i] - delta[i / 2 % 2]);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    backward_rows(const __grid_constant__ Attention a, const __grid_constant__ Maps maps) {
    u32 base = shared_base(), held_full = base + BARRIERS;
    Ring<STAGES> ks(held_full + 8), vs(held_full + 8 + Ring<STAGES>::BYTES);
    if (threadIdx.x == 0) {
        barrier_init(held_full, 1);
        ks.init(4 * WARPGROUPS);
        vs.init(4 * WARPGROUPS);
        barrier_init_fence();
    }
    sync_threads();

    int query_tiles = (a.queries + QUERIES - 1) / QUERIES;
    Place here = place(blockIdx.x, query_tiles, a.query_heads, a.batches,
                       i64(a.keys) * (2 * HEAD_DIM + 2 * VALUE_DIM) / a.group);
    int m = (MASK_RIGHT ? query_tiles - 1 - here.tile : here.tile) * QUERIES; // the longest first
    Band band(a);
    Range range = band.keys_of(m, QUERIES);
    int tiles = range.end > range.begin ? (range.end - range.begin + KEYS - 1) / KEYS : 0;
    int n = range.begin + (tiles - 1) * KEYS;

    if (threadIdx.x >= MATH_THREADS) {
        registers_shrink<LOAD_REGISTERS>();
        if (threadIdx.x == MATH_THREADS && tiles > 0)
            load(a, maps, base, ks, vs, held_full, here, m, n, tiles);
        return;
    }

    registers_grow<MATH_REGISTERS>();
    int wg = warpgroup_id(), row = m + threadIdx.x / 32 * 16 + lane_id() / 4;
    Rows rows = {band, band.keys_inside(m + wg * 64, 64, KEYS), row, a.scale * LOG2E, {}, {}};
    const float* statistics =
        reinterpret_cast<const float*>(a.statistics + (i64(here.batch) * a.query_heads + here.head) * a.padded_queries);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const float* of = statistics + (row + 8 * h) / 2 * 8 + row % 2;
        rows.l2[h] = of[0];
        rows.delta[h] = of[4];
    }
    float acc[HEAD_DIM / 2];
    clear(acc);

    if (tiles > 0) {
        u32 held = base + wg * 8192;
        Score s, x;
        Fragments ds;
        Ring<STAGES> before = ks; // the tile of K that dS is of
        barrier_wait(held_full, 0);
        issue_scores(s, x, base, held, ks, vs);
        wgmma_wait<1>();
        settle(s);
        rows.exponential(s, n);
        wgmma_wait<0>();
        settle(x);
        ks.advance();
        vs.release();
        vs.advance();
        rows.derivative(s, x);
        to_fragments(ds, x);
#pragma unroll 1
        for (int t = 1; t < tiles; t++) {
            n -= KEYS;
            issue_scores(s, x, base, held, ks, vs);
            issue_queries(acc, ds, base + K_RING + before.stage() * K_BYTES);
            wgmma_wait<2>();
            settle(s);
            rows.exponential(s, n);
            wgmma_wait<1>();
            settle(x);
            ks.advance();
            vs.release();
            vs.advance();
            rows.derivative(s, x);
            wgmma_wait<0>();
            settle(acc);
            keep(ds);
            before.release();
            before.advance();
            to_fragments(ds, x);
        }
        issue_queries(acc, ds, base + K_RING + before.stage() * K_BYTES);
        wgmma_wait<0>();
        settle(acc);
        keep(ds);
    }
    store_rows(a.out_q, here.batch, here.head, row, a.queries, a.dim, acc, a.scale);
}
