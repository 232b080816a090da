"""The adapter under torch.func: every transform, nested both ways, with any subset of inputs batched."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch import func  # noqa: E402
from torch.autograd import forward_ad  # noqa: E402
from torch_dense import dense, like, qkv  # noqa: E402

import flashbob_cupy as fb  # noqa: E402
from flashbob_cupy.torch import attention  # noqa: E402

ALL = (0, 1, 2)
Loss = Callable[..., Any]


def loss_of(function: Callable[..., Any], **options: Any) -> Loss:
    """A scalar that is not linear in o or in lse."""

    def loss(q: Any, k: Any, v: Any) -> Any:
        o, lse = function(q, k, v, return_lse=True, **options)
        return o.sin().sum() + lse.square().sum()

    return loss


def equal(derivative: Callable[[Loss], Any], **options: Any) -> None:
    """`derivative` of a loss is the same through the adapter as through dense operators, and is not zero."""
    ours, expected = derivative(loss_of(attention, **options)), derivative(loss_of(dense, **options))
    torch.testing.assert_close(ours, expected)
    assert all(x.abs().max() > 0 for x in torch.utils._pytree.tree_leaves(expected))


TRANSFORMS: dict[str, Callable[..., Any]] = {
    "grad": lambda f, x, u: func.grad(f, ALL)(*x),
    "vjp": lambda f, x, u: func.vjp(f, *x)[1](torch.tensor(2.0).double()),
    "jvp": lambda f, x, u: func.jvp(f, x, u),
    "jacfwd": lambda f, x, u: func.jacfwd(f, ALL)(*x),
    "jacrev": lambda f, x, u: func.jacrev(f, ALL)(*x),
    "hessian": lambda f, x, u: func.hessian(f, ALL)(*x),
    "jacrev(jacrev)": lambda f, x, u: func.jacrev(func.jacrev(f, ALL), ALL)(*x),
    "jacrev(jacfwd)": lambda f, x, u: func.jacrev(func.jacfwd(f, ALL), ALL)(*x),
    "jvp(grad)": lambda f, x, u: func.jvp(func.grad(f, ALL), x, u),
    "vjp(grad)": lambda f, x, u: func.vjp(func.grad(f, ALL), *x)[1](u),
    "grad(jvp)": lambda f, x, u: func.grad(lambda *y: func.jvp(f, y, u)[1], ALL)(*x),
    "grad(grad)": lambda f, x, u: func.grad(lambda q: func.grad(f)(q, *x[1:]).sin().sum())(x[0]),
    "jvp along one": lambda f, x, u: func.jvp(lambda k: func.grad(f, ALL)(x[0], k, x[2]), (x[1],), (u[1],)),
    "linearize": lambda f, x, u: func.linearize(f, *x)[1](*u),
}


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")  # of torch.func.linearize, whatever it traces
def test_transforms(name: str) -> None:
    x = tuple(qkv(1, 2, 1, 3, 4, 3, 2))
    equal(lambda loss: TRANSFORMS[name](loss, x, tuple(like(list(x)))), causal=True)


@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_jvp_with_a_scale(scale: float) -> None:
    x = tuple(qkv())
    equal(lambda loss: func.jvp(loss, x, tuple(like(list(x)))), scale=scale)


def test_jvp_is_the_array_function() -> None:
    x = tuple(qkv())
    u = tuple(like(list(x)))
    _, (to, tlse) = func.jvp(functools.partial(attention, return_lse=True), x, u)
    o, lse = fb.forward(*x)
    expected = fb.jvp(*x, *u, o, lse)
    assert torch.equal(to, expected.to)
    assert torch.equal(tlse, expected.tlse)


def test_jacobian_with_only_the_cotangent_batched() -> None:
    x = tuple(t.float() for t in qkv(2, 4, 4, 16, 16, 32, 32))
    rows = slice(None), slice(None), slice(0, 16, 5), slice(0, 32, 9)  # of a Jacobian of 67 million entries
    pick = lambda function: lambda q: function(q, *x[1:], causal=True)[rows]  # noqa: E731
    ours, expected = func.jacrev(pick(attention))(x[0]), func.jacrev(pick(dense))(x[0])
    torch.testing.assert_close(ours, expected)


# -------------------------------------------------------------------------------------------------------------- vmap


def second(function: Callable[..., Any], q: Any, k: Any, v: Any, do: Any, uq: Any, uk: Any, uv: Any) -> Any:
    """Forward, backward and double backward."""
    o, backward = func.vjp(function, q, k, v)
    gradients, double = func.vjp(lambda q, k, v, do: func.vjp(function, q, k, v)[1](do), q, k, v, do)
    return o, backward(do), gradients, double((uq, uk, uv))


def second_arguments(size: int | None, batched: tuple[bool, ...], axis: int) -> list[Any]:
    shapes = {"q": (2, 4, 5, 4), "k": (2, 2, 6, 4), "v": (2, 2, 6, 3), "do": (2, 4, 5, 3)}
    random = torch.Generator().manual_seed(0)
    arguments = []
    for name, yes in zip(("q", "k", "v", "do", "q", "k", "v"), batched, strict=True):
        x = torch.randn(*((size,) if yes else ()), *shapes[name], generator=random, dtype=torch.float64)
        arguments.append(x.movedim(0, axis) if yes else x)
    return arguments


SUBSETS = [
    *[tuple(i == j for j in range(7)) for i in range(7)],
    *[(a, b, c, True, False, True, True) for a, b, c in itertools.product([False, True], repeat=3)],
    (True,) * 7,
]


@pytest.mark.parametrize("axis", [0, 2, -1])
@pytest.mark.parametrize("batched", SUBSETS, ids=lambda b: "".join("ny"[x] for x in b))
def test_vmap_over_any_subset(batched: tuple[bool, ...], axis: int) -> None:
    arguments = second_arguments(3, batched, axis)
    in_dims = tuple(axis if yes else None for yes in batched)
    mapped = func.vmap(functools.partial(second, attention), in_dims)(*arguments)
    looped = [
        second(attention, *(x.select(axis, i) if yes else x for x, yes in zip(arguments, batched, strict=True)))
        for i in range(3)
    ]
    flat = [torch.utils._pytree.tree_leaves(one) for one in looped]
    for ours, expected in zip(torch.utils._pytree.tree_leaves(mapped), zip(*flat, strict=True), strict=True):
        torch.testing.assert_close(ours, torch.stack(expected))


def test_vmap_of_grad_gives_per_sample_gradients() -> None:
    batch = tuple(qkv(3, 4, 2))  # inside vmap, without a batch axis
    equal(lambda loss: func.vmap(func.grad(loss, ALL))(*batch))


def test_nested_vmap() -> None:
    x = qkv(leading=(3, 2))
    nested = func.vmap(func.vmap(attention, (0, None, 0)), (0, None, 0))(x[0], x[1][0, 0], x[2])
    torch.testing.assert_close(nested, dense(x[0], x[1][0, 0].expand(3, 2, *x[1].shape[2:]), x[2]))


def test_vmap_of_the_jvp() -> None:
    x = tuple(qkv())
    u = tuple(like(qkv(leading=(3,))))
    jvp = lambda *t: func.jvp(attention, x, t)[1]  # noqa: E731
    torch.testing.assert_close(func.vmap(jvp)(*u), torch.stack([jvp(*(t[i] for t in u)) for i in range(3)]))


def test_an_unbatched_input_of_one_batch_entry_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    from flashbob_cupy.torch import operators

    strides, run = [], operators._run

    def spy(op: str, arguments: tuple[Any, ...], options: Any) -> Any:
        strides.append([x.stride(0) for x in arguments])
        return run(op, arguments, options)

    monkeypatch.setattr(operators, "_run", spy)
    q, k, v = qkv(1, 4, 2)
    func.vmap(attention, (0, None, None))(q.expand(3, *q.shape).clone(), k, v)
    assert strides == [[q[0].numel(), 0, 0]]


@pytest.mark.parametrize("transform", ["grad", "jvp"])
def test_what_a_transform_left_behind_is_an_ordinary_tensor(transform: str) -> None:
    left: list[Any] = []
    keep = lambda x: left.append(x) or x.sum()  # noqa: E731
    q, k, v = (t.requires_grad_() for t in qkv())
    do, u = like([attention(q, k, v)])[0], like([q, k, v])
    for t in (q, do, *u):
        func.grad(keep)(t) if transform == "grad" else func.jvp(keep, (t,), (t,))

    def derivatives(q: Any, do: Any, *u: Any) -> Any:
        o = attention(q, k, v)
        first = torch.autograd.grad(o, (k, v), do, create_graph=True)
        again = torch.autograd.grad(o, (k, v), do, retain_graph=True)
        with torch.no_grad():
            plain = attention(q, k, v)
        return o, plain, *first, *again, *torch.autograd.grad(first, (k, v), u[1:])

    for a, b in zip(derivatives(*left), derivatives(q, do, *u), strict=True):
        assert torch.equal(a, b)


def test_a_torch_that_does_not_say_what_is_active(monkeypatch: pytest.MonkeyPatch) -> None:
    from flashbob_cupy.torch import chain

    def derivatives() -> Any:
        inputs = [t.requires_grad_() for t in qkv()]
        o = attention(*inputs, causal=True)
        first = torch.autograd.grad(o.sin().sum(), inputs, create_graph=True)
        return o, *first, *torch.autograd.grad(first, inputs, like(inputs))

    expected = derivatives()
    monkeypatch.setattr(chain, "_inside_a_transform", lambda: True)
    assert all(torch.equal(a, b) for a, b in zip(derivatives(), expected, strict=True))


# ------------------------------------------------------------------------------------------------- what is not offered

x, u = tuple(qkv(1, 1, 1, 3, 3, 2, 2)), tuple(like(qkv(1, 1, 1, 3, 3, 2, 2)))


def grad_of_sum(f: Callable[..., Any]) -> Callable[..., Any]:
    return func.grad(lambda q: f(q).sin().sum())


@pytest.mark.parametrize("through", ["o", "lse"])
@pytest.mark.parametrize(
    "third",
    [
        lambda f: grad_of_sum(grad_of_sum(grad_of_sum(f)))(x[0]),
        lambda f: func.jvp(grad_of_sum(grad_of_sum(f)), x[:1], u[:1]),
        lambda f: func.jvp(lambda q: func.jvp(grad_of_sum(f), (q,), u[:1])[1], x[:1], u[:1]),
        lambda f: grad_of_sum(lambda q: func.jvp(grad_of_sum(f), (q,), u[:1])[1])(x[0]),
        lambda f: func.vmap(grad_of_sum(grad_of_sum(grad_of_sum(f))))(x[0].expand(2, *x[0].shape)),
        lambda f: func.hessian(grad_of_sum(f))(x[0]),
    ],
    ids=["rrr", "frr", "ffr", "rfr", "vmap", "hessian of grad"],
)
def test_third_derivatives_raise(third: Callable[..., Any], through: str) -> None:
    index = 0 if through == "o" else 1
    f = lambda q: attention(q, *x[1:], return_lse=True)[index]  # noqa: E731
    with pytest.raises(fb.UnsupportedError, match=r"third|forward mode over forward mode"):
        third(f)


def test_forward_over_forward_raises_and_says_what_to_do() -> None:
    inner = lambda q: func.jvp(lambda q: attention(q, *x[1:]), (q,), u[:1])[1]  # noqa: E731
    with pytest.raises(fb.UnsupportedError, match="forward over reverse"):
        func.jvp(inner, x[:1], u[:1])


def test_the_tangent_of_a_tangent_alone_is_linear() -> None:
    inner = lambda t: func.jvp(lambda q: attention(q, *x[1:]), x[:1], (t,))[1]  # noqa: E731
    _, tangent = func.jvp(inner, u[:1], x[:1])
    torch.testing.assert_close(tangent, inner(x[0]))


def test_products_are_differentiable_in_their_vectors() -> None:
    def derivative(f: Loss) -> Any:
        product = lambda *t: func.jvp(func.grad(f, ALL), x, t)[1]  # noqa: E731
        return func.jacrev(product, ALL)(*u), func.jacfwd(product, ALL)(*u)

    torch.testing.assert_close(derivative(loss_of(attention)), derivative(loss_of(dense)))


def test_array_functions_refuse_what_a_transform_wraps() -> None:
    with pytest.raises(TypeError, match=r"flashbob_cupy\.torch\.attention"):
        func.vmap(lambda q: fb.forward(q, *x[1:]).o)(x[0].expand(2, *x[0].shape))
    with forward_ad.dual_level(), pytest.raises(TypeError, match=r"flashbob_cupy\.torch\.attention"):
        fb.forward(forward_ad.make_dual(x[0], u[0]), *x[1:])
