"""The engine of plain array code: right on every kind of problem, in bounded scratch, the same every time."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
import tracemalloc
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from engine import DTYPES, OPS, Case, case, same

from flashbob_cupy import blocked, reference
from flashbob_cupy.problem import OUTPUTS, Mask

CAUSAL = Mask(right=0)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 16 × 16, so that small problems have inner, partial and ragged ones."""
    monkeypatch.setattr(blocked, "_CPU_BLOCK", 16)


# ---- values


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask", [Mask(), CAUSAL, Mask(left=5, right=3), Mask(left=20), Mask(right=30)], ids=str)
@pytest.mark.parametrize(("M", "N"), [(70, 70), (33, 90), (90, 33)])
@pytest.mark.usefixtures("small_tiles")
def test_many_tiles(dtype: str, mask: Mask, M: int, N: int) -> None:
    case(M, N, 24, 8, B=2, Hq=4, Hkv=2, dtype=dtype, mask=mask, dlse=True).check()


@pytest.mark.parametrize("N", [1, 2, 3, 15, 16, 17, 31, 32, 33, 63, 65])
def test_blocks_larger_than_the_sequence(N: int) -> None:
    for dtype, mask in itertools.product(DTYPES, (Mask(), CAUSAL)):
        case(N, N, 64, Hq=2, dtype=dtype, mask=mask).check()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("D", [1, 3, 40, 56, 112, 160, 256])
@pytest.mark.usefixtures("small_tiles")
def test_head_dims(D: int, dtype: str) -> None:
    case(113, 64, D, dtype=dtype, mask=CAUSAL).check()


@pytest.mark.parametrize(("D", "Dv"), [(192, 128), (64, 32), (32, 64)])
def test_value_width_different_from_key_width(D: int, Dv: int) -> None:
    for dtype in DTYPES:
        case(65, 80, D, Dv, Hq=2, Hkv=1, dtype=dtype, mask=CAUSAL).check()


@pytest.mark.parametrize(("M", "N"), [(2, 5), (5, 2), (3, 128), (1, 300), (400, 200)])
def test_causal_is_aligned_at_the_bottom_right(M: int, N: int) -> None:
    for dtype in ("float16", "float32"):
        case(M, N, 16, dtype=dtype, mask=CAUSAL).check()


def test_window_with_causal() -> None:
    c = case(10, 10, 4, dtype="float64", mask=Mask(left=3, right=0))
    c.check()
    last = case(1, 4, 4, dtype="float64")
    last.arrays = {n: c.arrays[n][:, :, -1:] if n == "q" else c.arrays[n][:, :, 6:] for n in ("q", "k", "v")}
    np.testing.assert_allclose(c.call("forward")["o"][:, :, 9:], last.call("forward")["o"], rtol=1e-13)


@pytest.mark.parametrize(("Hq", "Hkv"), [(8, 1), (8, 2), (6, 2), (14, 2), (15, 5)])
def test_grouped_heads_repeat_and_sum(Hq: int, Hkv: int) -> None:
    for dtype, (M, N) in itertools.product(("bfloat16", "float32"), ((40, 50), (300, 20))):
        case(M, N, 16, B=2, Hq=Hq, Hkv=Hkv, dtype=dtype, mask=CAUSAL).check()


@pytest.mark.parametrize("scale", [1.0, 0.3, 0.0, -0.5])
def test_scale(scale: float) -> None:
    case(40, 50, 16, Hq=2, scale=scale).check()


def test_gradient_of_the_log_sum_exp() -> None:
    for dtype in DTYPES:
        c = case(65, 130, 32, Hq=3, dtype=dtype, dlse=True)
        c.check()
        assert np.any(c.call("bob")["gdlse"])


@pytest.mark.parametrize("N", [64, 65, 127, 704])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_log_sum_exp_near_minus_120(N: int, dtype: str) -> None:
    c = case(N, N, 64, dtype=dtype)
    for name, value in (("q", 1.0), ("k", -960.0)):
        c.arrays[name] = (c.arrays[name].astype(np.float32) * 0.1).astype(c.arrays[name].dtype)
        c.arrays[name][..., 0] = value
    lse = c.call("forward")["lse"]
    assert (lse > -122).all()
    assert (lse < -110).all()
    c.check()


