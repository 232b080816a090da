"""The four array functions as the chain calls them: directly, or as opaque operators where something is watching.

Tracers, fake tensors and other dispatch modes see operators only. Where one is active, each function is an operator
with a fake implementation, which can be recorded and replayed; otherwise nothing stands between chain and engine.

Each takes arrays, some of them None, and then the options.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _python_dispatch

from flashbob_cupy import arrays, ops

Results = tuple[Any, ...]


class Options:
    """What is the same along the chain. Opaque to torch's pytrees."""

    __slots__ = ("values",)

    def __init__(
        self,
        causal: bool,
        scale: float | None,
        window: tuple[int | None, int | None] | None,
        layout: str,
        deterministic: bool,
    ) -> None:
        self.values = (causal, scale, window, layout, deterministic)

    def flat(self) -> tuple[Any, ...]:
        """As an operator takes them."""
        causal, scale, window, layout, deterministic = self.values
        left, right = window or (None, None)
        return causal, scale, left, right, layout, deterministic


#: The schema of what `Options.flat` returns.
OPTIONS = "bool causal, float? scale, SymInt? left, SymInt? right, str layout, bool deterministic"


def options(causal: bool, scale: float | None, left: Any, right: Any, layout: str, deterministic: bool) -> Options:
    """The inverse of `Options.flat`."""
    window = None if left is None and right is None else (left, right)
    return Options(causal, scale, window, layout, deterministic)


def _untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` hidden from torch.compile, which tries to trace whatever Python runs after a graph break.

    torch.compiler.disable imports the compiler, which takes seconds: it waits until someone else has.
    """
    hidden: Callable[..., Any] | None = None

    def call(*arguments: Any) -> Any:
        nonlocal hidden
        if hidden is None:
            if "torch._dynamo" not in sys.modules:
                return function(*arguments)
            hidden = torch.compiler.disable(function)
        return hidden(*arguments)

    return call


@functools.cache
def _kind() -> arrays.Kind:
    """Tensors as they come: the chain records what they are part of, and to detach them all takes as long as a call."""
    return arrays.TorchKind(cut=True)


@_untraced
def _run(op: str, arguments: tuple[Any, ...], options: Options) -> Any:
    return ops.run(op, arguments, *options.values, kind=_kind())


def _forward(q: Any, k: Any, v: Any, options: Options) -> Results:
    o, lse = _run("forward", (q, k, v), options)
    return o, lse


def _backward(q: Any, k: Any, v: Any, do: Any, dlse: Any, o: Any, lse: Any, options: Options) -> Results:
    if do is None:
        do = _zeros(o)
    dq, dk, dv = _run("backward", (q, k, v, do, o, lse, dlse), options)
    return dq, dk, dv


def _bob(
    q: Any, k: Any, v: Any, do: Any, dlse: Any, o: Any, lse: Any, uq: Any, uk: Any, uv: Any, options: Options
) -> Results:
    if do is None:
        do = _zeros(o)
    result = _run("bob", (q, k, v, do, uq, uk, uv, o, lse, dlse), options)
    return *result, result.gdlse


def _jvp(q: Any, k: Any, v: Any, uq: Any, uk: Any, uv: Any, o: Any, lse: Any, options: Options) -> Results:
    to, tlse = _run("jvp", (q, k, v, uq, uk, uv, o, lse), options)
    return to, tlse


def _zeros(x: Tensor) -> Tensor:
    """Zeros of the shape of `x` that take no memory."""
    return x.new_zeros(()).expand(x.shape)


# --------------------------------------------------------------------------------------------------------- operators


def _empty_forward(q: Tensor, k: Tensor, v: Tensor, *flat: Any) -> Results:
    rows = q.shape[:3] if flat[-2] == "bhnd" else (q.shape[0], q.shape[2], q.shape[1])
    lse = q.new_empty(rows, dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)
    return q.new_empty((*q.shape[:3], v.shape[3])), lse


def _empty_backward(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Results:
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


def _empty_bob(q: Tensor, k: Tensor, v: Tensor, do: Any, dlse: Any, o: Tensor, lse: Tensor, *_: Any) -> Results:
    return *(x.new_empty(x.shape) for x in (q, k, v, o)), lse.new_empty(0 if dlse is None else lse.shape)


def _empty_jvp(q: Any, k: Any, v: Any, uq: Any, uk: Any, uv: Any, o: Tensor, lse: Tensor, *_: Any) -> Results:
    return o.new_empty(o.shape), lse.new_empty(lse.shape)


def _operator(name: str, direct: Callable[..., Results], empty: Callable[..., Results], schema: str) -> Any:
    def implementation(*arguments: Any) -> Results:
        return direct(*arguments[:-6], options(*arguments[-6:]))

    operator = torch.library.custom_op(f"flashbob::{name}", implementation, mutates_args=(), schema=schema)
    operator.register_fake(empty)
    return operator


def _complete_bob(*arguments: Any) -> Results:
    """An operator cannot return None."""
    *gradients, gdlse = _bob(*arguments)
    return *gradients, arguments[6].new_empty(0) if gdlse is None else gdlse


_QKV = "Tensor q, Tensor k, Tensor v"
_OUT = "Tensor? do, Tensor? dlse, Tensor o, Tensor lse"
_U = "Tensor? uq, Tensor? uk, Tensor? uv"

forward_operator = _operator("forward", _forward, _empty_forward, f"({_QKV}, {OPTIONS}) -> (Tensor, Tensor)")
backward_operator = _operator(
    "backward", _backward, _empty_backward, f"({_QKV}, {_OUT}, {OPTIONS}) -> (Tensor, Tensor, Tensor)"
)
bob_operator = _operator(
    "bob", _complete_bob, _empty_bob, f"({_QKV}, {_OUT}, {_U}, {OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
jvp_operator = _operator(
    "jvp", _jvp, _empty_jvp, f"({_QKV}, {_U}, Tensor o, Tensor lse, {OPTIONS}) -> (Tensor, Tensor)"
)


# ------------------------------------------------------------------------------------------------- what the chain calls

_watched = _python_dispatch.is_in_torch_dispatch_mode


def forward(q: Any, k: Any, v: Any, options: Options) -> Results:
    if _watched():
        return forward_operator(q, k, v, *options.flat())  # type: ignore[no-any-return]
    return _forward(q, k, v, options)


def backward(q: Any, k: Any, v: Any, do: Any, dlse: Any, o: Any, lse: Any, options: Options) -> Results:
    if _watched():
        return backward_operator(q, k, v, do, dlse, o, lse, *options.flat())  # type: ignore[no-any-return]
    return _backward(q, k, v, do, dlse, o, lse, options)


def bob(
    q: Any, k: Any, v: Any, do: Any, dlse: Any, o: Any, lse: Any, uq: Any, uk: Any, uv: Any, options: Options
) -> Results:
    if _watched():
        *gradients, gdlse = bob_operator(q, k, v, do, dlse, o, lse, uq, uk, uv, *options.flat())
        return *gradients, None if dlse is None else gdlse
    return _bob(q, k, v, do, dlse, o, lse, uq, uk, uv, options)


def jvp(q: Any, k: Any, v: Any, uq: Any, uk: Any, uv: Any, o: Any, lse: Any, options: Options) -> Results:
    if _watched():
        return jvp_operator(q, k, v, uq, uk, uv, o, lse, *options.flat())  # type: ignore[no-any-return]
    return _jvp(q, k, v, uq, uk, uv, o, lse, options)
