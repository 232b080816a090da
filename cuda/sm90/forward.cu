// Forward (2 products), with the softmax normalised as the keys stream past:
//     S = τQKᵀ, m = max_j S, l = Σ_j exp(S - m), O = Σ_j exp(S - m) V / l  -> out_o,   L = m + ln l  -> out_lse
// A CTA owns QUERIES queries of one head, 64 a warpgroup. Q stays in shared memory; K and V stream past on two rings,
// last keys first. The loop issues the scores of one tile, then the second product of the tile before it: the softmax
// runs under that product. Up to 64 columns the warpgroups issue in turn, so that one computes its softmax while the
// tensor cores have the products of another. The m subtracted need not be the maximum, only near it: it moves, and O is
// scaled, when the maximum has outgrown it by a factor of 2^SLACK. A row with no key keeps l = 0: O = 0, L = -inf.
#include "row_tiles.cuh"

constexpr u32 Q_BYTES = tile_bytes(QUERIES, HEAD_DIM), K_BYTES = tile_bytes(KEYS, HEAD_DIM),
              V_BYTES = tile_bytes(KEYS, VALUE_DIM);
// Shared memory: Q, then STAGES of K, then of V, then the barriers.
constexpr u32 V_RING = Q_BYTES + STAGES * K_BYTES, BARRIERS = V_RING + STAGES * V_BYTES;
// Where exponentials and tensor cores take equally long the warpgroups alternate; wider products hide the exponentials
// better when nobody waits for a turn.
constexpr bool TURNS = WARPGROUPS > 1 && HEAD_DIM <= 64 && VALUE_DIM <= 64;
constexpr float SLACK = 8.f; // exp(S - m) up to 2^8 loses nothing: it is far from the end of either half-precision type
constexpr float LOWEST = -3.4028235e38f; // below every score, yet LOWEST - LOWEST is a number

struct Maps {
    TensorMap q, k, v;
};

DEVICE void load(const Attention& a, const Maps& maps, u32 base, KeyRing<STAGES> ks, KeyRing<STAGES> vs, u32 q_full,
                 const RowTile& t, KeyTiles keys) {
    barrier_expect(q_full, Q_BYTES);
    load_queries<HEAD_DIM>(a, t, base, maps.q, q_full);
    load_keys(a, t, keys, Stream<HEAD_DIM, 1, STAGES>{ks, base + Q_BYTES, {&maps.k}},
              Stream<VALUE_DIM, 1, STAGES>{vs, base + V_RING, {&maps.v}});
}

// The warpgroups' turns at the tensor cores: each waits at its own barrier for the one before it.
DEVICE void take_turn(int wg) {
    if (TURNS)
        sync_named(1 + wg, 256);
}
DEVICE void pass_turn(int wg) {
    if (TURNS)
        arrive_named(1 + (wg + 1) % WARPGROUPS, 256);
}

// One group each.
DEVICE void issue_scores(Score& s, u32 q, u32 k) {
    wgmma_fence();
    score_into<HEAD_DIM, QUERIES>(s, q, k, false);
    wgmma_commit();
}
DEVICE void issue_values(float (&acc)[VALUE_DIM / 2], const Fragments& p, u32 v) {
    wgmma_fence();
    gather(acc, p, v);
    wgmma_commit();
}

// Of rows `row` and row + 8, in units of log2: what is subtracted from the scores, and the sum of the exponentials.
struct Softmax {
    Band band;
    Range inside;
    int row;
    float c, base[2], sum[2], shrink[2];

    // S -> exp(S - m) of the keys from n on. True if m has moved: all sums so far are to be multiplied by `shrink`.
    DEVICE bool apply(Score& s, int n) {
        if (n < inside.begin || n >= inside.end)
            drop(s, row, n, -INFINITY_F, [&](int i) { return band.seen(i); });
        float top[4] = {s[0], s[1], s[2], s[3]};
#pragma unroll
        for (int i = 4; i < KEYS / 2; i++)
            top[i % 4] = fmaxf(top[i % 4], s[i]);
        float high[2] = {row_max(fmaxf(top[0], top[1])) * c, row_max(fmaxf(top[2], top[3])) * c};
        bool moved = any(high[0] > base[0] + SLACK || high[1] > base[1] + SLACK);
        if (moved) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                float next = fmaxf(base[h], high[h]);
                shrink[h] = exp2_approx(base[h] - next);
                base[h] = next;
                sum[h] *= shrink[h];
            }
        }
#pragma unroll
        for (int i = 0; i < KEYS / 2; i++) {
            s[i] = exp2_approx(s[i] * c - base[i / 2 % 2]);
            sum[i / 2 % 2] += s[i];
        }
        return moved;
    }
    DEVICE void rescale(float (&acc)[VALUE_DIM / 2]) const {
#pragma unroll
        for (int i = 0; i < VALUE_DIM / 2; i++)
            acc[i] *= shrink[i / 2 % 2];
    }
};

