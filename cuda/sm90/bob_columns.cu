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
// A CTA owns KEYS keys of one key head, 64 a warpgroup; Q, UQ, dO and the statistics of all query heads of the group
// stream past on one ring, and gK and gV stay in fp32 registers until the end: K and V are never expanded and every
// result is written once. P∘F̂, dS and W go from accumulators straight into A fragments; C is accumulated by the tensor
// cores onto F̂∘X - ε. STACKED: Q and UQ are one operand of twice the rows, so that K meets both in one product and is
// read once for them. AHEAD: that product adds to UK Qᵀ, which was computed at the end of the tile before.
// FUSED: dS and W are also stored, as queries x keys, in shared memory, and gQ is computed transposed (UKᵀ dSᵀ + Kᵀ
// Wᵀ), so that any multiple of 16 queries will do, over all keys of the CTA. A warpgroup apart does so, a tile behind
// (APART); beside two that compute with two panels of D there are no registers for it, and each sums one panel itself.
#include "column_tiles.cuh"

constexpr bool TANGENT = HAS_UQ || HAS_UK;
static_assert(TANGENT || HAS_UV, "with no cotangent every result is zero and nothing is to be launched");

constexpr bool WIDE = panels(HEAD_DIM) == 2;
constexpr bool APART = FUSED && (!WIDE || KEYS == 64); // gQ has a warpgroup of its own
// Three warpgroups have 168 registers a thread at entry and share 504, two have 240.
constexpr int MATH_REGISTERS = KEYS == 128 && APART ? 216 : 240,
              SERVICE_REGISTERS = KEYS == 64 ? 128 : (APART ? 72 : 24);
constexpr bool STORE_DS = FUSED && HAS_UK;   // gQ takes dS with UK
constexpr bool FINISH_C = TANGENT && HAS_UV; // G goes onto F̂∘X - ε; otherwise C is the one or the other
// Registers are short: one warpgroup of 240 has none left for the edges of a window.
constexpr bool SHORT = WIDE && KEYS == 64 && MASK_LEFT && MASK_RIGHT;
// Where shared memory decides and gQ, computed by the same warpgroups, covers a product. Elsewhere it measured slower.
constexpr bool AHEAD = FUSED && WIDE && HAS_UQ && HAS_UK && !SHORT;
static_assert(!AHEAD || STAGES > 1, "the next tile is needed before this one is released");
// Where it measured faster, and where two products would need more registers than there are.
constexpr bool STACKED = AHEAD || (HAS_UQ && (FUSED != WIDE || !HAS_UV) && !SHORT);
static_assert(!STACKED || QUERIES <= 128, "a product has at most 256 columns");
constexpr int BUFFERS = FUSED && !WIDE ? 2 : 1; // of dS and W
// A stage: Q, UQ (STACKED: a panel of Q, the same of UQ, and so on), dO, statistics. Shared memory: K, UK, V, UV, the
// stages, buffers of dS and W of each warpgroup (64 keys wide), the barriers.
constexpr int Q_ROWS = STACKED ? 2 * QUERIES : QUERIES; // of a panel
constexpr u32 UQ_AT = STACKED ? QUERIES * 128 : Q_BYTES, D_AT = 2 * Q_BYTES, STATISTICS_AT = D_AT + D_BYTES;
constexpr u32 STAGE_BYTES = STATISTICS_AT + round_up(STATISTICS, 1024),
              LOAD_BYTES = Q_BYTES + HAS_UQ * Q_BYTES + D_BYTES + STATISTICS;
constexpr u32 V_AT = 2 * K_BYTES, RING = V_AT + 2 * V_BYTES, EXCHANGE = RING + STAGES * STAGE_BYTES,
              BUFFER_BYTES = WARPGROUPS * 2 * PANEL;
constexpr u32 BARRIERS = EXCHANGE + FUSED * BUFFERS * BUFFER_BYTES;

struct Maps {
    TensorMap q, uq, d, k, uk, v, uv;
};

// score_into and gather of a tile of Q, UQ or both, whose panels have Q_ROWS rows.
template <int N>
DEVICE void score_q(float (&s)[N], u32 a, u32 q, bool onto) {
#pragma unroll
    for (int k = 0; k < HEAD_DIM / 16; k++)
        wgmma<2 * N, 0, 0>(s, by_columns<KEYS>(a, k), by_columns<Q_ROWS>(q, k), onto || k > 0);
}
// ahead = UK Qᵀ, one group; k: the warpgroup's keys.
DEVICE void score_ahead(Score& ahead, u32 k, u32 q) {
    wgmma_fence();
    score_q(ahead, k + K_BYTES, q, false);
    wgmma_commit();
}
DEVICE void gather_q(float (&acc)[HEAD_DIM / 2], const Fragments& p, u32 q) {
#pragma unroll
    for (int t = 0; t < QUERIES / 16; t++)
        wgmma<HEAD_DIM, 1>(acc, p[t], by_rows<Q_ROWS>(q, t), true);
}

