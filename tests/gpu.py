"""What the GPU tests share: problems with their inputs, results of an engine on CUDA tensors, and verdicts.

A test is parametrised by its cases. Before the first test runs, the kernels and the float64 references of every
selected case are made in as many processes as there are cores (`prepare`): a GPU waits for neither.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import Any

import kinds
import ml_dtypes
import numpy as np
import pytest

from flashbob_cupy import accuracy, kernels, ops, reference
from flashbob_cupy import plan as planning
from flashbob_cupy.check import forced_family, pretended
from flashbob_cupy.errors import UnsupportedError
from flashbob_cupy.problem import AXES, INPUTS, OUTPUTS, Mask, Problem

Array = np.ndarray[Any, Any]

DEVICE = "cuda"
# "sm90-large": the tiles of large problems, whatever the size.
KERNELS = ("sm80", "sm90", "sm90-large")
ENGINES = (*KERNELS, "blocked")
HALF = ("float16", "bfloat16")
OPS = ("forward", "backward", "bob", "jvp")
COTANGENTS = ("uq", "uk", "uv")


@dataclass(frozen=True, slots=True)
class Case:
    """One problem, with random inputs that are the same in every process. Dv = 0 stands for D.

    `data` says what is special about the inputs (see `inputs`). Where there are very many batch entries, only the last
    `judged` of them are compared with float64; -1 says that the test compares with something else.
    """

    M: int
    N: int
    D: int = 64
    Dv: int = 0
    B: int = 1
    Hq: int = 2
    Hkv: int = 1
    dtype: str = "bfloat16"
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    scale: float | None = None
    deterministic: bool = False
    u: str = "qkv"
    dlse: bool = False
    data: str = "normal"
    seed: int = 0
    judged: int = 0
    ops: tuple[str, ...] = OPS

    def __str__(self) -> str:
        width = f"D{self.D}" + (f"x{self.Dv}" if self.Dv else "")
        heads = f"B{self.B}H{self.Hq}/{self.Hkv}"
        words = [self.dtype, f"{self.M}x{self.N}", width, heads]
        words += [word for word in ("causal", "deterministic", "dlse") if getattr(self, word)]
        words += [f"window({self.window[0]},{self.window[1]})"] if self.window else []
        words += [f"u={self.u or None}"] if self.u != "qkv" else []
        words += [self.data.replace(" ", "_")] if self.data != "normal" else []
        words += ["+".join(self.ops)] if self.ops != OPS else []
        words += [f"scale{self.scale:.3g}"] if self.scale is not None else []
        return "-".join(words)

    @property
    def mask(self) -> Mask:
        left, right = self.window or (None, None)
        if self.causal:
            right = 0 if right is None else min(right, 0)
        return Mask(left, right).within(self.M, self.N)

    def problem(self, op: str) -> Problem:
        present = {name: name[1] in self.u for name in COTANGENTS} if op in ("bob", "jvp") else {}
        return Problem(
            op, self.B, self.Hq, self.Hkv, self.M, self.N, self.D, self.Dv or self.D, self.dtype, self.mask,
            self.D**-0.5 if self.scale is None else self.scale, self.deterministic,
            dlse=self.dlse and "dlse" in INPUTS[op], **present,
        )  # fmt: skip

    def options(self) -> dict[str, Any]:
        names = ("causal", "window", "scale", "deterministic")
        return {name: getattr(self, name) for name in names}

    def unread(self, name: str) -> int:
        """So many first rows of an array are never read: no key is seen there, or no query sees them."""
        p = self.problem("bob")
        return p.first_query if AXES[name][2] == "M" else p.first_key

    def inputs(self) -> dict[str, Array | None]:
        """q, k, v, do, uq, uk, uv, dlse; None where absent. Not to be written to."""
        return _inputs(self.key())

    def key(self) -> Case:
        """The case without what changes neither inputs nor truth."""
        return replace(self, deterministic=False, ops=OPS)

    def make_inputs(self) -> dict[str, Array | None]:
        p = self.problem("bob")
        rng = np.random.default_rng(zlib.crc32(repr(self).encode()))
        x: dict[str, Any] = {}
        for name in ("q", "k", "v", "do", *COTANGENTS, "dlse"):
            x[name] = rng.standard_normal(p.shape(name), np.float32)
        dtypes = {name: kinds.NUMPY_DTYPES[p.dtype_of(name)] for name in x}
        if self.data == "very negative lse":
            for name in ("q", "k"):
                x[name] *= 0.1
            x["q"][..., 0], x["k"][..., 0] = 1, -960
        elif self.data == "one key takes all":
            x["q"][..., 0], x["k"][..., 0], x["k"][..., self.N // 2, 0] = 64, 0, 64
        elif self.data == "large where no key is seen":
            for name in ("do", "uq"):
                x[name][:, :, : p.first_query] = 1e4
        elif self.data == "gradient of a sum":
            x["do"][...] = 1
        elif self.data == "gradient penalty":
            x["do"][...] = 1
            q, k, v, do = (x[name][-self.judged :].astype(dtypes[name]) for name in ("q", "k", "v", "do"))
            x["uq"][-self.judged :] = 2 * reference.backward(q, k, v, do, mask=self.mask, scale=self.scale)[0] / self.B
        elif self.data == "small integers":  # sums are exact, and with q = 0 so is the softmax of one key
            for name in x:
                x[name] = np.rint(x[name]).clip(-1, 1)
            x["q"][...] = 0
        else:
            assert self.data == "normal", self.data
        absent = {name for name in COTANGENTS if name[1] not in self.u} | (set() if self.dlse else {"dlse"})
        return {name: None if name in absent else array.astype(dtypes[name]) for name, array in x.items()}


@functools.lru_cache(maxsize=4)
def _inputs(case: Case) -> dict[str, Array | None]:
    return case.make_inputs()


# ---- truths and kernels, made before they are needed ---------------------------------------------------------------
Reference = tuple[dict[str, Array], dict[str, Array]]
_references: dict[tuple[Case, str], Reference] = {}


def _reference(case: Case, op: str) -> Reference:
    """Truth and budgets of the judged batch entries, by output."""
    wanted = {"q", "k", "v", "do", *COTANGENTS, "dlse"}.intersection(INPUTS[op])
    x = {name: array for name, array in case.inputs().items() if name in wanted and array is not None}
    options: dict[str, Any] = {name: array[-case.judged :] for name, array in x.items()}
    options |= {"mask": case.mask, "scale": case.scale}
    truth = accuracy.truth(op, **options)
    return truth, accuracy.budgets(op, **options, expected=truth)


def reference_of(case: Case, op: str) -> Reference:
    """As prepared, or computed now. The jvp is what the double backward gives for do and dlse."""
    if op == "jvp":
        truth, budgets = reference_of(case, "bob")
        names = {"to": "gdo", "tlse": "gdlse"}
        return {new: truth[old] for new, old in names.items()}, {new: budgets[old] for new, old in names.items()}
    key = case.key(), op
    if key not in _references:
        _references[key] = _reference(*key)
    return _references[key]


def family_of(engine: str) -> str:
    return engine.partition("-")[0]


@contextlib.contextmanager
def forced(engine: str) -> Iterator[None]:
    """Ask the planner for an engine. On a GPU with one multiprocessor no problem is a small one."""
    large = pretended(multiprocessors=1) if engine.endswith("-large") else contextlib.nullcontext()
    with forced_family(family_of(engine)), large:
        yield


def specialisations_of(case: Case, engine: str) -> set[planning.Specialisation]:
    """Every kernel that the case may launch, copies included."""
    found: set[planning.Specialisation] = set()
    with forced(engine):
        device = kernels.device_info(0)
        for op in case.ops:
            problem = case.problem(op)
            if planning.route(problem, device) == family_of(engine) and engine in KERNELS:
                with contextlib.suppress(UnsupportedError):  # the test meets it too
                    found.update(planning.plan(problem, device, family_of(engine), frozenset()).specialisations())
    return found


def prepare(used: Iterable[tuple[Case, str]]) -> None:
    """Compile the kernels of (case, engine) into the disk cache and compute the references, on every core."""
    used = list(used)
    arch = kernels.device_info(0).arch
    specialisations = set().union(*(specialisations_of(case, engine) for case, engine in used))
    references = {(case.key(), "bob" if op == "jvp" else op) for case, _ in used for op in case.ops if case.judged >= 0}

    def scores(job: tuple[Case, str]) -> int:
        case, _ = job
        return case.M * case.N * case.Hq * (case.judged or case.B) + case.B * case.Hq * case.M * case.D

    longest_first = sorted(references - _references.keys(), key=scores, reverse=True)
    workers = min(os.cpu_count() or 1, len(specialisations) + len(longest_first))
    if workers < 2:
        return
    with pytest.MonkeyPatch.context() as patch:
        for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):  # the cores are taken
            patch.setenv(variable, "1")
        with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
            compiled = [pool.submit(_compile, one, arch) for one in specialisations]
            computed = {job: pool.submit(_reference, *job) for job in longest_first}
            wait(compiled)
            # What failed is tried again by the test that needs it, and fails there.
            _references.update({job: done.result() for job, done in computed.items() if done.exception() is None})


def _compile(specialisation: planning.Specialisation, arch: str) -> None:
    kernels.compile(specialisation, arch)


# ---- tensors -------------------------------------------------------------------------------------------------------
@functools.cache
def torch() -> Any:
    import torch

    return torch


@functools.cache
def _kind() -> Any:
    return kinds.GPU_KINDS["torch"]()


def tensor(x: Array) -> Any:
    return _kind().make(x)


def to_numpy(x: Any) -> Array:
    return np.asarray(_kind().numpy(x))


def tensors(case: Case) -> dict[str, Any]:
    """The inputs on the GPU."""
    return {name: None if x is None else tensor(x) for name, x in case.inputs().items()}


def dtype_of(case: Case, name: str) -> Any:
    return getattr(torch(), case.problem("bob").dtype_of(name))


def nans(case: Case, name: str) -> Any:
    """A result that has not been written."""
    return torch().full(case.problem("bob").shape(name), float("nan"), dtype=dtype_of(case, name), device=DEVICE)


def poison(engine: str) -> None:
    """Leave NaN in the memory that is handed out next: torch's blocks below 1 MiB and a large one, and CuPy's."""
    sizes = [1 << 19] * 32 + [192 << 20]
    blocks = [torch().full((size,), 255, dtype=torch().uint8, device=DEVICE) for size in sizes]
    if engine == "blocked":
        import cupy

        blocks.append(cupy.full(512 << 20, 255, dtype=np.uint8))
    del blocks


def assert_served(case: Case, op: str, engine: str) -> None:
    """Fail, or skip where this GPU has no such kernels, unless the engine computes the problem."""
    device = kernels.device_info(0)
    if family_of(engine) == "sm90" and device.arch != "sm_90a":
        pytest.skip(f"sm90 kernels run on Hopper; this GPU is {device.arch or device.capability}")
    chosen = planning.route(case.problem(op), device)
    assert chosen == family_of(engine), f"{op} of {case} goes to {chosen}, not to {engine}"


def run(
    case: Case,
    engine: str,
    given: Mapping[str, Any] | None = None,
    *,
    out: bool = False,
    poisoned: bool = True,
    **options: Any,
) -> dict[str, Any]:
    """Every result of the operations of a case, by name, on one engine.

    o and lse are the engine's own unless `given` has them. `poisoned`: workspaces and new results begin as NaN. `out`:
    the results are written into arrays of NaN given by the caller.
    """
    x = dict(tensors(case) if given is None else given)
    results: dict[str, Any] = {}
    if poisoned:
        torch().cuda.empty_cache()
    with forced(engine):
        for op in dict.fromkeys(("forward", *case.ops)):
            if op == "forward" and op not in case.ops and "lse" in x:
                continue
            assert_served(case, op, engine)
            if poisoned:
                poison(engine)
            if out:
                options["out"] = [nans(case, name) for name in OUTPUTS[op] if name != "gdlse" or case.dlse]
            result = kinds.call(op, {name: x.get(name) for name in INPUTS[op]}, **(case.options() | options))
            if out:
                assert all(a is b for a, b in zip(result, options["out"], strict=False)), f"{op}: out was not returned"
            results |= zip(OUTPUTS[op], result, strict=False)
            if getattr(result, "gdlse", None) is not None:
                results["gdlse"] = result.gdlse
            if op == "forward":
                x = {"o": result.o, "lse": result.lse, **x}
    return results


def judge(case: Case, results: Mapping[str, Any]) -> None:
    """Every result is within its budget, and exactly zero (lse -inf) in rows that see nothing."""
    wrong = []
    for op in case.ops:
        truth, budgets = reference_of(case, op)
        for name in OUTPUTS[op]:
            if name == "gdlse" and not case.dlse:
                continue
            actual = to_numpy(results[name])[-case.judged :]
            found = accuracy.compare(actual, truth[name], budgets[name])
            if not found.ok:
                wrong.append(f"{name}: error {found.error:.3g}, budget {found.budget:.3g}")
            unread = actual[:, :, : case.unread(name)].astype(np.float32)
            if not (unread == (-np.inf if name == "lse" else 0)).all():
                wrong.append(f"{name}: not zero in rows that see nothing")
    assert not wrong, f"{case}: " + "; ".join(wrong)


def check(case: Case, engine: str, given: Mapping[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    results = run(case, engine, given, **options)
    judge(case, results)
    return results


def assert_equal(actual: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """The same bits."""
    assert actual.keys() == expected.keys()
    integers = {2: torch().int16, 4: torch().int32, 8: torch().int64}
    wrong = []
    for name, e in expected.items():
        a = actual[name]
        assert (a.shape, a.dtype) == (e.shape, e.dtype), name
        a_bits, e_bits = (x.contiguous().view(integers[x.element_size()]) for x in (a, e))
        different = a_bits != e_bits
        if different.any():
            largest = (a.double() - e.double()).abs()[different].max().item()
            wrong.append(f"{name}: {int(different.sum())} of {different.numel()} differ, by up to {largest:.3g}")
    assert not wrong, "; ".join(wrong)


def each(*cases: Case, engines: Iterable[str] = KERNELS) -> Any:
    """Marks a GPU test with parameters `case` and `engine`, in every combination."""
    values = [pytest.param(case, engine, id=f"{case}-{engine}") for case in cases for engine in engines]

    def decorate(test: Any) -> Any:
        test = pytest.mark.parametrize(("case", "engine"), values)(test)
        return pytest.mark.gpu(pytest.mark.usefixtures("prepared")(test))

    return decorate


def forget(patch: pytest.MonkeyPatch) -> None:
    """Until the test ends, nothing is known of earlier calls: problems are planned and kernels loaded again."""
    patch.setattr(ops, "_calls", {})
    patch.setattr(kernels, "_loaded", kernels._Once())
    patch.setattr(kernels, "_cubins", kernels._Once())


# ---- large problems: the same rule on the GPU ----------------------------------------------------------------------
class _Plain:
    """The arithmetic of plain array code for accuracy's formulae, in float32 on torch tensors."""

    def __init__(self, dtype: Any) -> None:
        self.dtype = dtype

    def operand(self, x: Any) -> Any:
        return x.to(self.dtype).float()

    def hide(self, x: Any, seen: Any, value: float) -> Any:
        return torch().where(seen, x, value)

    def exp(self, x: Any) -> Any:
        return x.exp()

    def row_sum(self, x: Any) -> Any:
        return x.sum(-1, keepdim=True)

    def log_sum_exp(self, x: Any) -> Any:
        return x.logsumexp(-1, keepdim=True)


