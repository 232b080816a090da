"""Compilers and tracers: first order through an opaque operator, a recorded call is replayed, the rest is an error."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch import func  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402
from torch_dense import leaves, like, qkv  # noqa: E402

import flashbob_cupy as fb  # noqa: E402
from flashbob_cupy.torch import attention  # noqa: E402

x, u = tuple(qkv()), tuple(like(qkv()))


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def loss(q: Any, k: Any, v: Any) -> Any:
    o, lse = attention(q * 2, k, v, causal=True, window=(3, None), return_lse=True)
    return o.sin().sum() + lse.square().sum()


def compiled(function: Callable[..., Any], **options: Any) -> Any:
    # AOTAutograd without a code generator: what an operator goes through, in a tenth of the time.
    return torch.compile(function, **{"backend": "aot_eager", "fullgraph": True, **options})


def gradients(function: Callable[..., Any], **options: Any) -> tuple[Any, ...]:
    inputs = leaves(list(x))
    return torch.autograd.grad(function(*inputs), inputs, **options)


# ----------------------------------------------------------------------------------------------------------- compile


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_first_order_is_one_graph(backend: str) -> None:
    torch.testing.assert_close(gradients(compiled(loss, backend=backend)), gradients(loss))


def test_dynamic_shapes() -> None:
    function = compiled(attention, dynamic=True)
    for M, N in ((5, 7), (6, 9), (4, 4)):
        inputs = qkv(M=M, N=N)
        assert torch.equal(function(*inputs, causal=True), attention(*inputs, causal=True))


def test_options_and_layouts() -> None:
    inputs = [t.transpose(1, 2).contiguous() for t in x]
    function = lambda *t: attention(*t, layout="bnhd", scale=0.3, window=(2, 1), return_lse=True)  # noqa: E731
    torch.testing.assert_close(compiled(function)(*inputs), function(*inputs))


def test_the_operators_are_well_formed() -> None:
    from flashbob_cupy.torch import operators

    q, k, v = leaves(list(x))
    options = (True, None, None, None, "bhnd", False)
    torch.library.opcheck(operators.forward_operator, (q, k, v, *options))
    o, lse = (t.detach() for t in operators.forward_operator(q, k, v, *options))
    do, dlse = like([o, lse])
    for given in ((do, None), (None, dlse), (do.requires_grad_(), dlse)):
        torch.library.opcheck(operators.backward_operator, (q, k, v, *given, o, lse, *options))
    q, k, v, do = (t.detach() for t in (q, k, v, do))
    torch.library.opcheck(operators.bob_operator, (q, k, v, do, dlse, o, lse, *u, *options))
    torch.library.opcheck(operators.bob_operator, (q, k, v, do, None, o, lse, None, u[1], None, *options))
    torch.library.opcheck(operators.jvp_operator, (q, k, v, None, u[1], None, o, lse, *options))


def second_order(function: Callable[..., Any]) -> Any:
    inputs = leaves(list(x))
    first = torch.autograd.grad(function(*inputs), inputs, create_graph=True)
    return torch.autograd.grad(sum(g.sin().sum() for g in first), inputs)


def test_second_order_works_where_autograd_is_left_alone_and_raises_where_it_is_compiled() -> None:
    torch.testing.assert_close(second_order(compiled(loss, backend="eager")), second_order(loss))
    with pytest.raises(RuntimeError, match=r"create_graph|double backward"):
        second_order(compiled(loss))


TRANSFORMED = {
    "jvp": lambda q: func.jvp(lambda q: loss(q, *x[1:]), (q,), u[:1])[1],
    "grad": lambda q: func.grad(loss)(q, *x[1:]),
    "grad of grad": lambda q: func.grad(lambda q: func.grad(loss)(q, *x[1:]).sin().sum())(q),
    "jvp of grad": lambda q: func.jvp(lambda q: func.grad(loss)(q, *x[1:]), (q,), u[:1])[1],
}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_transforms_leave_the_graph_or_raise(name: str) -> None:
    function = TRANSFORMED[name]
    with pytest.raises(Exception, match=r"cannot be part of a compiled graph") as caught:
        compiled(function)(x[0])
    assert type(caught.value).__name__ == "Unsupported"
    torch.testing.assert_close(compiled(function, fullgraph=False)(x[0]), function(x[0]))


def test_tangents_are_not_dropped_by_a_compiled_function() -> None:
    function = compiled(loss, backend="eager")
    with torch.autograd.forward_ad.dual_level():
        duals = [torch.autograd.forward_ad.make_dual(a, b) for a, b in zip(x, u, strict=True)]
        with pytest.raises(fb.UnsupportedError, match="forward mode"):
            function(*duals)


def test_importing_the_adapter_does_not_import_the_compiler() -> None:
    code = "import sys, flashbob_cupy.torch; assert not {'torch._dynamo', 'transformers', 'jax'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


# ---------------------------------------------------------------------------------------------------------- tracing

TRACED = {
    "forward": (["forward"], lambda q: attention(q, *x[1:])),
    "gradient": (["forward", "backward"], lambda q: func.grad(loss)(q, *x[1:])),
    "second derivative": (["forward", "backward", "bob", "backward"], TRANSFORMED["grad of grad"]),
    "jvp": (["forward", "jvp"], TRANSFORMED["jvp"]),
    "vmap": (["forward"], lambda q: func.vmap(lambda q: attention(q, *(t[:1] for t in x[1:])))(q[:, None])),
}


@pytest.mark.parametrize("name", TRACED)
def test_a_trace_records_the_operators_and_can_be_replayed(name: str) -> None:
    expected, function = TRACED[name]
    graph = make_fx(function)(x[0])
    recorded = [str(node.target) for node in graph.graph.nodes if "flashbob" in str(node.target)]
    assert recorded == [f"flashbob.{operator}.default" for operator in expected]
    torch.testing.assert_close(graph(u[0]), function(u[0]))


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace")
def test_torch_jit_is_refused() -> None:
    with pytest.raises(fb.UnsupportedError, match=r"torch\.export"):
        torch.jit.trace(lambda q: attention(q, *x[1:]), (x[0],))


def test_export() -> None:
    class Module(torch.nn.Module):
        def forward(self, q: Any) -> Any:
            return attention(q, *x[1:], causal=True)

    exported = torch.export.export(Module(), (x[0],))
    torch.testing.assert_close(exported.module()(u[0]), Module()(u[0]))
    assert "flashbob" in str(exported.graph)


def test_fake_tensors_have_the_shapes_of_real_ones() -> None:
    def derivatives(*inputs: Any) -> list[Any]:
        inputs = leaves(list(inputs))
        o, lse = attention(*inputs, return_lse=True)
        first = torch.autograd.grad(o.sum() + lse.sum(), inputs, create_graph=True)
        return [o, lse, *first, *torch.autograd.grad(sum(g.sum() for g in first), inputs)]

    real = derivatives(*x)
    with FakeTensorMode() as mode:
        fake = derivatives(*map(mode.from_tensor, x))
    assert [(t.shape, t.dtype, t.stride()) for t in fake] == [(t.shape, t.dtype, t.stride()) for t in real]


def test_watching_changes_nothing() -> None:
    with FlopCounterMode(display=False):
        watched = second_order(loss)
    assert all(torch.equal(a, b) for a, b in zip(watched, second_order(loss), strict=True))


def test_the_old_vmap_is_refused_and_the_new_one_named() -> None:
    inputs = leaves(list(x))
    o = attention(*inputs)
    with pytest.raises(TypeError, match=r"torch\.func"):
        torch.autograd.grad(o, inputs, torch.ones(3, *o.shape).double(), is_grads_batched=True)
