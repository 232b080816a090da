"""Correctness runs behind `flashbob check`: a grid of problems, or the tensors of a file, on every engine present.

Every result is compared with a float64 truth computed on the CPU, within the budgets of accuracy.py that the tests use.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from flashbob_cupy import accuracy, ops, plan
from flashbob_cupy.arrays import borrow
from flashbob_cupy.problem import Problem, make_problem

Array = npt.NDArray[Any]

DTYPES: dict[str, npt.DTypeLike] = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float32": np.float32,
    "float64": np.float64,
}
INPUTS = ("q", "k", "v", "do", "uq", "uk", "uv")
OUTPUTS = {
    "forward": ("o", "lse"),
    "backward": ("dq", "dk", "dv"),
    "bob": ("gq", "gk", "gv", "gdo"),
    "jvp": ("to", "tlse"),
}
# What a file may bring to be judged beside the library's own results.
CANDIDATES = OUTPUTS["forward"] + OUTPUTS["backward"] + OUTPUTS["bob"]
OP_OF = {output: op for op, outputs in OUTPUTS.items() for output in outputs}
OPTION_NAMES = ("causal", "scale", "window", "layout")


class InputError(ValueError):
    """A file or an option that cannot be checked; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Options:
    """The keyword arguments of a call that change its result."""

    causal: bool = False
    scale: float | None = None
    window: tuple[int | None, int | None] | None = None
    layout: str = "bhnd"

    def problem(self, q: Array, k: Array, v: Array) -> Problem:
        """The double backward of these inputs; raises as the library does where they do not fit together."""
        views = {name: borrow(a, name) for name, a in (("q", q), ("k", k), ("v", v))}
        forward = make_problem(
            "forward",
            views,
            causal=self.causal,
            scale=self.scale,
            window=self.window,
            layout=self.layout,
            deterministic=False,
        )
        return replace(forward, op="bob", uq=True, uk=True, uv=True)

    def describe(self) -> str:
        words = ["causal" if self.causal else "not causal"]
        words.append("scale 1/√D" if self.scale is None else f"scale {self.scale:g}")
        if self.window is not None:
            words.append("window ({}, {})".format(*("∞" if side is None else side for side in self.window)))
        words.append(f"layout {self.layout}")
        return ", ".join(words)


@dataclass(frozen=True, slots=True)
class Case:
    """One problem of the grid."""

    Hq: int
    Hkv: int
    M: int
    N: int
    D: int
    Dv: int
    dtype: str
    options: Options = Options()
    deterministic: bool = False
    B: int = 1

    def inputs(self, seed: int) -> dict[str, Array]:
        rng = np.random.default_rng(seed)
        query, key = (self.B, self.Hq, self.M), (self.B, self.Hkv, self.N)
        shapes = {"q": (*query, self.D), "k": (*key, self.D), "v": (*key, self.Dv), "do": (*query, self.Dv)}
        shapes.update(uq=shapes["q"], uk=shapes["k"], uv=shapes["v"])
        arrays = {name: rng.standard_normal(shape).astype(DTYPES[self.dtype]) for name, shape in shapes.items()}
        if self.options.layout == "bnhd":
            arrays = {name: np.ascontiguousarray(a.swapaxes(1, 2)) for name, a in arrays.items()}
        return arrays

    def describe(self) -> str:
        heads = f"H={self.Hq}" if self.Hq == self.Hkv else f"H={self.Hq}/{self.Hkv}"
        length = f"N={self.N}" if self.M == self.N else f"M={self.M} N={self.N}"
        width = f"D={self.D}" if self.Dv == self.D else f"D={self.D} Dv={self.Dv}"
        suffix = ", deterministic" if self.deterministic else ""
        return f"{self.dtype} B={self.B} {heads} {length} {width}, {self.options.describe()}{suffix}"


