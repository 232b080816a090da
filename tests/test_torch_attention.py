"""`flashbob_cupy.torch.attention` under autograd: values within budget, every subset of inputs, nothing kept alive."""

from __future__ import annotations

import gc
import itertools
import warnings
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch.autograd import forward_ad, gradcheck, gradgradcheck  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402
from torch_dense import dense, leaves, like, qkv  # noqa: E402

import flashbob_cupy as fb  # noqa: E402
from flashbob_cupy import accuracy  # noqa: E402
from flashbob_cupy.problem import OUTPUTS, Mask  # noqa: E402
from flashbob_cupy.torch import attention  # noqa: E402

OPTIONS: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"causal": True, "scale": 0.3, "window": (2, None)},
    {"window": (3, 1), "layout": "bnhd"},
]


def numpy(x: Any) -> Any:
    return None if x is None else x.detach().to(torch.float64).numpy()


def judge(op: str, results: Any, operands: dict[str, Any], dtype: str, **options: Any) -> None:
    """Every result within the budget of accuracy.py."""
    operands = {name: numpy(x) for name, x in operands.items()}
    truth = accuracy.truth(op, **operands, **options)
    budgets = accuracy.budgets(op, **operands, **options, dtype=dtype, expected=truth)
    for name, result in zip(OUTPUTS[op], results, strict=False):
        verdict = accuracy.compare(numpy(result), truth[name], budgets[name])
        assert verdict.ok, f"{op} {name}: {verdict}"


def in_layout(tensors: list[Any], options: dict[str, Any]) -> list[Any]:
    swap = options.get("layout") == "bnhd"
    return [x.transpose(1, 2).contiguous() if swap else x for x in tensors]


# ------------------------------------------------------------------------------------------------------------ values


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("causal", [False, True])
def test_both_derivatives_are_within_budget(dtype: str, causal: bool) -> None:
    q, k, v = leaves(qkv(2, 4, 2, 33, 45, 16, 8, dtype=getattr(torch, dtype)))
    u = dict(zip(("uq", "uk", "uv"), like([q, k, v]), strict=True))
    o = attention(q, k, v, causal=causal)
    do = like([o], 2)[0].requires_grad_()
    gradients = torch.autograd.grad(o, (q, k, v), do, create_graph=True)
    second = torch.autograd.grad(gradients, (q, k, v, do), tuple(u.values()))
    options = {"mask": Mask(right=0 if causal else None)}
    operands = {"q": q, "k": k, "v": v}
    judge("forward", (o,), operands, dtype, **options)
    judge("backward", gradients, {**operands, "do": do}, dtype, **options)
    judge("bob", second, {**operands, "do": do, **u}, dtype, **options)


def test_gradient_penalty_in_half_precision() -> None:
    q, k, v = leaves(qkv(32, 8, 8, 128, 128, 64, 64, dtype=torch.float16))
    o = attention(q, k, v)
    (dq,) = torch.autograd.grad(o, q, torch.ones_like(o), create_graph=True)
    penalty = dq.square().sum() / 32
    (uq,) = torch.autograd.grad(penalty, dq, retain_graph=True)
    second = torch.autograd.grad(penalty, (q, k, v))
    few = slice(0, 32, 8)  # the truth of every head would take long
    operands = {"q": q, "k": k, "v": v, "do": torch.ones_like(o), "uq": uq, "uk": None, "uv": None}
    operands = {name: None if x is None else x[few] for name, x in operands.items()}
    judge("bob", [g[few] for g in second], operands, "float16")


def test_broadcast_cotangents_are_as_if_materialised() -> None:
    def second(cotangent: Any) -> Any:
        q, k, v = leaves(qkv())
        o = attention(q, k, v)
        gradients = torch.autograd.grad(o, (q, k, v), cotangent(o), create_graph=True)
        return torch.autograd.grad(sum(g.sum() for g in gradients), (q, k, v))

    broadcast, copied = second(lambda o: torch.ones(()).double().expand(o.shape)), second(torch.ones_like)
    assert all(torch.equal(a, b) for a, b in zip(broadcast, copied, strict=True))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gradcheck_in_both_modes(options: dict[str, Any]) -> None:
    inputs = leaves(in_layout(qkv(1, 2, 1, 3, 5, 4, 3), options))
    function = lambda q, k, v: attention(q, k, v, return_lse=True, **options)  # noqa: E731
    assert gradcheck(function, inputs, check_forward_ad=True)
    assert gradgradcheck(function, inputs, check_fwd_over_rev=True)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_jvp_can_be_differentiated(options: dict[str, Any]) -> None:
    inputs = leaves(in_layout(qkv(1, 2, 1, 3, 5, 4, 3), options))
    tangents = leaves(like(inputs))

    def jvp(*arrays: Any) -> Any:
        with forward_ad.dual_level():
            duals = [forward_ad.make_dual(x, t) for x, t in zip(arrays[:3], arrays[3:], strict=True)]
            results = attention(*duals, return_lse=True, **options)
            return tuple(forward_ad.unpack_dual(x).tangent for x in results)

    assert gradcheck(jvp, (*inputs, *tangents))


