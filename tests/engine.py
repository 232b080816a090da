"""What the tests of the CPU engine share: inputs of a problem, every operation on them, and the verdict."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import ml_dtypes
import numpy as np

from flashbob_cupy import accuracy, blocked
from flashbob_cupy.problem import AXES, INPUTS, OUTPUTS, Mask, Problem

DTYPES = ("float16", "bfloat16", "float32", "float64")
NUMPY = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32, "float64": np.float64}
OPS = ("forward", "backward", "bob", "jvp")


@dataclass
class Case:
    """One problem of all four operations, and its inputs by name."""

    problem: Problem
    arrays: dict[str, Any] = field(default_factory=dict)

    def empty(self, name: str) -> Any:
        """A result full of NaN: whatever is not written shows."""
        p = replace(self.problem, op="bob")
        return np.full(p.shape(name), np.nan, NUMPY[p.dtype_of(name)])

    def call(self, op: str, **options: Any) -> dict[str, Any]:
        """The outputs of one operation by name; o and lse are taken from the inputs or computed."""
        a = dict(self.arrays)
        if op != "forward" and "o" not in a:
            a |= self.call("forward", **options)
        results = {name: self.empty(name) for name in OUTPUTS[op]}
        inputs = [a.get(name) for name in INPUTS[op]]
        getattr(blocked, op)(replace(self.problem, op=op), *inputs, *results.values(), **options)
        return results

    def judge(self, op: str, results: dict[str, Any]) -> None:
        """Every output within its budget."""
        options: dict[str, Any] = {"mask": self.problem.mask, "scale": self.problem.scale}
        if op in ("backward", "bob"):
            options["dlse"] = self.arrays.get("dlse")
        operands = {name: self.arrays.get(name) for name in INPUTS[op] if name not in ("o", "lse", "dlse")}
        truth = accuracy.truth(op, **operands, **options)
        budgets = accuracy.budgets(op, **operands, **options, expected=truth)
        for name in OUTPUTS[op]:
            verdict = accuracy.compare(results[name], truth[name], budgets[name])
            assert verdict.ok, f"{op} {name} of {self.problem}: {verdict}"

    def check(self, **options: Any) -> None:
        forward = self.call("forward", **options)
        self.judge("forward", forward)
        case = Case(self.problem, {**self.arrays, **forward})
        for op in OPS[1:]:
            self.judge(op, case.call(op, **options))


def case(
    M: int,
    N: int,
    D: int,
    Dv: int | None = None,
    *,
    B: int = 1,
    Hq: int = 1,
    Hkv: int | None = None,
    dtype: str = "float32",
    mask: Mask = Mask(),  # noqa: B008 (frozen)
    scale: float | None = None,
    without: tuple[str, ...] = (),
    dlse: bool = False,
    seed: int = 0,
) -> Case:
    """Normal inputs; the cotangents named in `without` are None."""
    Hkv, Dv = Hkv or Hq, Dv or D
    present = [name not in without for name in ("uq", "uk", "uv")]
    tau = D**-0.5 if scale is None else scale
    problem = Problem("bob", B, Hq, Hkv, M, N, D, Dv, dtype, mask, tau, False, *present, dlse)
    rng = np.random.default_rng(seed)
    arrays = {}
    for name in ("q", "k", "v", "do", "uq", "uk", "uv", "dlse"):
        x = rng.standard_normal(problem.shape(name)).astype(NUMPY[problem.dtype_of(name)])
        if name not in without and (dlse or name != "dlse"):
            arrays[name] = x
    return Case(problem, arrays)


def same(actual: dict[str, Any], expected: dict[str, Any]) -> bool:
    """Bitwise equality of results."""
    return all(actual[name].tobytes() == expected[name].tobytes() for name in AXES if name in expected)
