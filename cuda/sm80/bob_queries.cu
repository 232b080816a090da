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

    Range queries = {a.first_query, a.queries}, keys = {a.first_key, a.keys};
    load_tile<QUERIES, HEAD_DIM, THREADS>(q, a.q, t.batch, t.head, t.m, queries, a.dim);
    if (HAS_UQ)
        load_tile<QUERIES, HEAD_DIM, THREADS>(uq, a.uq, t.batch, t.head, t.m, queries, a.dim);
    load_tile<QUERIES, VALUE_DIM, THREADS>(d, a.d, t.batch, t.head, t.m, queries, a.value_dim);

    float4 rows[2 * MT];
#pragma unroll
    for (int h = 0; h < 2 * MT; h++)
        rows[h] = a.statistics[(i64(t.batch) * a.query_heads + t.head) * a.padded_queries + t.row + 8 * h];
    float c = a.scale * LOG2E;
    float gq[MT][HEAD_DIM / 8][4];
    zero(gq);

    auto fetch = [&](int step, int stage) {
        int n = (t.begin + step) * KEYS;
        u32 k = ring + stage * 2 * (K_BYTES + V_BYTES), uk = k + K_BYTES, v = uk + K_BYTES, uv = v + V_BYTES;
        load_tile<KEYS, HEAD_DIM, THREADS>(k, a.k, t.batch, t.key_head, n, keys, a.dim);
        if (HAS_UK)
            load_tile<KEYS, HEAD_DIM, THREADS>(uk, a.uk, t.batch, t.key_head, n, keys, a.dim);
        load_tile<KEYS, VALUE_DIM, THREADS>(v, a.v, t.batch, t.key_head, n, keys, a.value_dim);
        if (HAS_UV)
            load_tile<KEYS, VALUE_DIM, THREADS>(uv, a.uv, t.batch, t.key_head, n, keys, a.value_dim);
    };
    auto compute = [&](int step, int stage) {
        int n = (t.begin + step) * KEYS;
        u32 lane = lane_offset(), k = ring + stage * 2 * (K_BYTES + V_BYTES) + lane, uk = k + K_BYTES, v = uk + K_BYTES,
            uv = v + V_BYTES;
        float s[MT][KEY_BLOCKS][4], f[MT][KEY_BLOCKS][4], x[MT][KEY_BLOCKS][4];
        u32 p[MT][KEYS / 16][4];
        zero(s);
        if (TANGENT)
            zero(f);
        multiply_with_tangent<HAS_UQ, HAS_UK, HEAD_DIM, QUERIES>(s, f, q + lane, uq + lane, warp_id() * MT, k, uk);
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
            for (int b = 0; b < KEY_BLOCKS; b++)
#pragma unroll
                for (int j = 0; j < 4; j++)
                    s[m][b][j] = exp2_approx(s[m][b][j] * c - rows[2 * m + j / 2].x);
        if (!band.inside(t.m + warp_id() * 16 * MT, 16 * MT, n, KEYS))
            drop(s, t.row, n, 0.f, [&](int i, int j) { return band.flows(i, j); });
        zero(x);
        multiply<VALUE_DIM, QUERIES>(x, d + lane, warp_id() * MT, v);
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
            for (int b = 0; b < KEY_BLOCKS; b++) {
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    float4 row = rows[2 * m + h];
                    float y[2];
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        float& e = x[m][b][2 * h + i];
                        e -= row.y;
                        y[i] = s[m][b][2 * h + i] * e;
                        e = TANGENT ? (f[m][b][2 * h + i] * a.scale - row.z) * e - row.w : -row.w;
                    }
                    p[m][b / 2][b % 2 * 2 + h] = pack(y[0], y[1]);
                }
            }
        if (HAS_UK)
            gather(gq, p, uk);
        if (HAS_UV)
            multiply<VALUE_DIM, QUERIES>(x, d + lane, warp_id() * MT, uv);
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
            for (int b = 0; b < KEY_BLOCKS; b++)
#pragma unroll
                for (int j = 0; j < 4; j++)
                    x[m][b][j] *= s[m][b][j];
        to_fragments(p, x);
        gather(gq, p, k);
    };
    stream(t.steps, fetch, compute);
    copy_async_wait<0>();
    store_rows(a.out_q, t.batch, t.head, t.m + warp_id() * 16 * MT, a.queries, a.dim, gq, a.scale);
}
