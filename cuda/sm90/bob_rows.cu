// Row pass of the double backward, which is also the Jacobian-vector product of the forward (5 products):
//     S = τQKᵀ, F = τ(UQ Kᵀ + Q UKᵀ), P = exp(S - L), α = Σ_j P∘F
//     gdO = (P∘F) V + P UV - α O                      -> out_o
//     α                                               -> out_lse, where wanted
//     L·log2 e, D = dO·O - dL, α, ε = dO·gdO          -> statistics, the only numbers the column pass needs from here
// A CTA owns QUERIES queries of one head, 64 a warpgroup. Q and UQ stay in shared memory; (K, UK) and (V, UV) stream
// past on two rings, last keys first. The loop issues the scores of one tile, then the second products of the tile
// before it, whose A fragments come straight from accumulators: the element-wise work on the scores runs under those
// products, and the two warpgroups fill each other's gaps. Meanwhile the idle warps zero the rows of the fp32
// accumulator that the column pass adds gQ to.
#include "row_tiles.cuh"

constexpr bool TANGENT = HAS_UQ || HAS_UK;
static_assert(TANGENT || HAS_UV, "with no cotangent every result is zero and nothing is to be launched");

constexpr u32 Q_BYTES = tile_bytes(QUERIES, HEAD_DIM), K_BYTES = tile_bytes(KEYS, HEAD_DIM),
              V_BYTES = tile_bytes(KEYS, VALUE_DIM);
// Shared memory: Q, UQ, then STAGES of K, UK, V, UV, then the barriers.
constexpr u32 K_RING = 2 * Q_BYTES, V_RING = K_RING + STAGES * 2 * K_BYTES, BARRIERS = V_RING + STAGES * 2 * V_BYTES;

struct Maps {
    TensorMap q, uq, k, uk, v, uv;
};

// Two groups: S; then F.
DEVICE void issue_scores(Score& s, Score& f, u32 q, u32 k) {
    wgmma_fence();
    score_into<HEAD_DIM, QUERIES>(s, q, k, false);
    wgmma_commit();
    if (HAS_UQ)
        score_into<HEAD_DIM, QUERIES>(f, q + Q_BYTES, k, false);
    if (HAS_UK)
        score_into<HEAD_DIM, QUERIES>(f, q, k + K_BYTES, HAS_UQ);
    wgmma_commit();
}
// One group.
DEVICE void issue_values(float (&acc)[VALUE_DIM / 2], const Fragments& p, const Fragments& pf, u32 v) {
    wgmma_fence();
    if (TANGENT)
        gather(acc, pf, v);
    if (HAS_UV)
        gather(acc, p, v + V_BYTES);
    wgmma_commit();
}

// The softmax of this thread's two rows, `row` and row + 8; `first` is the first of its warpgroup.
struct Rows {
    Band band;
    int first, row;
    float tau, c, l2[2], alpha[2];

    // S -> P, of the keys from n on.
    DEVICE void probabilities(Score& s, int n) const {
        exponential(s, c, l2);
        if (!band.inside(first, 64, n, KEYS))
            drop(s, row, n, 0.f, [&](int i) { return band.seen(i); });
    }
    // F -> P∘F, which counts for α where it is seen and for gdO where it can differ from αP.
    DEVICE void tangent(const Score& s, Score& f, int n) {
        if (TANGENT) {
#pragma unroll
            for (int i = 0; i < KEYS / 2; i++) {
                f[i] *= s[i] * tau;
                alpha[i / 2 % 2] += f[i];
            }
            if (!band.inside(first, 64, n, KEYS))
                drop(f, row, n, 0.f, [&](int i) { return band.moving(i); });
        }
    }
};

DEVICE void load(const Attention& a, const Maps& maps, u32 base, KeyRing<STAGES> ks, KeyRing<STAGES> vs, u32 q_full,
                 const RowTile& t, KeyTiles keys) {
    barrier_expect(q_full, HAS_UQ ? 2 * Q_BYTES : Q_BYTES);
    load_queries<HEAD_DIM>(a, t, base, maps.q, q_full);
    if (HAS_UQ)
        load_queries<HEAD_DIM>(a, t, base + Q_BYTES, maps.uq, q_full);
    load_keys(
        a, t, keys, Stream<HEAD_DIM, 2, STAGES>{ks, base + K_RING, {&maps.k, HAS_UK ? &maps.uk : nullptr}},
        Stream<VALUE_DIM, 2, STAGES>{vs, base + V_RING, {TANGENT ? &maps.v : nullptr, HAS_UV ? &maps.uv : nullptr}});
}

