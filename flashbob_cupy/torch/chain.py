"""Attention as a chain of autograd functions, each the derivative of the last.

    Forward     q, k, v                           ->  o, lse
    Jvp         q, k, v, tq, tk, tv               ->  to, tlse                the derivative of Forward
    Backward    q, k, v, do, dlse                 ->  dq, dk, dv              the gradient of Forward
    Bob         q, k, v, do, dlse, uq, uk, uv     ->  gq, gk, gv, gdo, gdlse  the gradient of Backward

The Hessian of <do, o> is symmetric, so the four close under differentiation in both modes: gq, gk, gv along tq, tk, tv
are the derivative of dq, dk, dv, and gdo is the tangent of o. o and lse are handed on as helpers, not as arguments of
their own: every derivative below is the total one in q, k and v, and the helpers get none.

Only what would differentiate q, k, v, do or dlse a third time has no formula. In forward mode that is known at once; in
reverse mode only when a gradient reaches them, so `_Last` stands in front of them and raises then. Everything that is
linear (uq, uk, uv; tq, tk, tv) can be differentiated without end.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from flashbob_cupy.errors import UnsupportedError
from flashbob_cupy.torch import operators
from flashbob_cupy.torch.operators import Options, Results


def _third_derivative(what: str) -> NoReturn:
    raise UnsupportedError(
        f"{what} of attention would be the third of its output in q, k, v, which is not offered: the first and the "
        "second are. Detach the second derivative, or use PyTorch's own attention here"
    )


def _any(*tensors: Tensor | None) -> bool:
    return any(x is not None for x in tensors)


#: torch binds the arguments of every call to the signature of `forward`, and would derive that anew each time.
_ANY = inspect.Signature([inspect.Parameter("inputs", inspect.Parameter.VAR_POSITIONAL)])

# Not part of torch's interface, like the level of forward mode below. Without them, all calls go the way of every mode.
_inside_a_transform: Callable[[], bool] = getattr(torch._C, "_are_functorch_transforms_active", lambda: True)


def _only_reverse_mode() -> bool:
    """Whether neither torch.func nor forward mode can be differentiating what is computed now."""
    return not _inside_a_transform() and getattr(forward_ad, "_current_level", 0) < 0


def keep(ctx: Any, arrays: Results, options: Options) -> Results:
    """Save what `backward` takes; returns the arrays."""
    ctx.save_for_backward(*arrays)
    ctx.set_materialize_grads(False)
    ctx.options = options
    return arrays


class _Function(torch.autograd.Function):  # type: ignore[misc]
    """A function of arrays that all have the batch as their first axis, and of options."""

    #: The same function for reverse mode alone, in the old form that computes and saves in one: torch takes twice as
    #: long to call one of the form that torch.func needs.
    _recorded: type[torch.autograd.Function]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        compute, save = cls.forward, cls.save
        compute.__signature__ = _ANY

        def forward(ctx: Any, *inputs: Any) -> Results:
            output = compute(*inputs)
            save(ctx, inputs, output)
            return output  # type: ignore[no-any-return]

        methods = {"forward": staticmethod(forward), "backward": staticmethod(cls.backward)}
        cls._recorded = type(cls.__name__, (torch.autograd.Function,), methods)

    @classmethod
    def apply(cls, *inputs: Any) -> Results:
        if not _only_reverse_mode():
            return super().apply(*inputs)  # type: ignore[no-any-return]
        if torch.is_grad_enabled():
            return cls._recorded.apply(*inputs)  # type: ignore[no-any-return]
        return cls.forward(*inputs)  # type: ignore[no-any-return]

    @staticmethod
    def save(ctx: Any, inputs: Any, output: Any) -> Results:
        """`keep` what `backward` takes."""
        return keep(ctx, inputs[:-1], inputs[-1])

    @classmethod
    def setup_context(cls, ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_forward(*cls.save(ctx, inputs, output))

    @classmethod
    def vmap(cls, info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Results, Any]:
        """Fold the mapped axis into the batch; an array without it is repeated, as a view where its batch is 1."""
        size = info.batch_size

        def fold(x: Any, dim: int | None) -> Any:
            if not isinstance(x, Tensor):
                return x
            return (x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)).flatten(0, 1)

        results = cls.apply(*map(fold, arguments, in_dims))
        unfolded = tuple(None if x is None else x.unflatten(0, (size, x.shape[0] // size)) for x in results)
        return unfolded, tuple(None if x is None else 0 for x in results)


class Forward(_Function):
    forward = staticmethod(operators.forward)

    @staticmethod
    def save(ctx: Any, inputs: Any, output: Any) -> Results:
        # Detached, because helpers get no derivatives: the second would pass through here only to find none.
        q, k, v, options = inputs
        o, lse = output
        return keep(ctx, (q, k, v, o.detach(), lse.detach()), options)

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> Results:
        if do is None and dlse is None:
            return (None,) * 4
        q, k, v, o, lse = ctx.saved_tensors
        dq, dk, dv = Backward.apply(q, k, v, do, dlse, o, lse, ctx.options)
        return dq, dk, dv, None

    @staticmethod
    def jvp(ctx: Any, tq: Tensor | None, tk: Tensor | None, tv: Tensor | None, _: None) -> Results:
        q, k, v, o, lse = ctx.saved_tensors
        return Jvp.apply(q, k, v, tq, tk, tv, o, lse, ctx.options)


class Jvp(_Function):
    forward = staticmethod(operators.jvp)

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> Results:
        if not _any(do, dlse):
            return (None,) * 9
        q, k, v, tq, tk, tv, o, lse = ctx.saved_tensors
        gq = gk = gv = dq = dk = dv = None
        if any(ctx.needs_input_grad[:3]):
            gq, gk, gv, _, _ = _guarded_bob(q, k, v, do, dlse, tq, tk, tv, o, lse, ctx.options)
        if any(ctx.needs_input_grad[3:6]):
            gradients = Backward.apply(q, k, v, do, dlse, o, lse, ctx.options)
            dq, dk, dv = (None if t is None else d for t, d in zip((tq, tk, tv), gradients, strict=True))
        return gq, gk, gv, dq, dk, dv, None, None, None

    @staticmethod
    def jvp(ctx: Any, sq: Any, sk: Any, sv: Any, rq: Any, rk: Any, rv: Any, *_: Any) -> Results:
        if _any(sq, sk, sv):
            raise UnsupportedError(
                "forward mode over forward mode of attention is not offered: take forward over reverse, reverse over "
                "forward or reverse over reverse, as in torch.func.hessian or jacfwd(jacrev(f))"
            )
        q, k, v, _tq, _tk, _tv, o, lse = ctx.saved_tensors
        return Jvp.apply(q, k, v, rq, rk, rv, o, lse, ctx.options)


class Backward(_Function):
    forward = staticmethod(operators.backward)

    @staticmethod
    def backward(ctx: Any, uq: Tensor | None, uk: Tensor | None, uv: Tensor | None) -> Results:
        if uq is None and uk is None and uv is None:
            return (None,) * 8
        q, k, v, do, dlse, o, lse = ctx.saved_tensors
        gq = gk = gv = None
        if any(ctx.needs_input_grad[:3]):
            gq, gk, gv, gdo, gdlse = _guarded_bob(q, k, v, do, dlse, uq, uk, uv, o, lse, ctx.options)
        else:  # the derivative in do and dlse alone is a third of the work
            gdo, gdlse = Jvp.apply(q, k, v, uq, uk, uv, o, lse, ctx.options)
        return gq, gk, gv, None if do is None else gdo, None if dlse is None else gdlse, None, None, None

    @staticmethod
    def jvp(ctx: Any, tq: Any, tk: Any, tv: Any, tdo: Any, tdlse: Any, *_: Any) -> Results:
        return _along(ctx, tq, tk, tv, tdo, tdlse)


class Bob(_Function):
    @staticmethod
    def forward(*inputs: Any) -> Results:
        q, k, v, do, dlse, o, lse, uq, uk, uv, _guarded, options = inputs
        return operators.bob(q, k, v, do, dlse, o, lse, uq, uk, uv, options)

    @staticmethod
    def save(ctx: Any, inputs: Any, output: Any) -> Results:
        *arrays, ctx.guarded, options = inputs
        return keep(ctx, tuple(arrays), options)

    @staticmethod
    def backward(ctx: Any, hq: Any, hk: Any, hv: Any, hdo: Any, hdlse: Any) -> Results:
        needed = ctx.needs_input_grad
        if any(needed[:5]) and not ctx.guarded:
            _third_derivative("this derivative")
        # Whatever reaches `_Last` makes it raise; nothing does if these derivatives are not wanted.
        *arguments, _o, _lse, uq, uk, uv = ctx.saved_tensors
        last = [x.new_zeros(()).expand(x.shape) if need else None for x, need in zip(arguments, needed, strict=False)]
        grads: list[Any] = [None, None, None]
        if any(needed[7:10]) and _any(hq, hk, hv, hdo, hdlse):
            # A symmetric Hessian: uq, uk, uv and their cotangents may change places.
            along = _along(ctx, hq, hk, hv, hdo, hdlse)
            grads = [None if u is None else g for u, g in zip((uq, uk, uv), along, strict=True)]
        return *last, None, None, *grads, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Results:
        if _any(*tangents[:5]):
            _third_derivative("this forward-mode derivative")
        q, k, v, do, dlse, o, lse, *_u = ctx.saved_tensors
        tuq, tuk, tuv = tangents[7:10]
        return _guarded_bob(q, k, v, do, dlse, tuq, tuk, tuv, o, lse, ctx.options)


class _Sum(_Function):
    """The sum of two arrays.

    In a `jvp` PyTorch records no tangents of its own operators, so a second forward-mode level would be lost at a `+`.
    """

    @staticmethod
    def forward(*inputs: Any) -> Results:
        a, b, _ = inputs
        return (a + b,)

    @staticmethod
    def save(ctx: Any, inputs: Any, output: Any) -> Results:
        ctx.set_materialize_grads(False)
        return ()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Results:
        return gradient, gradient, None

    @staticmethod
    def jvp(ctx: Any, a: Tensor | None, b: Tensor | None, _: None) -> Results:
        return (_sum(a, b),)


class _Last(torch.autograd.Function):  # type: ignore[misc]
    """The identity on arrays that may be differentiated no further; raises when a derivative has to pass."""

    @staticmethod
    def forward(*arrays: Tensor | None) -> Results:
        return tuple(None if x is None else x.view_as(x) for x in arrays)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Results:
        if _any(*grads):
            _third_derivative("this derivative")
        return (None,) * len(grads)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> NoReturn:
        _third_derivative("this forward-mode derivative")

    @classmethod
    def vmap(cls, info: Any, in_dims: tuple[int | None, ...], *arrays: Tensor | None) -> tuple[Results, Any]:
        return cls.apply(*arrays), in_dims


def _guarded_bob(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor | None,
    dlse: Tensor | None,
    uq: Tensor | None,
    uk: Tensor | None,
    uv: Tensor | None,
    o: Tensor,
    lse: Tensor,
    options: Options,
) -> Results:
    guarded = torch.is_grad_enabled()  # otherwise nothing is recorded that would have to be guarded
    if guarded:
        q, k, v, do, dlse = _Last.apply(q, k, v, do, dlse)
    return Bob.apply(q, k, v, do, dlse, o, lse, uq, uk, uv, guarded, options)


def _along(ctx: Any, tq: Any, tk: Any, tv: Any, tdo: Any, tdlse: Any) -> Results:
    """The derivative of dq, dk, dv along tangents of q, k, v, do and dlse."""
    q, k, v, do, dlse, o, lse, *_u = ctx.saved_tensors
    parts: list[Results] = []
    if _any(tq, tk, tv):
        parts.append(_guarded_bob(q, k, v, do, dlse, tq, tk, tv, o, lse, ctx.options)[:3])
    if _any(tdo, tdlse):
        parts.append(Backward.apply(q, k, v, tdo, tdlse, o, lse, ctx.options))
    return parts[0] if len(parts) == 1 else tuple(map(_sum, *parts))


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return _Sum.apply(a, b, None)[0]
