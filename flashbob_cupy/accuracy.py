"""How wrong a result may be: a float64 truth, an error budget computed from the data, and the comparison.

The budget of an output is

    2 × (error of the same formulae in plain array code) + one rounding of the output

as an L2 norm per head. "The same formulae" are written once, in `_formulae`, and evaluated by two arithmetics:

- `_Plain`: the working precision, with the operands of the second products (P, P∘F, P∘F̂, dS, W) and o rounded to the
  input dtype. Its distance from the truth is the error of one particular evaluation.
- `_Propagating`: float64 values that carry the mean square of their rounding error, taking roundings as independent.
  On a few elements, or where the truth is exactly zero by cancellation, one evaluation can be right by luck; the
  propagated error is what an evaluation in any other order has to be allowed.

The larger of the two counts. Nothing is tuned to results. Arrays are in the order batch, head, row, width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from . import blocked, reference
from .problem import INPUTS, OUTPUTS, Mask, Problem

Array: TypeAlias = NDArray[Any]
Float: TypeAlias = NDArray[np.float64]

_BAND = Mask()
# The dense reference up to this many scores of one group of heads, float64 blocks above.
_DENSE = 1 << 24
# Scores of one strip of queries in `budgets`; bounds its memory whatever the lengths.
_STRIP = 1 << 21
# Terms summed before a partial sum is rounded into a larger one, in any sensible matrix product.
_RUN = 256

_NUMPY: dict[str, Any] = {"bfloat16": ml_dtypes.bfloat16}


@dataclass(frozen=True, slots=True)
class Comparison:
    """The worst head of one output. Error and budget are relative to the truth's norm unless that is zero."""

    error: float
    budget: float
    ratio: float
    ok: bool


def compare(actual: Any, truth: Any, budget: Any) -> Comparison:
    """Judge `actual` against `truth`: in every head, ‖actual − truth‖ ≤ budget. Infinities must be the same ones.

    Args:
        actual: (B, H, ...) in any dtype.
        truth: the same shape in float64.
        budget: (B, H), or one number for all heads: absolute L2 norms.

    Raises:
        ValueError: the shapes differ.
    """
    actual, truth = np.asarray(actual).astype(np.float64), np.asarray(truth, dtype=np.float64)
    if actual.shape != truth.shape:
        raise ValueError(f"actual must have the shape of truth, {truth.shape}; got {actual.shape}")
    infinite = np.isinf(truth)
    with np.errstate(invalid="ignore"):
        difference = np.where(infinite & (actual == truth), 0.0, actual - truth)
    error = _norm(difference)
    error = np.where(np.isnan(error), np.inf, error)
    allowed = np.broadcast_to(np.asarray(budget, dtype=np.float64), error.shape)
    if error.size == 0:
        return Comparison(0.0, 0.0, 0.0, True)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(error == 0, 0.0, error / allowed)
    worst = np.unravel_index(np.argmax(ratio), ratio.shape)
    size = _norm(np.where(infinite, 0.0, truth))[worst] or 1.0
    return Comparison(
        error=float(error[worst] / size),
        budget=float(allowed[worst] / size),
        ratio=float(ratio[worst]),
        ok=bool(ratio[worst] <= 1.0),
    )


def truth(
    op: str,
    q: Any,
    k: Any,
    v: Any,
    do: Any = None,
    uq: Any = None,
    uk: Any = None,
    uv: Any = None,
    *,
    dlse: Any = None,
    mask: Mask = _BAND,
    scale: float | None = None,
) -> dict[str, Float]:
    """The outputs of `op` ("forward", "backward", "bob" or "jvp") in float64, by name.

    Dense where that fits, float64 blocks where it does not.
    """
    args = _Arguments(op, q, k, v, do, uq, uk, uv, dlse, mask, scale)
    p = args.problem
    if p.group * p.M * p.N > _DENSE:
        return _blocked_truth(args)
    results = {name: np.zeros(p.shape(name)) for name in OUTPUTS[op]}
    for b in range(p.B):
        for h in range(p.Hkv):
            one = args.head(b, h)
            for name, value in zip(OUTPUTS[op], one.dense(), strict=True):
                results[name][b, one.heads(name)] = value[0]
    return results


