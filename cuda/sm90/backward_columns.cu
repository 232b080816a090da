// First backward by columns (5 products, 4 without dQ). With keys as rows, for one tile of queries after another:
//     Sᵀ = τKQᵀ, P = exp(S - L), dPᵀ = V dOᵀ, dS = P∘(dP - D)
//     dV = Pᵀ dO                            -> out_v
//     dK = τ dSᵀ Q                          -> out_k
//     FUSED: dQ = dS K, added in fp32 to the accumulator (finish_queries scales and rounds it)
// L·log2 e and D of each query come from statistics.
// A CTA owns KEYS keys of one key head, 64 a warpgroup; Q, dO and the statistics of all query heads of the group stream
// past on one ring, and dK and dV stay in fp32 registers until the end: K and V are never expanded and every result is
// written once. P and dS go from accumulators straight into A fragments. FUSED: dS of both warpgroups meets in shared
// memory, as queries x keys, and each warpgroup sums one half of dQ over all keys, transposed (Kᵀ dSᵀ): one panel of D,
// or half of the queries where D has one panel; a single warpgroup sums all. It does so a tile late, from one of two
// buffers, so that neither waits for the other.
#include "column_tiles.cuh"

constexpr bool HALVES = panels(HEAD_DIM) < WARPGROUPS; // of the queries; otherwise panels of D
// What a warpgroup sums of dQ: so many queries, of so many panels of D.
constexpr int SUMS = FUSED && HALVES ? QUERIES / 2 : QUERIES, PANELS = HALVES ? 1 : panels(HEAD_DIM) / WARPGROUPS;
// A stage: Q, dO, statistics. Shared memory: K, V, the stages, two buffers for dS (a panel of 64 keys of each
// warpgroup), the barriers.
constexpr u32 D_AT = Q_BYTES, STATISTICS_AT = D_AT + D_BYTES, STAGE_BYTES = STATISTICS_AT + round_up(STATISTICS, 1024);
constexpr u32 RING = K_BYTES + V_BYTES, EXCHANGE = RING + STAGES * STAGE_BYTES, BUFFER_BYTES = WARPGROUPS * PANEL;
constexpr u32 BARRIERS = EXCHANGE + FUSED * 2 * BUFFER_BYTES, HANDED = BARRIERS + 8 + Ring<STAGES>::BYTES,
              PLACE = HANDED + Ring<2>::BYTES;

struct Maps {
    TensorMap q, d, k, v;
};

DEVICE void load(const Attention& a, const Maps& maps, u32 base, Ring<STAGES> ring, u32 keys_full, Place here,
                 Range queries) {
    int n = here.tile * KEYS - a.first_key;
    barrier_expect(keys_full, K_BYTES + V_BYTES);
    load_tile<KEYS, HEAD_DIM>(base, maps.k, keys_full, n, here.head, here.batch);
    load_tile<KEYS, VALUE_DIM>(base + K_BYTES, maps.v, keys_full, n, here.head, here.batch);
#pragma unroll 1 // few registers
    for (QueryTiles to(a, here, queries); to.more(); to.advance()) {
        u32 q = base + RING + ring.stage() * STAGE_BYTES, full = ring.fill(Q_BYTES + D_BYTES + STATISTICS);
        load_tile<QUERIES, HEAD_DIM>(q, maps.q, full, to.m - a.first_query, to.head, here.batch);
        load_tile<QUERIES, VALUE_DIM>(q + D_AT, maps.d, full, to.m - a.first_query, to.head, here.batch);
        stream_statistics(a, q + STATISTICS_AT, full, to, here.batch);
        ring.advance();
    }
}

