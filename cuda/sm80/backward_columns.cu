// First backward by columns (5 products, 4 without dQ). With keys as rows, for each tile of queries:
//     Sᵀ = τKQᵀ → P            dV += Pᵀ dO
//     dPᵀ = V dOᵀ, dS = P∘(dP - D)                     dK += dSᵀ Q
//     FUSED: dQ = dS K, added in fp32 to the accumulator (finish_queries scales and rounds it)
// L and D come from statistics. dK and dV stay in registers over all query tiles and all query heads of the group: ->
// out_k, out_v, written once.
#include "column_tiles.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1) backward_columns(const __grid_constant__ Attention a) {
    constexpr u32 K_BYTES = tile_bytes(KEYS, HEAD_DIM), V_BYTES = tile_bytes(KEYS, VALUE_DIM),
                  Q_BYTES = tile_bytes(QUERIES, HEAD_DIM), D_BYTES = tile_bytes(QUERIES, VALUE_DIM);
    constexpr u32 STAGE_BYTES = Q_BYTES + D_BYTES;
    Band band(a);
    ColumnTile t = column_tile(a, band);
    u32 k = shared_base(), v = k + K_BYTES, ring = v + V_BYTES, ds = ring + STAGES * STAGE_BYTES,
        statistics = ds + FUSED * WEIGHT_BYTES;

    Range queries = {a.first_query, a.queries}, keys = {a.first_key, a.keys};
    load_tile<KEYS, HEAD_DIM, THREADS>(k, a.k, t.batch, t.key_head, t.n, keys, a.dim);
    load_tile<KEYS, VALUE_DIM, THREADS>(v, a.v, t.batch, t.key_head, t.n, keys, a.value_dim);

    int key = t.n + warp_id() * 16 * MT; // this warp's first
    float c = a.scale * LOG2E;
    float dk[MT][HEAD_DIM / 8][4], dv[MT][VALUE_DIM / 8][4];
    zero(dk);
    zero(dv);

    Cursor ahead(t, a), now(t, a);
    auto fetch = [&](int, int stage) {
        int head = ahead.head, m = ahead.m;
        ahead.advance(t);
        u32 q = ring + stage * STAGE_BYTES, d = q + Q_BYTES;
        load_tile<QUERIES, HEAD_DIM, THREADS>(q, a.q, t.batch, head, m, queries, a.dim);
        load_tile<QUERIES, VALUE_DIM, THREADS>(d, a.d, t.batch, head, m, queries, a.value_dim);
        load_statistics(statistics + stage * STATISTICS_BYTES, a, t.batch, head, m);
    };
    auto compute = [&](int, int stage) {
        int head = now.head, m = now.m;
        now.advance(t);
        u32 lane = lane_offset(), q = ring + stage * STAGE_BYTES + lane, d = q + Q_BYTES;
        u32 rows = statistics + stage * STATISTICS_BYTES + lane_id() % 4 * 32;
        float s[MT][QUERY_BLOCKS][4], x[MT][QUERY_BLOCKS][4];
        u32 p[MT][QUERIES / 16][4];
        zero(s);
        multiply<HEAD_DIM, KEYS>(s, k + lane, warp_id() * MT, q);
        exponential(s, c, rows);
        bool edge = !band.inside(m, QUERIES, key, 16 * MT);
        if (edge)
            drop(s, m, key, [&](int i, int j) { return band.sees(i, j); });
        to_fragments(p, s);
        gather(dv, p, d);
        zero(x);
        multiply<VALUE_DIM, KEYS>(x, v + lane, warp_id() * MT, d);
#pragma unroll
        for (int b = 0; b < QUERY_BLOCKS; b++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                float delta = load_shared(rows + b * 128 + i * 16 + 4);
#pragma unroll
                for (int h = 0; h < 2 * MT; h++) {
                    float& e = x[h / 2][b][h % 2 * 2 + i];
                    e = s[h / 2][b][h % 2 * 2 + i] * (e - delta);
                }
            }
        if (edge)
            drop(x, m, key, [&](int i, int j) { return band.flows(i, j); });
        to_fragments(p, x);
        gather(dk, p, q);
        if (FUSED) {
            store_weights(ds, p);
            sync_threads();
            float* accumulator = a.accumulator + (i64(t.batch) * a.query_heads + head) * a.padded_queries * HEAD_DIM;
#pragma unroll
            for (int i = 0; i < QUERIES / 16; i += DOWN) {
                float g[2 * WIDE][4] = {};
                multiply_over_keys(g, ds + lane, i + warp_id() % DOWN, k + lane);
                reduce_queries(accumulator, m / 16 + i + warp_id() % DOWN, g);
            }
        }
    };
    stream(t.steps, fetch, compute);
    copy_async_wait<0>();

    store_rows(a.out_k, t.batch, t.key_head, key, a.keys, a.dim, dk, a.scale);
    store_rows(a.out_v, t.batch, t.key_head, key, a.keys, a.value_dim, dv, 1.f);
}
