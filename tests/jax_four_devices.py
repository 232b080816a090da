"""The adapter on four devices. Not collected by itself: `test_jax_sharding.py` runs it where there are four."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import pytest
from jax import numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax_dense import dense, qkv

from flashbob_cupy.errors import UnsupportedError
from flashbob_cupy.jax import attention

ALL = (0, 1, 2)
P = PartitionSpec


def four(*shape: int, explicit: bool = False) -> Any:
    axis = AxisType.Explicit if explicit else AxisType.Auto
    return jax.make_mesh(shape, ("x", "y")[: len(shape)], axis_types=(axis,) * len(shape))


def both_orders(function: Any, **options: Any) -> Any:
    """Reverse over reverse and forward over reverse of a loss, as one function of q, k and v."""
    loss = lambda *x: jnp.sin(function(*x, **options)).sum()  # noqa: E731
    grad = jax.grad(loss, ALL)

    def derivatives(*x: Any) -> Any:
        return jax.vjp(grad, *x)[1](x), jax.jvp(grad, x, x)[1]

    return derivatives


def assert_close(actual: Any, expected: Any) -> None:
    """float32 results agree to half of their digits."""
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        a, e = np.asarray(a), np.asarray(e)
        assert np.linalg.norm(a - e) <= np.sqrt(np.finfo(np.float32).eps) * np.linalg.norm(e)


@pytest.mark.parametrize(
    ("layout", "Hq", "Hkv", "spec", "gathers"),
    [
        ("bhnd", 4, 4, P("x"), False),
        ("bhnd", 4, 4, P("x", "y"), False),
        ("bhnd", 8, 4, P(None, ("x", "y")), False),
        ("bnhd", 8, 2, P("x", None, "y"), False),
        ("bhnd", 4, 4, P("x", None, "y"), True),
        ("bhnd", 4, 4, P(None, None, None, "x"), True),
        ("bhnd", 4, 2, P(None, ("x", "y")), True),
        ("bnhd", 4, 1, P("x", None, "y"), True),
    ],
)
def test_jit_splits_batch_and_key_heads(layout: str, Hq: int, Hkv: int, spec: Any, gathers: bool) -> None:
    x = qkv(4, Hq, Hkv, 8, 8, 4, 4, dtype="float32", layout=layout)
    sharding = NamedSharding(four(2, 2), spec)
    mesh = sharding.mesh.shape

    def split(a: Any) -> Any:
        """`a` the way the sharding says, as far as it goes: one key head cannot be split."""
        parts = [np.prod([mesh[axis] for axis in np.atleast_1d(axes)]) if axes else 1 for axes in spec]
        return jax.device_put(a, sharding) if all(n % p == 0 for n, p in zip(a.shape, parts, strict=False)) else a

    sharded = [split(a) for a in x]
    function = jax.jit(both_orders(attention, layout=layout))
    assert_close(function(*sharded), both_orders(dense, layout=layout)(*x))
    text = function.lower(*sharded).compile().as_text()
    assert ("all-gather" in text) == gathers


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize(
    ("q_spec", "kv_spec"), [(P("x"), P("x")), (P(None, "x"), P(None, "x")), (P(None, None, "x"), P())], ids=str
)
def test_shard_map(q_spec: Any, kv_spec: Any, check_vma: bool) -> None:
    """Batch, heads, and queries that all see the same keys, whose gradients have to be summed."""
    x = qkv(4, 4, 4, 8, 8, 4, 4, dtype="float32")
    specs = (q_spec, kv_spec, kv_spec)
    mapped = jax.shard_map(attention, mesh=four(4), in_specs=specs, out_specs=q_spec, check_vma=check_vma)
    assert_close(jax.jit(both_orders(mapped))(*x), both_orders(dense)(*x))


def test_derivatives_inside_shard_map() -> None:
    x = qkv(4, 4, 4, 8, 8, 4, 4, dtype="float32")
    mapped = jax.shard_map(both_orders(attention), mesh=four(4), in_specs=(P("x"),) * 3, out_specs=P("x"))
    assert_close(jax.jit(mapped)(*x), both_orders(dense)(*x))


def test_explicit_sharding_is_refused() -> None:
    sharding = NamedSharding(four(4, explicit=True), P("x"))
    q, k, v = (jax.device_put(a, sharding) for a in qkv(4, dtype="float32"))
    with pytest.raises(UnsupportedError, match=r"q has the explicit sharding.*call it inside jax\.shard_map"):
        jax.jit(functools.partial(attention, causal=True))(q, k, v)
