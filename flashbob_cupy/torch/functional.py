"""The public function: what a caller writes, in the form that the chain takes."""

from __future__ import annotations

from typing import Any

import torch

from flashbob_cupy.errors import UnsupportedError
from flashbob_cupy.torch import chain, compiled
from flashbob_cupy.torch.operators import Options


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: tuple[int | None, int | None] | None = None,
    layout: str = "bhnd",
    deterministic: bool = False,
    return_lse: bool = False,
) -> Any:
    """Exact attention, ``o = softmax(scale * q k^T) v``, that can be differentiated twice.

    Differentiable once and twice in q, k and v, through o and through lse, in reverse mode, in forward mode and with
    one over the other, except forward over forward: `torch.autograd`, `torch.func` (grad, vjp, jvp, jacrev, jacfwd,
    hessian, vmap), `torch.autograd.functional`, `torch.utils.checkpoint`. Nothing of the size of queries times keys is
    stored. Second derivatives are linear in the vectors they are multiplied with, and can be differentiated in these
    without end; a third derivative in q, k or v raises.

    Under `torch.autocast` the arguments are cast as PyTorch casts those of its own attention. Under `torch.compile` it
    is one opaque operator with a first-order gradient.

    Args:
        q: (..., Hq, M, D), float16, bfloat16, float32 or float64, on the CPU or a CUDA device.
        k: (..., Hkv, N, D) with the leading axes of q, and Hq a multiple of Hkv; query head h reads key head
            ``h // (Hq // Hkv)``.
        v: (..., Hkv, N, Dv).
        causal: query i sees key j only if ``j <= i + N - M``: the diagonal is aligned at the bottom right.
        scale: factor of the scores; None is ``1 / sqrt(D)``.
        window: (left, right), query i sees key j only if ``i + N - M - left <= j <= i + N - M + right``; None in place
            of a number is unbounded. Together with `causal`, right is at most 0.
        layout: "bhnd", or "bnhd" for heads after rows, (..., M, Hq, D), in q, k, v and o. lse stays (..., Hq, M).
        deterministic: the same inputs give bitwise the same derivatives, at some cost in time on a GPU. Also on while
            `torch.use_deterministic_algorithms` is.
        return_lse: also return the natural log-sum-exp of each row of scores.

    Returns:
        o, (..., Hq, M, Dv) of the dtype of q, or (o, lse) with lse (..., Hq, M), float32 or, for float64 inputs,
        float64. A query that sees no key has o = 0 and lse = -inf.

    Raises:
        TypeError: an argument is not a torch tensor or has a wrong dtype.
        ValueError: a shape, a device or an option does not fit.
        UnsupportedError: a derivative that is not offered is taken; valid, but not offered on this device.
        CompileError: a kernel did not compile.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} must be a torch tensor; got {type(x).__name__}")
    if torch.jit.is_tracing():
        raise UnsupportedError("attention cannot be traced by torch.jit: use torch.export or torch.compile")
    device = "cuda" if q.is_cuda else "cpu" if q.is_cpu else None  # without a torch.device, which takes longer to make
    if device is not None and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        q, k, v = (x if x.dtype == torch.float64 else x.to(dtype) for x in (q, k, v))
    if torch.are_deterministic_algorithms_enabled():
        deterministic = True
    leading = q.shape[:-3]
    if len(leading) != 1:
        q, k, v = _fold(leading, q, k, v)
    options = Options(causal, scale, window, layout, deterministic)
    if torch.compiler.is_compiling():
        o, lse = compiled.attention(q, k, v, *options.flat())
    else:
        o, lse = chain.Forward.apply(q, k, v, options)
    if len(leading) != 1:
        o, lse = o.reshape(*leading, *o.shape[1:]), lse.reshape(*leading, *lse.shape[1:])
    return (o, lse) if return_lse else o


def _fold(leading: torch.Size, *arrays: torch.Tensor) -> list[torch.Tensor]:
    """The arrays with one leading axis, the batch."""
    for name, x in zip(("q", "k", "v"), arrays, strict=True):
        if x.dim() < 3 or x.shape[:-3] != leading:
            raise ValueError(
                f"{name} must have three axes after the leading ones of q, which are {tuple(leading)}; got shape "
                f"{tuple(x.shape)}"
            )
    return [x.flatten(0, -4) if leading else x.unsqueeze(0) for x in arrays]