def grid() -> tuple[Case, ...]:
    """The problems of `flashbob check`: every option once or more, in sizes a laptop checks in seconds."""
    causal = Options(causal=True)
    cases = [
        Case(2, 2, 65, 65, 64, 64, dtype, Options(causal=is_causal)) for dtype in DTYPES for is_causal in (False, True)
    ]
    for dtype in ("float16", "bfloat16"):
        cases += [Case(2, 2, 113, 113, D, D, dtype, causal) for D in (1, 8, 32, 40, 96, 128, 160)]
        cases += [
            Case(2, 2, 70, 70, 64, 32, dtype, causal),
            Case(2, 2, 70, 70, 80, 128, dtype),
            Case(6, 2, 64, 64, 64, 64, dtype, causal, B=2),
            Case(4, 1, 33, 130, 64, 64, dtype, causal),
            Case(2, 2, 130, 33, 128, 128, dtype, causal),
            Case(2, 2, 100, 1, 64, 64, dtype),
            Case(2, 2, 150, 150, 64, 64, dtype, Options(causal=True, window=(16, 0))),
            Case(2, 2, 90, 150, 64, 64, dtype, Options(window=(8, 24))),
            Case(2, 2, 96, 96, 64, 64, dtype, Options(scale=0.3)),
            Case(3, 1, 80, 80, 64, 64, dtype, Options(causal=True, layout="bnhd"), B=2),
            Case(4, 2, 200, 200, 64, 64, dtype, causal, deterministic=True),
            Case(1, 1, 300, 300, 128, 128, dtype, causal),
            Case(2, 1, 150, 150, 128, 128, dtype, causal, deterministic=True),
            Case(1, 1, 130, 2100, 128, 128, dtype, causal, deterministic=True),
            Case(2, 2, 190, 190, 64, 64, dtype, causal, deterministic=True),
        ]
    return tuple(cases)


@contextmanager
def forced_family(name: str) -> Iterator[None]:
    """Ask the planner for one kernel family."""
    before = os.environ.get(plan.FAMILY_VARIABLE)
    os.environ[plan.FAMILY_VARIABLE] = name
    try:
        yield
    finally:
        if before is None:
            del os.environ[plan.FAMILY_VARIABLE]
        else:
            os.environ[plan.FAMILY_VARIABLE] = before


@contextmanager
def pretended(**changes: Any) -> Iterator[plan.Device]:
    """Plan anew, as if GPU 0 had other properties: with one multiprocessor no problem is a small one."""
    from flashbob_cupy.driver import driver

    real = driver().device(0)
    device = driver()._devices[0] = replace(real, **changes)
    ops._calls.clear()
    try:
        yield device
    finally:
        driver()._devices[0] = real
        ops._calls.clear()


@dataclass(frozen=True, slots=True)
class Engine:
    """One way to compute: the arrays' device and the kernel family asked for."""

    name: str
    device: str
    to_device: Callable[[Array], Any]
    to_host: Callable[[Any], Array]
    #: With the tiles of large problems, which those that are checked are not.
    large: bool = False

    @property
    def title(self) -> str:
        return f"{self.name} on {self.device}{', large tiles' if self.large else ''}"

    @contextmanager
    def selected(self) -> Iterator[None]:
        """Ask the planner for this engine; on the CPU there is no choice to make."""
        with ExitStack() as stack:
            if self.device == "cuda":
                stack.enter_context(forced_family(self.name))
            if self.large:
                stack.enter_context(pretended(multiprocessors=1))
            yield

    def serves(self, problem: Problem) -> bool:
        """Whether `problem` is computed by this engine when it is asked for."""
        if self.device == "cpu":
            return True
        from flashbob_cupy import kernels

        with self.selected():
            return plan.route(problem, kernels.device_info(0)) == self.name

    def run(self, arrays: Mapping[str, Array], options: Options, deterministic: bool = False) -> dict[str, Array]:
        """Every output of every operation, in the caller's layout; `o` and `lse` are used where they are given."""
        on_device = {name: self.to_device(a) for name, a in arrays.items()}
        q, k, v, do, uq, uk, uv = (on_device[name] for name in INPUTS)
        common: dict[str, Any] = {
            "causal": options.causal,
            "scale": options.scale,
            "window": options.window,
            "layout": options.layout,
            "deterministic": deterministic,
        }
        with self.selected():
            results: dict[str, Any] = dict(zip(OUTPUTS["forward"], ops.forward(q, k, v, **common), strict=True))
            o = on_device.get("o", results["o"])
            lse = on_device.get("lse", results["lse"])
            dq_dk_dv = ops.backward(q, k, v, do, o, lse, **common)
            results.update(zip(OUTPUTS["backward"], dq_dk_dv, strict=True))
            double = ops.bob(q, k, v, do, uq, uk, uv, o, lse, **common)
            results.update(zip(OUTPUTS["bob"], double, strict=True))
            results.update(zip(OUTPUTS["jvp"], ops.jvp(q, k, v, uq, uk, uv, o, lse, **common), strict=True))
            return {name: self.to_host(a) for name, a in results.items()}


