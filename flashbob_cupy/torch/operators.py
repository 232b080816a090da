"""The four array functions as the chain calls them: directly, or as opaque operators where something is watching.

Tracers, fake tensors and other dispatch modes see operators only. Where one is active, each function is an operator
with a fake implementation, which can be recorded and replayed; otherwise nothing stands between chain and engine.

Each takes arrays, some of them None, and then the options.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _python_dispatch

from flashbob_cupy import ops

Results = tuple[Any, ...]


class Options:
    """The keywords of the array functions, which are the same along the chain. Opaque to torch's pytrees."""

    __slots__ = ("keywords",)

    def __init__(self, **keywords: Any) -> None:
        self.keywords = keywords

    def flat(self) -> tuple[Any, ...]:
        """As an operator takes them."""
        k = self.keywords
        left, right = k["window"] or (None, None)
        return k["causal"], k["scale"], left, right, k["layout"], k["deterministic"]


#: The schema of what `Options.flat` returns.
OPTIONS = "bool causal, float? scale, SymInt? left, SymInt? right, str layout, bool deterministic"


def options(causal: bool, scale: float | None, left: Any, right: Any, layout: str, deterministic: bool) -> Options:
    """The inverse of `Options.flat`."""
    window = None if left is None and right is None else (left, right)
    return Options(causal=causal, scale=scale, window=window, layout=layout, deterministic=deterministic)


def _untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` hidden from torch.compile, which tries to trace whatever Python runs after a graph break.

    torch.compiler.disable imports the compiler, which takes seconds: it waits until someone else has.
    """
    hidden: Callable[..., Any] | None = None

    def call(*arguments: Any, **keywords: Any) -> Any:
        nonlocal hidden
        if hidden is None:
            if "torch._dynamo" not in sys.modules:
                return function(*arguments, **keywords)
            hidden = torch.compiler.disable(function)
        return hidden(*arguments, **keywords)

    return call


_array_forward = _untraced(ops.forward)
_array_backward = _untraced(ops.backward)
_array_bob = _untraced(ops.bob)
_array_jvp = _untraced(ops.jvp)


def _forward(q: Any, k: Any, v: Any, options: Options) -> Results:
    return tuple(_array_forward(q, k, v, **options.keywords))


def _backward(q: Any, k: Any, v: Any, do: Any, dlse: Any, o: Any, lse: Any, options: Options) -> Results:
    do = _zeros(o) if do is None else do
    return tuple(_array_backward(q, k, v, do, o, lse, dlse=dlse, **options.keywords))


def _bob(
    q: Any, k: Any, v: Any, do: Any, dlse: Any, o: Any, lse: Any, uq: Any, uk: Any, uv: Any, options: Options
) -> Results:
    do = _zeros(o) if do is None else do
    result = _array_bob(q, k, v, do, uq, uk, uv, o, lse, dlse=dlse, **options.keywords)
    # An operator cannot return None.
    return *result, lse.new_empty(0) if dlse is None else result.gdlse


def _jvp(q: Any, k: Any, v: Any, uq: Any, uk: Any, uv: Any, o: Any, lse: Any, options: Options) -> Results:
    return tuple(_array_jvp(q, k, v, uq, uk, uv, o, lse, **options.keywords))


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
        return direct(*plain(arguments[:-6]), options(*arguments[-6:]))

    operator = torch.library.custom_op(f"flashbob::{name}", implementation, mutates_args=(), schema=schema)
    operator.register_fake(empty)
    return operator


_QKV = "Tensor q, Tensor k, Tensor v"
_OUT = "Tensor? do, Tensor? dlse, Tensor o, Tensor lse"
_U = "Tensor? uq, Tensor? uk, Tensor? uv"

forward_operator = _operator("forward", _forward, _empty_forward, f"({_QKV}, {OPTIONS}) -> (Tensor, Tensor)")
backward_operator = _operator(
    "backward", _backward, _empty_backward, f"({_QKV}, {_OUT}, {OPTIONS}) -> (Tensor, Tensor, Tensor)"
)
bob_operator = _operator(
    "bob", _bob, _empty_bob, f"({_QKV}, {_OUT}, {_U}, {OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
jvp_operator = _operator(
    "jvp", _jvp, _empty_jvp, f"({_QKV}, {_U}, Tensor o, Tensor lse, {OPTIONS}) -> (Tensor, Tensor)"
)


def plain(arrays: tuple[Any, ...]) -> list[Any]:
    """The arrays as the array functions take them: what they are part of is recorded elsewhere."""
    return [x.detach() if x is not None and x.requires_grad else x for x in arrays]


def _watched(direct: Callable[..., Results], operator: Callable[..., Results]) -> Callable[..., Results]:
    def call(*inputs: Any) -> Results:
        arrays, options = plain(inputs[:-1]), inputs[-1]
        if _python_dispatch.is_in_torch_dispatch_mode():
            return operator(*arrays, *options.flat())
        return direct(*arrays, options)

    return call


forward = _watched(_forward, forward_operator)
backward = _watched(_backward, backward_operator)
bob = _watched(_bob, bob_operator)
jvp = _watched(_jvp, jvp_operator)