// Q -> -Q, this warpgroup's rows: with a negative scale the softmax is that of |τ| (-Q)Kᵀ, and the largest score is the
// largest product again.
DEVICE void negate_rows(u32 q, int wg) {
#pragma unroll
    for (int i = 0; i < 4 * panels(HEAD_DIM); i++) {
        u32 at = q + i / 4 * QUERIES * 128 + i % 4 * 2048 + threadIdx.x % 128 * 16;
        float4 x = load_shared_4(at);
        auto flip = [](float pair) { return __uint_as_float(__float_as_uint(pair) ^ 0x80008000u); };
        store_shared_4(at, flip(x.x), flip(x.y), flip(x.z), flip(x.w));
    }
    proxy_fence();
    sync_named(1 + WARPGROUPS + wg, 128);
}

extern "C" __global__ void CLUSTERED __launch_bounds__(THREADS, 1)
    forward(const __grid_constant__ Attention a, const __grid_constant__ Maps maps) {
    u32 base = shared_base(), q_full = base + BARRIERS;
    KeyRing<STAGES> ks(q_full + 8), vs(q_full + 8 + KeyRing<STAGES>::BYTES);
    init_barriers(q_full, ks, vs);
    RowTile t = row_tile(a, 2 * HEAD_DIM + 2 * VALUE_DIM);
    Band band(a);
    KeyTiles keys = key_tiles(band, t);
    if (loading_warpgroup()) {
        if (threadIdx.x == MATH_THREADS && keys.count > 0)
            load(a, maps, base, ks, vs, q_full, t, keys);
        return;
    }

    int wg = warpgroup_id(), first = first_query(t, wg), row = first + warp_id() * 16 + lane_id() / 4;
    // A scale of zero makes all scores 0; the smallest one that is not zero does the same, and leaves -inf as it is.
    float c = fmaxf(fabsf(a.scale) * LOG2E, 1.2e-38f);
    Softmax softmax = {band, band.keys_inside(first, 64, KEYS), row, c, {LOWEST, LOWEST}, {0.f, 0.f}, {1.f, 1.f}};
    float acc[VALUE_DIM / 2];
    clear(acc);

    OwnTiles own = own_tiles(band, keys, first);
    int n = own.n;
    if (wg == WARPGROUPS - 1 && keys.count > 1)
        pass_turn(wg);
    // There is a turn for every tile of the CTA but the first, whether it is this warpgroup's or not.
    auto end_turn = [&](int i) {
        if (wg < WARPGROUPS - 1 || i + 1 < keys.count)
            pass_turn(wg);
    };
    auto skip_turn = [&](int i) {
        if (i > 0) {
            take_turn(wg);
            end_turn(i);
        }
    };
    auto pass = [&](int begin, int end) {
#pragma unroll 1
        for (int i = begin; i < end; i++) {
            pass_tile(ks, vs);
            skip_turn(i);
        }
    };
    wait_held(q_full, keys);
    pass(0, own.before);
    if (own.count > 0) {
        skip_turn(own.before);
        u32 tiles = operands(base), q = tiles + wg * 8192;
        Score s;
        Fragments p;
        if (a.scale < 0.f)
            negate_rows(base + wg * 8192, wg);
        ks.wait();
        issue_scores(s, q, tiles + Q_BYTES + ks.stage() * K_BYTES);
        wgmma_wait<0>();
        settle(s);
        ks.release();
        ks.advance();
        softmax.apply(s, n);
        to_fragments(p, s);
#pragma unroll 1
        for (int i = own.before + 1; i < own.before + own.count; i++) {
            n -= KEYS;
            ks.wait();
            take_turn(wg);
            issue_scores(s, q, tiles + Q_BYTES + ks.stage() * K_BYTES);
            vs.wait();
            issue_values(acc, p, tiles + V_RING + vs.stage() * V_BYTES);
            end_turn(i);
            wgmma_wait<1>();
            settle(s);
            ks.release();
            ks.advance();
            bool moved = softmax.apply(s, n);
            wgmma_wait<0>();
            settle(acc);
            keep(p);
            vs.release();
            vs.advance();
            if (moved)
                softmax.rescale(acc);
            to_fragments(p, s);
        }
        vs.wait();
        issue_values(acc, p, tiles + V_RING + vs.stage() * V_BYTES);
        wgmma_wait<0>();
        settle(acc);
        keep(p);
        vs.release();
        vs.advance();
    }
    pass(keys.count - own.after, keys.count);

#pragma unroll
    for (int h = 0; h < 2; h++) {
        float total = row_sum(softmax.sum[h]);
        softmax.shrink[h] = total > 0.f ? 1.f / total : 0.f;
        if (lane_id() % 4 == 0 && row + 8 * h < a.queries)
            *at<float>(a.out_lse, t.batch, t.head, row + 8 * h) =
                total > 0.f ? (softmax.base[h] + log2_approx(total)) * LN2 : -INFINITY_F;
    }
    softmax.rescale(acc);
    store_rows(a.out_o, t.batch, t.head, row, a.queries, a.value_dim, acc, 1.f);
    leave();
}
