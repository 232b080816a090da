// Column pass of the double backward (10 products, 8 without gQ). With keys as rows, for each tile of queries:
//     Sᵀ = τKQᵀ → P           F̂ᵀ = τ(K UQᵀ + UK Qᵀ) - α           gV += (P∘F̂)ᵀ dO
//     Xᵀ = V dOᵀ - D          dS = P∘X                             gK += dSᵀ UQ
//     Cᵀ = F̂∘X - ε + UV dOᵀ   W = P∘C                              gK += Wᵀ Q
//     FUSED: gQ = dS UK + W K, added in fp32 to the accumulator (finish_queries scales and rounds it)
// L, D, α, ε come from bob_rows. C overwrites X and G = UV dOᵀ is accumulated onto it, so three score tiles are live at
// once. gK and gV stay in registers over all query tiles and all query heads of the group: -> out_k, out_v, written
// once.
#include "column_tiles.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1) bob_columns(const __grid_constant__ Attention a) {
    constexpr u32 K_BYTES = tile_bytes(KEYS, HEAD_DIM), V_BYTES = tile_bytes(KEYS, VALUE_DIM),
                  Q_BYTES = tile_bytes(QUERIES, HEAD_DIM), D_BYTES = tile_bytes(QUERIES, VALUE_DIM);
    constexpr u32 STAGE_BYTES = 2 * Q_BYTES + D_BYTES;
    constexpr bool TANGENT = HAS_UQ || HAS_UK;
    Band band(a);
    ColumnTile t = column_tile(a, band);
    u32 k = shared_base(), uk = k + K_BYTES, v = uk + K_BYTES, uv = v + V_BYTES, ring = uv + V_BYTES;
    u32 ds = ring + STAGES * STAGE_BYTES, w = ds + FUSED * WEIGHT_BYTES, statistics = w + FUSED * WEIGHT_BYTES;

    Range queries = {a.first_query, a.queries}, keys = {a.first_key, a.keys};
    load_tile<KEYS, HEAD_DIM, THREADS>(k, a.k, t.batch, t.key_head, t.n, keys, a.dim);
    if (HAS_UK)
        load_tile<KEYS, HEAD_DIM, THREADS>(uk, a.uk, t.batch, t.key_head, t.n, keys, a.dim);
    load_tile<KEYS, VALUE_DIM, THREADS>(v, a.v, t.batch, t.key_head, t.n, keys, a.value_dim);
    if (HAS_UV)
        load_tile<KEYS, VALUE_DIM, THREADS>(uv, a.uv, t.batch, t.key_head, t.n, keys, a.value_dim);

    int key = t.n + warp_id() * 16 * MT; // this warp's first
    float c = a.scale * LOG2E;
    float gk[MT][HEAD_DIM / 8][4], gv[MT][VALUE_DIM / 8][4];
    zero(gk);
    zero(gv);

    Cursor ahead(t, a), now(t, a);
    auto fetch = [&](int, int stage) {
        int head = ahead.head, m = ahead.m;
        ahead.advance(t);
        u32 q = ring + stage * STAGE_BYTES, uq = q + Q_BYTES, d = uq + Q_BYTES;
        load_tile<QUERIES, HEAD_DIM, THREADS>(q, a.q, t.batch, head, m, queries, a.dim);
        if (HAS_UQ)
            load_tile<QUERIES, HEAD_DIM, THREADS>(uq, a.uq, t.batch, head, m, queries, a.dim);
        load_tile<QUERIES, VALUE_DIM, THREADS>(d, a.d, t.batch, head, m, queries, a.value_dim);
        load_statistics(statistics + stage * STATISTICS_BYTES, a, t.batch, head, m);
    };
    auto compute = [&](int, int stage) {
        int head = now.head, m = now.m;
        now.advance(t);
        u32 lane = lane_offset(), q = ring + stage * STAGE_BYTES + lane, uq = q + Q_BYTES, d = uq + Q_BYTES;
        u32 rows = statistics + stage * STATISTICS_BYTES +
                   lane_id() % 4 * 32; // of the two queries this lane has in each block of 8
        float s[MT][QUERY_BLOCKS][4], f[MT][QUERY_BLOCKS][4], x[MT][QUERY_BLOCKS][4];
        u32 p[MT][QUERIES / 16][4];
        zero(s);
        if (TANGENT)
            zero(f);
        multiply_with_tangent<HAS_UK, HAS_UQ, HEAD_DIM, KEYS>(s, f, k + lane, uk + lane, warp_id() * MT, q, uq);
        exponential(s, c, rows);
        if (!band.inside(m, QUERIES, key, 16 * MT))
            drop(s, m, key, [&](int i, int j) { return band.flows(i, j); });
        if (TANGENT) {
#pragma unroll
            for (int b = 0; b < QUERY_BLOCKS; b++)
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    float alpha = load_shared(rows + b * 128 + i * 16 + 8);
#pragma unroll
                    for (int h = 0; h < 2 * MT; h++) {
                        float& e = f[h / 2][b][h % 2 * 2 + i];
                        e = e * a.scale - alpha;
                        x[h / 2][b][h % 2 * 2 + i] = s[h / 2][b][h % 2 * 2 + i] * e;
                    }
                }
        }
        if (TANGENT) {
            to_fragments(p, x);
            gather(gv, p, d);
        }
        zero(x);
        multiply<VALUE_DIM, KEYS>(x, v + lane, warp_id() * MT, d);
