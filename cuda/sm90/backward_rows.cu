// dQ by rows, for results that are bitwise the same in every run (3 products):
//     S = τQKᵀ, P = exp(S - L), dP = dO Vᵀ, dS = P∘(dP - D), dQ = τ dS K  -> out_q
// L·log2 e and D of each query come from statistics.
// A CTA owns QUERIES queries of one head, 64 a warpgroup. Q and dO stay in shared memory; K and V stream past on two
// rings, last keys first. The loop issues the scores of one tile, then the product dS K of the tile before it, whose A
// fragments come straight from accumulators: the element-wise work runs under it.
#include "row_tiles.cuh"

static_assert(STAGES >= 2, "a tile of K is read again while the next one is");

constexpr u32 Q_BYTES = tile_bytes(QUERIES, HEAD_DIM), D_BYTES = tile_bytes(QUERIES, VALUE_DIM);
constexpr u32 K_BYTES = tile_bytes(KEYS, HEAD_DIM), V_BYTES = tile_bytes(KEYS, VALUE_DIM);
// Shared memory: Q, dO, then STAGES of K, then of V, then the barriers.
constexpr u32 K_RING = Q_BYTES + D_BYTES, V_RING = K_RING + STAGES * K_BYTES, BARRIERS = V_RING + STAGES * V_BYTES;

struct Maps {
    TensorMap q, d, k, v;
};

DEVICE void load(const Attention& a, const Maps& maps, u32 base, KeyRing<STAGES> ks, KeyRing<STAGES> vs, u32 held_full,
                 const RowTile& t, KeyTiles keys) {
    barrier_expect(held_full, Q_BYTES + D_BYTES);
    load_queries<HEAD_DIM>(a, t, base, maps.q, held_full);
    load_queries<VALUE_DIM>(a, t, base + Q_BYTES, maps.d, held_full);
    load_keys(a, t, keys, Stream<HEAD_DIM, 1, STAGES>{ks, base + K_RING, {&maps.k}},
              Stream<VALUE_DIM, 1, STAGES>{vs, base + V_RING, {&maps.v}});
}

// Two groups: S; then dP. `held` is this warpgroup's rows of Q.
DEVICE void issue_scores(Score& s, Score& x, u32 tiles, u32 held, KeyRing<STAGES> ks, KeyRing<STAGES> vs) {
    ks.wait();
    wgmma_fence();
    score_into<HEAD_DIM, QUERIES>(s, held, tiles + K_RING + ks.stage() * K_BYTES, false);
    wgmma_commit();
    vs.wait();
    wgmma_fence();
    score_into<VALUE_DIM, QUERIES>(x, held + Q_BYTES, tiles + V_RING + vs.stage() * V_BYTES, false);
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
            drop(s, row, n, 0.f, [&](int i) { return band.flowing(i); });
    }
    // dP -> dS.
    DEVICE void derivative(const Score& s, Score& x) const {
#pragma unroll
        for (int i = 0; i < KEYS / 2; i++)
            x[i] = s[i] * (x[i] - delta[i / 2 % 2]);
    }
};

extern "C" __global__ void CLUSTERED __launch_bounds__(THREADS, 1)
    backward_rows(const __grid_constant__ Attention a, const __grid_constant__ Maps maps) {
    u32 base = shared_base(), held_full = base + BARRIERS;
    KeyRing<STAGES> ks(held_full + 8), vs(held_full + 8 + KeyRing<STAGES>::BYTES);
    init_barriers(held_full, ks, vs);
    RowTile t = row_tile(a, 2 * HEAD_DIM + 2 * VALUE_DIM);
    Band band(a);
    KeyTiles keys = key_tiles(band, t);
    if (loading_warpgroup()) {
        if (threadIdx.x == MATH_THREADS && keys.count > 0)
            load(a, maps, base, ks, vs, held_full, t, keys);
        return;
    }

    int wg = warpgroup_id(), first = first_query(t, wg), row = first + warp_id() * 16 + lane_id() / 4;
    OwnTiles own = own_tiles(band, keys, first);
    int n = own.n;
    float acc[HEAD_DIM / 2];
    clear(acc);

    wait_held(held_full, keys);
    pass_tiles(ks, vs, own.before);
    if (own.count > 0) {
        Rows rows = {band, band.keys_inside(first, 64, KEYS), row, a.scale * LOG2E, {}, {}};
        const float* statistics =
            reinterpret_cast<const float*>(a.statistics + (i64(t.batch) * a.query_heads + t.head) * a.padded_queries);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float unused;
            load_statistics(statistics, row + 8 * h, rows.l2[h], rows.delta[h], unused, unused);
        }
        u32 tiles = operands(base), held = tiles + wg * 8192;
        Score s, x;
        Fragments ds;
        KeyRing<STAGES> before = ks; // the tile of K that dS is of
        issue_scores(s, x, tiles, held, ks, vs);
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
        for (int i = 1; i < own.count; i++) {
            n -= KEYS;
            issue_scores(s, x, tiles, held, ks, vs);
            issue_queries(acc, ds, tiles + K_RING + before.stage() * K_BYTES);
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
        issue_queries(acc, ds, tiles + K_RING + before.stage() * K_BYTES);
        wgmma_wait<0>();
        settle(acc);
        keep(ds);
        before.release();
    }
    pass_tiles(ks, vs, own.after);
    store_rows(a.out_q, t.batch, t.head, row, a.queries, a.dim, acc, a.scale);
    leave();
}
