"""The CUDA kernels of both families on a GPU: every specialisation, compilers, streams, graphs, threads and devices."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import gpu
import kinds
import pytest
from gpu import ENGINES, HALF, KERNELS, Case, assert_equal, check, each, judge, run, tensors, torch

from flashbob_cupy import kernels
from flashbob_cupy import plan as planning
from flashbob_cupy.check import pretended
from flashbob_cupy.driver import driver
from flashbob_cupy.problem import INPUTS, Problem

ROOT = Path(__file__).resolve().parents[1]
CARRIED = "FLASHBOB_CARRIED_KERNELS"  # a folder that tools/carry_kernels.py made with another NVRTC


# ---- every specialisation ------------------------------------------------------------------------------------------
def _case(p: Problem, M: int) -> Case:
    """A representative problem, small and with ragged ends; it takes the same kernels as the long or a short one.

    Rows that see many keys still do.
    """
    N = 257 if p.M == p.N else 4100
    u = "".join(name[1] for name in gpu.COTANGENTS if getattr(p, name)) if p.op in ("bob", "jvp") else "qkv"
    window = None if p.mask.left is None else (p.mask.left, p.mask.right)
    causal = p.mask.left is None and p.mask.right == 0
    masked = {"causal": causal, "window": window}
    return Case(M, N, p.D, p.Dv, dtype=p.dtype, deterministic=p.deterministic, u=u, ops=(p.op,), **masked)


LONG, SHORT = 190, 100
REPRESENTATIVE = tuple(dict.fromkeys(_case(p, M) for M in (LONG, SHORT) for p in planning.representative_problems()))
#: Arrays that every kernel needs copied.
UNALIGNED = tuple(Case(100, 130, 36, 20, dtype=dtype, causal=True, ops=("bob",)) for dtype in HALF)


def test_these_problems_need_every_specialisation() -> None:
    found: set[planning.Specialisation] = set()
    for case, engine in itertools.product(REPRESENTATIVE, KERNELS):
        device = planning.typical_device("sm_90a")
        if engine.endswith("-large"):
            device = dataclasses.replace(device, multiprocessors=1)
        for op in ("forward", *case.ops):  # o and lse are made first
            planned = planning.plan(case.problem(op), device, gpu.family_of(engine), frozenset())
            found.update(planned.specialisations())
    assert found == set(planning.specialisations("sm_90a"))


@each(*REPRESENTATIVE, *UNALIGNED)
def test_every_specialisation(case: Case, engine: str) -> None:
    check(case, engine)


@functools.cache
def _carried() -> dict[tuple[str, str], Any]:
    folder = os.environ.get(CARRIED)
    if not folder:
        pytest.skip(f"{CARRIED} names no folder of kernels that another NVRTC compiled (tools/carry_kernels.py)")
    entries = json.loads((Path(folder) / "manifest.json").read_text())["kernels"]
    return {(entry["arch"], entry["kernel"]): entry | {"path": Path(folder) / entry["file"]} for entry in entries}


@pytest.fixture
def carried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels come from the folder of another NVRTC. The small ones that both families share may be the installed's."""
    installed = kernels.compile

    def load(specialisation: planning.Specialisation, arch: str, **options: Any) -> kernels.Compiled:
        entry = _carried().get((arch, str(specialisation)))
        if entry is None:
            assert not specialisation.family, f"{specialisation} for {arch} was not carried"
            return installed(specialisation, arch, **options)
        if entry["source"] != hashlib.sha256(kernels.source(specialisation.path).encode()).hexdigest():
            pytest.fail(f"{specialisation.path} has changed since it was carried: run tools/carry_kernels.py again")
        return kernels.Compiled(entry["path"].read_bytes(), "", None)

    _carried()
    gpu.forget(monkeypatch)
    monkeypatch.setattr(kernels, "compile", load)


@each(*REPRESENTATIVE)
@pytest.mark.usefixtures("carried")
def test_every_specialisation_of_another_compiler(case: Case, engine: str) -> None:
    check(case, engine)


