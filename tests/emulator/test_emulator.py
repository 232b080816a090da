"""The emulator computes what the hardware does, and reports what the hardware would let pass in silence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import emulator

pytestmark = pytest.mark.skipif(emulator.compiler() is None, reason="no C++ compiler was found (g++, c++ or clang++)")
BF16 = np.dtype(ml_dtypes.bfloat16)


@pytest.fixture
def probe(tmp_path: Path) -> Any:
    """Runs the body of a kernel with fields of Attention; views q, k, v and out_q, statistics as float* x."""

    def run(
        body: str,
        threads: int = 128,
        shared: int = 65536,
        maps: Any = None,
        grid: int = 1,
        cluster: int | None = None,
        seed: int = 0,
        **fields: Any,
    ) -> None:
        parameters = "const Attention a" + (", const Maps maps" if maps else "")
        names = ", ".join(f"m{i}" for i in range(len(maps or ())))
        file = tmp_path / "probe.cu"
        file.write_text(
            f"""#include "sm90/hopper.cuh"
            {f"struct Maps {{ TensorMap {names}; }};" if maps else ""}
            DEVICE u64 descriptor(u32 start, u32 leading, u32 stride) {{
                return u64((start & 0x3ffff) >> 4) | u64(leading >> 4) << 16 | u64(stride >> 4) << 32 | 1ull << 62;
            }}
            DEVICE u32 at(u32 row, u32 chunk) {{ return row * 128 + ((chunk ^ (row & 7)) << 4); }}
            extern "C" __global__ void probe({parameters}) {{
                u32 s = shared_base();
                int t = threadIdx.x, w = t / 32, l = t % 32;
                float* x = a.accumulator;
                {body}
            }}"""
        )
        macros = {"BFLOAT16": fields.pop("bfloat16", 1)} | ({"CLUSTER": cluster} if cluster else {})
        emulator.run(str(file), macros, fields, grid, threads, shared, maps, arch=900, seed=seed)

    return run


# ---- it computes what the hardware does ----------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [BF16, np.dtype(np.float16)])
def test_rounding_to_halves(probe: Any, dtype: np.dtype[Any]) -> None:
    rng = np.random.default_rng(0)
    x = rng.integers(0, 2**32, 4096, dtype=np.uint32).view(np.float32)
    halves = np.arange(65536, dtype=np.uint16).view(dtype).astype(np.float32)
    with np.errstate(all="ignore"):
        ties = (halves[:-1] + halves[1:]) / 2
    x = np.concatenate([x, halves, ties, np.float32([65504, 65519.996, 65520, 1e-8, 2**-25, -0.0, 3.4e38])])
    x = x[: x.size // 2 * 2].copy()
    out = np.zeros(x.size, np.uint16)
    body = "for (int i = t; i < a.queries; i += 128) ((u32*)a.statistics)[i] = pack(x[2 * i], x[2 * i + 1]);"
    probe(body, accumulator=x, statistics=out, queries=x.size // 2, bfloat16=int(dtype == BF16))
    with np.errstate(all="ignore"):
        expected = x.astype(dtype)
    nan = np.isnan(x)
    assert np.isnan(out.view(dtype)[nan].astype(np.float32)).all()
    assert np.array_equal(out[~nan], expected.view(np.uint16)[~nan])


@pytest.mark.parametrize("dtype", [BF16, np.dtype(np.float16)])
def test_unpacking_every_half(probe: Any, dtype: np.dtype[Any]) -> None:
    x, out = np.arange(65536, dtype=np.uint16), np.zeros(65536, np.float32)
    body = """for (int i = t; i < 32768; i += 128) {
        float2 y = unpack(((const u32*)a.statistics)[i]);
        x[2 * i] = y.x, x[2 * i + 1] = y.y;
    }"""
    probe(body, accumulator=out, statistics=x, bfloat16=int(dtype == BF16))
    assert np.array_equal(out, x.view(dtype).astype(np.float32), equal_nan=True)


def _integers(*shape: int) -> np.ndarray[Any, Any]:
    """Small integers: every product and sum is exact."""
    return np.random.default_rng(1).integers(-8, 9, shape).astype(BF16)


_STAGE = """
    for (int i = t; i < 512; i += 128) copy_async(s + at(i / 8, i % 8), (const u16*)a.q.data + 8 * i, true);
    for (int p = 0; p < PANELS; p++)
        for (int i = t; i < 512; i += 128)
            copy_async(s + 8192 * (1 + p) + at(i / 8, i % 8), (const u16*)a.k.data + 4096 * p + 8 * i, true);
    copy_async_commit();
    copy_async_wait<0>();
    proxy_fence();
    sync_threads();
