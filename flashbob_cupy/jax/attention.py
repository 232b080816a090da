"""The public function: check once, then hand over to the chain of primitives."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np

from flashbob_cupy.errors import UnsupportedError
from flashbob_cupy.jax import chain
from flashbob_cupy.problem import make_problem

__all__ = ("attention",)


class _Described(NamedTuple):
    shape: tuple[int, ...]
    dtype: str
    device: tuple[str, int]


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: tuple[int | None, int | None] | None = None,
    layout: str = "bhnd",
    deterministic: bool = False,
    return_lse: bool = False,
) -> Any:
    """Exact attention, ``o = softmax(scale * q k^T) v``, as a differentiable function of JAX arrays.

    First and second derivatives are computed without storing an M x N matrix: grad, grad of grad, jvp, jvp of grad,
    grad of jvp, hessian, jacrev, jacfwd, and vmap of each, under jit or not. A third derivative raises. Arrays are
    handed to the engine where they lie, and results are written where XLA wants them.

    Inside `jax.shard_map` every shard is a problem of its own: split the batch or the heads. Under `jit` with sharded
    arguments the batch is split the way the arguments are, and every other axis is gathered first.

    Args:
        q: (B, Hq, M, D), float16, bfloat16, float32 or float64.
        k: (B, Hkv, N, D), with Hq a multiple of Hkv; query head h reads key head ``h // (Hq // Hkv)``.
        v: (B, Hkv, N, Dv).
        causal: query i sees key j only if ``j <= i + N - M``: the diagonal is aligned at the bottom right.
        scale: factor of the scores, a Python number and no array; None is ``1 / sqrt(D)``.
        window: (left, right), query i sees key j only if ``i + N - M - left <= j <= i + N - M + right``; None in place
            of a number is unbounded. Together with `causal`, right is at most 0.
        layout: "bhnd", or "bnhd" for heads after rows, (B, M, Hq, D), in every 4-D argument and result. lse stays
            (B, Hq, M).
        deterministic: the same inputs give bitwise the same gradients, at some cost in time on a GPU.
        return_lse: return (o, lse), with lse (B, Hq, M) the natural log-sum-exp of each row of scores, float32 or, for
            float64 inputs, float64. It is differentiable too.

    Returns:
        o (B, Hq, M, Dv) of the dtype of q, or (o, lse). A query that sees no key has o = 0 and lse = -inf.

    Raises:
        TypeError: an argument is not an array, or its dtype or the type of an option is wrong.
        ValueError: a shape or an option does not fit.
        UnsupportedError: a third derivative, forward mode over forward mode, explicitly sharded arguments, or a
            platform that is neither a CPU nor an NVIDIA GPU. Derivatives are refused when they are evaluated.
    """
    arrays = {name: _array(name, x) for name, x in (("q", q), ("k", k), ("v", v))}
    if not isinstance(return_lse, bool):
        raise TypeError(f"return_lse must be True or False; got {return_lse!r} ({type(return_lse).__name__})")
    described = {
        name: _Described(x.shape, x.dtype.name, ("cpu", 0))  # the device is checked by JAX
        for name, x in arrays.items()
    }
    problem = make_problem(
        "forward",
        described,
        causal=causal,
        scale=scale,
        window=window,
        layout=layout,
        deterministic=deterministic,
    )
    options = chain.Options(problem.mask, problem.scale, layout, deterministic)
    o, lse = chain.forward(_alike(list(arrays.values())), options)
    return (o, lse) if return_lse else o


def _array(name: str, x: Any) -> jax.Array:
    if not isinstance(x, jax.Array | np.ndarray):
        raise TypeError(f"{name} must be a JAX array; got {type(x).__module__}.{type(x).__qualname__}")
    x = jax.numpy.asarray(x)
    spec = jax.typeof(x).sharding.spec
    if any(axis is not None for axis in spec):
        raise UnsupportedError(
            f"{name} has the explicit sharding {spec}, which this does not follow: call it inside jax.shard_map, with "
            "the batch or the heads split, or use a mesh with axes of type Auto"
        )
    return x


def _alike(arrays: list[jax.Array]) -> list[jax.Array]:
    """Arrays that vary over the same axes of a `shard_map`: the cast sums gradients where it has to."""
    varying = [jax.typeof(x).manual_axis_type.varying for x in arrays]
    union = frozenset[str]().union(*varying)
    return [
        jax.lax.pcast(x, tuple(union - own), to="varying") if own != union else x
        for x, own in zip(arrays, varying, strict=True)
    ]
