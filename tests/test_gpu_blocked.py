"""The engine in blocks of array code, on a GPU: what no kernel serves, and everything else when it is asked to."""

from __future__ import annotations

import pytest
from gpu import HALF, Case, assert_equal, check, each, run, tensors

from flashbob_cupy import blocked

BLOCKED = ("blocked",)
FLOATS = ("float32", "float64")

SHAPES = {
    "causal": {"M": 130, "N": 130, "causal": True, "dlse": True},
    "more keys, grouped": {"M": 37, "N": 130, "B": 2, "Hq": 6, "Hkv": 2, "causal": True},
    "queries without a key": {"M": 200, "N": 37, "D": 40, "Dv": 24, "causal": True, "dlse": True},
    "keys without a query": {"M": 37, "N": 200, "window": (3, 0)},
    "window": {"M": 130, "N": 65, "window": (16, 8), "scale": 0.3},
    "full, wide": {"M": 130, "N": 200, "D": 320, "Dv": 160},
    "one": {"M": 1, "N": 1, "D": 1, "dlse": True},
    "absent cotangents": {"M": 65, "N": 65, "u": "k", "causal": True},
}


@each(*(Case(**shape, dtype=dtype) for shape in SHAPES.values() for dtype in FLOATS), engines=BLOCKED)
def test_float32_and_float64(case: Case, engine: str) -> None:
    check(case, engine)


@each(*(Case(130, 200, 160, dtype=dtype, causal=True, dlse=True) for dtype in HALF), engines=BLOCKED)
def test_half_precision_of_wide_heads(case: Case, engine: str) -> None:
    check(case, engine, out=True)


@each(Case(130, 130, 160, dtype="float32", causal=True, judged=-1), engines=BLOCKED)
def test_float32_is_never_tf32(case: Case, engine: str) -> None:
    """Whatever CuPy was told (CUPY_TF32=1), and it is left as it was."""
    import cupy
    from cupy._core import get_compute_type, set_compute_type
    from cupy._core._routines_linalg import COMPUTE_TYPE_TF32

    x = tensors(case)
    expected = run(case, engine, x)
    before = get_compute_type(cupy.float32)
    set_compute_type(cupy.float32, COMPUTE_TYPE_TF32)
    try:
        actual = run(case, engine, x)
        assert get_compute_type(cupy.float32) == COMPUTE_TYPE_TF32
    finally:
        set_compute_type(cupy.float32, before)
    assert_equal(actual, expected)


@each(
    *(Case(700, 700, Hq=2, dtype=dtype, causal=True, deterministic=True) for dtype in ("float32", "bfloat16")),
    engines=BLOCKED,
)
def test_scratch_is_bounded(case: Case, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """CuPy refuses what passes the limit; unbounded, the scores of two heads alone would."""
    import cupy

    scratch = 6 << 20
    assert 6 * case.Hq * case.M * case.N * 4 > scratch
    pool = cupy.cuda.MemoryPool()
    pool.set_limit(size=scratch)
    monkeypatch.setattr(blocked, "SCRATCH_BYTES", scratch)
    monkeypatch.delenv("FLASHBOB_SCRATCH_MIB", raising=False)
    with cupy.cuda.using_allocator(pool.malloc):
        check(case, engine, poisoned=False)
    assert 0 < pool.total_bytes() <= scratch


@each(Case(300, 300, 160, B=2, Hq=4, Hkv=2, dtype="float32", deterministic=True, judged=-1), engines=BLOCKED)
def test_deterministic(case: Case, engine: str) -> None:
    x = tensors(case)
    first = run(case, engine, x)
    for _ in range(10):
        assert_equal(run(case, engine, x, poisoned=False), first)
