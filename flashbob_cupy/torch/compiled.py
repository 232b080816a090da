"""The same attention for torch.compile: opaque operators with a fake implementation and a gradient.

A graph that is being compiled holds the operators and not what they do. Compilers differentiate once; the gradient can
be differentiated all the same, for backends that leave autograd to run as usual.

`flashbob::attention` is what a graph calls. It is made of the others, and exists to see forward-mode tangents, which
PyTorch drops without a word at an operator that is defined outside it.
"""

# Annotations are read by torch.library: they have to be types, not strings.
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from flashbob_cupy.errors import UnsupportedError
from flashbob_cupy.torch import chain


def _options(
    causal: bool, scale: float | None, left: int | None, right: int | None, layout: str, deterministic: bool
) -> chain.Options:
    window = None if left is None and right is None else (left, right)
    return chain.Options(causal=causal, scale=scale, window=window, layout=layout, deterministic=deterministic)


@torch.library.custom_op("flashbob::forward", mutates_args=())  # type: ignore[untyped-decorator]
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float | None,
    left: int | None,
    right: int | None,
    layout: str,
    deterministic: bool,
) -> tuple[Tensor, Tensor]:
    return chain.Forward.forward(q, k, v, _options(causal, scale, left, right, layout, deterministic))


@_forward.register_fake  # type: ignore[untyped-decorator]
def _(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    rows = q.shape[:3] if options[4] == "bhnd" else (q.shape[0], q.shape[2], q.shape[1])
    lse = q.new_empty(rows, dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)
    return q.new_empty((*q.shape[:3], v.shape[3])), lse


@torch.library.custom_op("flashbob::backward", mutates_args=())  # type: ignore[untyped-decorator]
def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor | None,
    dlse: Tensor | None,
    o: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float | None,
    left: int | None,
    right: int | None,
    layout: str,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    options = _options(causal, scale, left, right, layout, deterministic)
    return chain.Backward.forward(q, k, v, do, dlse, o, lse, options)


@_backward.register_fake  # type: ignore[untyped-decorator]
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save_forward(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, v, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.set_materialize_grads(False)


def _forward_gradient(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    q, k, v, o, lse = ctx.saved_tensors
    return *_backward(q, k, v, do, dlse, o, lse, *ctx.options), *(None for _ in ctx.options)


def _save_backward(ctx: Any, inputs: Any, output: Any) -> None:
    chain.Backward.setup_context(ctx, (*inputs[:7], _options(*inputs[7:])), output)


def _backward_gradient(ctx: Any, *cotangents: Tensor | None) -> tuple[Any, ...]:
    return *chain.Backward.backward(ctx, *cotangents), *(None for _ in range(5))


_forward.register_autograd(_forward_gradient, setup_context=_save_forward)
_backward.register_autograd(_backward_gradient, setup_context=_save_backward)


torch.library.define(
    "flashbob::attention",
    "(Tensor q, Tensor k, Tensor v, bool causal, float? scale, SymInt? left, SymInt? right, str layout, "
    "bool deterministic) -> (Tensor, Tensor)",
)


@torch.library.impl("flashbob::attention", "CompositeImplicitAutograd")  # type: ignore[untyped-decorator]
def _attention(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    # NotImplementedError, which UnsupportedError is, makes the compiler leave the function to run as it is, if it may.
    for x in (q, k, v):
        if torch._C._functorch.is_functorch_wrapped_tensor(x) or forward_ad.unpack_dual(x).tangent is not None:
            raise UnsupportedError(
                "torch.func transforms and forward mode through attention cannot be part of a compiled graph, plain "
                "first-order gradients can: drop fullgraph=True, or keep the function that differentiates out of the "
                "graph with torch.compiler.disable"
            )
    return _forward(q, k, v, *options)  # type: ignore[no-any-return]


attention = torch.ops.flashbob.attention.default
