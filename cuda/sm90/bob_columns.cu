// Column pass of the double backward (10 products; 8 without gQ). With keys as rows, for one tile of queries after
// another:
// clang-format off
//     Sᵀ = τKQᵀ, P = exp(S - L)          Fᵀ = τ(K UQᵀ + UK Qᵀ), F̂ = F - α
//     X = V dOᵀ - D, dS = P∘X            C = F̂∘X - ε + UV dOᵀ, W = P∘C
//     gV = (P∘F̂)ᵀ dO                     -> out_v
//     gK = τ(Wᵀ Q + dSᵀ UQ)              -> out_k
//     FUSED: gQ = dS UK + W K, added in fp32 to the accumulator (finish_queries scales and rounds it)
// clang-format on
// L·log2 e, D, α and ε of each query come from the row pass.
// A CTA owns 128 keys of one key head, 64 a warpgroup; Q, UQ, dO and the statistics of all query heads of the group
// stream past on one ring, and gK and gV stay in fp32 registers until the end: K and V are never expanded and every
// result is written once. P∘F̂, dS and W go from accumulators straight into A fragments; C is accumulated by the tensor
// cores onto F̂∘X - ε. FUSED: dS and W are also stored, as queries x keys, in shared memory, and gQ is computed
// transposed (UKᵀ dSᵀ + Kᵀ Wᵀ), so that any multiple of 16 queries will do. With two panels of D each warpgroup sums
// one of them over all 128 keys; with one panel each sums its own 64 keys.
#include "tiles.cuh"

constexpr bool TANGENT = HAS_UQ || HAS_UK;
static_assert(TANGENT || HAS_UV, "with no cotangent every result is zero and nothing is to be launched");
static_assert(KEYS == 128 && QUERIES % 16 == 0, "64 keys a warpgroup, 16 queries an A fragment");

constexpr int THREADS = 384;
constexpr bool SHARE = panels(HEAD_DIM) == 2;
constexpr bool STORE_DS = FUSED && HAS_UK;   // gQ takes dS with UK
constexpr bool FINISH_C = TANGENT && HAS_UV; // G goes onto F̂∘X - ε; otherwise C is the one or the other
constexpr u32 K_BYTES = tile_bytes(KEYS, HEAD_DIM), V_BYTES = tile_bytes(KEYS, VALUE_DIM);
constexpr u32 Q_BYTES = tile_bytes(QUERIES, HEAD_DIM), D_BYTES = tile_bytes(QUERIES, VALUE_DIM),
              STATISTICS = QUERIES * STATISTICS_BYTES;
// A stage: Q, UQ, dO, statistics. Shared memory: K, UK, V, UV, the stages, dS and W of each warpgroup (64 keys wide),
// the barriers.
constexpr u32 UQ_AT = Q_BYTES, D_AT = 2 * Q_BYTES, STATISTICS_AT = D_AT + D_BYTES;
constexpr u32 STAGE_BYTES = STATISTICS_AT + round_up(STATISTICS, 1024),
              LOAD_BYTES = Q_BYTES + HAS_UQ * Q_BYTES + D_BYTES + STATISTICS;
constexpr u32 V_AT = 2 * K_BYTES, RING = V_AT + 2 * V_BYTES, EXCHANGE = RING + STAGES * STAGE_BYTES,
              PANEL = QUERIES * 128;
constexpr u32 BARRIERS = EXCHANGE + FUSED * 4 * PANEL;

struct Maps {
    TensorMap q, uq, d, k, uk, v, uv;
};

typedef float Score[QUERIES / 2];
typedef u32 Fragments[QUERIES / 16][4];

DEVICE void load(const Attention& a, const Maps& maps, u32 base, Ring<STAGES> ring, u32 keys_full, u32 tile_at,
                 Place here, int begin, int tiles) {
    int n = here.tile * KEYS - a.first_key;
    barrier_expect(keys_full, (1 + HAS_UK) * K_BYTES + (TANGENT + HAS_UV) * V_BYTES);
    load_tile<KEYS, HEAD_DIM>(base, maps.k, keys_full, n, here.head, here.batch);
    if (HAS_UK)
        load_tile<KEYS, HEAD_DIM>(base + K_BYTES, maps.uk, keys_full, n, here.head, here.batch);
    if (TANGENT)
        load_tile<KEYS, VALUE_DIM>(base + V_AT, maps.v, keys_full, n, here.head, here.batch);
    if (HAS_UV)
        load_tile<KEYS, VALUE_DIM>(base + V_AT + V_BYTES, maps.uv, keys_full, n, here.head, here.batch);
#pragma unroll 1 // few registers
    for (int head = here.head * a.group; head < (here.head + 1) * a.group; head++) {
        int line = here.batch * a.query_heads + head;
        const float4* statistics = a.statistics + i64(line) * a.padded_queries;
#pragma unroll 1
        for (int t = 0, m = begin; t < tiles; t++, m += QUERIES) {
            u32 q = base + RING + ring.stage() * STAGE_BYTES;
            ring.wait_empty();
            store_shared(tile_at + 8 * ring.stage(), u32(m));
            bool last = t + 1 == tiles && head + 1 == (here.head + 1) * a.group;
            store_shared(tile_at + 8 * ring.stage() + 4, u32(last ? ~line : line));
            u32 full = ring.announce(LOAD_BYTES);
            load_tile<QUERIES, HEAD_DIM>(q, maps.q, full, m - a.first_query, head, here.batch);
            if (HAS_UQ)
                load_tile<QUERIES, HEAD_DIM>(q + UQ_AT, maps.uq, full, m - a.first_query, head, here.batch);
            load_tile<QUERIES, VALUE_DIM>(q + D_AT, maps.d, full, m - a.first_query, head, here.batch);
            load_bulk(q + STATISTICS_AT, statistics + m, STATISTICS, full);
            ring.advance();
        }
    }
}

