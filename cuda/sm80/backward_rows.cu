// dQ by rows, for results that are bitwise the same in every run (3 products):
//     S → P, dP = dO Vᵀ, dS = P∘(dP - D), dQ = τ dS K  -> out_q
// L and D come from statistics. Q and dO stay in shared memory, K and V stream past.
#include "row_tiles.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1) backward_rows(const __grid_constant__ Attention a) {
    constexpr u32 Q_BYTES = tile_bytes(QUERIES, HEAD_DIM), D_BYTES = tile_bytes(QUERIES, VALUE_DIM),
                  K_BYTES = tile_bytes(KEYS, HEAD_DIM), V_BYTES = tile_bytes(KEYS, VALUE_DIM);
    Band band(a);
    RowTile t = row_tile(a, band);
    u32 q = shared_base(), d = q + Q_BYTES, ring = d + D_BYTES;

    load_queries<HEAD_DIM>(q, a.q, t, a.dim);
    load_queries<VALUE_DIM>(d, a.d, t, a.value_dim);

    float l2[2 * MT], delta[2 * MT];
#pragma unroll
    for (int h = 0; h < 2 * MT; h++) {
        float4 row = a.statistics[(i64(t.batch) * a.query_heads + t.head) * a.padded_queries + t.row + 8 * h];
        l2[h] = row.x;
        delta[h] = row.y;
    }
    float c = a.scale * LOG2E;
    float dq[MT][HEAD_DIM / 8][4];
    zero(dq);

    auto fetch = [&](int step, int stage) {
        int n = (t.begin + step) * KEYS;
        u32 k = ring + stage * (K_BYTES + V_BYTES), v = k + K_BYTES;
        load_keys<HEAD_DIM>(k, a.k, t, n, a.dim);
        load_keys<VALUE_DIM>(v, a.v, t, n, a.value_dim);
    };
    auto compute = [&](int step, int stage) {
        int n = (t.begin + step) * KEYS;
        u32 lane = lane_offset(), k = ring + stage * (K_BYTES + V_BYTES) + lane, v = k + K_BYTES;
        Score s, x;
        zero(s);
        multiply<HEAD_DIM, QUERIES>(s, q + lane, warp_id() * MT, k);
        exponential(s, c, l2);
        if (!band.inside(t.m + warp_id() * 16 * MT, 16 * MT, n, KEYS))
            drop(s, t.row, n, 0.f, [&](int i) { return band.flowing(i); });
        zero(x);
        multiply<VALUE_DIM, QUERIES>(x, d + lane, warp_id() * MT, v);
        for_elements([&](int m, int b, int j) { x[m][b][j] = s[m][b][j] * (x[m][b][j] - delta[2 * m + j / 2]); });
        u32 p[MT][KEYS / 16][4];
        to_fragments(p, x);
        gather(dq, p, k);
    };
    stream(t.steps, fetch, compute);
    copy_async_wait<0>();
    store_rows(a.out_q, t.batch, t.head, t.m + warp_id() * 16 * MT, a.queries, a.dim, dq, a.scale);
}