# ---- shapes, masks, options ----------------------------------------------------------------------------------------
SHAPES: dict[str, dict[str, Any]] = {
    "causal": {"M": 130, "N": 130, "causal": True, "dlse": True},
    "more keys": {"M": 37, "N": 130, "B": 2, "Hq": 4, "Hkv": 2, "causal": True},
    "tiles of queries without a key": {"M": 300, "N": 37, "D": 40, "dtype": "float16", "causal": True, "dlse": True},
    "tiles of keys without a query": {"M": 37, "N": 300, "window": (3, 0)},
    "window": {"M": 130, "N": 65, "window": (16, 8), "dlse": True, "scale": 0.3},
    "left": {"M": 200, "N": 200, "dtype": "float16", "window": (70, None)},
    "full": {"M": 130, "N": 200, "D": 128},
    "full, float16": {"M": 257, "N": 129, "D": 128, "dtype": "float16", "dlse": True},
    "wide values": {"M": 65, "N": 130, "D": 64, "Dv": 128, "dtype": "float16", "causal": True},
    "narrow values": {"M": 130, "N": 65, "D": 128, "Dv": 32, "window": (5, None)},
    "negative scale": {"M": 100, "N": 100, "scale": -0.2, "causal": True},
    "one query": {"M": 1, "N": 130},
    "one key": {"M": 37, "N": 1},
}


@each(
    *(Case(**shape, deterministic=deterministic) for shape in SHAPES.values() for deterministic in (False, True)),
    engines=ENGINES,
)
def test_shapes(case: Case, engine: str) -> None:
    check(case, engine)


@each(
    *(
        Case(100, 130, u=u, causal=True, deterministic=deterministic, ops=("bob", "jvp"))
        for u in ("q", "k", "v", "qk", "qv", "kv")
        for deterministic in (False, True)
    )
)
def test_absent_cotangents(case: Case, engine: str) -> None:
    check(case, engine)


