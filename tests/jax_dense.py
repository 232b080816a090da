"""Attention written out in jax.numpy: what JAX makes of it is what the adapter is held to."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from flashbob_cupy.jax import attention


def dense(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: tuple[int | None, int | None] | None = None,
    layout: str = "bhnd",
    return_lse: bool = False,
) -> Any:
    """The function that `flashbob_cupy.jax.attention` is, for queries that all see a key."""
    if layout == "bnhd":
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = (jnp.repeat(x, group, 1) for x in (k, v))
    M, N = q.shape[2], k.shape[2]
    s = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    left, right = window or (None, None)
    if causal:
        right = 0 if right is None else min(right, 0)
    offset = np.arange(N) - np.arange(M)[:, None] - (N - M)
    visible = np.ones((M, N), bool)
    if left is not None:
        visible &= offset >= -left
    if right is not None:
        visible &= offset <= right
    s = jnp.where(visible, s, -jnp.inf)
    o = jax.nn.softmax(s) @ v
    if layout == "bnhd":
        o = o.swapaxes(1, 2)
    return (o, jax.nn.logsumexp(s, -1)) if return_lse else o


def qkv(
    B: int = 2,
    Hq: int = 4,
    Hkv: int = 2,
    M: int = 5,
    N: int = 7,
    D: int = 4,
    Dv: int = 3,
    *,
    dtype: str = "float64",
    layout: str = "bhnd",
    seed: int = 0,
) -> list[jax.Array]:
    """Normal q, k and v."""
    random = np.random.default_rng(seed)
    shapes = ((B, Hq, M, D), (B, Hkv, N, D), (B, Hkv, N, Dv))
    arrays = [random.standard_normal(shape) for shape in shapes]
    return [jnp.asarray(x.swapaxes(1, 2) if layout == "bnhd" else x, dtype) for x in arrays]


def like(arrays: Any, seed: int = 1) -> list[jax.Array]:
    """Normal arrays of the same shapes and dtypes."""
    random = np.random.default_rng(seed)
    return [jnp.asarray(random.standard_normal(x.shape), x.dtype) for x in arrays]


def assert_close(actual: Any, expected: Any) -> None:
    """Every float64 array of a tree agrees to half of its digits, and is not zero."""
    ours, theirs = jax.tree.leaves(actual), jax.tree.leaves(expected)
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, e in zip(ours, theirs, strict=True):
        assert a.shape == e.shape
        assert a.dtype == e.dtype == np.float64
        size = np.linalg.norm(e)
        assert size > 0
        assert np.linalg.norm(np.asarray(a) - np.asarray(e)) <= np.sqrt(np.finfo(np.float64).eps) * size


def all_links(q: Any, k: Any, v: Any, do: Any, dlse: Any, u: Any, **options: Any) -> dict[str, Any]:
    """The results of the four operations, as JAX derives them from `attention`."""

    def function(*x: Any) -> Any:
        o, lse = attention(*x, return_lse=True, **options)
        return (o, lse) if dlse is not None else o

    def backward(q: Any, k: Any, v: Any, ct: Any) -> Any:
        return jax.vjp(function, q, k, v)[1](ct)

    ct = do if dlse is None else (do, dlse)
    pair = functools.partial(attention, return_lse=True, **options)
    *bob, gct = jax.vjp(backward, q, k, v, ct)[1](tuple(u))
    return {
        "forward": pair(q, k, v),
        "jvp": jax.jvp(pair, (q, k, v), tuple(u))[1],
        "backward": backward(q, k, v, ct),
        "bob": (*bob, *([gct] if dlse is None else gct)),
    }