def test_rows_without_a_key_have_no_derivatives() -> None:
    q, k, v = leaves(qkv(1, 1, 1, 5, 2))
    with torch.no_grad():
        q[:, :, :3] = torch.nan
    o, lse = attention(q, k, v, causal=True, return_lse=True)
    assert torch.equal(o[:, :, :3], torch.zeros_like(o[:, :, :3]))
    assert (lse[:, :, :3] == -torch.inf).all()
    do = torch.full_like(o, 1e4).requires_grad_()
    gradients = torch.autograd.grad(o, (q, k, v), do, create_graph=True)
    second = torch.autograd.grad(sum(g.sum() for g in gradients), (q, k, v, do))
    for result in (*gradients, *second):
        assert result.isfinite().all()
    for result in (gradients[0], second[0], second[3]):
        assert (result[:, :, :3] == 0).all()


# ---------------------------------------------------------------------------------------------------------- autograd


@pytest.mark.parametrize("required", [r for r in itertools.product([False, True], repeat=4) if any(r)], ids=str)
def test_every_subset_that_requires_grad(required: tuple[bool, ...]) -> None:
    def first_and_second(function: Any) -> list[Any]:
        q, k, v = qkv()
        arrays = [q, k, v, like([function(q, k, v)], 2)[0]]
        for x, r in zip(arrays, required, strict=True):
            x.requires_grad_(r)
        q, k, v, do = arrays
        wanted = [x for x in (q, k, v) if x.requires_grad]
        o = function(q, k, v)
        if not wanted:
            assert not o.requires_grad
            return []
        gradients = torch.autograd.grad(o, wanted, do, create_graph=True)
        # The squares see to it that there is something to differentiate: dv does not depend on v.
        squares = sum(x.square().sum() for x in arrays if x.requires_grad)
        (squares + sum((g.sin() * g).sum() for g in gradients)).backward()
        return [*gradients, *(x.grad for x in arrays)]

    ours, expected = first_and_second(attention), first_and_second(dense)
    for a, b in zip(ours, expected, strict=True):
        assert (a is None) == (b is None)
        if b is not None:
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("through", ["o", "lse", "both"])
def test_gradients_through_lse(through: str) -> None:
    def derivatives(function: Any) -> Any:
        inputs = leaves(qkv(1, 3, 3, 65, 130, 8, 8))
        o, lse = function(*inputs, causal=True, return_lse=True)
        loss = 0
        if through != "lse":
            loss = loss + o.sin().sum()
        if through != "o":
            loss = loss + lse.square().sum()
        gradients = torch.autograd.grad(loss, inputs, create_graph=True, materialize_grads=True)
        norm = sum(g.square().sum() for g in gradients)
        return *gradients, *torch.autograd.grad(norm, inputs, materialize_grads=True)

    for a, b in zip(derivatives(attention), derivatives(dense), strict=True):
        torch.testing.assert_close(a, b)


def test_the_gradient_of_dlse_is_the_tangent_of_lse() -> None:
    q, k, v = leaves(qkv())
    o, lse = attention(q, k, v, return_lse=True)
    dlse = like([lse], 3)[0].requires_grad_()
    u = like([q, k, v])
    gradients = torch.autograd.grad((o, lse), (q, k, v), (torch.ones_like(o), dlse), create_graph=True)
    (alpha,) = torch.autograd.grad(gradients, dlse, u)
    plain = [x.detach() for x in (q, k, v, *u, o, lse)]
    torch.testing.assert_close(alpha, fb.jvp(*plain).tlse)


