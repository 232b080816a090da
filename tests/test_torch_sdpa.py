"""`scaled_dot_product_attention` served from here: what PyTorch returns, with its causal alignment, never less."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import torch.nn.functional as F  # noqa: E402
from torch_dense import leaves, qkv  # noqa: E402

import flashbob_cupy as fb  # noqa: E402
from flashbob_cupy.torch import attention, install, installed, sdpa, uninstall  # noqa: E402

own = F.scaled_dot_product_attention


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Installed; a list of who served each call."""
    log: list[str] = []
    with installed():
        monkeypatch.setattr(sdpa, "attention", lambda *a, **k: log.append("ours") or attention(*a, **k))
        monkeypatch.setattr(sdpa, "_original", lambda *a, **k: log.append("PyTorch") or own(*a, **k))
        yield log
        monkeypatch.undo()


@pytest.mark.parametrize(("M", "N"), [(5, 7), (7, 5), (6, 6), (1, 4), (4, 1)])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("Hq", "Hkv"), [(4, 4), (4, 2)])
def test_values_and_derivatives(M: int, N: int, is_causal: bool, Hq: int, Hkv: int, served: list[str]) -> None:
    def derivatives(function: Any) -> Any:
        inputs = leaves(qkv(2, Hq, Hkv, M, N))
        o = function(*inputs, is_causal=is_causal, scale=0.7, enable_gqa=Hq != Hkv)
        first = torch.autograd.grad(o.sin().sum(), inputs, create_graph=True)
        return o, *first, *torch.autograd.grad(sum(g.sin().sum() for g in first), inputs)

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        expected = derivatives(own)
    torch.testing.assert_close(derivatives(F.scaled_dot_product_attention), expected)
    assert served == ["ours"]


@pytest.mark.parametrize("leading", [(), (3,), (3, 2)], ids=str)
def test_any_number_of_leading_axes(leading: tuple[int, ...], served: list[str]) -> None:
    inputs = [x.reshape(*leading, *x.shape[-2:]) for x in qkv(1, 1, 1, leading=leading)] if leading else None
    inputs = inputs or [x[0] for x in qkv(1, 3, 3)]
    torch.testing.assert_close(F.scaled_dot_product_attention(*inputs), own(*inputs))
    assert served == ["ours"]


q, k, v = qkv(2, 4, 4)
PASSED_ON = {
    "mask": ((q, k, v), {"attn_mask": torch.ones(5, 7, dtype=torch.bool).tril(1)}),
    "bias": ((q, k, v), {"attn_mask": torch.linspace(0, 1, 35).reshape(5, 7).double()}),
    "dropout": ((q, k, v), {"dropout_p": 1.0}),
    "broadcast batch": ((q, k[:1], v[:1]), {}),
    "broadcast heads": ((q, k[:, :1], v[:, :1]), {}),
    "two axes": ((q[0, 0], k[0, 0], v[0, 0]), {}),
}


@pytest.mark.parametrize("name", PASSED_ON)
def test_what_is_not_ours_goes_to_pytorch(name: str, served: list[str]) -> None:
    arguments, options = PASSED_ON[name]
    torch.testing.assert_close(F.scaled_dot_product_attention(*arguments, **options), own(*arguments, **options))
    assert served == ["PyTorch"]


@pytest.mark.parametrize("name", PASSED_ON)
def test_strict_refuses_it_and_says_why(name: str) -> None:
    arguments, options = PASSED_ON[name]
    with installed(strict=True), pytest.raises(fb.UnsupportedError, match="cannot serve this"):
        F.scaled_dot_product_attention(*arguments, **options)


@pytest.mark.parametrize("arguments", [(q, k, v[..., :3, :]), (q, k[..., :2], v), (q.float(), k, v), (q.long(), k, v)])
def test_errors_are_pytorchs(arguments: tuple[Any, ...], served: list[str]) -> None:
    with pytest.raises((RuntimeError, ValueError)):
        F.scaled_dot_product_attention(*arguments)
    assert served == ["PyTorch"]


def test_autocast(served: list[str]) -> None:
    mixed = (q.float(), k.bfloat16(), v.float())
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(F.scaled_dot_product_attention(*mixed), own(*mixed))
    assert served == ["ours"]


def test_modules_of_pytorch_use_it(served: list[str]) -> None:
    torch.manual_seed(0)
    layer = torch.nn.MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64)
    x = torch.randn(2, 5, 8, dtype=torch.float64, requires_grad=True)
    layer(x, x, x, need_weights=False)[0].sum().backward()
    assert served == ["ours"]


def test_a_compiled_function_uses_it(served: list[str]) -> None:
    torch._dynamo.reset()
    function = torch.compile(
        lambda *x: F.scaled_dot_product_attention(*x, is_causal=True), backend="aot_eager", fullgraph=True
    )
    inputs = qkv(2, 4, 4, 7, 5)
    torch.testing.assert_close(function(*inputs), own(*inputs, is_causal=True))
    torch._dynamo.reset()


def test_install_and_uninstall() -> None:
    assert F.scaled_dot_product_attention is own
    uninstall()
    assert F.scaled_dot_product_attention is own
    install()
    install()
    try:
        assert F.scaled_dot_product_attention is sdpa.scaled_dot_product_attention
        with installed(strict=True), pytest.raises(fb.UnsupportedError):
            F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
        F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
    finally:
        uninstall()
    assert F.scaled_dot_product_attention is own


def test_uninstall_does_not_undo_the_work_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    with installed():
        with monkeypatch.context() as patch:
            patch.setattr(F, "scaled_dot_product_attention", own)
            with pytest.raises(RuntimeError, match="replaced by something else"):
                uninstall()
        assert F.scaled_dot_product_attention is sdpa.scaled_dot_product_attention
    assert F.scaled_dot_product_attention is own
