"""Every CUDA kernel, planned and launched as on a GPU but carried out by the emulator, against float64.

What no kernel may read (rows that see no key, keys that no query sees, memory around the arrays, fresh workspaces and
results) holds NaN throughout.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import emulator
import ml_dtypes
import numpy as np
import pytest

from flashbob_cupy import accuracy
from flashbob_cupy import plan as planning
from flashbob_cupy.problem import AXES, INPUTS, OUTPUTS, Mask, Problem

pytestmark = pytest.mark.skipif(emulator.compiler() is None, reason="no C++ compiler was found (g++, c++ or clang++)")

Array = np.ndarray[Any, Any]
NUMPY = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16), "float32": np.dtype(np.float32)}
ARCHES = {"sm80": "sm_80", "sm90": "sm_90a"}
CAUSAL = Mask(right=0)


def make(
    op: str,
    M: int,
    N: int,
    D: int = 64,
    Dv: int | None = None,
    *,
    B: int = 1,
    Hq: int = 2,
    Hkv: int = 1,
    dtype: str = "bfloat16",
    mask: Mask = CAUSAL,
    scale: float | None = None,
    deterministic: bool = False,
    dlse: bool = False,
    u: str = "qkv",
) -> Problem:
    cotangents = {f"u{x}": x in u for x in "qkv"} if op in ("bob", "jvp") else {}
    return Problem(
        op, B, Hq, Hkv, M, N, D, Dv or D, dtype, mask.within(M, N), scale or D**-0.5,
        deterministic, dlse=dlse and "dlse" in INPUTS[op], **cotangents,
    )  # fmt: skip


def served(problem: Problem) -> Iterator[str]:
    """The families that have the kernels for a problem."""
    for family, arch in ARCHES.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(planning.FAMILY_VARIABLE, family)
            if planning.route(problem, planning.typical_device(arch)) == family:
                yield family


def operands(p: Problem, seed: int = 0) -> dict[str, Array]:
    """Everything but o and lse, random."""
    rng = np.random.default_rng(seed)
    names = {"q", "k", "v", "do", "uq", "uk", "uv", "dlse"}.intersection(INPUTS[p.op])
    absent = {name for name in ("uq", "uk", "uv", "dlse") if not getattr(p, name)}
    return {x: rng.standard_normal(p.shape(x)).astype(NUMPY[p.dtype_of(x)]) for x in sorted(names - absent)}


def results_of(p: Problem) -> dict[str, Array]:
    return {name: np.full(p.shape(name), np.nan, NUMPY[p.dtype_of(name)]) for name in OUTPUTS[p.op]}


def complete(p: Problem, x: dict[str, Array]) -> dict[str, Array]:
    """The arguments of the kernels: o and lse added, NaN in every row that must not be read."""
    x = {name: array.copy() for name, array in x.items()}
    if "o" in INPUTS[p.op]:
        forward = accuracy.truth("forward", x["q"], x["k"], x["v"], mask=p.mask, scale=p.scale)
        x["o"], x["lse"] = forward["o"].astype(NUMPY[p.dtype]), forward["lse"].astype(np.float32)
    for name, array in x.items():
        if name != "lse":
            array[:, :, : p.first_query if AXES[name][2] == "M" else p.first_key] = np.nan
    return x


def check(p: Problem, x: dict[str, Array], family: str, **options: Any) -> dict[str, Array]:
    """Run a problem and judge every result; x is what `operands` gave."""
    results = results_of(p)
    launched = emulator.execute(p, complete(p, x), results, family, **options)
    assert any(file.startswith(family) for file in launched)
    judge(p, x, results)
    return results


def judge(p: Problem, x: dict[str, Array], results: dict[str, Array]) -> None:
    given = {"mask": p.mask, "scale": p.scale, **x}
    truth = accuracy.truth(p.op, **given)
    budgets = accuracy.budgets(p.op, **given, expected=truth)
    for name, result in results.items():
        found = accuracy.compare(result, truth[name], budgets[name])
        assert found.ok, f"{name}: {found}"
        dead = result[:, :, : p.first_query if AXES[name][2] == "M" else p.first_key].astype(np.float32)
        assert (dead == (-np.inf if name == "lse" else 0)).all(), f"{name}: rows that see nothing"


# ---- shapes, masks, dtypes -----------------------------------------------------------------------------------------
SHAPES: dict[str, dict[str, Any]] = {
    "causal": {"M": 130, "N": 130, "dlse": True},
    "more keys": {"M": 37, "N": 130, "B": 2, "Hq": 4, "Hkv": 2},
    "tiles of queries without a key": {"M": 200, "N": 37, "D": 40, "dtype": "float16", "dlse": True},
    "tiles of keys without a query": {"M": 37, "N": 200, "mask": Mask(3, 0)},
    "window": {"M": 130, "N": 65, "mask": Mask(16, 8), "dlse": True, "scale": 0.3},
    "strictly before": {"M": 65, "N": 65, "mask": Mask(None, -3), "Dv": 32},
    "full, wide": {"M": 130, "N": 200, "D": 128, "mask": Mask()},
    "wide values": {"M": 65, "N": 130, "D": 64, "Dv": 128, "dtype": "float16"},
    "narrow values": {"M": 130, "N": 65, "D": 128, "Dv": 32, "mask": Mask(5, None)},
    "widths that are copied": {"M": 37, "N": 37, "D": 36, "Dv": 20},
    "warpgroups without a query": {"M": 410, "N": 410, "Hq": 1},
    "warpgroups without a query in a window": {"M": 410, "N": 700, "Hq": 1, "mask": Mask(200, 0)},
    "one query": {"M": 1, "N": 130, "mask": Mask()},
    "one key": {"M": 37, "N": 1, "mask": Mask()},
}
_BY_SHAPE = [
    pytest.param(problem, family, id=f"{op}-{'deterministic-' if deterministic else ''}{name}-{family}")
    for name, shape in SHAPES.items()
    for op in OUTPUTS
    for deterministic in ((False, True) if op in ("backward", "bob") else (False,))
    for problem in [make(op, deterministic=deterministic, **shape)]
    for family in served(problem)
]


@pytest.mark.parametrize(("problem", "family"), _BY_SHAPE)
def test_results(problem: Problem, family: str) -> None:
    check(problem, operands(problem), family)


_BY_COTANGENT = [
    pytest.param(problem, family, id=f"{op}-{'deterministic-' if deterministic else ''}u{u}-{family}")
    for u in ("q", "k", "v", "qk", "qv", "kv")
    for op, deterministic in (("jvp", False), ("bob", False), ("bob", True))
    for problem in [make(op, 37, 65, deterministic=deterministic, u=u)]
    for family in served(problem)
]


@pytest.mark.parametrize(("problem", "family"), _BY_COTANGENT)
def test_absent_cotangents(problem: Problem, family: str) -> None:
    check(problem, operands(problem), family)


@pytest.mark.parametrize(("problem", "family"), [p for p in (*_BY_SHAPE, *_BY_COTANGENT) if p.values[1] == "sm90"])
def test_tiles_of_small_problems(problem: Problem, family: str) -> None:
    check(problem, operands(problem), family, multiprocessors=128)


_IN_CLUSTERS: dict[str, dict[str, Any]] = {
    "full": {"M": 300, "N": 200, "mask": Mask()},
    "one CTA has no query": {"M": 128, "N": 130, "mask": Mask()},
    "causal": {"M": 385, "N": 385, "Dv": 96},
    "no key for the first CTA": {"M": 256, "N": 65, "Hq": 3},
    "window": {"M": 520, "N": 600, "D": 80, "mask": Mask(200, 0), "dtype": "float16"},
    "tiles that no query sees": {"M": 137, "N": 400, "mask": Mask(3, 0), "Hq": 2},
}


@pytest.mark.parametrize("shape", _IN_CLUSTERS)
@pytest.mark.parametrize("op", OUTPUTS)
def test_clusters(op: str, shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the planner would not have them, in the order of threads that comes first and in others."""
    monkeypatch.setattr(planning, "_PAIRED", 0.0)
    problem = make(op, deterministic=True, **{"D": 128, "Hq": 1, **_IN_CLUSTERS[shape]})
    device = dataclasses.replace(planning.typical_device("sm_90a"), multiprocessors=1)
    planned = planning.plan(problem, device, "sm90", frozenset(INPUTS[op] + OUTPUTS[op]))
    assert (2 in [dict(one.macros).get("CLUSTER") for one in planned.specialisations()]) == (op != "forward")
    x = operands(problem)
    for seed in (0, 1):
        check(problem, x, "sm90", seed=seed)