extern "C" __global__ void CLUSTERED __launch_bounds__(THREADS, 1)
    bob_rows(const __grid_constant__ Attention a, const __grid_constant__ Maps maps) {
    u32 base = shared_base(), q_full = base + BARRIERS;
    KeyRing<STAGES> ks(q_full + 8), vs(q_full + 8 + KeyRing<STAGES>::BYTES);
    init_barriers(q_full, ks, vs);
    RowTile t = row_tile(a, 4 * HEAD_DIM + 4 * VALUE_DIM);
    i64 line = i64(t.batch) * a.query_heads + t.head;
    bool last = t.m + QUERIES >= a.queries;
    Band band(a);
    KeyTiles keys = key_tiles(band, t);
    if (loading_warpgroup()) {
        if (threadIdx.x == MATH_THREADS && keys.count > 0) {
            load(a, maps, base, ks, vs, q_full, t, keys);
        } else if (threadIdx.x >= MATH_THREADS + 32 && a.accumulator) {
            float4* rows = reinterpret_cast<float4*>(a.accumulator + (line * a.padded_queries + t.m) * ACCUMULATOR_DIM);
            int count = (last ? a.padded_queries - t.m : QUERIES) * (ACCUMULATOR_DIM / 4);
#pragma unroll 4
            for (int i = threadIdx.x - MATH_THREADS - 32; i < count; i += 96)
                rows[i] = make_float4(0.f, 0.f, 0.f, 0.f);
        }
        return;
    }

    int first = first_query(t, warpgroup_id()), row = first + warp_id() * 16 + lane_id() / 4;
    Rows rows = {band, first, row, a.scale, a.scale * LOG2E, {}, {0.f, 0.f}};
    float acc[VALUE_DIM / 2];
    clear(acc);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        bool real = row + 8 * h >= a.first_query && row + 8 * h < a.queries;
        float l = real ? *at<const float>(a.lse, t.batch, t.head, row + 8 * h) * LOG2E : INFINITY_F;
        rows.l2[h] = l == -INFINITY_F ? INFINITY_F : l; // no key: P must be 0
    }

    OwnTiles own = own_tiles(band, keys, first);
    int n = own.n;
    wait_held(q_full, keys);
    pass_tiles(ks, vs, own.before);
    if (own.count > 0) {
        u32 tiles = operands(base), q = tiles + warpgroup_id() * 8192;
        Score s, f;
        Fragments p, pf;
        ks.wait();
        issue_scores(s, f, q, tiles + K_RING + ks.stage() * 2 * K_BYTES);
        wgmma_wait<1>();
        settle(s);
        rows.probabilities(s, n);
        wgmma_wait<0>();
        settle(f);
        ks.release();
        ks.advance();
        rows.tangent(s, f, n);
        to_fragments(p, s);
        to_fragments(pf, f);
        for (int i = 1; i < own.count; i++) {
            n -= KEYS;
            ks.wait();
            issue_scores(s, f, q, tiles + K_RING + ks.stage() * 2 * K_BYTES);
            vs.wait();
            issue_values(acc, p, pf, tiles + V_RING + vs.stage() * 2 * V_BYTES);
            wgmma_wait<2>();
            settle(s);
            rows.probabilities(s, n);
            wgmma_wait<1>();
            settle(f);
            ks.release();
            ks.advance();
            rows.tangent(s, f, n);
            wgmma_wait<0>();
            settle(acc);
            keep(p);
            keep(pf);
            vs.release();
            vs.advance();
            to_fragments(p, s);
            to_fragments(pf, f);
        }
        vs.wait();
        issue_values(acc, p, pf, tiles + V_RING + vs.stage() * 2 * V_BYTES);
        wgmma_wait<0>();
        settle(acc);
        keep(p);
        keep(pf);
        vs.release();
        vs.advance();
    }
    pass_tiles(ks, vs, own.after);

    float* statistics = reinterpret_cast<float*>(a.statistics + line * a.padded_queries);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        int r = row + 8 * h;
        bool real = r >= a.first_query && r < a.queries;
        float alpha = row_sum(rows.alpha[h]), shift = band.alone(r) ? 0.f : alpha;
        float delta = 0.f, epsilon = 0.f;
        if (r < a.queries) {
            const u16* o = at<const u16>(a.o, t.batch, t.head, r) + lane_id() % 4 * 2;
            const u16* d = at<const u16>(a.d, t.batch, t.head, r) + lane_id() % 4 * 2;
            u16* out = at<u16>(a.out_o, t.batch, t.head, r) + lane_id() % 4 * 2;
#pragma unroll
            for (int b = 0; b < VALUE_DIM / 8; b++) {
                if (8 * b >= a.value_dim)
                    break;
                float2 x = make_float2(0.f, 0.f);
                if (real) {
                    float2 value = unpack(*reinterpret_cast<const u32*>(o + 8 * b));
                    x.x = acc[4 * b + 2 * h] - shift * value.x;
                    x.y = acc[4 * b + 2 * h + 1] - shift * value.y;
                    if (a.d.data) {
                        float2 cotangent = unpack(*reinterpret_cast<const u32*>(d + 8 * b));
                        delta += cotangent.x * value.x + cotangent.y * value.y;
                        epsilon += cotangent.x * x.x + cotangent.y * x.y;
                    }
                }
                *reinterpret_cast<u32*>(out + 8 * b) = pack(x.x, x.y);
            }
        }
        delta = row_sum(delta);
        epsilon = row_sum(epsilon);
        if (lane_id() % 4 == 0) {
            if (a.out_lse.data && r < a.queries)
                *at<float>(a.out_lse, t.batch, t.head, r) = alpha;
            if (a.statistics && r < a.padded_queries) {
                if (real && a.dlse.data)
                    delta -= *at<const float>(a.dlse, t.batch, t.head, r);
                store_statistics(statistics, r, rows.l2[h], delta, alpha, epsilon);
            }
        }
    }
    if (a.statistics && last) // other kernels' tiles may reach further than this one's
        for (int r = t.m + QUERIES + threadIdx.x; r < a.padded_queries; r += MATH_THREADS)
            store_statistics(statistics, r, INFINITY_F, 0.f, 0.f, 0.f);
    leave();
}