typedef float Sums[PANELS][SUMS / 2];
// One group: this warpgroup's part of dQᵀ. `k` is its panel of K, `ds` its rows of dS.
DEVICE void issue_queries(Sums& g, u32 k, u32 ds) {
    wgmma_fence();
#pragma unroll
    for (int p = 0; p < PANELS; p++)
#pragma unroll
        for (int t = 0; t < KEYS / 16; t++)
            wgmma<SUMS, 1, 0>(g[p], by_rows<KEYS>(k + p * KEYS * 128, t), by_columns<QUERIES>(ds, t), t > 0);
    wgmma_commit();
}
DEVICE void settle_queries(Sums& g) {
#pragma unroll
    for (int p = 0; p < PANELS; p++)
        settle(g[p]);
}
DEVICE void add_queries(float* sums, int wg, const Sums& g) {
#pragma unroll
    for (int p = 0; p < PANELS; p++)
        reduce_queries(sums, 0, HALVES ? 0 : wg + p, g[p]);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    backward_columns(const __grid_constant__ Attention a, const __grid_constant__ Maps maps) {
    u32 base = shared_base(), keys_full = base + BARRIERS;
    Ring<STAGES> ring(keys_full + 8);
    Ring<2> exchange(base + HANDED), before = exchange; // where dS of this tile goes, and that of the one before lies
    Place here = column_tile(a, 2 * HEAD_DIM + 2 * VALUE_DIM + STATISTICS_BYTES + FUSED * 4 * HEAD_DIM);
    if (threadIdx.x == 0) {
        barrier_init(keys_full, 1);
        ring.init(MATH_THREADS);
        exchange.init(4 * WARPGROUPS, 4 * WARPGROUPS);
        barrier_init_fence();
        store_place(base + PLACE, here);
    }
    sync_threads();
    int n = here.tile * KEYS;
    Band band(a);
    Range queries = tiles_of_queries(band, n);

    if (threadIdx.x >= MATH_THREADS) {
        registers_shrink<24>();
        if (threadIdx.x == MATH_THREADS)
            load(a, maps, base, ring, keys_full, here, queries);
        return;
    }

    registers_grow<240>();
    int wg = warpgroup_id();
    Range inside = band.queries_inside(QUERIES, n + wg * 64, 64);
    float c = a.scale * LOG2E;
    float acc_k[HEAD_DIM / 2], acc_v[VALUE_DIM / 2];
    Score s, x;
    Fragments p, ds;
    clear(acc_k);
    clear(acc_v);
    i64 first = i64(here.batch * a.key_heads + here.head) * a.group *
                a.padded_queries; // of the query head, in rows of the accumulator
    float* sums = nullptr;        // of the tile before
    if (FUSED) {                  // there is none before the first: its dS is 0
        store_zeros<1>(base + EXCHANGE + wg * PANEL);
        exchange.fill_by_warps();
        exchange.advance();
    }
    // dQ of the tile before: its products; and when they are complete its sum, to which the tile at m succeeds.
    auto issue_before = [&](Sums& g, u32 tile) {
        before.wait();
        issue_queries(g, HALVES ? tile : tile + wg * KEYS * 128,
                      tile + EXCHANGE + before.stage() * BUFFER_BYTES + (HALVES ? wg * SUMS * 128 : 0));
    };
    auto add_before = [&](Sums& g, int m) {
        settle_queries(g);
        before.release();
        before.advance();
        if (sums)
            add_queries(sums, wg, g);
        sums = a.accumulator + (first + m + (HALVES ? wg * SUMS : 0)) * ACCUMULATOR_DIM;
    };
    barrier_wait(keys_full, 0);

#pragma unroll 1
    for (int member = 0; member < a.group; member++, first += a.padded_queries) {
        int m = queries.begin;
        // The first tiles, whose queries see keys of the other warpgroup alone.
#pragma unroll 1
        for (int i = tiles_before(band, queries, n + wg * 64); m < queries.end && i > 0; i--, m += QUERIES) {
            if (FUSED) {
                Sums g;
                issue_before(g, base);
                exchange.wait_empty();
                store_zeros<1>(base + EXCHANGE + exchange.stage() * BUFFER_BYTES + wg * PANEL);
                exchange.fill_by_warps();
                exchange.advance();
                wgmma_wait<0>();
                add_before(g, m);
            }
            ring.wait();
            ring.release_by_lanes();
            ring.advance();
        }
#pragma unroll 1
        for (; m < queries.end; m += QUERIES) {
            u32 tile = fresh(base), k = tile + wg * 8192, v = k + K_BYTES;
            u32 q = base + RING + ring.stage() * STAGE_BYTES, d = q + D_AT,
                pair = q + STATISTICS_AT + lane_id() % 4 * 32;
            Sums g;
            ring.wait();
            wgmma_fence();
            score_into<HEAD_DIM, KEYS>(s, k, q, false);
            wgmma_commit();
            score_into<VALUE_DIM, KEYS>(x, v, d, false);
            wgmma_commit();
            if (FUSED) {
                issue_before(g, tile);
                wgmma_wait<2>();
            } else {
                wgmma_wait<1>();
            }
            settle(s);
#pragma unroll
            for (int b = 0; b < QUERIES / 8; b++) {
                float2 l = load_shared_2(pair + b * 128);
#pragma unroll
                for (int j = 0; j < 4; j++)
                    s[4 * b + j] = exp2_approx(s[4 * b + j] * c - (j % 2 ? l.y : l.x));
            }
            bool edge = m < inside.begin || m >= inside.end;
            if (edge)
                drop_transposed(s, m, fresh(n) + threadIdx.x / 32 * 16 + lane_id() / 4,
                                [&](int j) { return band.seeing(j); });
            to_fragments(p, s);
            wgmma_wait<FUSED ? 1 : 0>();
            settle(x);
#pragma unroll
            for (int b = 0; b < QUERIES / 8; b++) {
                float2 delta = load_shared_2(pair + b * 128 + 16);
#pragma unroll
                for (int j = 0; j < 4; j++)
                    x[4 * b + j] = s[4 * b + j] * (x[4 * b + j] - (j % 2 ? delta.y : delta.x));
            }
            if (edge)
                drop_transposed(x, m, fresh(n) + threadIdx.x / 32 * 16 + lane_id() / 4,
                                [&](int j) { return band.carrying(j); });
            to_fragments(ds, x);
            wgmma_fence();
            gather(acc_v, p, d);
            gather(acc_k, ds, q);
            wgmma_commit();
            if (FUSED) {
                exchange.wait_empty();
                store_transposed(tile + EXCHANGE + exchange.stage() * BUFFER_BYTES + wg * PANEL, ds);
                exchange.fill_by_warps();
                exchange.advance();
                wgmma_wait<1>();
                add_before(g, m);
            }
            wgmma_wait<0>();
            keep(p);
            keep(ds);
            settle(acc_k);
            settle(acc_v);
            ring.release_by_lanes();
            ring.advance();
        }
    }
    if (FUSED && sums) {
        Sums g;
        issue_before(g, base);
        wgmma_wait<0>();
        settle_queries(g);
        add_queries(sums, wg, g);
    }
    store_results(a, load_place(base + PLACE), acc_k, acc_v); // again: registers are short in the loop
}
