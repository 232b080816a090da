// gQ of the double backward by rows (7 products), for results that are the same on every run:
//     S = τQKᵀ, F = τ(UQ Kᵀ + Q UKᵀ), P = exp(S - L), F̂ = F - α, X = dO Vᵀ - D, G = dO UVᵀ
//     dS = P∘X, W = P∘(F̂∘X + G - ε), gQ = τ(W K + dS UK)           -> out_q
// L·log2 e, D, α and ε of each query come from the row pass.
// A CTA owns QUERIES queries of one head, 64 a warpgroup. Q, UQ and dO stay in shared memory; (K, UK) and (V, UV)
// stream past on two rings, last keys first. As in bob_rows the scores of one tile are issued before the second
// products of the tile before it; the ring of K is one stage deeper, because its tiles are read a second time there.
#include "tiles.cuh"

constexpr bool TANGENT = HAS_UQ || HAS_UK;
static_assert(TANGENT || HAS_UV, "with no cotangent every result is zero and nothing is to be launched");
static_assert(QUERIES == 128 && KEYS % 16 == 0, "64 queries a warpgroup, 16 keys an A fragment");

constexpr int THREADS = 384, K_STAGES = STAGES + 1;
constexpr u32 Q_BYTES = tile_bytes(QUERIES, HEAD_DIM), D_BYTES = tile_bytes(QUERIES, VALUE_DIM);
constexpr u32 K_BYTES = tile_bytes(KEYS, HEAD_DIM), V_BYTES = tile_bytes(KEYS, VALUE_DIM);
// Shared memory: Q, UQ, dO, then K_STAGES of K, UK, then STAGES of V, UV, then the barriers.
constexpr u32 D_AT = 2 * Q_BYTES, K_RING = D_AT + D_BYTES, V_RING = K_RING + K_STAGES * 2 * K_BYTES;
constexpr u32 BARRIERS = V_RING + STAGES * 2 * V_BYTES;

struct Maps {
    TensorMap q, uq, d, k, uk, v, uv;
};

typedef float Score[KEYS / 2];
typedef u32 Fragments[KEYS / 16][4];

// Four groups: S; F; dO Vᵀ; G. Those that are not needed are empty.
DEVICE void issue_scores(Score& s, Score& f, Score& x, Score& g, u32 q, u32 d, u32 k, u32 v) {
    wgmma_fence();
    score_into<HEAD_DIM, QUERIES>(s, q, k, false);
    wgmma_commit();
    if (HAS_UQ)
        score_into<HEAD_DIM, QUERIES>(f, q + Q_BYTES, k, false);
    if (HAS_UK)
        score_into<HEAD_DIM, QUERIES>(f, q, k + K_BYTES, HAS_UQ);
    wgmma_commit();
    if (TANGENT)
        score_into<VALUE_DIM, QUERIES>(x, d, v, false);
    wgmma_commit();
    if (HAS_UV)
        score_into<VALUE_DIM, QUERIES>(g, d, v + V_BYTES, false);
    wgmma_commit();
}
// One group.
DEVICE void issue_gathers(float (&acc)[HEAD_DIM / 2], const Fragments& ds, const Fragments& w, u32 k) {
    wgmma_fence();
    if (HAS_UK)
        gather(acc, ds, k + K_BYTES);
    gather(acc, w, k);
    wgmma_commit();
}

// The statistics of this thread's two rows.
struct Rows {
    float l2[2], delta[2], alpha[2], epsilon[2];
};

// Scores -> dS in x, W in s.
DEVICE void elements(Score& s, Score& f, Score& x, const Score& g, float tau, const Rows& rows) {
#pragma unroll
    for (int i = 0; i < KEYS / 2; i++) {
        int h = i / 2 % 2;
        if (TANGENT) {
            x[i] -= rows.delta[h];
            f[i] = (f[i] * tau - rows.alpha[h]) * x[i] - rows.epsilon[h];
            if (HAS_UV)
                f[i] += g[i];
            x[i] *= s[i];
            s[i] *= f[i];
        } else {
            s[i] *= g[i] - rows.epsilon[h];
        }
    }
}