def test_equal_and_huge_logits_of_one_key() -> None:
    """One key: o = v, gdo = uv, whatever the logits are."""
    c = case(7, 1, 16, dtype="float32")
    c.arrays["q"] *= 1e6
    c.check()
    np.testing.assert_array_equal(c.call("forward")["o"], np.broadcast_to(c.arrays["v"], (1, 1, 7, 16)))


# ---- what must be exactly zero, or not read


ABSENT = [names for n in range(4) for names in itertools.combinations(("uq", "uk", "uv"), n)]


@pytest.mark.parametrize("absent", ABSENT, ids=str)
@pytest.mark.usefixtures("small_tiles")
def test_cotangents_that_are_none_are_zero(absent: tuple[str, ...]) -> None:
    none = case(40, 37, 8, Hq=2, dtype="float32", mask=CAUSAL, without=absent)
    none.check()
    zeros = case(40, 37, 8, Hq=2, dtype="float32", mask=CAUSAL)
    for name in absent:
        zeros.arrays[name][...] = 0
    for op in ("bob", "jvp"):
        for name, x in none.call(op).items():
            np.testing.assert_array_equal(x, zeros.call(op)[name], err_msg=name)


def test_zero_cotangents_give_exact_zeros() -> None:
    for dtype in DTYPES:
        c = case(20, 20, 8, dtype=dtype, without=("uq", "uk", "uv"))
        for name, x in {**c.call("bob"), **c.call("jvp")}.items():
            assert not x.any(), name
        c = case(20, 20, 8, dtype=dtype)
        c.arrays["do"][...] = 0
        results = {**c.call("backward"), **c.call("bob")}
        for name in ("dq", "dk", "dv", "gq", "gk", "gv"):
            assert not results[name].any(), name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("small_tiles")
def test_rows_with_no_key(dtype: str) -> None:
    """o = 0, lse = -inf and every derivative exactly 0 there, whatever stands in those rows; the rest is untouched."""
    mask = Mask(left=7, right=2)
    clean = case(60, 30, 8, Hq=2, dtype=dtype, mask=mask, dlse=True)
    first = clean.problem.first_query
    assert first == 28
    forward = clean.call("forward")
    assert not forward["o"][:, :, :first].any()
    assert (forward["lse"][:, :, :first] == -np.inf).all()
    assert np.isfinite(forward["lse"][:, :, first:]).all()
    for value in (1e4, np.nan, np.inf):
        dirty = Case(clean.problem, {n: x.copy() for n, x in clean.arrays.items()} | forward)
        for name in ("q", "do", "uq", "dlse"):
            dirty.arrays[name][:, :, :first] = value
        dirty.arrays["lse"] = forward["lse"].copy()
        dirty.arrays["lse"][:, :, :first] = np.inf  # another forward may mark such rows so
        for op in OPS:
            results = dirty.call(op)
            assert same(results, clean.call(op)), op
            for name in OUTPUTS[op]:
                assert name == "lse" or np.isfinite(results[name].astype(np.float32)).all(), name
                if name in ("dq", "gq", "gdo", "gdlse", "to", "tlse"):
                    assert not results[name][:, :, :first].any(), name


@pytest.mark.usefixtures("small_tiles")
def test_keys_that_no_query_sees_are_not_read() -> None:
    clean = case(30, 60, 8, Hq=2, mask=Mask(left=7, right=0))
    first = clean.problem.first_key
    assert first == 23
    dirty = Case(clean.problem, {n: x.copy() for n, x in clean.arrays.items()})
    for name in ("k", "v", "uk", "uv"):
        dirty.arrays[name][:, :, :first] = np.nan
        clean.arrays[name][:, :, :first] = 0
    for op in OPS:
        results = dirty.call(op)
        assert same(results, clean.call(op)), op
        for name in ("dk", "dv", "gk", "gv"):
            if name in results:
                assert not results[name][:, :, :first].any(), name


def test_infinity_behind_the_mask_stays_there() -> None:
    """A key inside a tile that only the last query sees: scores and tangents are selected away, not multiplied."""
    clean, dirty = (case(12, 12, 4, mask=CAUSAL) for _ in range(2))
    dirty.arrays["k"][:, :, 11] = np.inf
    for op in ("forward", "jvp"):
        expected, actual = clean.call(op), dirty.call(op)
        for name in OUTPUTS[op]:
            np.testing.assert_array_equal(actual[name][:, :, :11], expected[name][:, :, :11], err_msg=name)