def _any_problem(seed: int) -> Problem:
    """One of many CTAs and of more tiles than a ring has stages, under a mask with edges anywhere."""
    rng = np.random.default_rng(seed)
    op = str(rng.choice(["forward", "backward", "bob", "jvp"]))
    # 385 to 448: of the rows of the last CTA, 64 or fewer are queries.
    M = int(rng.choice([rng.integers(1, 400), rng.integers(385, 449)]))
    N = int(rng.choice([M, M + rng.integers(300), rng.integers(1, 500)]))
    left, right = int(rng.integers(300)), int(rng.integers(100))
    masks = (CAUSAL, Mask(left, right), Mask(left, -min(left, right)), Mask(left, None), Mask())
    return make(
        op, M, N, int(rng.choice([16, 64, 128])), Hq=int(rng.integers(1, 3)), mask=masks[rng.integers(len(masks))],
        deterministic=op in ("backward", "bob") and bool(rng.integers(2)),
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(40))
def test_any_problem(seed: int) -> None:
    problem = _any_problem(seed)
    for family in served(problem):
        # Every other one in a random order of threads: in the usual one no lane falls behind its warp.
        check(problem, operands(problem, seed), family, multiprocessors=1 if seed % 3 else 132, seed=seed % 2 * seed)


def _each(**shape: Any) -> list[Any]:
    """One problem per operation and family."""
    return [
        pytest.param(problem, family, id=f"{op}-{family}")
        for op in OUTPUTS
        for problem in [make(op, **shape)]
        for family in served(problem)
    ]


