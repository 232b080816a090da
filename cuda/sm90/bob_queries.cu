// gQ of the double backward by rows (7 products), for results that are the same on every run:
//     S = τQKᵀ, F = τ(UQ Kᵀ + Q UKᵀ), P = exp(S - L), F̂ = F - α, X = dO Vᵀ - D, G = dO UVᵀ
//     dS = P∘X, W = P∘(F̂∘X + G - ε), gQ = τ(W K + dS UK)           -> out_q
// L·log2 e, D, α and ε of each query come from the row pass.
// A CTA owns QUERIES queries of one head, 64 a warpgroup. Q, UQ and dO stay in shared memory; (K, UK) and (V, UV)
// stream past on two rings, last keys first. As in bob_rows the scores of one tile are issued before the second
// products of the tile before it; the ring of K is one stage deeper, because its tiles are read a second time there.
#include "row_tiles.cuh"

constexpr bool TANGENT = HAS_UQ || HAS_UK;
static_assert(TANGENT || HAS_UV, "with no cotangent every result is zero and nothing is to be launched");

constexpr int K_STAGES = STAGES + 1;
constexpr u32 Q_BYTES = tile_bytes(QUERIES, HEAD_DIM), D_BYTES = tile_bytes(QUERIES, VALUE_DIM);
constexpr u32 K_BYTES = tile_bytes(KEYS, HEAD_DIM), V_BYTES = tile_bytes(KEYS, VALUE_DIM);
// Shared memory: Q, UQ, dO, then K_STAGES of K, UK, then STAGES of V, UV, then the barriers.
constexpr u32 D_AT = 2 * Q_BYTES, K_RING = D_AT + D_BYTES, V_RING = K_RING + K_STAGES * 2 * K_BYTES;
constexpr u32 BARRIERS = V_RING + STAGES * 2 * V_BYTES;

struct Maps {
    TensorMap q, uq, d, k, uk, v, uv;
};

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

DEVICE void load(const Attention& a, const Maps& maps, u32 base, KeyRing<K_STAGES> ks, KeyRing<STAGES> vs, u32 q_full,
                 const RowTile& t, KeyTiles keys) {
    barrier_expect(q_full, (1 + HAS_UQ) * Q_BYTES + D_BYTES);
    load_queries<HEAD_DIM>(a, t, base, maps.q, q_full);
    if (HAS_UQ)
        load_queries<HEAD_DIM>(a, t, base + Q_BYTES, maps.uq, q_full);
    load_queries<VALUE_DIM>(a, t, base + D_AT, maps.d, q_full);
    load_keys(
        a, t, keys, Stream<HEAD_DIM, 2, K_STAGES>{ks, base + K_RING, {&maps.k, HAS_UK ? &maps.uk : nullptr}},
        Stream<VALUE_DIM, 2, STAGES>{vs, base + V_RING, {TANGENT ? &maps.v : nullptr, HAS_UV ? &maps.uv : nullptr}});
}

extern "C" __global__ void CLUSTERED __launch_bounds__(THREADS, 1)
    bob_queries(const __grid_constant__ Attention a, const __grid_constant__ Maps maps) {
    u32 base = shared_base(), q_full = base + BARRIERS;
    KeyRing<K_STAGES> ks(q_full + 8);
    KeyRing<STAGES> vs(q_full + 8 + KeyRing<K_STAGES>::BYTES);
    init_barriers(q_full, ks, vs);
    RowTile t = row_tile(a, 4 * HEAD_DIM + 4 * VALUE_DIM);
    Band band(a);
    KeyTiles keys = key_tiles(band, t);
    if (loading_warpgroup()) {
        if (threadIdx.x == MATH_THREADS && keys.count > 0)
            load(a, maps, base, ks, vs, q_full, t, keys);
        return;
    }

    int wg = warpgroup_id(), first = first_query(t, wg), row = first + warp_id() * 16 + lane_id() / 4;
    float tau = a.scale, c = tau * LOG2E, acc[HEAD_DIM / 2];
    clear(acc);
    OwnTiles own = own_tiles(band, keys, first);
    int n = own.n;
    wait_held(q_full, keys);
    pass_tiles(ks, vs, own.before);
    if (own.count > 0) {
        Rows rows;
        const float* statistics =
            reinterpret_cast<const float*>(a.statistics + (i64(t.batch) * a.query_heads + t.head) * a.padded_queries);
#pragma unroll
        for (int h = 0; h < 2; h++)
            load_statistics(statistics, row + 8 * h, rows.l2[h], rows.delta[h], rows.alpha[h], rows.epsilon[h]);

        u32 tiles = operands(base), first_q = tiles + wg * 8192;
        Score s, f, x, g;
        Fragments ds, w;
        auto probabilities = [&](Score& s, int n) {
            exponential(s, c, rows.l2);
            if (!band.inside(first, 64, n, KEYS))
                drop(s, row, n, 0.f, [&](int i) { return band.flowing(i); });
        };
        ks.wait();
        vs.wait();
        issue_scores(s, f, x, g, first_q, first_q + D_AT, tiles + K_RING + ks.stage() * 2 * K_BYTES,
                     tiles + V_RING + vs.stage() * 2 * V_BYTES);
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
        for (int i = 1; i < own.count; i++) {
            n -= KEYS;
            u32 tile = uniform(fresh(tiles)), q = tile + wg * 8192, before = tile + K_RING + ks.stage() * 2 * K_BYTES;
            KeyRing<K_STAGES> next = ks;
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
        issue_gathers(acc, ds, w, tiles + K_RING + ks.stage() * 2 * K_BYTES);
        wgmma_wait<0>();
        settle(acc);
        keep(ds);
        keep(w);
        ks.release();
        ks.advance();
    }
    pass_tiles(ks, vs, own.after);
    store_rows(a.out_q, t.batch, t.head, row, a.queries, a.dim, acc, tau);
    leave();
}