// gQ of one panel: Gᵀ (64 columns of the panel x QUERIES), summed over the 64·BLOCKS keys whose rows of UK, K and dS, W
// begin at the addresses given.
template <int BLOCKS>
DEVICE void gather_queries(Score& g, u32 uk, u32 k, u32 ds, u32 w) {
#pragma unroll
    for (int t = 0; HAS_UK && t < 4 * BLOCKS; t++)
        wgmma<QUERIES, 1, 0>(g, by_rows<KEYS>(uk, t), by_columns<2 * QUERIES>(ds, t), t > 0);
#pragma unroll
    for (int t = 0; t < 4 * BLOCKS; t++)
        wgmma<QUERIES, 1, 0>(g, by_rows<KEYS>(k, t), by_columns<2 * QUERIES>(w, t), HAS_UK || t > 0);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    bob_columns(const __grid_constant__ Attention a, const __grid_constant__ Maps maps) {
    u32 base = shared_base(), keys_full = base + BARRIERS;
    u32 place_at = keys_full + 8 + Ring<STAGES>::BYTES, tile_at = place_at + 16;
    Ring<STAGES> ring(keys_full + 8);
    // Under a causal mask the first keys are seen by the most queries: the longest tiles come first as they are.
    i64 streamed = i64(a.queries) * (4 * HEAD_DIM + 2 * VALUE_DIM + STATISTICS_BYTES + FUSED * 4 * HEAD_DIM) * a.group;
    Place here = place(blockIdx.x, (a.keys + KEYS - 1) / KEYS, a.key_heads, a.batches, streamed);
    if (threadIdx.x == 0) {
        barrier_init(keys_full, 1);
        ring.init(256);
        barrier_init_fence();
        store_place(place_at, here);
    }
    sync_threads();
    int n = here.tile * KEYS;
    Band band(a);
    Range queries = band.queries_of(n, KEYS);
    queries.begin = queries.begin / QUERIES * QUERIES; // the accumulator knows tiles of 8 queries, the statistics pairs
    int tiles = max(0, (queries.end - queries.begin + QUERIES - 1) / QUERIES);

    if (threadIdx.x >= 256) {
        registers_shrink<24>();
        if (threadIdx.x == 256)
            load(a, maps, base, ring, keys_full, tile_at, here, queries.begin, tiles);
        return;
    }

    registers_grow<240>();
    int wg = warpgroup_id();
    u32 ds_to = base + EXCHANGE + wg * 2 * PANEL, w_to = ds_to + PANEL;
    float tau = a.scale, c = tau * LOG2E;
    float acc_k[HEAD_DIM / 2], acc_v[VALUE_DIM / 2];
    Score s, f, x;
    Fragments p, ds, w;
    clear(acc_k);
    clear(acc_v);
    barrier_wait(keys_full, 0);

    // Where the CTA and the tile are, and whether it is the last (a negative line), is read from shared memory when it
    // is needed: the loop has no registers for it.
#pragma unroll 1
    for (bool more = tiles > 0; more;) {
        u32 tile = uniform(fresh(base)), k = tile + wg * 8192, uk = k + K_BYTES, v = k + V_AT, uv = v + V_BYTES;
        u32 q = base + RING + ring.stage() * STAGE_BYTES, uq = q + UQ_AT, d = q + D_AT,
            pair = q + STATISTICS_AT + lane_id() % 4 * 32;
        ring.wait();
        wgmma_fence();
        score_into<HEAD_DIM, KEYS>(s, k, q, false);
        wgmma_commit();
        if (HAS_UQ)
            score_into<HEAD_DIM, KEYS>(f, k, uq, false);
        if (HAS_UK)
            score_into<HEAD_DIM, KEYS>(f, uk, q, HAS_UQ);
        wgmma_commit();
        if (TANGENT)
            score_into<VALUE_DIM, KEYS>(x, v, d, false);
        else
            score_into<VALUE_DIM, KEYS>(x, uv, d, false);
        wgmma_commit();

        int first = load_place(place_at).tile * KEYS + wg * 64, m = load_shared_int(tile_at + 8 * ring.stage());
        wgmma_wait<2>();
        settle(s);
#pragma unroll
        for (int b = 0; b < QUERIES / 8; b++) {
            float2 l = load_shared_2(pair + b * 128);
#pragma unroll
            for (int j = 0; j < 4; j++)
                s[4 * b + j] = exp2_approx(s[4 * b + j] * c - (j % 2 ? l.y : l.x));
        }
        if (!band.inside(m, QUERIES, first, 64))
            drop_transposed(s, m, first + warp_id() * 16 + lane_id() / 4,
                            [&](int i, int j) { return band.flows(i, j); });
        wgmma_wait<1>();
        if (TANGENT) {
            settle(f);
#pragma unroll
            for (int b = 0; b < QUERIES / 8; b++) {
                float2 alpha = load_shared_2(pair + b * 128 + 8);
#pragma unroll
                for (int j = 0; j < 4; j++)
                    f[4 * b + j] = f[4 * b + j] * tau - (j % 2 ? alpha.y : alpha.x);
#pragma unroll
                for (int j = 0; j < 2; j++)
                    p[b / 2][b % 2 * 2 + j] =
                        pack(s[4 * b + 2 * j] * f[4 * b + 2 * j], s[4 * b + 2 * j + 1] * f[4 * b + 2 * j + 1]);
            }
        }
        wgmma_wait<0>();
        settle(x);
        if (TANGENT) {
            wgmma_fence();
            gather(acc_v, p, d);
            wgmma_commit();
            if (!FINISH_C) { // W is next, and registers for another set of fragments are short
                wgmma_wait<0>();
                settle(acc_v);
                keep(p);
            }
        }
#pragma unroll
        for (int b = 0; b < QUERIES / 8; b++) {
            float4 de = load_shared_4(pair + b * 128 + 16);
#pragma unroll
            for (int i = 4 * b; i < 4 * b + 4; i += 2) {
                if (TANGENT) {
                    x[i] -= de.x;
                    x[i + 1] -= de.y;
                    ds[i / 8][i % 8 / 2] = pack(s[i] * x[i], s[i + 1] * x[i + 1]);
                    x[i] = f[i] * x[i] - de.z;
                    x[i + 1] = f[i + 1] * x[i + 1] - de.w;
                } else {
                    x[i] -= de.z;
                    x[i + 1] -= de.w;
                }
                if (!FINISH_C)
                    w[i / 8][i % 8 / 2] = pack(s[i] * x[i], s[i + 1] * x[i + 1]);
            }
        }
        wgmma_fence();
        if (FINISH_C)
            score_into<VALUE_DIM, KEYS>(x, uv, d, true);
        wgmma_commit();
        if (HAS_UQ)
            gather(acc_k, ds, uq);
        wgmma_commit();
        if (STORE_DS)
            store_transposed(ds_to, ds);
        if (FINISH_C) {
            wgmma_wait<1>();
            settle(x);
            keep(p);
#pragma unroll
            for (int i = 0; i < QUERIES / 2; i++)
                s[i] *= x[i];
            to_fragments(w, s);
        }
        wgmma_fence();
        gather(acc_k, w, q);
        wgmma_commit();
        Score g[SHARE ? 1 : panels(HEAD_DIM)];
        if (FUSED) {
            store_transposed(w_to, w);
            proxy_fence();
            sync_named(SHARE ? 1 : 1 + wg, SHARE ? 256 : 128); // dS and W are stored
            wgmma_fence();
            if (SHARE)
                gather_queries<2>(g[0], tile + K_BYTES + wg * KEYS * 128, tile + wg * KEYS * 128, tile + EXCHANGE,
                                  tile + EXCHANGE + PANEL);
            else
                gather_queries<1>(g[0], uk, k, ds_to, w_to);
            wgmma_commit();
        }
        int at = load_shared_int(tile_at + 8 * ring.stage()), line = load_shared_int(tile_at + 8 * ring.stage() + 4);
        more = line >= 0;
        line = more ? line : ~line;
        wgmma_wait<0>();
        keep(p);
        keep(ds);
        keep(w);
        settle(acc_k);
        settle(acc_v);
        ring.release_by_lanes();
        ring.advance();
        if (FUSED) {
            settle(g[0]);
            reduce_queries(a.accumulator + i64(line) * a.padded_queries * ACCUMULATOR_DIM, at, SHARE ? wg : 0, g[0]);
            sync_named(SHARE ? 3 : 1 + wg, SHARE ? 256 : 128); // dS and W may be overwritten
        }
    }
    here = load_place(place_at);
    int key = here.tile * KEYS + threadIdx.x / 32 * 16 + lane_id() / 4;
    store_rows(a.out_k, here.batch, here.head, key, a.keys, a.dim, acc_k, tau);
    store_rows(a.out_v, here.batch, here.head, key, a.keys, a.value_dim, acc_v, 1.f);
}