# ---- numbers -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("problem", "family"), _each(M=65, N=65))
def test_very_negative_log_sum_exp(problem: Problem, family: str) -> None:
    """exp(0 - lse) of a padded key would overflow."""
    check(problem, _very_negative(problem), family)


def _very_negative(problem: Problem) -> dict[str, Array]:
    x = operands(problem)
    for name in ("q", "k"):
        x[name] = (0.1 * x[name].astype(np.float32)).astype(x[name].dtype)
    x["q"][..., 0], x["k"][..., 0] = 1, -960
    return x


@pytest.mark.parametrize("family", ["sm80", "sm90"])
def test_what_a_tile_rounds_does_not_add_up_over_many(family: str) -> None:
    """The probabilities of the jvp sum to 1 only if the forward's lse is that of its scores, to the last few bits."""
    problem = make("jvp", M=40, N=700, mask=Mask(), dtype="float16")
    x = _very_negative(problem)
    forward = make("forward", M=40, N=700, mask=Mask(), dtype="float16")
    found = results_of(forward)
    emulator.execute(forward, complete(forward, x), found, family)
    results = results_of(problem)
    emulator.execute(problem, {**complete(problem, x), **found}, results, family)
    judge(problem, x, results)


@pytest.mark.parametrize(("problem", "family"), _each(M=37, N=65, mask=Mask()))
def test_one_key_takes_all(problem: Problem, family: str) -> None:
    """P is exactly 0 or 1: nothing flows to q and k through the softmax."""
    x = operands(problem)
    x["q"][..., 0], x["k"][..., 0], x["k"][..., 7, 0] = 64, 0, 64
    check(problem, x, family)


_ALONE = [
    pytest.param(problem, family, id=f"{op}-{'deterministic-' if deterministic else ''}{name}-{family}")
    for name, shape in {
        "one key": {"M": 37, "N": 1, "mask": Mask()},
        "the diagonal": {"M": 70, "N": 70, "mask": Mask(0, 0)},
        "wide": {"M": 37, "N": 70, "D": 128, "mask": Mask(0, 0)},
    }.items()
    for op, deterministic in (("backward", False), ("backward", True), ("bob", False), ("bob", True), ("jvp", False))
    for problem in [make(op, deterministic=deterministic, **shape)]
    for family in served(problem)
]


@pytest.mark.parametrize(("problem", "family"), _ALONE)
def test_a_query_that_sees_one_key_is_exact(problem: Problem, family: str) -> None:
    """O is that key's value, however large the logits are: nothing flows through the softmax."""
    x = operands(problem)
    for name in ("q", "k"):
        x[name] = 16 * x[name]
    given, results = complete(problem, x), results_of(problem)
    emulator.execute(problem, given, results, family)
    for name in {"dq", "dk", "gq", "gk", "gv"}.intersection(results):
        assert (results[name] == 0).all(), name
    key = np.arange(problem.M) + problem.N - problem.M if problem.N > 1 else np.zeros(problem.M, np.int64)
    for name in {"gdo", "to"}.intersection(results):
        assert np.array_equal(results[name], np.repeat(x["uv"], problem.group, axis=1)[:, :, key]), name


@pytest.mark.parametrize(("problem", "family"), _each(M=65, N=37))
def test_log_sum_exp_of_dead_rows_may_have_either_sign(problem: Problem, family: str) -> None:
    x = operands(problem)
    given, results = complete(problem, x), results_of(problem)
    if "lse" in given:
        given["lse"][:, :, : problem.first_query : 2] = np.inf
    emulator.execute(problem, given, results, family)
    judge(problem, x, results)