def large_truth(case: Case, x: Mapping[str, Any]) -> dict[str, Any]:
    """Every output in float64, by the blocked engine."""
    wide = {name: None if array is None else array.double() for name, array in x.items()}
    return run(replace(case, dtype="float64", deterministic=False), "blocked", wide)


def large_budgets(case: Case, x: Mapping[str, Any], truth: Mapping[str, Any]) -> dict[str, Any]:
    """Twice the error of plain array code, and one rounding: norms (B, H) by output of half precision.

    For problems so large that luck in one evaluation averages out, and where every query sees a key. Sums that stay in
    float32 (lse, tlse, gdlse) are not judged: plain code adds more exactly than a matrix unit does.
    """
    p = case.problem("bob")
    assert p.first_query == 0
    arithmetic = _Plain(dtype_of(case, "q"))
    rows, keys = torch().arange(p.M, device=DEVICE)[:, None] + p.N - p.M, torch().arange(p.N, device=DEVICE)[None, :]
    left, right = (bound if bound is not None else p.M + p.N for bound in (p.mask.left, p.mask.right))
    seen = (keys >= rows - left) & (keys <= rows + right)

    def side(name: str, b: int, h: int) -> Any:
        if x.get(name) is None:
            return torch().zeros(*p.shape(name)[2:], *[1] * (4 - len(AXES[name])), device=DEVICE)
        return x[name][b, h].float().reshape(p.shape(name)[2], -1)

    truth = {name: e for name, e in truth.items() if e.ndim == 4}
    plain = {name: torch().zeros_like(e, dtype=torch().float32) for name, e in truth.items()}
    for b in range(p.B):
        for h in range(p.Hq):
            queries = [side(name, b, h) for name in ("q", "do", "uq", "dlse")]
            others = [side(name, b, h // p.group) for name in ("k", "v", "uk", "uv")]
            for op in case.ops:
                by_query, by_key = accuracy._formulae(arithmetic, op, seen, p.scale, queries, others)
                for name in by_query.keys() & plain.keys():
                    plain[name][b, h] = by_query[name].reshape(plain[name][b, h].shape)
                for name in by_key.keys() & plain.keys():
                    plain[name][b, h // p.group] += by_key[name]
    return {name: 2 * norms(plain[name].double() - e) + norms(_rounding(case, name, e)) for name, e in truth.items()}


def norms(x: Any) -> Any:
    """L2 norms (B, H)."""
    return x.double().flatten(2).norm(dim=2)


def _rounding(case: Case, name: str, x: Any) -> Any:
    return x.abs() * (float(ml_dtypes.finfo(case.problem("bob").dtype_of(name)).eps) / 2)