"""


def test_ldmatrix_and_mma(probe: Any) -> None:
    A, B, out = _integers(1, 1, 16, 64), _integers(1, 1, 8, 64), np.full((16, 8), np.nan, np.float32)
    body = """
        if (w > 0) return;
        for (int i = l; i < 128; i += 32) copy_async(s + at(i / 8, i % 8), (const u16*)a.q.data + 8 * i, true);
        for (int i = l; i < 64; i += 32) copy_async(s + 2048 + at(i / 8, i % 8), (const u16*)a.k.data + 8 * i, true);
        copy_async_commit();
        copy_async_wait<0>();
        float d[4] = {};
        for (int k = 0; k < 4; k++) {
            u32 x[4], y[4];
            load_matrices(x, s + at(l % 16, 2 * k + l / 16));
            load_matrices(y, s + 2048 + at(l % 8, 2 * k + l / 8 % 2));
            mma(d, x, y[0], y[1]);
        }
        for (int j = 0; j < 4; j++) x[(l / 4 + j / 2 * 8) * 8 + l % 4 * 2 + j % 2] = d[j];
    """
    probe(body, q=A, k=B, accumulator=out)
    assert np.array_equal(out, A[0, 0].astype(np.float32) @ B[0, 0].astype(np.float32).T)


def test_transposed_matrices(probe: Any) -> None:
    A, out = _integers(1, 1, 16, 64), np.zeros((16, 64), np.uint16)
    body = """
        if (w > 0) return;
        for (int i = l; i < 128; i += 32) copy_async(s + at(i / 8, i % 8), (const u16*)a.q.data + 8 * i, true);
        copy_async_commit();
        copy_async_wait<0>();
        u32 r[4];
        load_matrices_transposed(r, s + at(l % 16, l / 16));  // 16 x 16
        store_matrices_transposed(s + 4096 + at(l % 16, 2 + l / 16), r[0], r[1], r[2], r[3]);
        for (int i = l; i < 512; i += 32) {
            float y = load_shared(s + 4096 + i * 4 / 128 * 128 + ((i % 32 / 4 ^ (i / 32 & 7)) << 4) + i % 4 * 4);
            if (i % 32 < 16) ((u32*)a.statistics)[i] = __float_as_uint(y);
        }
    """
    probe(body, q=A, statistics=out)
    block = A[0, 0, :, :16].view(np.uint16)
    assert np.array_equal(out[:, 16:32], block)


@pytest.mark.parametrize(("n", "kind", "ta", "tb"), [
    (64, "ss", 0, 0), (48, "ss", 0, 0), (64, "ss", 0, 1), (128, "ss", 0, 1), (64, "ss", 1, 0), (64, "ss", 1, 1),
    (64, "rs", 0, 0), (128, "rs", 0, 1),
])  # fmt: skip
def test_wgmma(probe: Any, n: int, kind: str, ta: int, tb: int) -> None:
    """The cases whose descriptors and layouts were confirmed on an H200."""
    panels = -(-n // 64)
    A, B, out = _integers(1, 1, 64, 64), _integers(1, panels, 64, 64), np.full((64, n), np.nan, np.float32)
    b = "descriptor(s + 8192 + k * 2048, 8192, 1024)" if tb else "descriptor(s + 8192 + k * 32, 16, 1024)"
    if kind == "ss":
        first = "descriptor(s + k * 2048, 8192, 1024)" if ta else "descriptor(s + k * 32, 16, 1024)"
        product = f"wgmma<{n}, {ta}, {tb}>(d, {first}, {b}, k > 0);"
    else:
        product = f"wgmma<{n}, {tb}>(d, f[k], {b}, k > 0);"
    body = (
        _STAGE.replace("PANELS", str(panels))
        + f"""
        float d[{n // 2}];
        u32 f[4][4];
        for (int k = 0; k < 4; k++)
            for (int j = 0; j < 4; j++) {{
                int row = w * 16 + l / 4 + (j & 1) * 8, column = k * 16 + l % 4 * 2 + (j >> 1) * 8;
                f[k][j] = *(const u32*)((const u16*)a.q.data + row * 64 + column);
            }}
        wgmma_fence();
        for (int k = 0; k < 4; k++) {product}
        wgmma_commit();
        wgmma_wait<0>();
        settle(d);
        keep(f);
        for (int i = 0; i < {n // 2}; i++)
            x[(w * 16 + l / 4 + (i / 2 & 1) * 8) * {n} + i / 4 * 8 + l % 4 * 2 + i % 2] = d[i];
    """
    )
    probe(body, q=A, k=B, accumulator=out)
    left = A[0, 0].astype(np.float32)
    right = B[0].astype(np.float32)
    right = np.concatenate(list(right), axis=1) if tb else right[0].T[:, :n]
    assert np.array_equal(out, (left.T if ta else left) @ right)


def test_tensor_load_zero_fills_and_swizzles(probe: Any) -> None:
    whole = _integers(2, 3, 40, 48)
    out = np.full((64, 64), np.nan, np.float32)
    body = """
        u32 bar = s + 8192;
        if (t == 0) barrier_init(bar, 1), barrier_init_fence();
        sync_threads();
        if (t == 0) barrier_expect(bar, 8192), load_tensor(s, maps.m0, bar, 0, -3, 2, 1);
        barrier_wait(bar, 0);
        for (int i = t; i < 2048; i += 128) {
            float2 y = unpack(__float_as_uint(load_shared(s + at(i / 32, i % 32 / 4) + i % 4 * 4)));
            x[2 * i] = y.x, x[2 * i + 1] = y.y;
        }
    """
    probe(body, maps=[emulator.TensorMap(whole, 64, first=4)], accumulator=out)
    expected = np.zeros((64, 64), np.float32)
    expected[3:39, :48] = whole[1, 2, 4:]
    assert np.array_equal(out, expected)


def test_bulk_copies(probe: Any) -> None:
    source, out = np.arange(256, dtype=np.float32), np.ones(256, np.float32)
    body = """
        u32 bar = s + 8192;
        if (t == 0) barrier_init(bar, 1), barrier_init_fence();
        sync_threads();
        if (t == 0) {
            barrier_expect(bar, 1024);
            load_bulk(s, a.statistics, 1024, bar);
        }
        barrier_wait(bar, 0);
        for (int i = t; i < 256; i += 128) x[i] = load_shared(s + 4 * i);
    """
    probe(body, statistics=source, accumulator=out)
    assert np.array_equal(out, source)


_CLUSTER = """
    u32 bar = s + 8192, empty = bar + 8;
    int rank = blockIdx.x % CLUSTER;
    if (t == 0) barrier_init(bar, 1), barrier_init(empty, CLUSTER), barrier_init_fence();
    cluster_arrive();
    cluster_wait();
"""


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_multicast_and_remote_arrivals(probe: Any, seed: int) -> None:
    """Each CTA of a pair loads half of every tile for both, when both have read the tile before."""
    tiles, out = _integers(1, 3, 64, 64), np.full((4, 3, 64, 64), np.nan, np.float32)
    body = (
        _CLUSTER
        + """
        for (int head = 0; head < 3; head++) {
            if (t == 0) {
                barrier_wait(empty, (head & 1) ^ 1);
                barrier_expect(bar, 8192);
                load_tensor_multicast(s + 4096 * rank, maps.m0, bar, 0, 32 * rank, head, 0, 2);
            }
            barrier_wait(bar, head & 1);
            float* y = x + (blockIdx.x * 3 + head) * 4096;
            for (int i = t; i < 2048; i += 128) {
                float2 z = unpack(__float_as_uint(load_shared(s + at(i / 32, i % 32 / 4) + i % 4 * 4)));
                y[2 * i] = z.x, y[2 * i + 1] = z.y;
            }
            sync_threads();
            if (t < 2) barrier_arrive_in(empty, t);
        }
        cluster_arrive();
        cluster_wait();
    """
    )
    probe(body, maps=[emulator.TensorMap(tiles, 32)], grid=4, cluster=2, seed=seed, accumulator=out)
    assert np.array_equal(out, np.broadcast_to(tiles[0].astype(np.float32), out.shape))


def test_a_multicast_to_some_reaches_no_other(probe: Any) -> None:
    tile, out = _integers(1, 1, 32, 64), np.zeros((3, 128), np.float32)
    body = (
        _CLUSTER
        + """
        if (t == 0 && rank < 2) barrier_expect(bar, 4096);
        if (t == 0 && rank == 2) load_tensor_multicast(s, maps.m0, bar, 0, 0, 0, 0, 2);
        if (rank < 2) barrier_wait(bar, 0);
        x[blockIdx.x * 128 + t] = unpack(__float_as_uint(load_shared(s + 4 * (t % 4)))).x;
    """
    )
    probe(body, maps=[emulator.TensorMap(tile, 32)], grid=3, cluster=3, accumulator=out)
    assert np.array_equal(out[:2], np.broadcast_to(np.tile(tile[0, 0, 0, :8:2], 32).astype(np.float32), (2, 128)))
    assert np.isnan(out[2]).all()


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_cluster_barrier_orders(probe: Any, seed: int) -> None:
    """Also where a warp ends early; barriers of a CTA stay its own."""
    x = np.zeros((4, 96), np.float32)
    body = """
        if (w == 3) return;
        sync_named(1, 96);
        store_shared(s + 4 * t, float(1000 * blockIdx.x + t));
        x[blockIdx.x * 96 + t] = blockIdx.x + 1;
        cluster_arrive();
        cluster_wait();
        float sum = load_shared(s + 4 * ((t + 32) % 96)) + 10000 * x[(blockIdx.x ^ 1) * 96 + t];
        cluster_arrive();
        sync_threads();
        cluster_wait();
        x[blockIdx.x * 96 + t] = sum;
    """
    probe(body, grid=4, cluster=2, seed=seed, accumulator=x)
    block, t = np.indices(x.shape)
    assert np.array_equal(x, 1000 * block + (t + 32) % 96 + 10000 * ((block ^ 1) + 1))


def test_each_cta_of_a_cluster_multiplies_its_own(probe: Any) -> None:
    """Descriptors are relative to the CTA, and so is a warp's place in its warpgroup."""
    A, B, out = _integers(1, 2, 64, 64), _integers(1, 1, 64, 64), np.full((2, 64, 64), np.nan, np.float32)
    body = (
        "if (w == 4) return;"
        + _STAGE.replace("PANELS", "1").replace("a.q.data", "a.q.data + 4096 * blockIdx.x")
        + """
        float d[32];
        wgmma_fence();
        for (int k = 0; k < 4; k++)
            wgmma<64, 0, 0>(d, descriptor(s + k * 32, 16, 1024), descriptor(s + 8192 + k * 32, 16, 1024), k > 0);
        wgmma_commit();
        wgmma_wait<0>();
        settle(d);
        x += 4096 * blockIdx.x;
        for (int i = 0; i < 32; i++)
            x[(w * 16 + l / 4 + (i / 2 & 1) * 8) * 64 + i / 4 * 8 + l % 4 * 2 + i % 2] = d[i];
    """
    )
    probe(body, threads=160, grid=2, cluster=2, q=A, k=B, accumulator=out)
    assert np.array_equal(out, A[0].astype(np.float32) @ B[0, 0].astype(np.float32).T)


# ---- it reports what the hardware lets pass --------------------------------------------------------------------------
_BARRIER = "u32 bar = s + 8192; if (t == 0) { barrier_init(bar, 1); barrier_init_fence(); } sync_threads();"
_TILES = "for (int i = t; i < 8192; i += 128) store_shared(s + 4 * i, 0.0f);"
_PRODUCT = "wgmma<64, 0, 0>(d, descriptor(s, 16, 1024), descriptor(s + 8192, 16, 1024), false); wgmma_commit();"
_READY = _TILES + "proxy_fence(); sync_threads(); float d[32]; wgmma_fence();"
_FAULTS = {
    "store past the end": ("store_shared(s + 65536, 1.0f);", "outside the 65536 bytes"),
    "misaligned load": ("x[0] = load_shared_4(s + 8).x;", "not aligned"),
    "no barrier": ("if (w == 0) store_shared(s + 4 * l, 1.0f); if (w == 1) x[l] = load_shared(s + 4 * l);", "race"),
    "overwritten too early": (
        "if (w == 0) store_shared(s + 4 * l, 1.0f); sync_threads();"
        "if (w == 1) x[l] = load_shared(s + 4 * l); if (w == 0) store_shared(s + 4 * l, 2.0f);",
        "race",
    ),
    "no wait for cp.async": ("copy_async(s + 16 * t, x, true); x[t] = load_shared(s + 16 * t);", "not been waited for"),
    "cp.async past the end": ("copy_async(s, x + 253, true);", "not aligned"),
    "cp.async outside": ("copy_async(s, x + 256, true);", "in no array"),
    "load past the end": ("x[0] = x[256];", "invalid memory access"),
    "load before the start": ("x[0] = x[-1100];", "invalid memory access"),
    "diverged": ("if (l < 16) x[t] = shuffle_xor(x[t], 1); else { u32 r[4]; load_matrices(r, s); }", "diverged"),
    "lane ended": ("if (l == 3) return; x[t] = shuffle_xor(x[t], 1);", "ended"),
    "deadlock": ("if (w == 0) sync_named(1, 64);", "deadlock"),
    "counts differ": ("sync_named(1, w == 0 ? 64 : 128);", "others wait for"),
    "bytes never come": (_BARRIER + "if (t == 0) barrier_expect(bar, 16); barrier_wait(bar, 0);", "deadlock"),
    "no fence after init": ("u32 bar = s; if (t == 0) barrier_init(bar, 4); if (l == 0) barrier_arrive(bar);", "init"),
    "arrived twice": (_BARRIER + "if (t < 2) barrier_expect(bar, 16);", "more than 1 arrivals"),
    "nobody waits": (_BARRIER + "if (t == 0) { barrier_expect(bar, 16); load_bulk(s, x, 16, bar); }", "in flight"),
    "read before the wait": (
        _BARRIER + "if (t == 0) { barrier_expect(bar, 16); load_bulk(s, x, 16, bar); x[0] = load_shared(s); }",
        "not been waited for",
    ),
    "barrier overwritten": (_BARRIER + "if (t == 0) store_shared(bar, 0u);", "an mbarrier lives there"),
    "no proxy fence": (
        _TILES + "sync_threads(); float d[32]; wgmma_fence();" + _PRODUCT + "wgmma_wait<0>();",
        "no proxy fence",
    ),
    "no wgmma fence": (_READY.replace("wgmma_fence();", "") + _PRODUCT + "wgmma_wait<0>();", "no wgmma.fence"),
    "accumulator written in flight": (_READY + _PRODUCT + "d[3] = 0.0f; settle(d); wgmma_wait<0>();", "accumulator"),
    "operand overwritten": (
        _READY + _PRODUCT + "if (l == 0) store_shared(s + 2048 * w, 1.0f); wgmma_wait<0>();",
        "race|overwritten",
    ),
    "fragment overwritten": (
        _READY + "u32 f[1][4] = {}; wgmma<64, 0>(d, f[0], descriptor(s, 16, 1024), false); wgmma_commit();"
        "f[0][1] = 7; keep(f); wgmma_wait<0>();",
        "fragment",
    ),
    "never waited for": (_READY + _PRODUCT, "nothing waited for"),
    "register count": ("registers_grow<250>();", "in steps of 8"),
}


@pytest.mark.parametrize("fault", _FAULTS)
def test_faults_are_reported(probe: Any, fault: str) -> None:
    body, message = _FAULTS[fault]
    with pytest.raises(emulator.EmulatorError, match=message):
        probe(body, accumulator=np.zeros(256, np.float32))


def test_addresses_carry_the_number_of_the_cta(probe: Any) -> None:
    """As on the machine, where a descriptor made of one without care points elsewhere."""
    x = np.full(4, np.nan, np.float32)
    probe("if (t == 0) x[blockIdx.x] = float(s >> 24);", grid=4, cluster=2, accumulator=x)
    assert x.tolist() == [0, 1, 0, 1]


_MULTICAST = "load_tensor_multicast(s, maps.m0, bar, 0, 0, 0, 0, 2);"
_NO_CLUSTER_BARRIER = _CLUSTER.replace("cluster_arrive();", "sync_threads();").replace("cluster_wait();", "")
_END = "cluster_arrive(); cluster_wait();"
_CLUSTER_FAULTS = {
    "multicast over words in use": (
        _CLUSTER + "store_shared(s + 4 * t, 1.0f); cluster_arrive(); cluster_wait();"
        "if (rank == 0) x[t] = load_shared(s + 4 * t); else if (t == 0) " + _MULTICAST + _END,
        "race: bulk copy of shared offset 0 of CTA 0 by warp 0 of CTA 1, read by warp 0 of CTA 0",
    ),
    "multicast over words written": (
        _CLUSTER + "if (rank == 0) store_shared(s + 4 * t, 1.0f); else if (t == 0) " + _MULTICAST + _END,
        "race: bulk copy .* last written by warp 0 of CTA 0",
    ),
    "read before the wait": (
        _CLUSTER
        + "if (t == 0) barrier_expect(bar, 4096); if (t == 0 && rank == 0) "
        + _MULTICAST
        + _END
        + "if (rank == 1) x[t] = load_shared(s + 4 * t);",
        "issued by warp 0 of CTA 0, has not been waited for",
    ),
    "arrival with no cluster barrier after init": (
        _NO_CLUSTER_BARRIER + "if (t == 0 && rank == 1) barrier_arrive_in(empty, 0);" + _END,
        "offset 8200 of CTA 0 is used with no barrier after its initialisation",
    ),
    "multicast with no cluster barrier after init": (
        _NO_CLUSTER_BARRIER + "if (t == 0 && rank == 1) " + _MULTICAST + _END,
        "offset 8192 of CTA 0 is used with no barrier after its initialisation",
    ),
    "arrival before init": ("if (t == 0 && blockIdx.x == 0) barrier_arrive_in(s, 1);", "no mbarrier .* 0 of CTA 1"),
    "arrival in a CTA that has ended": (
        _CLUSTER + "if (rank == 1 && t == 0) barrier_arrive_in(empty, 0);",
        "arrival in CTA 0, which has ended",
    ),
    "arrival that the end overtakes": (
        _CLUSTER + "if (rank == 0 && t == 0) barrier_arrive_in(empty, 1);",
        "nothing orders this, by warp 0 of CTA 0, before the end of CTA 1",
    ),
    "multicast to a CTA that has ended": (
        _CLUSTER + "if (rank == 1 && t == 0) " + _MULTICAST,
        "multicast to CTA 0, which has ended",
    ),
    "nobody waits": (
        _CLUSTER
        + "if (t == 0) barrier_expect(bar, 4096); if (t == 0 && rank == 0) "
        + _MULTICAST
        + _END
        + "if (rank == 0) barrier_wait(bar, 0);",
        "in flight",
    ),
    "an address of another CTA": (
        "if (t == 0) x[blockIdx.x] = load_shared(s ^ 1 << 24);",
        "load at shared address 0x1000400: not one of this CTA's",
    ),
    "no such CTA": (_CLUSTER + "barrier_arrive_in(empty, 2);", "CTA 2: the cluster has 2"),
    "too many CTAs": (_CLUSTER + _MULTICAST.replace("2)", "3)"), "multicast to 3 CTAs: the cluster has 2"),
    "arrived too often": (
        _CLUSTER
        + "if (t == 0) barrier_expect(bar, 16);"
        + _END
        + "if (t == 0 && rank == 0) barrier_arrive_in(bar, 1);",
        "8192 of CTA 1: more than 1 arrivals",
    ),
    "cluster_arrive twice": ("cluster_arrive(); cluster_arrive();", "twice"),
    "cluster_wait alone": ("cluster_wait();", "no cluster_arrive"),
    "one CTA does not arrive": (
        _CLUSTER + "if (rank == 1) barrier_wait(bar, 0);" + _END,
        r"(?s)deadlock in block \(0, 0, 0\) to \(1, 0, 0\).*threads 0-127 of CTA 0: cluster barrier .*"
        r"threads 0-127 of CTA 1: mbarrier .*cluster barrier: 128 of 256 threads.*mbarrier 8192 of CTA 1: phase 0",
    ),
    "barriers are a CTA's own": (
        "if (w == int(blockIdx.x)) sync_named(1, 64);",
        "barrier 1 of CTA 1: 32 of 64 threads",
    ),
}


@pytest.mark.parametrize("fault", _CLUSTER_FAULTS)
def test_faults_of_clusters_are_reported(probe: Any, fault: str) -> None:
    body, message = _CLUSTER_FAULTS[fault]
    maps = [emulator.TensorMap(_integers(1, 1, 32, 64), 32)]
    with pytest.raises(emulator.EmulatorError, match=message):
        probe(body, maps=maps, grid=2, cluster=2, accumulator=np.zeros(256, np.float32))


def test_launches_of_clusters_are_checked(probe: Any) -> None:
    with pytest.raises(emulator.EmulatorError, match="grid of 3 blocks is not a multiple of the cluster of 2"):
        probe("", grid=3, cluster=2)
    with pytest.raises(emulator.EmulatorError, match="2 CTAs of 17 warps: there may be 32 warps"):
        probe("", grid=2, cluster=2, threads=544)


def test_accumulators_are_nan_in_flight(probe: Any) -> None:
    out = np.zeros(128, np.float32)
    probe(_READY + _PRODUCT + "x[t] = d[0]; wgmma_wait<0>(); settle(d);", accumulator=out)
    assert np.isnan(out).all()


def test_a_kernel_without_faults_runs(probe: Any) -> None:
    out = np.zeros(128, np.float32)
    probe(_READY + _PRODUCT + "wgmma_wait<0>(); settle(d); x[t] = d[0];", accumulator=out)
    assert not out.any()


@pytest.mark.parametrize("header", emulator.REPLACED)
def test_every_wrapper_is_replaced(header: Path) -> None:
    """A new wrapper in cuda/ needs its counterpart here, or kernels that use it stop compiling for the emulator."""
    import re

    names = re.compile(r"^(?:inline|DEVICE) [\w ]+?(\w+)\(", re.MULTILINE)
    wanted = set(names.findall(header.read_text())) - {"shared", "registers"}
    assert wanted
    assert wanted <= set(names.findall(emulator.REPLACED[header].read_text()))
