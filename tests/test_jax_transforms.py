"""The adapter under JAX's transformations: every one, nested both ways, with any subset of inputs batched."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed")
pytest.importorskip("jax_tvm_ffi", reason="jax-tvm-ffi is not installed")

import numpy as np  # noqa: E402
from jax import numpy as jnp  # noqa: E402
from jax.test_util import check_grads  # noqa: E402
from jax_dense import assert_close, dense, like, qkv  # noqa: E402

from flashbob_cupy.errors import UnsupportedError  # noqa: E402
from flashbob_cupy.hvp import hvp, linearize  # noqa: E402
from flashbob_cupy.jax import attention  # noqa: E402

ALL = (0, 1, 2)
Loss = Callable[..., Any]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"causal": True, "scale": 1.0},
    {"causal": True, "scale": 0.3, "window": (2, None)},
    {"window": (3, 1), "layout": "bnhd"},
]


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def loss_of(function: Callable[..., Any], **options: Any) -> Loss:
    """A scalar that is not linear in o or in lse."""

    def loss(q: Any, k: Any, v: Any) -> Any:
        o, lse = function(q, k, v, return_lse=True, **options)
        return jnp.sin(o).sum() + (lse**2).sum()

    return loss


def dot(a: Any, b: Any) -> Any:
    return sum(jnp.vdot(x, y) for x, y in zip(a, b, strict=True))


def equal(derivative: Callable[[Loss], Any], *arguments: Any, **options: Any) -> None:
    """`derivative` of a loss is the same through the adapter as through dense operations, and is not zero."""
    ours, expected = (
        jax.jit(functools.partial(derivative, loss_of(function, **options)))(*arguments)
        for function in (attention, dense)
    )
    assert_close(ours, expected)


TRANSFORMS: dict[str, Callable[..., Any]] = {
    "grad": lambda f, x, u: jax.grad(f, ALL)(*x),
    "vjp": lambda f, x, u: jax.vjp(f, *x)[1](jnp.float64(2)),
    "jvp": lambda f, x, u: jax.jvp(f, x, u),
    "jacfwd": lambda f, x, u: jax.jacfwd(f, ALL)(*x),
    "jacrev": lambda f, x, u: jax.jacrev(f, ALL)(*x),
    "hessian": lambda f, x, u: jax.hessian(f, ALL)(*x),
    "jacrev(jacrev)": lambda f, x, u: jax.jacrev(jax.jacrev(f, ALL), ALL)(*x),
    "jacrev(jacfwd)": lambda f, x, u: jax.jacrev(jax.jacfwd(f, ALL), ALL)(*x),
    "jvp(grad)": lambda f, x, u: jax.jvp(jax.grad(f, ALL), x, u),
    "vjp(grad)": lambda f, x, u: jax.vjp(jax.grad(f, ALL), *x)[1](u),
    "grad(jvp)": lambda f, x, u: jax.grad(lambda *y: jax.jvp(f, y, u)[1], ALL)(*x),
    "grad(jvp) along": lambda f, x, u: jax.grad(lambda *w: jax.jvp(f, x, w)[1], ALL)(*u),
    "grad(grad)": lambda f, x, u: jax.grad(lambda q: jnp.sin(jax.grad(f)(q, *x[1:])).sum())(x[0]),
    "grad(grad) of all": lambda f, x, u: jax.grad(lambda *y: dot(jax.grad(f, ALL)(*y), u), ALL)(*x),
    "grad(grad) along": lambda f, x, u: jax.grad(lambda *w: dot(jax.grad(f, ALL)(*x), w), ALL)(*u),
    "jvp along one": lambda f, x, u: jax.jvp(lambda k: jax.grad(f, ALL)(x[0], k, x[2]), x[1:2], u[1:2]),
    "linearize": lambda f, x, u: jax.linearize(f, *x)[1](*u),
    "linearize(grad)": lambda f, x, u: jax.linearize(jax.grad(f, ALL), *x)[1](*u),
    "transpose of jvp(grad)": lambda f, x, u: jax.linear_transpose(jax.linearize(jax.grad(f, ALL), *x)[1], *x)(u),
    "grad(checkpoint)": lambda f, x, u: jax.grad(jax.checkpoint(f), ALL)(*x),
    "grad(grad(checkpoint))": lambda f, x, u: jax.vjp(jax.grad(jax.checkpoint(f), ALL), *x)[1](u),
    "jvp(grad(scan))": lambda f, x, u: jax.jvp(
        jax.grad(lambda *y: jax.lax.scan(lambda c, _: (jnp.sin(c * f(*y)), None), 1.0, None, length=2)[0], ALL), x, u
    ),
    "vmap(vjp)": lambda f, x, u: jax.vmap(lambda *w: jax.vjp(jax.grad(f, ALL), *x)[1](w))(*map(_stacked, u)),
    "vmap(grad)": lambda f, x, u: jax.vmap(jax.grad(f, ALL), (0, None, 1))(_stacked(x[0]), x[1], _stacked(x[2], 1)),
}


def _stacked(x: Any, axis: int = 0) -> Any:
    return jnp.stack([x, -0.5 * x, 2 * x], axis)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_derivatives_equal_dense(name: str) -> None:
    x = tuple(qkv(1, 2, 1, 3, 4, 3, 2))
    u = tuple(like(x))
    equal(TRANSFORMS[name], x, u, causal=True)


@pytest.mark.parametrize("name", ["grad", "vjp(grad)", "jvp(grad)", "linearize(grad)", "vmap(vjp)"])
def test_outside_jit_as_inside(name: str) -> None:
    x = tuple(qkv())
    u = tuple(like(x))
    f = functools.partial(TRANSFORMS[name], loss_of(attention))
    assert_close(f(x, u), jax.jit(f)(x, u))


@pytest.mark.parametrize("name", ["vjp(grad)", "jvp(grad)", "grad(jvp)"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options(name: str, options: dict[str, Any]) -> None:
    x = tuple(qkv(2, 4, 2, 3, 5, 3, 2, layout=options.get("layout", "bhnd")))
    u = tuple(like(x))
    equal(TRANSFORMS[name], x, u, **options)


def test_with_jit_disabled() -> None:
    x = tuple(qkv())
    with jax.disable_jit():
        ours = jax.grad(loss_of(attention), ALL)(*x)
    assert_close(ours, jax.grad(loss_of(dense), ALL)(*x))


def test_finite_differences() -> None:
    x = tuple(qkv(1, 2, 1, 3, 4, 3, 2))
    both = functools.partial(attention, causal=True, return_lse=True)
    check_grads(both, x, order=2, modes=["rev"])
    check_grads(both, x, order=1, modes=["fwd"])
    check_grads(jax.grad(loss_of(attention), ALL), x, order=1, modes=["fwd"])


@pytest.mark.parametrize(
    "batched", [b for b in itertools.product([None, 0], [None, 2], [None, 4]) if b != (None,) * 3], ids=str
)
def test_vmap_over_any_inputs(batched: tuple[int | None, ...]) -> None:
    shapes = [
        x.shape if axis is None else (*x.shape[:axis], 3, *x.shape[axis:])
        for x, axis in zip(qkv(), batched, strict=True)
    ]
    x = [jnp.asarray(np.random.default_rng(i).standard_normal(shape)) for i, shape in enumerate(shapes)]
    u = like(qkv())
    equal(lambda f: jax.vmap(lambda *y: jax.jvp(jax.grad(f, ALL), y, tuple(u)), batched)(*x))


def test_vmap_twice() -> None:
    q, k, v = qkv()
    equal(lambda f: jax.vmap(jax.vmap(jax.grad(f), (0, None, None)), (None, 0, None))(_stacked(q), _stacked(k), v))


def test_jacrev_with_only_the_cotangent_batched() -> None:
    x = qkv(2, 4, 4, 16, 16, 32, 32)
    some = lambda function: jax.jit(jax.jacrev(lambda *y: function(*y)[1, 2, :3, :4], ALL))(*x)  # noqa: E731
    ours, expected = some(attention), some(dense)
    assert all(a.shape == (3, 4, 2, 4, 16, 32) for a in ours)
    assert_close(ours, expected)


@pytest.mark.parametrize("wanted", [w for n in ALL for w in itertools.combinations(ALL, n + 1)], ids=str)
def test_any_subset_of_inputs(wanted: tuple[int, ...]) -> None:
    x = tuple(qkv())

    def second(f: Loss) -> Any:
        return jax.grad(lambda *y: sum((g**2).sum() for g in jax.grad(f, wanted)(*y)), wanted)(*x)

    equal(second)


def test_lse_alone() -> None:
    x, u = tuple(qkv()), tuple(like(qkv()))[:2]

    def derivatives(function: Callable[..., Any]) -> Any:
        loss = lambda q, k: (function(q, k, x[2], return_lse=True)[1] ** 2).sum()  # noqa: E731
        grad = jax.grad(loss, (0, 1))
        return jax.jvp(grad, x[:2], u), jax.vjp(grad, *x[:2])[1](u)

    ours, expected = (jax.jit(derivatives, static_argnums=0)(function) for function in (attention, dense))
    assert_close(ours, expected)


def test_second_order_maml() -> None:
    q, k, v = qkv(1, 2, 2, 6, 6, 4, 4)
    weights, target = like([q[0, 0, :4], q])

    def outer(function: Callable[..., Any], w: Any) -> Any:
        loss = lambda w: ((function(q @ w, k @ w, v) - target) ** 2).mean()  # noqa: E731
        for _ in range(2):
            w = w - 0.1 * jax.grad(loss)(w)
        return loss(w)

    ours, expected = (jax.jit(jax.grad(functools.partial(outer, f)))(weights) for f in (attention, dense))
    assert_close(ours, expected)


def test_hutchinson() -> None:
    x = {"q": qkv()[0], "kv": tuple(qkv()[1:])}
    u = jax.tree.map(lambda a: jnp.sign(like([a], 5)[0]), x)

    def estimate(loss: Loss) -> Any:
        value, product = jax.jit(lambda x, u: hvp(lambda x: loss(x["q"], *x["kv"]), x, u))(x, u)
        return value, product, jax.tree.map(jnp.vdot, u, product)

    equal(estimate)
    value, gradient, product = linearize(lambda x: loss_of(attention)(x["q"], *x["kv"]), x)
    assert_close((value, product(u)), estimate(loss_of(dense))[:2])
    assert_close(gradient, jax.grad(lambda x: loss_of(dense)(x["q"], *x["kv"]))(x))
    assert_close(product(lambda a: jnp.sign(like([a], 5)[0])), product(u))


def test_hvp_says_what_it_wants() -> None:
    x = qkv()[0]
    with pytest.raises(ValueError, match=r"function must return a scalar array; got shape \(2, 4, 5, 4\)"):
        hvp(lambda x: x, x, x)
    with pytest.raises(ValueError, match=r"vector must have the structure of inputs.*\(2, 4, 5, 4\).*got \(4, 5, 4\)"):
        hvp(jnp.sum, x, x[0])
    with pytest.raises(TypeError, match="inputs must be floating-point arrays; got one of dtype int64"):
        hvp(jnp.sum, jnp.arange(3), x)


# ------------------------------------------------------------------------------------------------- where it has to stop


def second_derivative(q: Any) -> Any:
    x = qkv()[1:]
    f = lambda q: jnp.sin(attention(q, *x)).sum()  # noqa: E731
    return jax.grad(lambda q: (jax.grad(f)(q) ** 2).sum())(q)


def along(q: Any) -> Any:
    x = qkv()[1:]
    return jax.jvp(jax.grad(lambda q: jnp.sin(attention(q, *x)).sum()), (q,), (jnp.ones_like(q),))[1]


@pytest.mark.parametrize("second", [second_derivative, along])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.vmap], ids=["eager", "jit", "vmap"])
@pytest.mark.parametrize("mode", ["reverse", "forward"])
def test_a_third_derivative_raises(second: Callable[..., Any], wrap: Callable[..., Any], mode: str) -> None:
    q = qkv()[0]
    if wrap is jax.vmap:
        q = _stacked(q)
    function = wrap(second)
    with pytest.raises(
        UnsupportedError, match=r"(a third derivative|forward mode over forward mode) of attention is not"
    ):
        jax.grad(lambda q: function(q).sum())(q) if mode == "reverse" else jax.jvp(function, (q,), (q,))


@pytest.mark.parametrize("third", [jax.jacfwd, jax.jacrev, jax.hessian])
def test_higher_jacobians_raise(third: Callable[..., Any]) -> None:
    with pytest.raises(UnsupportedError, match="a third derivative of attention is not offered"):
        third(lambda a: second_derivative(a * qkv()[0]).sum())(jnp.float64(1))


def test_forward_over_forward_raises_and_says_what_to_use() -> None:
    q, k, v = qkv()
    f = lambda q: jnp.sin(attention(q, k, v)).sum()  # noqa: E731
    with pytest.raises(UnsupportedError, match=r"forward mode over forward mode.*use jax\.hessian"):
        jax.jvp(lambda q: jax.jvp(f, (q,), (q,))[1], (q,), (q,))
    with pytest.raises(UnsupportedError, match=r"forward mode over forward mode.*use jax\.hessian"):
        jax.jit(jax.jacfwd(jax.jacfwd(f)))(q)


def test_a_third_derivative_nobody_asks_for_does_not_raise() -> None:
    q, k, v = qkv()
    f = lambda q: jnp.sin(attention(q, k, v)).sum()  # noqa: E731
    inside = jax.grad(lambda q: f(q) + jax.lax.stop_gradient(second_derivative(q)).sum())
    assert_close(inside(q), jax.grad(f)(q))
