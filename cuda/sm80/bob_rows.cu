// Row pass of the double backward, which is also the Jacobian-vector product of the forward (5 products):
//     S = τQKᵀ, F = τ(UQ Kᵀ + Q UKᵀ), P = exp(S - L), α = Σ_j P∘F
//     gdO = (P∘F) V + P UV - α O                      -> out_o
//     α                                               -> out_lse, where wanted
//     (L·log2 e, D = dO·O - dL, α, ε = dO·gdO)        -> statistics, the only numbers the column pass needs from here
// Q and UQ stay in shared memory, K UK V UV stream past. P and P∘F go from the accumulators of the first products
// straight into the A fragments of the second. The rows of the fp32 accumulator that the column pass adds gQ to are
// zeroed here, which saves a launch.
#include "row_tiles.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1) bob_rows(const __grid_constant__ Attention a) {
    constexpr u32 Q_BYTES = tile_bytes(QUERIES, HEAD_DIM), K_BYTES = tile_bytes(KEYS, HEAD_DIM),
                  V_BYTES = tile_bytes(KEYS, VALUE_DIM);
    constexpr bool TANGENT = HAS_UQ || HAS_UK;
    Band band(a);
    RowTile t = row_tile(a, band);
    u32 base = shared_base(), q = base, uq = q + Q_BYTES, ring = uq + Q_BYTES;
    i64 line = i64(t.batch) * a.query_heads + t.head;

    load_queries<HEAD_DIM>(q, a.q, t, a.dim);
    if (HAS_UQ)
        load_queries<HEAD_DIM>(uq, a.uq, t, a.dim);

    float l2[2 * MT], alpha[2 * MT];
#pragma unroll
    for (int h = 0; h < 2 * MT; h++) {
        int row = t.row + 8 * h;
        float l = row >= a.first_query && row < a.queries ? *at<const float>(a.lse, t.batch, t.head, row) * LOG2E
                                                          : INFINITY_F;
        l2[h] = l == -INFINITY_F ? INFINITY_F : l; // no key: P must be 0
        alpha[h] = 0.f;
    }
    float c = a.scale * LOG2E;
    float acc[MT][VALUE_DIM / 8][4];
    zero(acc);

    auto fetch = [&](int step, int stage) {
        int n = (t.begin + step) * KEYS;
        u32 k = ring + stage * 2 * (K_BYTES + V_BYTES), uk = k + K_BYTES, v = uk + K_BYTES, uv = v + V_BYTES;
        load_keys<HEAD_DIM>(k, a.k, t, n, a.dim);
        if (HAS_UK)
            load_keys<HEAD_DIM>(uk, a.uk, t, n, a.dim);
        if (TANGENT)
            load_keys<VALUE_DIM>(v, a.v, t, n, a.value_dim);
        if (HAS_UV)
            load_keys<VALUE_DIM>(uv, a.uv, t, n, a.value_dim);
    };
    auto compute = [&](int step, int stage) {
        int n = (t.begin + step) * KEYS;
        u32 lane = lane_offset(), k = ring + stage * 2 * (K_BYTES + V_BYTES) + lane, uk = k + K_BYTES, v = uk + K_BYTES,
            uv = v + V_BYTES;
        Score s, f;
        zero(s);
        if (TANGENT)
            zero(f);
        multiply_with_tangent<HAS_UQ, HAS_UK, HEAD_DIM, QUERIES>(s, f, q + lane, uq + lane, warp_id() * MT, k, uk);
        exponential(s, c, l2);
        bool edge = !band.inside(t.m + warp_id() * 16 * MT, 16 * MT, n, KEYS);
        if (edge)
            drop(s, t.row, n, 0.f, [&](int i) { return band.seen(i); });
        u32 p[MT][KEYS / 16][4];
        if (TANGENT) {
            for_elements([&](int m, int b, int j) {
                f[m][b][j] *= s[m][b][j] * a.scale;
                alpha[2 * m + j / 2] += f[m][b][j];
            });
            if (edge)
                drop(f, t.row, n, 0.f, [&](int i) { return band.moving(i); });
            to_fragments(p, f);
            gather(acc, p, v);
        }
        if (HAS_UV) {
            to_fragments(p, s);
            gather(acc, p, uv);
        }
    };
    stream(t.steps, fetch, compute);
    copy_async_wait<0>();

#pragma unroll
    for (int h = 0; h < 2 * MT; h++) {
        int row = t.row + 8 * h;
        bool real = row >= a.first_query && row < a.queries;
        alpha[h] = row_sum(alpha[h]);
        float shift = band.alone(row) ? 0.f : alpha[h];
        float delta = 0.f, epsilon = 0.f;
        if (row < a.queries) {
            const u16* o = at<const u16>(a.o, t.batch, t.head, row) + lane_id() % 4 * 2;
            const u16* d = at<const u16>(a.d, t.batch, t.head, row) + lane_id() % 4 * 2;
            u16* out = at<u16>(a.out_o, t.batch, t.head, row) + lane_id() % 4 * 2;
#pragma unroll
            for (int b = 0; b < VALUE_DIM / 8; b++) {
                if (8 * b >= a.value_dim)
                    break;
                float2 x = make_float2(0.f, 0.f);
                if (real) {
                    float2 value = unpack(*reinterpret_cast<const u32*>(o + 8 * b));
                    x = make_float2(acc[h / 2][b][2 * (h % 2)] - shift * value.x,
                                    acc[h / 2][b][2 * (h % 2) + 1] - shift * value.y);
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
            if (a.out_lse.data && row < a.queries)
                *at<float>(a.out_lse, t.batch, t.head, row) = alpha[h];
            if (a.statistics) {
                if (real && a.dlse.data)
                    delta -= *at<const float>(a.dlse, t.batch, t.head, row);
                a.statistics[line * a.padded_queries + row] = make_float4(l2[h], delta, alpha[h], epsilon);
            }
        }
    }
    if (a.accumulator) {
        float4* rows = reinterpret_cast<float4*>(a.accumulator + (line * a.padded_queries + t.m) * HEAD_DIM);
        for (int i = threadIdx.x; i < QUERIES * HEAD_DIM / 4; i += THREADS)
            rows[i] = make_float4(0.f, 0.f, 0.f, 0.f);
    }
}