DEVICE void load(const Attention& a, const Maps& maps, u32 base, Ring<K_STAGES> ks, Ring<STAGES> vs, u32 q_full,
                 Place here, int m, int n, int tiles) {
    int key_head = here.head / a.group;
    barrier_expect(q_full, (1 + HAS_UQ) * Q_BYTES + D_BYTES);
    load_tile<QUERIES, HEAD_DIM>(base, maps.q, q_full, m - a.first_query, here.head, here.batch);
    if (HAS_UQ)
        load_tile<QUERIES, HEAD_DIM>(base + Q_BYTES, maps.uq, q_full, m - a.first_query, here.head, here.batch);
    load_tile<QUERIES, VALUE_DIM>(base + D_AT, maps.d, q_full, m - a.first_query, here.head, here.batch);
#pragma unroll 1 // few registers
    for (int t = 0; t < tiles; t++, n -= KEYS) {
        u32 k = base + K_RING + ks.stage() * 2 * K_BYTES, v = base + V_RING + vs.stage() * 2 * V_BYTES;
        u32 full = ks.fill((1 + HAS_UK) * K_BYTES);
        load_tile<KEYS, HEAD_DIM>(k, maps.k, full, n - a.first_key, key_head, here.batch);
        if (HAS_UK)
            load_tile<KEYS, HEAD_DIM>(k + K_BYTES, maps.uk, full, n - a.first_key, key_head, here.batch);
        full = vs.fill((TANGENT + HAS_UV) * V_BYTES);
        if (TANGENT)
            load_tile<KEYS, VALUE_DIM>(v, maps.v, full, n - a.first_key, key_head, here.batch);
        if (HAS_UV)
            load_tile<KEYS, VALUE_DIM>(v + V_BYTES, maps.uv, full, n - a.first_key, key_head, here.batch);
        ks.advance();
        vs.advance();
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    bob_queries(const __grid_constant__ Attention a, const __grid_constant__ Maps maps) {
    u32 base = shared_base(), q_full = base + BARRIERS;
    Ring<K_STAGES> ks(q_full + 8);
    Ring<STAGES> vs(q_full + 8 + Ring<K_STAGES>::BYTES);
    if (threadIdx.x == 0) {
        barrier_init(q_full, 1);
        ks.init(8);
        vs.init(8);
        barrier_init_fence();
    }
    sync_threads();

    int query_tiles = (a.queries + QUERIES - 1) / QUERIES;
    Place here = place(blockIdx.x, query_tiles, a.query_heads, a.batches,
                       i64(a.keys) * (4 * HEAD_DIM + 4 * VALUE_DIM) / a.group);
    int m = (MASK_RIGHT ? query_tiles - 1 - here.tile : here.tile) * QUERIES;
    Band band(a);
    Range range = band.keys_of(m, QUERIES);
    int tiles = range.end > range.begin ? (range.end - range.begin + KEYS - 1) / KEYS : 0;
    int n = range.begin + (tiles - 1) * KEYS;

    if (threadIdx.x >= 256) {
        registers_shrink<24>();
        if (threadIdx.x == 256 && tiles > 0)
            load(a, maps, base, ks, vs, q_full, here, m, n, tiles);
        return;
    }

    registers_grow<240>();
    int wg = warpgroup_id(), first = m + wg * 64, row = first + warp_id() * 16 + lane_id() / 4;
    float tau = a.scale, c = tau * LOG2E, acc[HEAD_DIM / 2];
    clear(acc);
    if (tiles > 0) {
        Rows rows;
        const float* statistics = reinterpret_cast<const float*>(
            a.statistics + (i64(here.batch) * a.query_heads + here.head) * a.padded_queries);
#pragma unroll
        for (int h = 0; h < 2; h++)
            load_statistics(statistics, row + 8 * h, rows.l2[h], rows.delta[h], rows.alpha[h], rows.epsilon[h]);

        u32 first_q = base + wg * 8192;
        Score s, f, x, g;
        Fragments ds, w;
        auto probabilities = [&](Score& s, int n) {
            exponential(s, c, rows.l2);
            if (!band.inside(first, 64, n, KEYS))
                drop(s, row, n, 0.f, [&](int i, int j) { return band.flows(i, j); });
        };
        barrier_wait(q_full, 0);
        ks.wait();
        vs.wait();
        issue_scores(s, f, x, g, first_q, first_q + D_AT, base + K_RING, base + V_RING);
        wgmma_wait<3>();
        settle(s);
        probabilities(s, n);
        wgmma_wait<0>();
        settle(f);
        settle(x);
        settle(g);
        vs.release();
        vs.advance();
        elements(s, f, x, g, tau, rows);
        to_fragments(ds, x);
        to_fragments(w, s);
        for (int t = 1; t < tiles; t++) {
            n -= KEYS;
            u32 tile = uniform(fresh(base)), q = tile + wg * 8192, before = tile + K_RING + ks.stage() * 2 * K_BYTES;
            Ring<K_STAGES> next = ks;
            next.advance();
            next.wait();
            vs.wait();
            issue_scores(s, f, x, g, q, q + D_AT, tile + K_RING + next.stage() * 2 * K_BYTES,
                         tile + V_RING + vs.stage() * 2 * V_BYTES);
            issue_gathers(acc, ds, w, before);
            wgmma_wait<4>();
            settle(s);
            probabilities(s, n);
            wgmma_wait<1>();
            settle(f);
            settle(x);
            settle(g);
            vs.release();
            vs.advance();
            elements(s, f, x, g, tau, rows);
            wgmma_wait<0>();
            settle(acc);
            keep(ds);
            keep(w);
            ks.release();
            ks = next;
            to_fragments(ds, x);
            to_fragments(w, s);
        }
        issue_gathers(acc, ds, w, base + K_RING + ks.stage() * 2 * K_BYTES);
        wgmma_wait<0>();
        settle(acc);
        keep(ds);
        keep(w);
    }
    store_rows(a.out_q, here.batch, here.head, row, a.queries, a.dim, acc, tau);
}