DEVICE void load_keys(const Attention& a, const Maps& maps, u32 base, u32 bar, Place here) {
    int n = here.tile * KEYS - a.first_key;
    barrier_expect(bar, (1 + HAS_UK) * K_BYTES + (TANGENT + HAS_UV) * V_BYTES);
    load_tile<KEYS, HEAD_DIM>(base, maps.k, bar, n, here.head, here.batch);
    if (HAS_UK)
        load_tile<KEYS, HEAD_DIM>(base + K_BYTES, maps.uk, bar, n, here.head, here.batch);
    if (TANGENT)
        load_tile<KEYS, VALUE_DIM>(base + V_AT, maps.v, bar, n, here.head, here.batch);
    if (HAS_UV)
        load_tile<KEYS, VALUE_DIM>(base + V_AT + V_BYTES, maps.uv, bar, n, here.head, here.batch);
}
DEVICE void load_queries(const Attention& a, const Maps& maps, u32 base, Ring<STAGES>& ring, u32 tile_at, int batch,
                         QueryTiles& to) {
    u32 q = base + RING + ring.stage() * STAGE_BYTES;
    int m = to.m - a.first_query, line = batch * a.query_heads + to.head;
    ring.wait_empty();
    store_shared(tile_at + 8 * ring.stage(), u32(to.m));
    store_shared(tile_at + 8 * ring.stage() + 4, u32(to.last() ? ~line : line));
    u32 full = ring.announce(LOAD_BYTES);
    load_tile<Q_ROWS, HEAD_DIM>(q, maps.q, full, m, to.head, batch);
    if (HAS_UQ)
        load_tile<Q_ROWS, HEAD_DIM>(q + UQ_AT, maps.uq, full, m, to.head, batch);
    load_tile<QUERIES, VALUE_DIM>(q + D_AT, maps.d, full, m, to.head, batch);
    stream_statistics(a, q + STATISTICS_AT, full, to, batch);
    ring.advance();
    to.advance();
}

// Gᵀ of one panel of D: 64 columns x QUERIES, summed over the CTA's keys. k: the panel of K; buffer: dS and W.
DEVICE void sum_queries(Score& g, u32 k, u32 buffer) {
    u32 uk = k + K_BYTES, ds = buffer, w = buffer + PANEL;
#pragma unroll
    for (int t = 0; HAS_UK && t < KEYS / 16; t++)
        wgmma<QUERIES, 1, 0>(g, by_rows<KEYS>(uk, t), by_columns<2 * QUERIES>(ds, t), t > 0);
#pragma unroll
    for (int t = 0; t < KEYS / 16; t++)
        wgmma<QUERIES, 1, 0>(g, by_rows<KEYS>(k, t), by_columns<2 * QUERIES>(w, t), HAS_UK || t > 0);
}

// line: batch and query head in one number, its complement at the last tile.
DEVICE float* accumulator_of(const Attention& a, int line) {
    return a.accumulator + i64(line >= 0 ? line : ~line) * a.padded_queries * ACCUMULATOR_DIM;
}