@pytest.mark.parametrize("sizes", [(0, 8, 16, 16), (1, 0, 16, 16), (1, 8, 0, 0), (1, 2, 3, 0), (1, 2, 0, 3)], ids=str)
def test_zero_sizes(sizes: tuple[int, int, int, int]) -> None:
    B, H, M, N = sizes
    c = case(M, N, 64, B=B, Hq=1, dlse=True)
    c.problem = replace(c.problem, Hq=H, Hkv=H)
    c.arrays = {name: np.ones(c.problem.shape(name), np.float32) for name in c.arrays}
    for op in OPS:
        for name, x in c.call(op).items():
            assert x.shape == c.problem.shape(name)
            np.testing.assert_array_equal(x, -np.inf if name == "lse" else 0)


# ---- arrays


def layouts(x: Any) -> dict[str, Any]:
    """The same values under other strides."""
    moved = np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2)
    turned = np.ascontiguousarray(x.swapaxes(2, 3)).swapaxes(2, 3)
    spread = np.full((*x.shape[:-1], 2 * x.shape[-1]), np.nan, x.dtype)
    spread[..., ::2] = x
    return {"bnhd": moved, "column": turned, "spread": spread[..., ::2], "reversed": x[:, :, ::-1].copy()[:, :, ::-1]}


@pytest.mark.parametrize("kind", ["bnhd", "column", "spread", "reversed"])
def test_strides(kind: str) -> None:
    c = case(40, 33, 8, B=2, Hq=4, Hkv=2, mask=CAUSAL)
    views = Case(c.problem, {name: layouts(x)[kind] for name, x in c.arrays.items()})
    for op in OPS:
        assert same(views.call(op), c.call(op)), op


def test_results_of_any_strides() -> None:
    c = case(40, 33, 8, B=2, Hq=4, Hkv=2, dtype="float16", mask=CAUSAL)
    contiguous = {op: c.call(op) for op in OPS}
    plain = c.empty
    c.empty = lambda name: layouts(plain(name))["bnhd"] if plain(name).ndim == 4 else plain(name)  # type: ignore[method-assign]
    for op in OPS:
        assert same(c.call(op), contiguous[op]), op


def test_broadcast_cotangents() -> None:
    c = case(20, 20, 8, B=2, Hq=2)
    for name in ("do", "uq", "uk", "uv"):
        c.arrays[name] = np.broadcast_to(np.float32(0.5), c.arrays[name].shape)
    copies = Case(c.problem, {name: x.copy() for name, x in c.arrays.items()})
    for op in OPS:
        assert same(c.call(op), copies.call(op)), op


def test_bfloat16_bits_give_what_bfloat16_gives() -> None:
    """CuPy arrays of bfloat16 come as uint16 views; the arithmetic on them is the same."""
    c = case(40, 33, 8, Hq=4, Hkv=2, dtype="bfloat16", mask=CAUSAL)
    bits = Case(c.problem, {n: x.view(np.uint16) if x.ndim == 4 else x for n, x in c.arrays.items()})
    plain = bits.empty
    bits.empty = lambda n: plain(n).view(np.uint16) if plain(n).ndim == 4 else plain(n)  # type: ignore[method-assign]
    for op in OPS:
        results = bits.call(op)
        assert next(iter(results.values())).dtype == np.uint16
        assert same(results, c.call(op)), op


def test_every_bfloat16_and_its_neighbours_in_float32() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    values = np.empty(bits.size, np.float32)
    blocked.load(np, values, bits)
    np.testing.assert_array_equal(
        values.view(np.uint32), bits.view(ml_dtypes.bfloat16).astype(np.float32).view(np.uint32)
    )

    low = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    inputs = ((bits.astype(np.uint32) << 16)[:, None] | low).view(np.float32)
    rounded = np.empty(inputs.shape, np.uint16)
    blocked.store(np, rounded, inputs)
    with np.errstate(all="ignore"):
        expected = inputs.astype(ml_dtypes.bfloat16).view(np.uint16)
    number = ~np.isnan(inputs)
    np.testing.assert_array_equal(rounded[number], expected[number])
    assert np.isnan(rounded[~number].view(ml_dtypes.bfloat16).astype(np.float32)).all()


# ---- cutting the work


