// gQ by rows, for results that are bitwise the same in every run (7 products): the sum over keys stays in registers and
// nothing is added across CTAs.
//     S → P, F → F̂ = F - α, X = dP - D, dS = P∘X, W = P∘(F̂∘X - ε + dO UVᵀ)
//     gQ = τ(W K + dS UK)                             -> out_q
// L, D, α, ε come from bob_rows. Q, UQ, dO stay in shared memory, K UK V UV stream past.
#include "row_tiles.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1) bob_queries(const __grid_constant__ Attention a) {
    constexpr u32 Q_BYTES = tile_bytes(QUERIES, HEAD_DIM), D_BYTES = tile_bytes(QUERIES, VALUE_DIM),
                  K_BYTES = tile_bytes(KEYS, HEAD_DIM), V_BYTES = tile_bytes(KEYS, VALUE_DIM);
    constexpr bool TANGENT = HAS_UQ || HAS_UK;
    Band band(a);
    RowTile t = row_tile(a, band);
    u32 q = shared_base(), uq = q + Q_BYTES, d = uq + Q_BYTES, ring = d + D_BYTES;

    load_queries<HEAD_DIM>(q, a.q, t, a.dim);
    if (HAS_UQ)
        load_queries<HEAD_DIM>(uq, a.uq, t, a.dim);
    load_queries<VALUE_DIM>(d, a.d, t, a.value_dim);

    float l2[2 * MT], delta[2 * MT], alpha[2 * MT], epsilon[2 * MT];
#pragma unroll
    for (int h = 0; h < 2 * MT; h++) {
        float4 row = a.statistics[(i64(t.batch) * a.query_heads + t.head) * a.padded_queries + t.row + 8 * h];
        l2[h] = row.x;
        delta[h] = row.y;
        alpha[h] = row.z;
        epsilon[h] = row.w;
    }
    float c = a.scale * LOG2E;
    float gq[MT][HEAD_DIM / 8][4];
    zero(gq);

    auto fetch = [&](int step, int stage) {
        int n = (t.begin + step) * KEYS;
        u32 k = ring + stage * 2 * (K_BYTES + V_BYTES), uk = k + K_BYTES, v = uk + K_BYTES, uv = v + V_BYTES;
        load_keys<HEAD_DIM>(k, a.k, t, n, a.dim);
        if (HAS_UK)
            load_keys<HEAD_DIM>(uk, a.uk, t, n, a.dim);
        load_keys<VALUE_DIM>(v, a.v, t, n, a.value_dim);
        if (HAS_UV)
            load_keys<VALUE_DIM>(uv, a.uv, t, n, a.value_dim);
    };
    auto compute = [&](int step, int stage) {
        int n = (t.begin + step) * KEYS;
        u32 lane = lane_offset(), k = ring + stage * 2 * (K_BYTES + V_BYTES) + lane, uk = k + K_BYTES, v = uk + K_BYTES,
            uv = v + V_BYTES;
        Score s, f, x;
        u32 p[MT][KEYS / 16][4];
        zero(s);
        if (TANGENT)
            zero(f);
        multiply_with_tangent<HAS_UQ, HAS_UK, HEAD_DIM, QUERIES>(s, f, q + lane, uq + lane, warp_id() * MT, k, uk);
        exponential(s, c, l2);
        if (!band.inside(t.m + warp_id() * 16 * MT, 16 * MT, n, KEYS))
            drop(s, t.row, n, 0.f, [&](int i) { return band.flowing(i); });
        zero(x);
        multiply<VALUE_DIM, QUERIES>(x, d + lane, warp_id() * MT, v);
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
            for (int b = 0; b < KEY_BLOCKS; b++) {
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    int row = 2 * m + h;
                    float y[2];
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        float& e = x[m][b][2 * h + i];
                        e -= delta[row];
                        y[i] = s[m][b][2 * h + i] * e;
                        e = TANGENT ? (f[m][b][2 * h + i] * a.scale - alpha[row]) * e - epsilon[row] : -epsilon[row];
                    }
                    p[m][b / 2][b % 2 * 2 + h] = pack(y[0], y[1]);
                }
            }
        if (HAS_UK)
            gather(gq, p, uk);
        if (HAS_UV)
            multiply<VALUE_DIM, QUERIES>(x, d + lane, warp_id() * MT, uv);
        for_elements([&](int m, int b, int j) { x[m][b][j] *= s[m][b][j]; });
        to_fragments(p, x);
        gather(gq, p, k);
    };
    stream(t.steps, fetch, compute);
    copy_async_wait<0>();
    store_rows(a.out_q, t.batch, t.head, t.m + warp_id() * 16 * MT, a.queries, a.dim, gq, a.scale);
}
