"""Hessian-vector products by name, and the memory they take."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch_dense import dense, like, qkv  # noqa: E402

from flashbob_cupy.hvp import hvp, linearize  # noqa: E402
from flashbob_cupy.torch import attention  # noqa: E402


class Layer(torch.nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.qkv = torch.nn.Linear(8, 24, dtype=torch.float64)
        self.out = torch.nn.Linear(8, 8, dtype=torch.float64)
        self.unused = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.frozen = torch.nn.Parameter(torch.ones(8, dtype=torch.float64), requires_grad=False)

    def forward(self, x: Any) -> Any:
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return self.out(self.function(q, k, v, causal=True).transpose(1, 2).flatten(2)) * self.frozen


x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def loss(layer: Layer) -> Any:
    return (layer(x) - x).square().mean()


def vector(layer: Layer) -> dict[str, Any]:
    random = torch.Generator().manual_seed(2)
    named = {n: p for n, p in layer.named_parameters() if p.requires_grad}
    return {name: torch.randn(p.shape, generator=random, dtype=p.dtype) for name, p in named.items()}


def test_a_module() -> None:
    ours, expected = Layer(attention), Layer(dense)
    value, product = hvp(loss, ours, vector(ours))
    torch.testing.assert_close(value, loss(expected).detach())
    parameters = {n: p for n, p in expected.named_parameters() if p.requires_grad}
    first = torch.autograd.grad(loss(expected), parameters.values(), create_graph=True, materialize_grads=True)
    dot = sum((g * u).sum() for g, u in zip(first, vector(expected).values(), strict=True))
    second = torch.autograd.grad(dot, parameters.values(), materialize_grads=True)
    torch.testing.assert_close(product, dict(zip(parameters, second, strict=True)))
    assert "frozen" not in product
    assert not product["unused"].any()
    assert all(p.grad is None for p in ours.parameters())
    assert not any(p.requires_grad for p in product.values())


def test_tensors_in_any_nesting() -> None:
    inputs = {"q": qkv()[0], "kv": (qkv()[1], [qkv()[2]])}
    u = {"q": like(qkv())[0], "kv": (like(qkv())[1], [like(qkv())[2]])}
    function = lambda f: lambda t: f(t["q"], t["kv"][0], t["kv"][1][0]).sin().sum()  # noqa: E731
    value, product = hvp(function(attention), inputs, u)
    expected = torch.func.jvp(torch.func.grad(function(dense)), (inputs,), (u,))[1]
    torch.testing.assert_close(product, expected)
    torch.testing.assert_close(value, function(dense)(inputs))
    assert not inputs["q"].requires_grad


def test_one_tensor_alone() -> None:
    q, k, v = qkv()
    value, product = hvp(lambda q: attention(q, k, v).sin().sum(), q, torch.ones_like)
    expected = torch.autograd.functional.hvp(lambda q: dense(q, k, v).sin().sum(), q, torch.ones_like(q))
    torch.testing.assert_close((value, product), expected)


def test_linearize_multiplies_with_many_vectors() -> None:
    q, k, v = qkv()
    function = lambda q: attention(q, k, v).sin().sum()  # noqa: E731
    value, gradient, product = linearize(function, q)
    torch.testing.assert_close(gradient, torch.func.grad(function)(q))
    for seed in range(3):
        u = like([q], seed)[0]
        assert torch.equal(product(u), hvp(function, q, u)[1])
    torch.testing.assert_close(value, function(q))


def test_a_linear_loss_has_no_curvature() -> None:
    product = hvp(lambda q: q.sum(), qkv()[0], torch.ones_like)[1]
    assert torch.equal(product, torch.zeros_like(qkv()[0]))


def test_works_where_gradients_are_off() -> None:
    q, k, v = qkv()
    with torch.no_grad():
        product = hvp(lambda q: attention(q, k, v).sin().sum(), q, torch.ones_like)[1]
    assert product.abs().max() > 0


@pytest.mark.parametrize(
    ("function", "inputs", "vector", "error", "message"),
    [
        (lambda q: q, torch.ones(3), torch.ones(3), ValueError, r"must return a scalar tensor; got shape \(3,\)"),
        (lambda q: 1.0, torch.ones(3), torch.ones(3), ValueError, "got float"),
        (lambda q: q.sum(), torch.ones(3), torch.ones(2), ValueError, r"shapes \[\(3,\)\]; got \[\(2,\)\]"),
        (lambda q: q[0].sum(), (torch.ones(3), 1), None, TypeError, "got Tensor, int"),
        (lambda q: q, [], None, TypeError, "got nothing"),
        (lambda q: q.sum(), torch.ones(3, dtype=torch.int32), None, TypeError, "floating-point"),
        (lambda m: 0, torch.nn.ReLU(), None, ValueError, "none"),
    ],
)
def test_errors(function: Any, inputs: Any, vector: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        hvp(function, inputs, vector)