def budgets(
    op: str,
    q: Any,
    k: Any,
    v: Any,
    do: Any = None,
    uq: Any = None,
    uk: Any = None,
    uv: Any = None,
    *,
    dlse: Any = None,
    mask: Mask = _BAND,
    scale: float | None = None,
    dtype: str | None = None,
    expected: Mapping[str, Any] | None = None,
) -> dict[str, Float]:
    """The largest error each output of `op` may have, as absolute L2 norms (B, H), by name.

    Args:
        dtype: the dtype of the computation to be judged; that of q where it is None.
        expected: what `truth` gave for the same arguments, to save computing it again.
    """
    args = _Arguments(op, q, k, v, do, uq, uk, uv, dlse, mask, scale)
    p = args.problem
    dtype = args.problem.dtype if dtype is None else dtype
    expected = truth(op, q, k, v, do, uq, uk, uv, dlse=dlse, mask=mask, scale=scale) if expected is None else expected
    exact = {name: np.where(np.isinf(x), 0.0, x) for name, x in expected.items()}
    result = {}
    for name in OUTPUTS[op]:
        stored = dtype if exact[name].ndim == 4 else _working(dtype)
        result[name] = _norm(_rounding(exact[name], stored))
    if p.first_query == p.M:
        return result
    for b in range(p.B):
        for h in range(p.Hkv):
            one = args.head(b, h)
            part = {name: exact[name][b, one.heads(name)] for name in OUTPUTS[op]}
            with np.errstate(all="ignore"):
                emulated = one.square_errors(_Plain(dtype), part)
                propagated = one.square_errors(_Propagating(dtype), part)
            for name in OUTPUTS[op]:
                square = np.maximum(emulated[name], propagated[name])
                if dtype == "float64":  # the truth is rounded as well
                    square += propagated[name]
                result[name][b, one.heads(name)] += 2.0 * np.sqrt(square)
    return result


# ---- the formulae, once -------------------------------------------------------------------------------------------