@pytest.mark.usefixtures("small_tiles")
def test_tiles_outside_the_band_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    tiles: list[tuple[int, int]] = []
    scores = blocked._Worker.P

    def counted(self: Any, rows: Any, keys: Any, hidden: Any) -> Any:
        tiles.append((rows.span[0] // 16, keys.span[0] // 16))
        return scores(self, rows, keys, hidden)

    monkeypatch.setattr(blocked._Worker, "P", counted)
    c = case(128, 128, 8, mask=CAUSAL)
    c.arrays |= c.call("forward")
    c.call("bob")
    assert sorted(tiles) == sorted(2 * [(i, j) for i in range(8) for j in range(i + 1)])
    tiles.clear()
    case(128, 128, 8, mask=Mask(left=16, right=0)).call("backward")
    assert sorted(set(tiles)) == [(i, j) for i in range(8) for j in range(max(0, i - 1), i + 1)]


@pytest.mark.parametrize("mask", [Mask(), CAUSAL, Mask(left=2, right=1), Mask(left=0), Mask(left=0, right=0)], ids=str)
def test_the_mask_of_a_tile(mask: Mask) -> None:
    for M, N in ((9, 9), (5, 12), (12, 5)):
        band = blocked._Band(case(M, N, 4, mask=mask).problem)
        seen = reference.visible(mask, M, N)
        for i0, i1 in itertools.combinations(range(band.first_query, M + 1), 2):
            j0, j1 = band.keys(i0, i1)
            assert np.flatnonzero(seen[i0:i1].any(axis=0)).tolist() == list(range(j0, j1))
            hidden = band.hidden(np, i0, i1, 1, N - 1)
            expected = ~seen[i0:i1, 1 : N - 1]
            assert (hidden is None and not expected.any()) or np.array_equal(hidden, expected)
        for j0, j1 in itertools.combinations(range(band.first_key, N + 1), 2):
            i0, i1 = band.queries(j0, j1)
            assert np.flatnonzero(seen[:, j0:j1].any(axis=1)).tolist() == list(range(i0, i1))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("scratch_kib", [120, 600, 2400])
def test_scratch_is_bounded(dtype: str, scratch_kib: int) -> None:
    """Little scratch means smaller tiles, fewer threads and, in half precision, gq in a pass of its own."""
    c = case(700, 300, 32, 40, Hq=4, Hkv=2, dtype=dtype, mask=Mask(left=200, right=0), dlse=True)
    c.arrays |= c.call("forward")
    for op in OPS:
        results: dict[str, Any] = {}

        def run(op: str = op, results: dict[str, Any] = results) -> None:
            results |= c.call(op, scratch_bytes=scratch_kib << 10)

        run()  # imports and first-call caches are no scratch
        tracemalloc.start()
        run()
        kept = tracemalloc.get_traced_memory()[0]
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        # A few Python objects per block, beside the arrays.
        assert peak - kept <= (scratch_kib << 10) + 100_000, op
        c.judge(op, results)


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("op", OPS)
def test_plans_for_long_sequences_and_wide_heads_fit(op: str, on_gpu: bool) -> None:
    for D, dtype, Hq in itertools.product((64, 256, 4096), DTYPES, (1, 16)):
        p = replace(case(1, 1, 1, dtype=dtype).problem, op=op, M=1 << 18, N=1 << 18, D=D, Dv=D, Hq=Hq)
        plan = blocked._plan(p, on_gpu, blocked.SCRATCH_BYTES)
        size = 8 if dtype == "float64" else 4
        tiles = plan.workers * plan.heads * plan.group * plan.queries * plan.keys * size
        assert 4 * tiles <= blocked.SCRATCH_BYTES
        assert plan.queries * plan.keys >= 64 * 64


def test_too_little_scratch_says_how_much_is_needed() -> None:
    c = case(1000, 1000, 64)
    with pytest.raises(ValueError, match=r"scratch_bytes must be at least \d+ for this problem; got 1000"):
        c.call("forward", scratch_bytes=1000)


def test_scratch_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    c = case(300, 300, 8)
    monkeypatch.setenv("FLASHBOB_SCRATCH_MIB", "lots")
    with pytest.raises(ValueError, match="FLASHBOB_SCRATCH_MIB must be a whole number of MiB; got 'lots'"):
        c.call("forward")
    monkeypatch.setenv("FLASHBOB_SCRATCH_MIB", "0")
    with pytest.raises(ValueError, match="scratch_bytes must be at least"):
        c.call("forward")
    monkeypatch.setenv("FLASHBOB_SCRATCH_MIB", "1")
    c.check()


# ---- threads


def test_the_same_bits_every_time() -> None:
    c = case(300, 300, 32, B=2, Hq=8, Hkv=4, mask=CAUSAL, dtype="float16")
    first = {op: c.call(op) for op in OPS}
    for _ in range(10):
        for op in OPS:
            assert same(c.call(op), first[op]), op


def test_concurrent_callers_and_blas_threads() -> None:
    """Several callers at once get the right bits, and OpenBLAS has its threads back afterwards."""
    before = blocked._BLAS.threads()
    c = case(300, 300, 16, Hq=8, mask=CAUSAL)
    expected = c.call("bob")
    found: list[bool] = []
    callers = [threading.Thread(target=lambda: found.append(same(c.call("bob"), expected))) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert found == [True] * 4
    assert blocked._BLAS.threads() == before
    assert blocked._BLAS.holders == 0


def test_an_error_in_a_thread_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Any, unit: Any) -> None:
        raise RuntimeError("a unit failed")

    monkeypatch.setattr(blocked._Worker, "forward", broken)
    with pytest.raises(RuntimeError, match="a unit failed"):
        case(300, 300, 16, Hq=8).call("forward")
    assert blocked._BLAS.holders == 0


# ---- size and speed, each in a process of its own


def run_script(script: str) -> list[float]:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [float(x) for x in done.stdout.split()]


LONG = """
import resource
import numpy as np
from flashbob_cupy import blocked
from flashbob_cupy.problem import Mask, Problem

N, H, D = 16384, 8, 64
rng = np.random.default_rng(0)
q, k, v, do, uq, uk, uv = (rng.standard_normal((1, H, N, D), np.float32) for _ in range(7))
o, gq, gk, gv, gdo = (np.ones((1, H, N, D), np.float32) for _ in range(5))
lse = np.ones((1, H, N), np.float32)
p = lambda op: Problem(op, 1, H, H, N, N, D, D, "float32", Mask(256, 0), D**-0.5, False, True, True, True)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
blocked.forward(p("forward"), q, k, v, o, lse)
blocked.bob(p("bob"), q, k, v, do, uq, uk, uv, o, lse, None, gq, gk, gv, gdo)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


def test_memory_of_16384_tokens() -> None:
    """MiB beyond inputs and results. The scratch does not depend on the mask; a window makes the test short."""
    (mib,) = run_script(LONG)
    assert mib < 600


RACE = """
import time
import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from flashbob_cupy import blocked
from flashbob_cupy.problem import Mask, Problem

H, N, D = 8, 2048, 64
torch.manual_seed(0)
q, k, v, do = (torch.randn(1, H, N, D, requires_grad=True) for _ in range(4))
u = [torch.randn(1, H, N, D) for _ in range(3)]
p = lambda op: Problem(op, 1, H, H, N, N, D, D, "float32", Mask(right=0), D**-0.5, False, True, True, True)
qn, kn, vn, don = (x.detach().numpy() for x in (q, k, v, do))
un = [x.numpy() for x in u]
o, lse = np.empty_like(qn), np.empty((1, H, N), np.float32)
results = [np.empty_like(qn) for _ in range(4)]
blocked.forward(p("forward"), qn, kn, vn, o, lse)
ours, theirs = [], []
for _ in range(2):
    with sdpa_kernel(SDPBackend.MATH):
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        first = torch.autograd.grad(out, (q, k, v), do, create_graph=True)
        start = time.perf_counter()
        double = torch.autograd.grad(first, (q, k, v, do), u)
        theirs.append(time.perf_counter() - start)
    start = time.perf_counter()
    blocked.bob(p("bob"), qn, kn, vn, don, *un, o, lse, None, *results)
    ours.append(time.perf_counter() - start)
worst = max(float(np.abs(a - b.numpy()).max() / b.abs().max()) for a, b in zip(results, double))
print(min(ours), min(theirs), worst)
"""


def test_double_backward_is_no_slower_than_pytorch() -> None:
    pytest.importorskip("torch")
    ours, theirs, worst = run_script(RACE)
    assert ours <= theirs
    assert worst < 1e-4  # two float32 evaluations of the same thing, or the race means nothing
