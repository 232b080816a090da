"""The same attention for torch.compile: an operator with a first-order gradient.

A graph that is being compiled holds operators and not what they do. Compilers differentiate once; the gradient can be
differentiated all the same, for backends that leave autograd to run as usual.

`flashbob::attention` is what a graph calls. It is made of the forward, and exists to see forward-mode tangents, which
PyTorch drops without a word at an operator that is defined outside it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from flashbob_cupy.errors import UnsupportedError
from flashbob_cupy.torch import chain, operators


def _save_forward(ctx: Any, inputs: Any, output: Any) -> None:
    chain.keep(ctx, (*inputs[:-6], *output), operators.options(*inputs[-6:]))


def _save_backward(ctx: Any, inputs: Any, output: Any) -> None:
    chain.keep(ctx, inputs[:-6], operators.options(*inputs[-6:]))


def _forward_gradient(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    q, k, v, o, lse = ctx.saved_tensors
    return *operators.backward_operator(q, k, v, do, dlse, o, lse, *ctx.options.flat()), *(None,) * 6


def _backward_gradient(ctx: Any, *cotangents: Tensor | None) -> tuple[Any, ...]:
    return *chain.Backward.backward(ctx, *cotangents)[:-1], *(None,) * 6


operators.forward_operator.register_autograd(_forward_gradient, setup_context=_save_forward)
operators.backward_operator.register_autograd(_backward_gradient, setup_context=_save_backward)

torch.library.define("flashbob::attention", f"(Tensor q, Tensor k, Tensor v, {operators.OPTIONS}) -> (Tensor, Tensor)")


@torch.library.impl("flashbob::attention", "CompositeImplicitAutograd")  # type: ignore[untyped-decorator]
def _attention(q: Tensor, k: Tensor, v: Tensor, *flat: Any) -> tuple[Tensor, Tensor]:
    # NotImplementedError, which UnsupportedError is, makes the compiler leave the function to run as it is, if it may.
    for x in (q, k, v):
        if torch._C._functorch.is_functorch_wrapped_tensor(x) or forward_ad.unpack_dual(x).tangent is not None:
            raise UnsupportedError(
                "torch.func transforms and forward mode through attention cannot be part of a compiled graph, plain "
                "first-order gradients can: drop fullgraph=True, or keep the function that differentiates out of the "
                "graph with torch.compiler.disable"
            )
    return operators.forward_operator(q, k, v, *flat)  # type: ignore[no-any-return]


attention = torch.ops.flashbob.attention.default
