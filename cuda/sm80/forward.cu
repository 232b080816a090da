// Forward (2 products), with the softmax normalised as the keys stream past:
//     S = QKᵀ, m = max_j τS, l = Σ_j exp(τS - m), O = Σ_j exp(τS - m) V / l  -> out_o,   L = m + ln l  -> out_lse
// Q stays in shared memory, K and V stream past; exp(τS - m) goes from the accumulators straight into the A fragments
// of the second product. A row with no key has m = -inf and l = 0: O = 0, L = -inf.
#include "row_tiles.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1) forward(const __grid_constant__ Attention a) {
    constexpr u32 Q_BYTES = tile_bytes(QUERIES, HEAD_DIM), K_BYTES = tile_bytes(KEYS, HEAD_DIM),
                  V_BYTES = tile_bytes(KEYS, VALUE_DIM);
    Band band(a);
    RowTile t = row_tile(a, band);
    u32 q = shared_base(), ring = q + Q_BYTES;

    load_queries<HEAD_DIM>(q, a.q, t, a.dim);

    // With a negative scale the softmax is that of |τ| (-Q)Kᵀ, and the largest score is the largest product all the
    // same. A scale of zero makes all scores 0; the smallest normal number does the same and leaves the -inf of unseen
    // entries as it is.
    float c = fmaxf(fabsf(a.scale) * LOG2E, 1.17549435e-38f);
    if (a.scale < 0.f) {
        copy_async_commit();
        copy_async_wait<0>();
        sync_threads();
        for (u32 i = threadIdx.x * 4; i < Q_BYTES; i += THREADS * 4)
            store_shared(q + i, __float_as_uint(load_shared(q + i)) ^ 0x80008000u);
    }
    // base: the scaled maximum as it was rounded, in powers of 2. What is subtracted now must be taken away later to
    // the last bit, or every tile of keys would leave a factor behind.
    float highest[2 * MT], base[2 * MT], sum[2 * MT], o[MT][VALUE_DIM / 8][4];
    zero(o);
#pragma unroll
    for (int h = 0; h < 2 * MT; h++) {
        highest[h] = base[h] = -INFINITY_F;
        sum[h] = 0.f;
    }

    auto fetch = [&](int step, int stage) {
        int n = (t.begin + step) * KEYS;
        u32 k = ring + stage * (K_BYTES + V_BYTES), v = k + K_BYTES;
        load_keys<HEAD_DIM>(k, a.k, t, n, a.dim);
        load_keys<VALUE_DIM>(v, a.v, t, n, a.value_dim);
    };
    auto compute = [&](int step, int stage) {
        int n = (t.begin + step) * KEYS;
        u32 lane = lane_offset(), k = ring + stage * (K_BYTES + V_BYTES) + lane, v = k + K_BYTES;
        Score s;
        zero(s);
        multiply<HEAD_DIM, QUERIES>(s, q + lane, warp_id() * MT, k);
        if (!band.inside(t.m + warp_id() * 16 * MT, 16 * MT, n, KEYS))
            drop(s, t.row, n, -INFINITY_F, [&](int i) { return band.seen(i); });
#pragma unroll
        for (int h = 0; h < 2 * MT; h++) {
            float top = highest[h];
#pragma unroll
            for (int b = 0; b < KEY_BLOCKS; b++)
                top = fmaxf(top, fmaxf(s[h / 2][b][2 * (h % 2)], s[h / 2][b][2 * (h % 2) + 1]));
            top = fmaxf(top, shuffle_xor(top, 1));
            top = fmaxf(top, shuffle_xor(top, 2));
            highest[h] = top;
            float now = top == -INFINITY_F ? 0.f : top * c; // nothing seen so far: inf - inf must not arise
            float shrink = exp2_approx(base[h] - now);
            base[h] = now;
            sum[h] *= shrink;
#pragma unroll
            for (int b = 0; b < VALUE_DIM / 8; b++) {
                o[h / 2][b][2 * (h % 2)] *= shrink;
                o[h / 2][b][2 * (h % 2) + 1] *= shrink;
            }
#pragma unroll
            for (int b = 0; b < KEY_BLOCKS; b++)
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    float& e = s[h / 2][b][2 * (h % 2) + i];
                    e = exp2_approx(e * c - now);
                    sum[h] += e;
                }
        }
        u32 p[MT][KEYS / 16][4];
        to_fragments(p, s);
        gather(o, p, v);
    };
    stream(t.steps, fetch, compute);
    copy_async_wait<0>();

#pragma unroll
    for (int h = 0; h < 2 * MT; h++) {
        int row = t.row + 8 * h;
        float total = row_sum(sum[h]), inverse = total > 0.f ? 1.f / total : 0.f;
#pragma unroll
        for (int b = 0; b < VALUE_DIM / 8; b++) {
            o[h / 2][b][2 * (h % 2)] *= inverse;
            o[h / 2][b][2 * (h % 2) + 1] *= inverse;
        }
        if (lane_id() % 4 == 0 && row < a.queries)
            *at<float>(a.out_lse, t.batch, t.head, row) =
                total > 0.f ? (base[h] + log2_approx(total)) * LN2 : -INFINITY_F;
    }
    store_rows(a.out_o, t.batch, t.head, t.m + warp_id() * 16 * MT, a.queries, a.value_dim, o, 1.f);
}