def test_absent_cotangents_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from flashbob_cupy.torch import operators

    seen = []
    run = operators._run

    def spy(op: str, arguments: tuple[Any, ...], options: Any) -> Any:
        if op != "forward":
            seen.append((op, [x is None for x in arguments]))
        return run(op, arguments, options)

    monkeypatch.setattr(operators, "_run", spy)
    q, k, v = leaves(qkv())
    o = attention(q, k, v)
    do = torch.ones_like(o).requires_grad_()
    _, dk, _ = torch.autograd.grad(o, (q, k, v), do, create_graph=True)
    torch.autograd.grad(dk.sum(), (q, do))
    assert seen == [
        ("backward", [False] * 6 + [True]),
        ("bob", [False] * 4 + [True, False, True] + [False] * 2 + [True]),
    ]
    seen.clear()
    q = q.detach()
    o = attention(q, k.detach(), v)
    (dv,) = torch.autograd.grad(o, v, do, create_graph=True)
    torch.autograd.grad(dv.sum(), do)
    assert [op for op, _ in seen] == ["backward", "bob"]
    seen.clear()
    with torch.no_grad():
        attention(q, k, v)
    assert seen == []


def test_a_gradient_that_only_depends_on_its_cotangent_takes_the_row_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    from flashbob_cupy.torch import chain, operators

    run, seen = operators._run, []
    monkeypatch.setattr(operators, "_run", lambda op, *rest: seen.append(op) or run(op, *rest))
    q, k, v = qkv()
    o, lse = fb.forward(q, k, v)
    do, u = like([o])[0].requires_grad_(), like([q, k, v], 2)
    options = operators.Options(causal=False, scale=None, window=None, layout="bhnd", deterministic=False)
    gradients = chain.Backward.apply(q, k, v, do, None, o, lse, options)
    (gdo,) = torch.autograd.grad(gradients, do, u)
    assert torch.equal(gdo, fb.jvp(q, k, v, *u, o, lse).to)
    assert seen == ["backward", "jvp"]  # and not the whole double backward