@each(
    Case(300, 200, 128, Dv=96, deterministic=True, u="kv"),
    Case(600, 600, 128, B=2, causal=True, dlse=True, deterministic=True),
    Case(256, 65, 128, causal=True, deterministic=True),
    Case(520, 600, 80, dtype="float16", window=(200, 0), deterministic=True),
    Case(1500, 1500, 128, dtype="float16", Hq=8, Hkv=8, causal=True, ops=("jvp", "bob")),
    engines=("sm90-large",),
)
def test_clusters(case: Case, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the planner would not have them."""
    monkeypatch.setattr(planning, "_PAIRED", 0.0)
    assert any(dict(one.macros).get("CLUSTER") == 2 for one in gpu.specialisations_of(case, engine))
    check(case, engine)


LARGE = (
    Case(4096, 4096, 64, causal=True, dlse=True, judged=-1),
    Case(4096, 3000, 128, dtype="float16", judged=-1),
    Case(3000, 4096, 128, causal=True, judged=-1),
)


#: Inputs, truth and budgets.
Judged: TypeAlias = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]


def _judged(case: Case, x: dict[str, Any]) -> Judged:
    truth = gpu.large_truth(case, x)
    return x, truth, gpu.large_budgets(case, x, truth)


@functools.lru_cache(maxsize=1)
def _large(case: Case) -> Judged:
    return _judged(case, tensors(case))


def _judge_large(case: Case, results: dict[str, Any]) -> None:
    _, truth, budgets = _large(case)
    errors = {name: gpu.norms(results[name].double() - truth[name]) for name in budgets}
    worst = {name: float((error / budgets[name]).max()) for name, error in errors.items()}
    assert all(ratio <= 1 for ratio in worst.values()), f"errors over budgets: {worst}"


@each(*LARGE)
def test_many_rows(case: Case, engine: str) -> None:
    _judge_large(case, run(case, engine, _large(case)[0]))


@each(
    *(dataclasses.replace(case, deterministic=True, ops=("bob", "jvp")) for case in LARGE if case.dtype == "bfloat16")
)
def test_linear_in_the_cotangents(case: Case, engine: str) -> None:
    """A power of two scales every result exactly, as long as nothing is subnormal: not float16."""
    x = tensors(case)
    scaled = {name: 4 * array if name in gpu.COTANGENTS else array for name, array in x.items()}
    expected = {name: array if name in ("o", "lse") else 4 * array for name, array in run(case, engine, x).items()}
    assert_equal(run(case, engine, scaled), expected)


PAIRS = (("uq", "gq"), ("uk", "gk"), ("uv", "gv"))


@functools.lru_cache(maxsize=1)
def _two_directions(case: Case) -> tuple[Judged, Judged]:
    """A random U, and the W whose rows are those of bob(U), each made as long as that row of U.

    Every row adds its length to <W, bob(U)>, so that no part of it is small, and the rows with few keys, whose
    derivatives are the largest, have no more weight than others in what the errors may come to.
    """
    along_u = x, truth, _ = _judged(case, tensors(case))
    w = {}
    for u, g in PAIRS:
        lengths = x[u].double().norm(dim=-1, keepdim=True)
        w[u] = (torch().nn.functional.normalize(truth[g], dim=-1) * lengths).to(x[u].dtype)
    return along_u, _judged(case, x | w)


@each(*(dataclasses.replace(case, ops=("bob",)) for case in LARGE))
def test_the_hessian_is_symmetric(case: Case, engine: str) -> None:
    """<W, bob(U)> = <U, bob(W)>, as far as the errors allow that both may have."""
    along_u, along_w = _two_directions(case)
    products, parts, allowed = [], [], 0.0
    for (x, truth, budgets), (against, _, _) in ((along_u, along_w), (along_w, along_u)):
        results = run(case, engine, x)
        products.append(sum(float((against[u].double() * results[g].double()).sum()) for u, g in PAIRS))
        parts += [float((against[u].double() * truth[g]).sum()) for u, g in PAIRS]
        allowed += sum(float((gpu.norms(against[u]) * budgets[g]).sum()) for u, g in PAIRS)
    assert abs(products[0] - products[1]) <= allowed
    # Without any one of its parts a product would differ by more than that, even if errors made up for `allowed` of it.
    assert min(parts) > 2 * allowed


# ---- machines ------------------------------------------------------------------------------------------------------
@pytest.fixture
def little_shared_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[planning.Device]:
    """This GPU, as if a block could have no more shared memory than on consumer GPUs."""
    gpu.forget(monkeypatch)
    with pretended(shared_limit=99 << 10) as device:
        yield device


@each(*(Case(130, 200, D, causal=True) for D in (64, 128)), Case(130, 200, 128, deterministic=True), engines=("sm80",))
def test_little_shared_memory(case: Case, engine: str, little_shared_memory: planning.Device) -> None:
    # cupy 2118
    used = gpu.specialisations_of(case, engine)
    assert used
    assert max(one.shared_bytes for one in used) <= little_shared_memory.shared_limit
    check(case, engine)


@pytest.mark.gpu
def test_a_kernel_that_was_compiled_before_is_reported_too() -> None:
    """NVRTC's own cache, which works only where there is a driver, says nothing of registers and spills."""
    one = next(s for s in planning.specialisations(kernels.device_info(0).arch) if s.kernel == "copy_rows")
    for _ in range(2):
        made = kernels.compile(one, kernels.device_info(0).arch, cached=False)
        assert made.resources is not None
        assert made.resources.registers > 0


# ---- streams, graphs, threads, devices -----------------------------------------------------------------------------
SMALL = (
    Case(130, 200, causal=True, deterministic=True, dlse=True),
    Case(130, 200, causal=True),
    Case(65, 130, 36, deterministic=True),  # copies
)


@each(*SMALL, engines=ENGINES)
@pytest.mark.parametrize("named", [False, True], ids=["current", "argument"])
def test_everything_runs_on_the_stream(case: Case, engine: str, named: bool) -> None:
    # cupy 5970: the inputs are not there yet when the call is made
    ready = tensors(case)
    run(case, engine, ready)  # compiles
    cuda = torch().cuda
    stream = cuda.Stream()
    late = {name: x if x is None else torch().full_like(x, float("nan")) for name, x in ready.items()}
    cuda.synchronize()
    with cuda.stream(stream):
        cuda._sleep(200_000_000)  # some 0.1 s
        for name, x in ready.items():
            if x is not None:
                late[name].copy_(x)
    current = cuda.current_stream()
    if named:
        results = run(case, engine, late, poisoned=False, stream=stream)
    else:
        with cuda.stream(stream):
            results = run(case, engine, late, poisoned=False)
    waited = stream.query()
    assert cuda.current_stream() == current
    stream.synchronize()
    judge(case, results)
    assert not waited, "the call waited for the stream"


@each(*SMALL, engines=KERNELS)
def test_graphs(case: Case, engine: str) -> None:
    # cupy 4567, DeepEP 62
    cuda = torch().cuda
    x = tensors(case)
    run(case, engine, x)
    graph = cuda.CUDAGraph()
    with cuda.graph(graph):
        captured = run(case, engine, x, poisoned=False)
    for seed in (1, 0):
        other = dataclasses.replace(case, seed=seed)
        for name, array in tensors(other).items():
            if array is not None:
                x[name].copy_(array)
        for array in captured.values():
            array.fill_(float("nan"))
        graph.replay()
        cuda.synchronize()
        judge(other, captured)
        # Fused sums of dQ and gQ are added in any order.
        exact = captured.keys() if case.deterministic else captured.keys() - {"dq", "gq"}
        eager = run(case, engine, x)
        assert_equal({name: captured[name] for name in exact}, {name: eager[name] for name in exact})


@each(Case(64, 64, 48, causal=True, deterministic=True, ops=("bob",)))
def test_threads_compile_once(case: Case, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = tensors(case)
    x |= run(dataclasses.replace(case, ops=("forward",)), engine, x)
    expected = run(case, engine, x)
    gpu.forget(monkeypatch)
    compiled: list[planning.Specialisation] = []
    load = kernels.compile

    def count(specialisation: planning.Specialisation, arch: str) -> kernels.Compiled:
        compiled.append(specialisation)
        return load(specialisation, arch)

    monkeypatch.setattr(kernels, "compile", count)
    results: list[Any] = [None] * 8
    together = threading.Barrier(len(results))

    def call(i: int) -> None:
        together.wait()
        results[i] = kinds.call("bob", {name: x.get(name) for name in INPUTS["bob"]}, **case.options())

    with gpu.forced(engine):
        threads = [threading.Thread(target=call, args=(i,)) for i in range(len(results))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    torch().cuda.synchronize()
    assert sorted(map(str, compiled)) == sorted(set(map(str, compiled)))
    for i, result in enumerate(results):
        assert result is not None, f"thread {i} failed"
        assert_equal(result._asdict(), {name: expected[name] for name in result._fields})


@each(Case(64, 64, causal=True, deterministic=True, judged=-1), engines=ENGINES)
def test_the_current_device_and_context_stay(case: Case, engine: str) -> None:
    x = tensors(case)
    before = torch().cuda.current_device(), driver().current_context()
    expected = run(case, engine, x)
    assert (torch().cuda.current_device(), driver().current_context()) == before
    if torch().cuda.device_count() < 2:
        return
    there = {name: array if array is None else array.to("cuda:1") for name, array in x.items()}
    results = run(case, engine, there)
    assert (torch().cuda.current_device(), driver().current_context()) == before
    assert {str(array.device) for array in results.values()} == {"cuda:1"}
    assert_equal({name: array.to("cuda:0") for name, array in results.items()}, expected)


@pytest.mark.gpu
def test_arrays_on_two_devices() -> None:
    # cupy 5379
    if torch().cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    x = tensors(Case(16, 16))
    lse = x["q"][..., 0].float()
    given = {name: x.get(name, x["q"]) for name in INPUTS["bob"]} | {"lse": lse, "uk": x["uk"].to("cuda:1")}
    with pytest.raises(ValueError, match="uk must be on cuda:0 like q; got cuda:1"):
        kinds.call("bob", given)


# ---- processes -----------------------------------------------------------------------------------------------------
def _python(script: str, **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": str(ROOT), **variables},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


FIRST_CALL = """
import time
import cupy
import numpy as np
import flashbob_cupy as fb
x = cupy.asarray(np.ones((1, 2, 256, 64), np.float16))
lse = cupy.asarray(np.zeros((1, 2, 256), np.float32))
cupy.cuda.Device().synchronize()
start = time.perf_counter()
fb.bob(*[x] * 8, lse, causal=True)
cupy.cuda.Device().synchronize()
print(time.perf_counter() - start)
"""


@pytest.mark.gpu
def test_time_of_a_first_call(tmp_path: Path) -> None:
    """With no cache, and with what the first process left there; no toolkit is looked for."""
    toolkit = dict.fromkeys(("CUDA_PATH", "CUDA_HOME"), str(tmp_path / "none"))
    cold, warm = (float(_python(FIRST_CALL, FLASHBOB_CACHE_DIR=str(tmp_path / "cache"), **toolkit)) for _ in range(2))
    assert cold < 10
    assert warm < 1


FORK = """
import os
import numpy as np
import flashbob_cupy as fb
child = os.fork()
if child == 0:
    import cupy
    x = cupy.asarray(np.ones((1, 1, 16, 64), np.float16))
    os._exit(not (cupy.asnumpy(fb.forward(x, x, x).o) == 1).all())
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.gpu
def test_use_in_a_forked_child() -> None:
    # pycuda 137
    _python(FORK)