def _formulae(
    a: Any, op: str, seen: Array, tau: float, queries: Sequence[Any], keys: Sequence[Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Every output of `op` for one head and a strip of its queries: by query, and this strip's part by key."""
    (q, do, uq, dlse), (k, v, uk, uv) = queries, keys
    S = a.hide((q @ k.T) * tau, seen, -math.inf)
    L = a.log_sum_exp(S)
    P = a.exp(S - L)
    P_operand = a.operand(P)
    O = P_operand @ v
    if op == "forward":
        return {"o": O, "lse": L}, {}
    o = a.operand(O)

    if op != "jvp":
        D = a.row_sum(do * o) - dlse
        X = a.hide(do @ v.T, seen, 0.0) - D
        dS = a.operand(P * X)
    if op == "backward":
        return {"dq": (dS @ k) * tau}, {"dk": (dS.T @ q) * tau, "dv": P_operand.T @ do}

    F = a.hide((uq @ k.T + q @ uk.T) * tau, seen, 0.0)
    alpha = a.row_sum(P * F)
    gdO = a.operand(P * F) @ v + P_operand @ uv - alpha * o
    if op == "jvp":
        return {"to": gdO, "tlse": alpha}, {}

    epsilon = a.row_sum(do * gdO)
    Fhat = F - alpha
    G = a.hide(do @ uv.T, seen, 0.0)
    W = a.operand(P * (Fhat * X + G - epsilon))
    rows = {"gq": (W @ k + dS @ uk) * tau, "gdo": gdO, "gdlse": alpha}
    columns = {"gk": (W.T @ q + dS.T @ uq) * tau, "gv": a.operand(P * Fhat).T @ do}
    return rows, columns


class _Plain:
    """NumPy arrays in the working precision of a dtype."""

    def __init__(self, dtype: str) -> None:
        self.dtype = _NUMPY.get(dtype, dtype)
        self.working = _working(dtype)

    def take(self, x: Array) -> Array:
        return x.astype(self.working)

    def square_error(self, x: Array, exact: Float) -> float:
        return float(np.sum(np.square(x.reshape(exact.shape).astype(np.float64) - exact)))

    def operand(self, x: Array) -> Array:
        """Rounded to the input dtype, as an operand of a second product."""
        return x.astype(self.dtype).astype(self.working)

    def hide(self, x: Array, seen: Array, value: float) -> Array:
        return np.where(seen, x, self.working(value))

    def exp(self, x: Array) -> Array:
        return np.exp(x)

    def row_sum(self, x: Array) -> Array:
        return np.asarray(np.sum(x, axis=-1, keepdims=True))

    def log_sum_exp(self, S: Array) -> Array:
        top = np.max(S, axis=-1, keepdims=True)
        return np.asarray(top + np.log(np.sum(np.exp(S - top), axis=-1, keepdims=True)))


class _Estimate:
    """A float64 value and the mean square of its rounding error (None: exact)."""

    __slots__ = ("_mean_square", "unit", "value")
    __array_ufunc__ = None

    def __init__(self, value: Float, mean_square: Float | None, unit: float) -> None:
        self.value, self._mean_square, self.unit = value, mean_square, unit

    @property
    def mean_square(self) -> Float:
        return np.zeros_like(self.value) if self._mean_square is None else self._mean_square

    @property
    def T(self) -> _Estimate:
        return _Estimate(self.value.T, None if self._mean_square is None else self._mean_square.T, self.unit)

    def _rounded(self, value: Float, mean_square: Float) -> _Estimate:
        return _Estimate(value, mean_square + (self.unit * value) ** 2, self.unit)

    def __add__(self, other: _Estimate) -> _Estimate:
        return self._rounded(self.value + other.value, self.mean_square + other.mean_square)

    def __sub__(self, other: _Estimate) -> _Estimate:
        return self._rounded(self.value - other.value, self.mean_square + other.mean_square)

    def __mul__(self, other: _Estimate | float) -> _Estimate:
        if not isinstance(other, _Estimate):
            return self._rounded(self.value * other, self.mean_square * other**2)
        carried = self.value**2 * other.mean_square + other.value**2 * self.mean_square
        return self._rounded(self.value * other.value, carried)

    def __matmul__(self, other: _Estimate) -> _Estimate:
        mine, yours = self.value**2, other.value**2
        # Every product and every partial sum is rounded; the partial sums of K terms of random sign have mean square
        # K/2 times that of a term, and a rounding is uniform: one third of its largest square.
        mean_square = (self.unit**2 * (1.0 + min(self.value.shape[1], _RUN) / 6.0)) * (mine @ yours)
        if self._mean_square is not None:
            mean_square += self._mean_square @ yours
        if other._mean_square is not None:
            mean_square += mine @ other._mean_square
        return _Estimate(self.value @ other.value, mean_square, self.unit)


class _Propagating:
    """Float64 values with propagated rounding errors: the working precision's, and the operands' input dtype's."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        # Matrix units for half precision keep float32 sums but cut them off instead of rounding to nearest.
        self.unit = {"float64": 2.0**-53, "float32": 2.0**-24}.get(dtype, 2.0**-22)

    def take(self, x: Array) -> _Estimate:
        return _Estimate(x.astype(np.float64), None, self.unit)

    def square_error(self, x: _Estimate, exact: Float) -> float:
        return float(np.sum(x.mean_square))

    def operand(self, x: _Estimate) -> _Estimate:
        return _Estimate(x.value, x.mean_square + _rounding(x.value, self.dtype) ** 2 / 3.0, self.unit)

    def hide(self, x: _Estimate, seen: Array, value: float) -> _Estimate:
        return _Estimate(np.where(seen, x.value, value), np.where(seen, x.mean_square, 0.0), self.unit)

    def exp(self, x: _Estimate) -> _Estimate:
        value = np.exp(x.value)
        mean_square = np.where(value == 0, 0.0, x.mean_square + self.unit**2)
        return _Estimate(value, value**2 * mean_square, self.unit)

    def row_sum(self, x: _Estimate) -> _Estimate:
        return x @ _Estimate(np.ones((x.value.shape[1], 1)), None, self.unit)

    def log_sum_exp(self, S: _Estimate) -> _Estimate:
        top = np.max(S.value, axis=-1, keepdims=True)
        L = top + np.log(np.sum(np.exp(S.value - top), axis=-1, keepdims=True))
        carried = np.sum(np.exp(S.value - L) ** 2 * S.mean_square, axis=-1, keepdims=True)
        return _Estimate(L, carried + self.unit**2 * (1.0 + L**2), self.unit)


# ---- one group of heads at a time ---------------------------------------------------------------------------------


class _Arguments:
    """The arguments of one call, whole or for one group of query heads and its key head."""

    def __init__(
        self,
        op: str,
        q: Any,
        k: Any,
        v: Any,
        do: Any,
        uq: Any,
        uk: Any,
        uv: Any,
        dlse: Any,
        mask: Mask,
        scale: float | None,
        key_head: int = 0,
    ) -> None:
        (B, Hq, M, D), (_, Hkv, N, Dv) = q.shape, v.shape
        self.arrays = {"q": q, "k": k, "v": v, "do": do, "uq": uq, "uk": uk, "uv": uv, "dlse": dlse}
        self.key_head = key_head
        dtype = np.asarray(q).dtype.name
        tau = 1.0 / math.sqrt(D) if scale is None else scale
        present = [x is not None for x in (uq, uk, uv, dlse)]
        self.problem = Problem(op, B, Hq, Hkv, M, N, D, Dv, dtype, mask.within(M, N), tau, False, *present)

    def head(self, b: int, h: int) -> _Arguments:
        """Batch entry b, key head h and the query heads that read it."""
        g, p = self.problem.group, self.problem
        rows, keys = slice(h * g, (h + 1) * g), slice(h, h + 1)
        at = {name: keys if name in ("k", "v", "uk", "uv") else rows for name in self.arrays}
        part = {name: None if x is None else np.asarray(x)[b : b + 1, at[name]] for name, x in self.arrays.items()}
        return _Arguments(p.op, **part, mask=p.mask, scale=p.scale, key_head=h)

    def heads(self, output: str) -> slice:
        """Where this part's heads are in an output of the whole."""
        count = 1 if output in ("dk", "dv", "gk", "gv") else self.problem.group
        return slice(self.key_head * count, (self.key_head + 1) * count)

    def dense(self) -> tuple[Float, ...]:
        p = self.problem
        options = {"mask": p.mask, "scale": p.scale}
        if "dlse" in INPUTS[p.op]:
            options["dlse"] = self.arrays["dlse"]
        operands = (self.arrays[name] for name in INPUTS[p.op] if name not in ("o", "lse", "dlse"))
        results: tuple[Float, ...] = getattr(reference, p.op)(*operands, **options)
        return results

    def square_errors(self, arithmetic: Any, exact: Mapping[str, Float]) -> dict[str, Float]:
        """The squared L2 error of every output under `arithmetic`, per head, in strips of queries.

        Args:
            exact: the truth of this part, (heads, rows, width) or (heads, rows).
        """
        p = self.problem
        squares = {name: np.zeros(len(exact[name])) for name in OUTPUTS[p.op]}
        seen_key = (np.arange(p.N) >= p.first_key)[:, None]
        keys = [arithmetic.take(np.where(seen_key, self.side(name, 0), 0)) for name in ("k", "v", "uk", "uv")]
        step = max(1, _STRIP // p.N)
        sums: dict[str, Any] = {}
        for head in range(p.group):
            whole = [self.side(name, head) for name in ("q", "do", "uq", "dlse")]
            for i0 in range(p.first_query, p.M, step):
                strip = slice(i0, min(p.M, i0 + step))
                queries = [arithmetic.take(x[strip]) for x in whole]
                rows, columns = _formulae(arithmetic, p.op, self.seen(strip), p.scale, queries, keys)
                for name, x in rows.items():
                    squares[name][head] += arithmetic.square_error(x, exact[name][head, strip])
                for name, x in columns.items():
                    sums[name] = sums[name] + x if name in sums else x
        for name, x in sums.items():
            squares[name][0] = arithmetic.square_error(x, exact[name][0])
        return squares

    def side(self, name: str, head: int) -> Array:
        """One operand of one head, (rows, width); zeros where it is None."""
        p = self.problem
        x = self.arrays[name]
        if x is None:
            like = {"uq": (p.M, p.D), "uk": (p.N, p.D), "uv": (p.N, p.Dv), "do": (p.M, p.Dv)}
            return np.zeros(like.get(name, (p.M, 1)))
        return np.asarray(x[0, head].reshape(x.shape[2], -1))

    def seen(self, strip: slice) -> Array:
        """The rows of the mask that belong to a strip: a band around a diagonal that is off by the rows after it."""
        p, after = self.problem, self.problem.M - strip.stop
        left = None if p.mask.left is None else p.mask.left + after
        right = None if p.mask.right is None else p.mask.right - after
        return reference.visible(Mask(left, right), strip.stop - strip.start, p.N)


def _blocked_truth(args: _Arguments) -> dict[str, Float]:
    p = replace(args.problem, dtype="float64")
    a: dict[str, Any] = {
        name: None if x is None else np.asarray(x).astype(np.float64) for name, x in args.arrays.items()
    }
    a["o"], a["lse"] = np.empty(p.shape("o")), np.empty(p.shape("lse"))
    blocked.forward(p, a["q"], a["k"], a["v"], a["o"], a["lse"])
    if p.op == "forward":
        return {"o": a["o"], "lse": a["lse"]}
    results = {name: np.empty(p.shape(name)) for name in OUTPUTS[p.op]}
    getattr(blocked, p.op)(p, *(a[name] for name in INPUTS[p.op]), *results.values())
    return results


def _working(dtype: str) -> Any:
    return np.float64 if dtype == "float64" else np.float32


def _rounding(x: Array, dtype: Any) -> Float:
    """The largest error of rounding x to a dtype, element by element; zero is exact."""
    info = ml_dtypes.finfo(dtype)
    size = np.abs(x.astype(np.float64))
    largest = np.maximum(size * (float(info.eps) / 2), float(info.smallest_subnormal) / 2)
    return np.where(size == 0, 0.0, largest)


def _norm(x: Float) -> Float:
    """The L2 norm of every head of (B, H, ...), without underflow: an error of 1e-300 is not zero."""
    axes = tuple(range(2, x.ndim))
    largest = np.max(np.abs(x), axis=axes, keepdims=True, initial=0.0)
    unit = np.where((largest > 0) & np.isfinite(largest), largest, 1.0)
    norms: Float = np.sqrt(np.sum(np.square(x / unit), axis=axes)) * unit.reshape(x.shape[:2])
    return norms