def test_second_derivatives_are_linear_in_their_vectors_and_differentiable_in_them() -> None:
    def twice(function: Any) -> Any:
        inputs = leaves(qkv())
        gradients = torch.autograd.grad(function(*inputs).sin().sum(), inputs, create_graph=True)
        u = leaves(like(inputs))
        products = torch.autograd.grad(gradients, inputs, u, create_graph=True)
        return torch.autograd.grad(sum(p.sin().sum() for p in products), u)

    for a, b in zip(twice(attention), twice(dense), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", ["hvp", "vhp", "jvp", "vjp", "hessian", "jacobian"])
def test_torch_autograd_functional(name: str) -> None:
    inputs = tuple(qkv(1, 2, 1, 3, 4, 2, 2))

    def derivative(function: Any) -> Any:
        loss = lambda q, k, v: function(q, k, v, causal=True).sin().sum()  # noqa: E731
        vector = {"hvp": (tuple(like(list(inputs))),), "vhp": (tuple(like(list(inputs))),)}
        vector["jvp"] = vector["hvp"]
        return getattr(torch.autograd.functional, name)(loss, inputs, *vector.get(name, ()))

    torch.testing.assert_close(derivative(attention), derivative(dense))


def test_the_second_derivative_does_not_pass_through_the_forward() -> None:
    inputs = leaves(qkv())
    first = torch.autograd.grad(attention(*inputs).sum(), inputs, create_graph=True)
    nodes = [node for node, _ in first[0].grad_fn.next_functions if node is not None]
    assert [getattr(node, "variable", None) for node in nodes] == inputs


@pytest.mark.parametrize("name", ["q", "k", "v", "o", "lse", "do"])
def test_what_was_saved_must_not_have_been_changed(name: str) -> None:
    arrays = dict(zip("qkv", qkv(), strict=True))
    inputs = [x.clone().requires_grad_() for x in arrays.values()]
    arrays = {key: x.view_as(x) for key, x in zip(arrays, inputs, strict=True)}
    arrays["o"], arrays["lse"] = attention(*arrays.values(), return_lse=True)
    arrays["do"] = torch.ones_like(arrays["o"])
    first = torch.autograd.grad(arrays["o"], inputs, arrays["do"], create_graph=True)
    with torch.no_grad():
        arrays[name].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(first, inputs, like(inputs), retain_graph=True)
    if name != "do":
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(arrays["o"], inputs, torch.ones_like(arrays["o"]))


def test_parameters_and_subclasses_are_tensors() -> None:
    class Subclass(torch.Tensor):
        pass

    q, k, v = qkv()
    results = []
    for kind in (torch.Tensor, torch.nn.Parameter, Subclass):
        inputs = [x.clone().as_subclass(kind) if kind is Subclass else kind(x.clone()) for x in (q, k, v)]
        inputs = [x.requires_grad_() for x in inputs]
        o = attention(*inputs)
        first = torch.autograd.grad(o, inputs, torch.ones_like(o), create_graph=True)
        results.append([o, *first, *torch.autograd.grad(first, inputs, like(inputs))])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("kind", [torch.Tensor, torch.nn.Parameter])
def test_a_step_that_was_made_before_is_recognised(monkeypatch: pytest.MonkeyPatch, kind: type) -> None:
    from flashbob_cupy.torch import operators

    def step() -> None:
        inputs = [kind(x.clone()).requires_grad_() for x in qkv()]
        o = attention(*inputs, causal=True)
        first = torch.autograd.grad(o, inputs, torch.ones_like(o), create_graph=True)
        torch.autograd.grad(first, inputs, like(inputs))

    step()
    read: list[Any] = []
    monkeypatch.setattr(operators._kind(), "read", lambda names, *rest: read.append(names))
    step()
    assert read == []


def test_third_derivatives_raise() -> None:
    q, k, v = leaves(qkv())
    gradients = torch.autograd.grad(attention(q, k, v).sin().sum(), (q, k, v), create_graph=True)
    second = torch.autograd.grad(sum(g.sin().sum() for g in gradients), (q, k, v), create_graph=True)
    with pytest.raises(fb.UnsupportedError, match="third"):
        torch.autograd.grad(second[0].sum(), k)


def test_checkpoint() -> None:
    def derivatives(call: Any) -> Any:
        inputs = leaves(qkv())
        loss = call(lambda q, k, v: attention(q.sin(), k, v), *inputs).square().sum()
        gradients = torch.autograd.grad(loss, inputs, create_graph=True)
        return *gradients, *torch.autograd.grad(sum(g.square().sum() for g in gradients), inputs)

    plain = derivatives(lambda function, *inputs: function(*inputs))
    recomputed = derivatives(lambda function, *inputs: checkpoint(function, *inputs, use_reentrant=False))
    assert all(torch.equal(a, b) for a, b in zip(plain, recomputed, strict=True))


@pytest.mark.parametrize("dtypes", [("float32",) * 3, ("float32", "bfloat16", "float32"), ("float64",) * 3], ids=str)
def test_autocast_is_that_of_torchs_own_attention(dtypes: tuple[str, ...]) -> None:
    inputs = [x.to(getattr(torch, d)).requires_grad_() for x, d in zip(qkv(1, 2, 2), dtypes, strict=True)]
    with torch.autocast("cpu", torch.bfloat16):
        o = attention(*inputs)
        own = torch.nn.functional.scaled_dot_product_attention(*inputs)
    assert o.dtype == own.dtype
    gradients = torch.autograd.grad(o.float().sum(), inputs, create_graph=True)
    second = torch.autograd.grad(sum(g.float().sum() for g in gradients), inputs)
    assert [g.dtype for g in (*gradients, *second)] == [x.dtype for x in inputs] * 2
    half = leaves([x.detach().to(o.dtype) for x in inputs])
    assert torch.equal(o, attention(*half))


def test_maml_with_two_inner_steps() -> None:
    x, target = qkv(2, 1, 1, 6, 6, 8, 8, seed=3)[:2]

    def outer(function: Any) -> Any:
        weights = leaves(qkv(1, 1, 1, 8, 8, 8, 8, seed=4))

        def loss(w: Any, batch: int) -> Any:
            q, k, v = (x[batch] @ matrix[0, 0] for matrix in w)
            return (function(q[None], k[None], v[None], causal=True)[0] - target[batch]).square().mean()

        adapted = weights
        for _ in range(2):
            gradients = torch.autograd.grad(loss(adapted, 0), adapted, create_graph=True)
            adapted = [w - 0.1 * g for w, g in zip(adapted, gradients, strict=True)]
        return torch.autograd.grad(loss(adapted, 1), weights)

    torch.testing.assert_close(outer(attention), outer(dense))


# ------------------------------------------------------------------------------------------------- shapes and options


@pytest.mark.parametrize("leading", [(3,), (3, 2), ()], ids=str)
@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
def test_leading_axes_are_a_loop(leading: tuple[int, ...], layout: str) -> None:
    batched = qkv(2, 4, 2, leading=(*leading,)) if leading else [x[0] for x in qkv(1, 4, 2)]
    if layout == "bnhd":
        batched = [x.transpose(-3, -2).contiguous() for x in batched]
    inputs = leaves(batched)
    o, lse = attention(*inputs, causal=True, layout=layout, return_lse=True)
    gradients = torch.autograd.grad(o.sin().sum() + lse.sum(), inputs, create_graph=True)
    second = torch.autograd.grad(sum(g.sin().sum() for g in gradients), inputs)
    expected_inputs = leaves(batched)
    o_, lse_ = dense(*expected_inputs, causal=True, layout=layout, return_lse=True)
    expected = torch.autograd.grad(o_.sin().sum() + lse_.sum(), expected_inputs, create_graph=True)
    expected_second = torch.autograd.grad(sum(g.sin().sum() for g in expected), expected_inputs)
    torch.testing.assert_close((o, lse, *gradients, *second), (o_, lse_, *expected, *expected_second))


def test_deterministic_algorithms_reach_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    from flashbob_cupy.torch import operators

    asked, run = [], operators._run

    def spy(op: str, arguments: tuple[Any, ...], options: Any) -> Any:
        if op == "bob":
            asked.append(options.values[4])
        return run(op, arguments, options)

    monkeypatch.setattr(operators, "_run", spy)

    def second(**options: Any) -> None:
        q, k, v = leaves(qkv())
        gradients = torch.autograd.grad(attention(q, k, v, **options).sum(), (q, k, v), create_graph=True)
        torch.autograd.grad(gradients[0].sum(), q)

    second()
    second(deterministic=True)
    torch.use_deterministic_algorithms(True)
    try:
        second()
    finally:
        torch.use_deterministic_algorithms(False)
    assert asked == [False, True, True]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": np.zeros((1, 1, 2, 4))}, TypeError, "q must be a torch tensor; got ndarray"),
        ({"k": None}, TypeError, "k must be a torch tensor; got NoneType"),
        ({"v": torch.zeros(2, 2, 7, 3)}, TypeError, "v must be float64 like q; got float32"),
        ({"k": torch.zeros(2, 3, 7, 4).double(), "v": torch.zeros(2, 3, 7, 3).double()}, ValueError, "multiple"),
        ({"k": torch.zeros(5, 2, 2, 7, 4).double()}, ValueError, "k must have"),
        ({"q": torch.zeros(5, 2, 4, 5, 4).double()}, ValueError, "k must have three axes after the leading ones of q"),
        ({"scale": "1"}, TypeError, "scale must be"),
        ({"window": (1, -1)}, ValueError, "window right must be 0 or more"),
        ({"layout": "hnd"}, ValueError, "layout must be"),
        ({"causal": 1}, TypeError, "causal must be True or False"),
    ],
    ids=lambda x: str(x)[:30],
)
def test_errors_name_the_argument(change: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = dict(zip("qkv", qkv(), strict=True))
    with pytest.raises(error, match=message):
        attention(**{**arguments, **change})


def test_array_functions_point_here() -> None:
    q, k, v = leaves(qkv())
    with pytest.raises(TypeError, match=r"flashbob_cupy\.torch\.attention"):
        fb.forward(q, k, v)


# ------------------------------------------------------------------------------------------------------------ memory


def live_tensors() -> int:
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # objects of other libraries that deprecate being looked at
        return sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects())


