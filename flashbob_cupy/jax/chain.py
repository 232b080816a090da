"""Attention as a chain of JAX primitives, each the derivative of another.

    forward    (q, k, v)                                   ->  o, lse
    jvp        (q, k, v; tq, tk, tv)                       ->  to, tlse                  derivative of forward
    backward   (q, k, v; do, dlse)                         ->  dq, dk, dv                transpose of jvp
    along      (q, k, v, do, dlse; tq, tk, tv, tdo, tdlse) ->  dq, dk, dv                derivative of backward
    bob        (q, k, v, do, dlse; uq, uk, uv)             ->  gq, gk, gv, gdo, gdlse    transpose of along
    second     (q, k, v, tq, tk, tv; sq, sk, sv)           ->  to, tlse                  derivative of jvp

Each is linear in what follows the semicolon, and is transposed in that. The Hessian of <do, o> + <dlse, lse> is
symmetric, so `along` is made of `bob` and `backward`, and the transpose of `second` is a part of `bob`. `second` itself
would be forward mode over forward mode, which no kernel computes: it raises when it is evaluated. o and lse are passed
along as helpers of q, k and v, not as arguments of their own: every derivative is the total one, and they have none.

Derivatives of `along`, `bob` and `second` in what precedes the semicolon would be third derivatives. They are the
primitive `third`, which raises when it is evaluated or transposed: one that nobody asks for must not raise.

All arguments but q, k, v, o and lse may be absent, which is exactly zero. The parameter `names` says which are there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import jax
import numpy as np
from jax import numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding, PartitionSpec

from flashbob_cupy.errors import UnsupportedError
from flashbob_cupy.jax import lowering
from flashbob_cupy.problem import Mask, axes_of

Array = Any
Results = list[Any]

NO_THIRD = (
    "a third derivative of attention is not offered: its forward, its gradient, its jvp and its double backward are. "
    "Apply jax.lax.stop_gradient to what the second derivative is taken at, or use a plain jax.numpy attention here"
)
NO_SECOND = (
    "forward mode over forward mode of attention is not offered; forward over reverse, reverse over forward and "
    "reverse over reverse are: use jax.hessian, jax.jvp of jax.grad or jax.jacfwd(jax.jacrev(f)) in place of jax.jvp "
    "of jax.jvp or jax.jacfwd(jax.jacfwd(f))"
)


@dataclass(frozen=True, slots=True)
class Options:
    """What is the same along the chain."""

    mask: Mask
    scale: float
    layout: str
    deterministic: bool


class Group(dict[str, Array]):
    """Arguments by name; absent ones and symbolic zeros are left out."""

    def __init__(self, names: Sequence[str], arrays: Sequence[Array]) -> None:
        super().__init__((n, x) for n, x in zip(names, arrays, strict=True) if x is not None and type(x) is not ad.Zero)

    def pick(self, *names: str) -> Group:
        return self.renamed(names, names)

    def renamed(self, names: Sequence[str], new: Sequence[str]) -> Group:
        return Group(new, [self.get(name) for name in names])


_QKV = ("q", "k", "v")
_CT = ("do", "dlse")
_T = ("tq", "tk", "tv")
_T_CT = ("tdo", "tdlse")
_U = ("uq", "uk", "uv")
_S = ("sq", "sk", "sv")
_HELPERS = ("o", "lse")


@dataclass(frozen=True, slots=True)
class Link:
    """A primitive: the arguments that it is not linear in, those that it is, and what its results are like."""

    primitive: Primitive
    point: tuple[str, ...]
    linear: tuple[str, ...]
    results: tuple[str, ...]

    def __call__(self, options: Options, *groups: Group) -> Results:
        arrays = {name: x for group in groups for name, x in group.items()}
        results: Results = self.primitive.bind(*arrays.values(), names=tuple(arrays), options=options)
        return results

    def point_of(self, x: Group) -> Group:
        return x.pick(*self.point, *_HELPERS)


def _primitive(name: str) -> Primitive:
    primitive = Primitive(f"flashbob_{name}")
    primitive.multiple_results = True
    return primitive


_forward = Link(_primitive("forward"), _QKV, (), _HELPERS)
_jvp = Link(_primitive("jvp"), _QKV, _T, _HELPERS)
_backward = Link(_primitive("backward"), _QKV, _CT, _QKV)
_along = Link(_primitive("along"), _QKV + _CT, _T + _T_CT, _QKV)
_bob = Link(_primitive("bob"), _QKV + _CT, _U, _QKV + _CT)
_second = Link(_primitive("second_jvp"), _QKV + _T, _S, _HELPERS)
#: (results of a link, tangents of what it is not linear in) -> tangents of the results
_third = _primitive("third_derivative")


def forward(qkv: Sequence[Array], options: Options) -> tuple[Array, Array]:
    """o and lse, differentiable."""
    o, lse = _forward(options, Group(_QKV, qkv))
    return o, lse


# ------------------------------------------------------------------------------------------------------- derivatives


def _derivative_of_forward(x: Group, t: Group, options: Options) -> tuple[Results, Results | None]:
    results = _forward(options, x)
    return results, _jvp(options, x, Group(_HELPERS, results), t.renamed(_QKV, _T))


def _derivative_of_jvp(x: Group, t: Group, options: Options) -> tuple[Results, Results | None]:
    linear, moved = t.pick(*_T), t.renamed(_QKV, _S)
    return _jvp(options, x), _sum(
        _jvp(options, _jvp.point_of(x), linear) if linear else None,
        _second(options, x, moved) if moved else None,
    )


def _derivative_of_backward(x: Group, t: Group, options: Options) -> tuple[Results, Results | None]:
    linear, moved = t.pick(*_CT), t.renamed(_QKV, _T)
    results = _backward(options, x)
    if moved:  # one primitive for both, so that one call of bob is its transpose
        return results, _along(options, x, moved, linear.renamed(_CT, _T_CT))
    return results, _backward(options, _backward.point_of(x), linear) if linear else None


def _derivative_of_last(link: Link, x: Group, t: Group, options: Options) -> tuple[Results, Results | None]:
    linear, moved = t.pick(*link.linear), t.pick(*link.point)
    results = link(options, x)
    return results, _sum(
        link(options, link.point_of(x), linear) if linear else None,
        _third.bind(*results, *moved.values(), results=len(results)) if moved else None,
    )


def _sum(*terms: Results | None) -> Results | None:
    """The sum of lists, where None is zero."""
    given = [term for term in terms if term is not None]
    if len(given) == 2:
        return [a + b for a, b in zip(*given, strict=True)]
    return given[0] if given else None


def _define_derivative(link: Link, rule: Callable[[Group, Group, Options], tuple[Results, Results | None]]) -> None:
    def jvp(
        primals: Results, tangents: Results, *, names: tuple[str, ...], options: Options
    ) -> tuple[Results, Results]:
        results, moved = rule(Group(names, primals), Group(names, tangents), options)
        return results, [ad.Zero.from_primal_value(x) for x in results] if moved is None else moved

    ad.primitive_jvps[link.primitive] = jvp


# -------------------------------------------------------------------------------------------------------- transposes


def _transpose_of_jvp(x: Group, ct: Results, wanted: set[str], options: Options) -> Group:
    return Group(_T, _backward(options, _jvp.point_of(x), Group(_CT, ct)))


def _transpose_of_backward(x: Group, ct: Results, wanted: set[str], options: Options) -> Group:
    return Group(_CT, _jvp(options, _backward.point_of(x), Group(_T, ct)))


def _transpose_of_along(x: Group, ct: Results, wanted: set[str], options: Options) -> Group:
    if wanted.isdisjoint(_T):  # a third of the work
        return Group(_T_CT, _jvp(options, _jvp.point_of(x), Group(_T, ct)))
    results = _bob(options, _bob.point_of(x), Group(_U, ct))
    return Group((_T + _T_CT)[: len(results)], results)


def _transpose_of_bob(x: Group, ct: Results, wanted: set[str], options: Options) -> Group:
    moved = Group((_T + _T_CT)[: len(ct)], ct)
    if moved.pick(*_T):
        return Group(_U, _along(options, _along.point_of(x), moved))
    return Group(_U, _backward(options, _backward.point_of(x), moved.renamed(_T_CT, _CT)))


def _transpose_of_second(x: Group, ct: Results, wanted: set[str], options: Options) -> Group:
    point = x.pick(*_QKV, *_HELPERS)
    return Group(_S, _bob(options, point, Group(_CT, ct), x.renamed(_T, _U))[:3])


def _define_transpose(link: Link, rule: Callable[[Group, Results, set[str], Options], Group]) -> None:
    def transpose(cts: Results, *arrays: Array, names: tuple[str, ...], options: Options) -> Results:
        wanted = {name: x for name, x in zip(names, arrays, strict=True) if ad.is_undefined_primal(x)}
        grads = Group((), ())
        if any(type(ct) is not ad.Zero for ct in cts):
            known = [None if name in wanted else x for name, x in zip(names, arrays, strict=True)]
            grads = rule(Group(names, known), cts, set(wanted), options)
        return [grads.get(name, ad.Zero(wanted[name].aval)) if name in wanted else None for name in names]

    ad.primitive_transposes[link.primitive] = transpose


# ------------------------------------------------------------------------------------------------ shapes and batches


def _abstract(link: Link, *avals: Any, names: tuple[str, ...], options: Options) -> Results:
    given = dict(zip(names, avals, strict=True))
    like = given["q"]
    sizes = {axis: n for name in _QKV for axis, n in zip(axes_of(name, options.layout), given[name].shape, strict=True)}

    def result(name: str) -> Any:
        if name in _QKV:
            return given[name].update(weak_type=False)
        shape = tuple(sizes[axis] for axis in axes_of(name, options.layout))
        if len(shape) == 4:
            return like.update(shape=shape, weak_type=False)
        dtype = np.promote_types(like.dtype, np.float32)
        sharding = NamedSharding(like.sharding.mesh, PartitionSpec(None, None, None))
        return like.update(shape=shape, dtype=dtype, weak_type=False, sharding=sharding)

    return [result(name) for name in link.results if name != "dlse" or "dlse" in given]


def _define_batching(link: Link) -> None:
    """A mapped axis is folded into the batch."""

    def rule(
        arrays: Results, dims: Sequence[int | None], *, names: tuple[str, ...], options: Options
    ) -> tuple[Results, list[int]]:
        arrays = _at_front(arrays, dims)
        size, B = arrays[0].shape[:2]
        folded = [x.reshape(size * B, *x.shape[2:]) for x in arrays]
        results = link.primitive.bind(*folded, names=names, options=options)
        return [x.reshape(size, B, *x.shape[1:]) for x in results], [0] * len(results)

    batching.primitive_batchers[link.primitive] = rule


def _at_front(arrays: Results, dims: Sequence[int | None]) -> Results:
    """All arrays with the mapped axis first; one without it is repeated."""
    size = next(x.shape[dim] for x, dim in zip(arrays, dims, strict=True) if dim is not None)
    return [
        jnp.broadcast_to(x, (size, *x.shape)) if dim is None else jnp.moveaxis(x, dim, 0)
        for x, dim in zip(arrays, dims, strict=True)
    ]


# -------------------------------------------------------------------------------------------------------- evaluation


def _value_of_along(*arrays: Array, names: tuple[str, ...], options: Options) -> Results:
    x = Group(names, arrays)
    linear = x.renamed(_T_CT, _CT)
    total = _sum(
        _bob(options, _bob.point_of(x), x.renamed(_T, _U))[:3],
        _backward(options, _backward.point_of(x), linear) if linear else None,
    )
    assert total is not None
    return total


def _refuse(message: str) -> Callable[..., NoReturn]:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise UnsupportedError(message)

    return refuse


def _define_value(primitive: Primitive) -> None:
    """Outside jit, a primitive is compiled by itself."""
    compiled = jax.jit(primitive.bind, static_argnames=("names", "options"))

    def value(*arrays: Array, **params: Any) -> Results:
        with jax.disable_jit(False):
            results: Results = compiled(*arrays, **params)
        return results

    primitive.def_impl(value)


def _define_third() -> None:
    def derivative(primals: Results, tangents: Results, *, results: int) -> tuple[Results, Results]:
        outputs = _third.bind(*primals, results=results)
        moved = [t for t in tangents if type(t) is not ad.Zero]
        return outputs, _third.bind(*outputs, *moved, results=results)

    def transpose(cts: Results, *arrays: Array, results: int) -> Results:
        if any(type(ct) is not ad.Zero for ct in cts):
            raise UnsupportedError(NO_THIRD)
        return [ad.Zero(x.aval) if ad.is_undefined_primal(x) else None for x in arrays]

    def batch(arrays: Results, dims: Sequence[int | None], *, results: int) -> tuple[Results, list[int]]:
        return _third.bind(*_at_front(arrays, dims), results=results), [0] * results

    _third.def_abstract_eval(lambda *avals, results: list(avals[:results]))
    _third.def_impl(_refuse(NO_THIRD))
    mlir.register_lowering(_third, _refuse(NO_THIRD))
    ad.primitive_jvps[_third] = derivative
    ad.primitive_transposes[_third] = transpose
    batching.primitive_batchers[_third] = batch


def _define() -> None:
    for link in (_forward, _jvp, _backward, _along, _bob, _second):
        link.primitive.def_abstract_eval(functools.partial(_abstract, link))
        _define_batching(link)
        _define_value(link.primitive)
    _define_third()
    _define_derivative(_forward, _derivative_of_forward)
    _define_derivative(_jvp, _derivative_of_jvp)
    _define_derivative(_backward, _derivative_of_backward)
    for link in (_along, _bob, _second):
        _define_derivative(link, functools.partial(_derivative_of_last, link))
    _define_transpose(_jvp, _transpose_of_jvp)
    _define_transpose(_backward, _transpose_of_backward)
    _define_transpose(_along, _transpose_of_along)
    _define_transpose(_bob, _transpose_of_bob)
    _define_transpose(_second, _transpose_of_second)
    mlir.register_lowering(_second.primitive, _refuse(NO_SECOND))
    lowering.tell_devices(_along.primitive)
    mlir.register_lowering(_along.primitive, mlir.lower_fun(_value_of_along, multiple_results=True))
    for op, link in (("forward", _forward), ("jvp", _jvp), ("backward", _backward), ("bob", _bob)):
        lowering.register(op, link.primitive)


_define()