// The last warpgroup: its first thread loads; APART, all of it sums gQ from what the others have stored.
DEVICE void serve(const Attention& a, const Maps& maps, u32 base, Ring<STAGES> ring, Ring<BUFFERS> exchange,
                  u32 keys_full, u32 tile_at, Place here, Range queries) {
    bool loads = threadIdx.x == MATH_THREADS;
    QueryTiles ahead(a, here, queries);
    if (loads) {
        load_keys(a, maps, base, keys_full, here);
        for (int s = 0; s < STAGES && ahead.more(); s++)
            load_queries(a, maps, base, ring, tile_at, here.batch, ahead);
    }
    if (!APART) {
#pragma unroll 1
        while (loads && ahead.more())
            load_queries(a, maps, base, ring, tile_at, here.batch, ahead);
        return;
    }
    barrier_wait(keys_full, 0);
#pragma unroll 1
    for (QueryTiles now(a, here, queries); now.more(); now.advance()) {
        u32 k = uniform(fresh(base));
        float* to = a.accumulator + i64(here.batch * a.query_heads + now.head) * a.padded_queries * ACCUMULATOR_DIM;
        exchange.wait();
#pragma unroll
        for (int p = 0; p < panels(HEAD_DIM); p++) {
            Score g;
            wgmma_fence();
            sum_queries(g, k + p * KEYS * 128, base + EXCHANGE + exchange.stage() * BUFFER_BYTES);
            wgmma_commit();
            if (p == 0 && loads && ahead.more())
                load_queries(a, maps, base, ring, tile_at, here.batch, ahead);
            wgmma_wait<0>();
            settle(g);
            if (p == panels(HEAD_DIM) - 1)
                exchange.release();
            reduce_queries(to, now.m, p, g);
        }
        exchange.advance();
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    bob_columns(const __grid_constant__ Attention a, const __grid_constant__ Maps maps) {
    u32 base = shared_base(), keys_full = base + BARRIERS;
    Ring<STAGES> ring(keys_full + 8);
    Ring<BUFFERS> exchange(ring.full + ring.BYTES);
    u32 place_at = exchange.full + exchange.BYTES, tile_at = place_at + 16;
    Place here = column_tile(a, 4 * HEAD_DIM + 2 * VALUE_DIM + STATISTICS_BYTES + FUSED * 4 * HEAD_DIM);
    if (threadIdx.x == 0) {
        barrier_init(keys_full, 1);
        ring.init(MATH_THREADS);
        exchange.init(APART ? 4 : 8, MATH_THREADS / 32);
        barrier_init_fence();
        store_place(place_at, here);
    }
    sync_threads();
    Range queries = tiles_of_queries(Band(a), here.tile * KEYS);

    if (threadIdx.x >= MATH_THREADS) {
        registers_shrink<SERVICE_REGISTERS>();
        serve(a, maps, base, ring, exchange, keys_full, tile_at, here, queries);
        return;
    }

    registers_grow<MATH_REGISTERS>();
    int wg = WARPGROUPS > 1 ? warpgroup_id() : 0;
    float c = a.scale * LOG2E;
    float acc_k[HEAD_DIM / 2], acc_v[VALUE_DIM / 2];
    float sf[QUERIES]; // S and F: one accumulator when STACKED
    Score &s = half<0>(sf), &f = half<1>(sf), x;
    Score& e = AHEAD && FINISH_C ? f : x; // what becomes C
    Fragments p, ds, w;
    clear(acc_k);
    clear(acc_v);
    barrier_wait(keys_full, 0);

    // Where the CTA and the tile are, and whether it is the last, is read from shared memory when it is needed: the
    // loop has no registers for it.
    bool more = queries.begin < queries.end;
    // The first tiles, whose queries see keys of the other warpgroup alone. (Those of the group's first query head: the
    // loop does not know where another one begins.)
#pragma unroll 1
    for (int i = tiles_before(Band(a), queries, here.tile * KEYS + wg * 64); more && i > 0; i--) {
        ring.wait();
        int m = load_shared_int(tile_at + 8 * ring.stage()), line = load_shared_int(tile_at + 8 * ring.stage() + 4);
        more = line >= 0;
        if (FUSED) {
            exchange.wait_empty();
            store_zeros<2>(base + EXCHANGE + exchange.stage() * BUFFER_BYTES + wg * 2 * PANEL);
            exchange.fill_by_warps();
            if (!APART) {
                exchange.wait();
                Score g;
                wgmma_fence();
                sum_queries(g, base + wg * KEYS * 128, base + EXCHANGE);
                wgmma_commit();
                wgmma_wait<0>();
                settle(g);
                exchange.release();
                reduce_queries(accumulator_of(a, line), m, wg, g);
            }
            exchange.advance();
        }
        ring.release_by_lanes();
        ring.advance();
    }
    Score ahead; // UK Qᵀ of the next tile
    if (AHEAD && more) {
        ring.wait();
        score_ahead(ahead, base + wg * 8192, base + RING + ring.stage() * STAGE_BYTES);
        wgmma_wait<0>();
        settle(ahead);
    }
#pragma unroll 1
    while (more) {
        u32 tile = uniform(fresh(base)), k = tile + wg * 8192, uk = k + K_BYTES, v = k + V_AT, uv = v + V_BYTES;
        u32 q = base + RING + ring.stage() * STAGE_BYTES, uq = q + UQ_AT, d = q + D_AT,
            pair = q + STATISTICS_AT + lane_id() % 4 * 32;
        if (AHEAD) { // the tile was waited for then; S starts from 0, F from UK Qᵀ
            clear(s);
#pragma unroll
            for (int i = 0; i < QUERIES / 2; i++)
                f[i] = ahead[i];
        } else {
            ring.wait();
        }
        wgmma_fence();
        if (STACKED) {
            score_q(sf, k, q, AHEAD);
            wgmma_commit();
            if (AHEAD)
                score_into<VALUE_DIM, KEYS>(x, v, d, false);
            else if (HAS_UK)
                score_q(x, uk, q, false); // products in flight on one accumulator have one shape: not onto F
            wgmma_commit();
            wgmma_wait<1>();
            settle(sf);
        } else {
            score_q(s, k, q, false);
            wgmma_commit();
            if (HAS_UQ)
                score_q(f, k, uq, false);
            if (HAS_UK)
                score_q(f, uk, q, HAS_UQ);
            wgmma_commit();
            if (TANGENT)
                score_into<VALUE_DIM, KEYS>(x, v, d, false);
            else
                score_into<VALUE_DIM, KEYS>(x, uv, d, false);
            wgmma_commit();
            wgmma_wait<2>();
            settle(s);
        }
#pragma unroll
        for (int b = 0; b < QUERIES / 8; b++) {
            float2 l = load_shared_2(pair + b * 128);
#pragma unroll
            for (int j = 0; j < 4; j++)
                s[4 * b + j] = exp2_approx(s[4 * b + j] * c - (j % 2 ? l.y : l.x));
        }
        int first = load_place(place_at).tile * KEYS + wg * 64, m = load_shared_int(tile_at + 8 * ring.stage());
        Band band(a); // made anew for each tile, or its sums occupy registers through the loop
        band.low = a.shift - int(fresh(a.left));
        band.high = a.shift + int(fresh(a.right));
        if (!band.inside(m, QUERIES, first, 64))
            drop_transposed(s, m, first + warp_id() * 16 + lane_id() / 4, [&](int j) { return band.carrying(j); });
        if (STACKED && !AHEAD) {
            wgmma_wait<0>();
            if (HAS_UK) {
                settle(x);
#pragma unroll
                for (int i = 0; i < QUERIES / 2; i++)
                    f[i] += x[i];
            }
            wgmma_fence();
            score_into<VALUE_DIM, KEYS>(x, v, d, false);
            wgmma_commit();
        } else {
            wgmma_wait<1>();
            if (TANGENT)
                settle(f);
        }
        if (TANGENT) {
#pragma unroll
            for (int b = 0; b < QUERIES / 8; b++) {
                float2 alpha = load_shared_2(pair + b * 128 + 8);
#pragma unroll
                for (int j = 0; j < 4; j++)
                    f[4 * b + j] = f[4 * b + j] * a.scale - (j % 2 ? alpha.y : alpha.x);
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
            if (!FINISH_C || SHORT) { // W is next, and registers for another set of fragments are short
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
                    e[i] = f[i] * x[i] - de.z;
                    e[i + 1] = f[i + 1] * x[i + 1] - de.w;
                } else {
                    e[i] -= de.z;
                    e[i + 1] -= de.w;
                }
                if (!FINISH_C)
                    w[i / 8][i % 8 / 2] = pack(s[i] * e[i], s[i + 1] * e[i + 1]);
            }
        }
        wgmma_fence();
        if (FINISH_C)
            score_into<VALUE_DIM, KEYS>(e, uv, d, true);
        wgmma_commit();
        if (HAS_UQ)
            gather_q(acc_k, ds, uq);
        wgmma_commit();
        u32 ds_to = base + EXCHANGE + exchange.stage() * BUFFER_BYTES + wg * 2 * PANEL;
        if (FUSED)
            exchange.wait_empty();
        if (STORE_DS)
            store_transposed(fresh(ds_to), ds); // fresh: or each thread's place in the panel occupies a register
        if (FINISH_C) {
            wgmma_wait<1>();
            settle(e);
            keep(p);
#pragma unroll
            for (int i = 0; i < QUERIES / 2; i++)
                s[i] *= e[i];
            to_fragments(w, s);
        }
        wgmma_fence();
        gather_q(acc_k, w, q);
        wgmma_commit();
        Score g;
        if (FUSED) {
            store_transposed(fresh(ds_to + PANEL), w);
            exchange.fill_by_warps();
        }
        int line = load_shared_int(tile_at + 8 * ring.stage() + 4);
        more = line >= 0;
        if (AHEAD) {
            Ring<STAGES> next = ring;
            next.advance();
            if (more) // if not, the product is of no use; a condition around it would make ptxas serialise
                next.wait();
            score_ahead(ahead, k, base + RING + next.stage() * STAGE_BYTES);
        }
        if (FUSED && !APART) {
            exchange.wait();
            wgmma_fence();
            sum_queries(g, tile + wg * KEYS * 128, tile + EXCHANGE);
            wgmma_commit();
        }
        wgmma_wait<0>();
        if (AHEAD)
            settle(ahead);
        keep(p);
        keep(ds);
        keep(w);
        settle(acc_k);
        settle(acc_v);
        if (FUSED && !APART) {
            settle(g);
            exchange.release();
            reduce_queries(accumulator_of(a, line), load_shared_int(tile_at + 8 * ring.stage()), wg, g);
        }
        if (FUSED)
            exchange.advance();
        ring.release_by_lanes();
        ring.advance();
    }
    store_results(a, load_place(place_at), acc_k, acc_v);
}