def test_nothing_is_kept_without_create_graph() -> None:
    q, k, v = leaves(qkv())
    saved: list[tuple[int, ...]] = []

    def pack(x: Any) -> Any:
        saved.append(tuple(x.shape))
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        o = attention(q, k, v)
        assert len(saved) == 5  # q, k, v, o, lse
        do = torch.ones_like(o)
        saved.clear()
        gradients = torch.autograd.grad(o, (q, k, v), do, retain_graph=True)
        assert saved == []
        assert not any(g.requires_grad for g in gradients)
        gradients = torch.autograd.grad(o, (q, k, v), do, create_graph=True)
        assert len(saved) == 6  # q, k, v, do, o, lse
        saved.clear()
        second = torch.autograd.grad(gradients, (q, k, v), like([q, k, v]))
        assert saved == []
        assert not any(g.requires_grad for g in second)
        attention(*(x.detach() for x in (q, k, v)))
        assert saved == []


def test_hutchinson_steps_do_not_accumulate() -> None:
    inputs = leaves(qkv())

    def step() -> Any:
        gradients = torch.autograd.grad(attention(*inputs).sin().sum(), inputs, create_graph=True)
        vectors = [torch.randn_like(g).sign() for g in gradients]
        products = torch.autograd.grad(gradients, inputs, vectors)
        return [float((u * p).sum()) for u, p in zip(vectors, products, strict=True)]

    assert all(np.isfinite(step()))
    before = live_tensors()
    for _ in range(5):
        step()
    assert live_tensors() <= before