# ---- arrays --------------------------------------------------------------------------------------------------------
def _transposed(x: Array) -> Array:
    """(batch, row, head, width) in memory."""
    return np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2)


def _shifted(x: Array) -> Array:
    """One element past an aligned address."""
    buffer = np.zeros(x.size + 16, x.dtype)
    start = (-buffer.ctypes.data % 16) // x.itemsize + 1
    view = buffer[start : start + x.size].reshape(x.shape)
    view[...] = x
    return view


def _columns_first(x: Array) -> Array:
    """Rows adjacent in memory."""
    return np.ascontiguousarray(x.swapaxes(-1, -2)).swapaxes(-1, -2)


def _sliced(x: Array) -> Array:
    """A part of a larger array that holds NaN elsewhere."""
    B, H, N, D = x.shape
    buffer = np.full((B, H + 1, N + 3, D + 8), np.nan, x.dtype)
    buffer[:, :H, :N, :D] = x
    return buffer[:, :H, :N, :D]


_STRIDED = [
    pytest.param(problem, family, layout, id=f"{op}-{layout.__name__.strip('_')}-{family}")
    for op in OUTPUTS
    for problem in [make(op, 37, 65, 40, B=2, Hq=4, Hkv=2, deterministic=True)]
    for layout in (_transposed, _shifted, _columns_first, _sliced)
    for family in served(dataclasses.replace(problem, deterministic=False))
]


@pytest.mark.parametrize(("problem", "family", "layout"), _STRIDED)
def test_strides_change_nothing(problem: Problem, family: str, layout: Any) -> None:
    """Bitwise, and nothing is written between the rows of a result."""
    problem = problem if family in served(problem) else dataclasses.replace(problem, deterministic=False)
    given = complete(problem, operands(problem))
    plain, strided = results_of(problem), results_of(problem)
    emulator.execute(problem, given, plain, family)
    strided = {name: layout(x) if x.ndim == 4 else x for name, x in strided.items()}
    emulator.execute(problem, {name: layout(x) if x.ndim == 4 else x for name, x in given.items()}, strided, family)
    for name, x in plain.items():
        assert np.array_equal(x, strided[name]), name


@pytest.mark.parametrize(("problem", "family"), _each(M=37, N=65, Hq=4, Hkv=2, B=2))
def test_broadcast_operands(problem: Problem, family: str) -> None:
    """One row, stride 0, as the gradient of a sum has."""
    x = operands(problem)
    names = [name for name in ("do", "uq", "uk", "uv") if name in x] or ["v"]
    for name in names:
        x[name] = np.broadcast_to(x[name][:1, :1, :1], x[name].shape)
    given = complete(problem, x)
    for name in names:  # nothing of these is dead here
        given[name] = x[name]
    results = results_of(problem)
    emulator.execute(problem, given, results, family)
    judge(problem, x, results)


# ---- machines ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("op", OUTPUTS)
@pytest.mark.parametrize("D", [64, 128])
def test_small_shared_memory(op: str, D: int) -> None:
    """The tiles of GPUs that offer 99 KiB a block."""
    problem = make(op, 65, 130, D, mask=Mask(40, 0))
    check(problem, operands(problem), "sm80", arch="sm_86")


@pytest.mark.parametrize("op", OUTPUTS)
def test_portable_kernels_on_later_machines(op: str) -> None:
    """From sm_90 on they add four numbers at once."""
    problem = make(op, 65, 130)
    check(problem, operands(problem), "sm80", arch="sm_100a")


_DETERMINISTIC = [
    pytest.param(problem, family, id=f"{op}-{D}-{family}")
    for op in OUTPUTS
    for D in (64, 128)
    for problem in [make(op, 65, 130, D, Hq=4, Hkv=2, deterministic=op in ("backward", "bob"))]
    for family in served(problem)
]


@pytest.mark.parametrize(("problem", "family"), _DETERMINISTIC)
def test_any_order_of_threads_gives_the_same_bits(problem: Problem, family: str) -> None:
    given = complete(problem, operands(problem))
    first, second = results_of(problem), results_of(problem)
    emulator.execute(problem, given, first, family)
    emulator.execute(problem, given, second, family, seed=1)
    for name, x in first.items():
        assert np.array_equal(x, second[name]), name


@pytest.mark.parametrize(("problem", "family"), _each(M=65, N=130, D=128))
def test_any_order_of_threads_is_right(problem: Problem, family: str) -> None:
    check(problem, operands(problem), family, seed=2)