def engines(device: str) -> list[Engine]:
    """The engines of `device` ("cpu", "cuda" or "all") that can run here; no "cuda" engine means no usable GPU."""
    found: list[Engine] = []
    if device in ("cpu", "all"):
        found.append(Engine("blocked", "cpu", lambda a: a, lambda a: a))
    if device in ("cuda", "all"):
        from flashbob_cupy import doctor

        if doctor.usable_gpu() is not None:
            import cupy

            found += [Engine(family, "cuda", cupy.asarray, cupy.asnumpy) for family in plan.FAMILIES]
            found.append(Engine("sm90", "cuda", cupy.asarray, cupy.asnumpy, large=True))
    return found


def to_bhnd(arrays: Mapping[str, Array], layout: str) -> dict[str, Array]:
    """Views in the axis order (B, H, rows, D); lse has it already."""
    if layout == "bhnd":
        return dict(arrays)
    return {name: a.swapaxes(1, 2) if a.ndim == 4 else a for name, a in arrays.items()}


@dataclass(frozen=True, slots=True)
class Truth:
    """What the outputs should be, in float64 and the axis order (B, H, rows, D), and the error each may have."""

    values: dict[str, Array]
    budgets: dict[str, Array]


def find_truth(problem: Problem, inputs: Mapping[str, Array]) -> Truth:
    """The truth of every output of every operation; `inputs` are in the axis order (B, H, rows, D)."""
    values: dict[str, Array] = {}
    budgets: dict[str, Array] = {}
    taken = {
        "forward": ("q", "k", "v"),
        "backward": ("q", "k", "v", "do"),
        "bob": INPUTS,
        "jvp": ("q", "k", "v", "uq", "uk", "uv"),
    }
    for op, names in taken.items():
        operands: dict[str, Any] = {name: inputs[name] for name in names}
        options: dict[str, Any] = {"mask": problem.mask, "scale": problem.scale}
        exact = accuracy.truth(op, **operands, **options)
        values |= exact
        budgets |= accuracy.budgets(op, **operands, **options, expected=exact)
    return Truth(values, budgets)


@dataclass(frozen=True, slots=True)
class Result:
    """One output judged in its worst head: relative L2 error against float64, its budget and their ratio."""

    source: str
    op: str
    output: str
    error: float
    budget: float
    ratio: float
    ok: bool
    problem: str


def judge(source: str, results: Mapping[str, Array], truth: Truth, layout: str, problem: str) -> Iterator[Result]:
    """Compare every result that has a truth; both may hold more."""
    for name, actual in to_bhnd(results, layout).items():
        expected = truth.values[name]
        found = accuracy.compare(actual.reshape(expected.shape), expected, truth.budgets[name])
        yield Result(source, OP_OF[name], name, found.error, found.budget, found.ratio, found.ok, problem)


def run_case(case: Case, seed: int, on: Sequence[Engine]) -> Iterator[Result]:
    """Every output of one case on every engine that serves it."""
    inputs = case.inputs(seed)
    yield from _run(inputs, {}, case.options, on, case.describe(), case.deterministic)


def _run(
    inputs: Mapping[str, Array],
    candidates: Mapping[str, Array],
    options: Options,
    on: Sequence[Engine],
    title: str,
    deterministic: bool = False,
) -> Iterator[Result]:
    problem = options.problem(inputs["q"], inputs["k"], inputs["v"])
    given = {name: candidates[name] for name in ("o", "lse") if name in candidates}
    # The library runs first: its argument checks speak before any long computation.
    computed = {
        engine.title: engine.run({**inputs, **given}, options, deterministic) for engine in on if engine.serves(problem)
    }
    truth = find_truth(problem, to_bhnd(inputs, options.layout))
    if candidates:
        yield from judge("file", candidates, truth, options.layout, title)
    for source, results in computed.items():
        yield from judge(source, results, truth, options.layout, title)


@dataclass(frozen=True, slots=True)
class File:
    """The arrays of a file that `check` knows, by role, and the options recorded beside them."""

    path: Path
    inputs: dict[str, Array]
    candidates: dict[str, Array]
    options: Options
    ignored: tuple[str, ...]

    @property
    def dtype(self) -> str:
        return self.inputs["q"].dtype.name

    def describe(self) -> str:
        q, k, v = (self.inputs[name] for name in "qkv")
        return f"{self.path.name}: q {q.shape}, k {k.shape}, v {v.shape} {self.dtype}, {self.options.describe()}"


def run_file(file: File, on: Sequence[Engine]) -> Iterator[Result]:
    """The file's own candidates, and the library's results on every engine that serves the problem."""
    return _run(file.inputs, file.candidates, file.options, on, file.path.name)