#pragma unroll
        for (int b = 0; b < QUERY_BLOCKS; b++) {
            float y[2 * MT][2];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                float4 row = load_shared_4(rows + b * 128 + i * 16);
#pragma unroll
                for (int h = 0; h < 2 * MT; h++) {
                    float& e = x[h / 2][b][h % 2 * 2 + i];
                    e -= row.y;
                    y[h][i] = s[h / 2][b][h % 2 * 2 + i] * e;
                    e = TANGENT ? f[h / 2][b][h % 2 * 2 + i] * e - row.w : -row.w;
                }
            }
#pragma unroll
            for (int h = 0; h < 2 * MT; h++)
                p[h / 2][b / 2][b % 2 * 2 + h % 2] = pack(y[h][0], y[h][1]);
        }
        if (HAS_UQ)
            gather(gk, p, uq);
        if (FUSED && HAS_UK)
            store_weights(ds, p);
        if (HAS_UV)
            multiply<VALUE_DIM, KEYS>(x, uv + lane, warp_id() * MT, d);
#pragma unroll
        for (int m = 0; m < MT; m++)
#pragma unroll
            for (int b = 0; b < QUERY_BLOCKS; b++)
#pragma unroll
                for (int j = 0; j < 4; j++)
                    x[m][b][j] *= s[m][b][j];
        to_fragments(p, x);
        gather(gk, p, q);
        if (FUSED) {
            store_weights(w, p);
            sync_threads();
            float* accumulator = a.accumulator + (i64(t.batch) * a.query_heads + head) * a.padded_queries * HEAD_DIM;
#pragma unroll
            for (int i = 0; i < QUERIES / 16; i += DOWN) {
                float g[2 * WIDE][4] = {};
                if (HAS_UK)
                    multiply_over_keys(g, ds + lane, i + warp_id() % DOWN, uk + lane);
                multiply_over_keys(g, w + lane, i + warp_id() % DOWN, k + lane);
                reduce_queries(accumulator, m / 16 + i + warp_id() % DOWN, g);
            }
        }
    };
    stream(t.steps, fetch, compute);
    copy_async_wait<0>();

    store_rows(a.out_k, t.batch, t.key_head, key, a.keys, a.dim, gk, a.scale);
    store_rows(a.out_v, t.batch, t.key_head, key, a.keys, a.value_dim, gv, 1.f);
}