def read_file(path: Path, **given: Any) -> File:
    """Read tensors and options from a .npz or .safetensors file; options in `given` that are not None come first.

    Raises:
        InputError: the file cannot be read, lacks an array, or holds an array or option that cannot be used.
    """
    readers = {".npz": _read_npz, ".safetensors": _read_safetensors}
    if path.suffix not in readers:
        raise InputError(f"{path}: expected a file named .npz or .safetensors")
    try:
        arrays, recorded = readers[path.suffix](path)
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"{path} cannot be read as {path.suffix}: {error}") from error
    missing = [name for name in INPUTS if name not in arrays]
    if missing:
        raise InputError(
            f"{path} lacks {', '.join(missing)}: expected the arrays {', '.join(INPUTS)} "
            f"(zeros for a cotangent that is absent); it holds {', '.join(arrays) or 'nothing'}"
        )
    inputs = {name: arrays[name] for name in INPUTS}
    for name, array in inputs.items():
        if array.dtype.name not in DTYPES:
            raise InputError(f"{path}: {name} must be {', '.join(DTYPES)}; got {array.dtype.name}")
        bad = array.size - int(np.count_nonzero(np.isfinite(array.astype(np.float64))))
        if bad:
            raise InputError(f"{path}: {name} holds {bad} NaN or infinite number(s) of {array.size}")
    candidates = {name: arrays[name] for name in CANDIDATES if name in arrays}
    options = Options(**(_recorded_options(path, recorded) | {k: v for k, v in given.items() if v is not None}))
    _check_candidates(path, inputs, candidates, options)
    ignored = tuple(sorted(set(arrays) - set(INPUTS) - set(CANDIDATES)))
    return File(path, inputs, candidates, options, ignored)


def _read_npz(path: Path) -> tuple[dict[str, Array], dict[str, Any]]:
    with np.load(path, allow_pickle=False) as content:
        entries = {name: content[name] for name in content.files}
    recorded = {name: entries.pop(name).tolist() for name in OPTION_NAMES if name in entries}
    # NumPy's format keeps bfloat16 as two raw bytes.
    arrays = {name: a.view(ml_dtypes.bfloat16) if a.dtype == np.dtype("V2") else a for name, a in entries.items()}
    return arrays, recorded


def _read_safetensors(path: Path) -> tuple[dict[str, Array], dict[str, Any]]:
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise InputError(f"{path}: reading .safetensors needs: pip install safetensors") from error
    with safe_open(path, framework="numpy") as content:
        arrays = {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118
        metadata = content.metadata() or {}
    recorded: dict[str, Any] = {}
    for name in OPTION_NAMES:
        if name in metadata:
            # Metadata is text: options are written as JSON ("true", "0.125", "[16, null]"), layout as it is.
            recorded[name] = metadata[name] if name == "layout" else json.loads(metadata[name].lower())
    return arrays, recorded


def _recorded_options(path: Path, recorded: dict[str, Any]) -> dict[str, Any]:
    checks: dict[str, Callable[[Any], bool]] = {
        "causal": lambda x: isinstance(x, bool),
        "scale": lambda x: x is None or (isinstance(x, int | float) and not isinstance(x, bool)),
        "window": lambda x: x is None or (isinstance(x, list | tuple) and len(x) == 2),
        "layout": lambda x: x in ("bhnd", "bnhd"),
    }
    for name, value in recorded.items():
        if not checks[name](value):
            raise InputError(f"{path} records {name} = {value!r}, which is not a value of that option")
    if recorded.get("window") is not None:
        recorded["window"] = tuple(recorded["window"])
    return recorded


def _check_candidates(path: Path, inputs: dict[str, Array], candidates: dict[str, Array], options: Options) -> None:
    q, v = inputs["q"], inputs["v"]
    rows = q.shape[:3] if options.layout == "bhnd" else (q.shape[0], q.shape[2], q.shape[1])
    shapes = {"o": (*q.shape[:-1], v.shape[-1]), "gdo": inputs["do"].shape, "lse": rows}
    shapes |= {f"{kind}{name}": inputs[name].shape for kind in "dg" for name in "qkv"}
    for name, array in candidates.items():
        if array.shape != shapes[name] and not (name == "lse" and array.shape == (*rows, 1)):
            raise InputError(f"{path}: {name} must have shape {shapes[name]}; got {array.shape}")
        if array.dtype.kind not in "fV" or array.dtype.name not in DTYPES:
            raise InputError(f"{path}: {name} must be {', '.join(DTYPES)}; got {array.dtype.name}")
