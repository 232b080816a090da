"""The dense specification against automatic differentiation, differences, and what masks promise."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flashbob_cupy import reference
from flashbob_cupy.problem import Mask

# B, Hq, Hkv, M, N, D, Dv, mask; every query sees a key, so that other implementations have a value there too.
SHAPES = [
    (2, 3, 3, 7, 7, 5, 5, Mask()),
    (1, 4, 2, 5, 9, 8, 3, Mask(right=0)),
    (2, 2, 1, 6, 6, 4, 6, Mask(left=2, right=1)),
    (1, 2, 2, 9, 5, 4, 4, Mask(left=6)),
]


def inputs(B: int, Hq: int, Hkv: int, M: int, N: int, D: int, Dv: int, seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    shapes = {"q": (B, Hq, M, D), "k": (B, Hkv, N, D), "v": (B, Hkv, N, Dv), "do": (B, Hq, M, Dv), "dlse": (B, Hq, M)}
    arrays = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    return arrays | {f"u{name}": rng.standard_normal(shapes[name]) for name in "qkv"}


def everything(a: dict[str, Any], mask: Mask, scale: float | None) -> dict[str, Any]:
    options: dict[str, Any] = {"mask": mask, "scale": scale}
    qkv, u = (a["q"], a["k"], a["v"]), (a["uq"], a["uk"], a["uv"])
    results = dict(zip(("o", "lse"), reference.forward(*qkv, **options), strict=True))
    first = reference.backward(*qkv, a["do"], dlse=a["dlse"], **options)
    results |= zip(("dq", "dk", "dv"), first, strict=True)
    double = reference.bob(*qkv, a["do"], *u, dlse=a["dlse"], **options)
    results |= zip(("gq", "gk", "gv", "gdo", "gdlse"), double, strict=True)
    return results | dict(zip(("to", "tlse"), reference.jvp(*qkv, *u, **options), strict=True))


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("shape", SHAPES)
def test_torch_double_backward(shape: tuple[Any, ...], scale: float | None) -> None:
    torch = pytest.importorskip("torch")
    *sizes, mask = shape
    a = inputs(*sizes)
    ours = everything(a, mask, scale)
    t = {name: torch.tensor(x, requires_grad=not name.startswith("u")) for name, x in a.items()}
    g = t["q"].shape[1] // t["k"].shape[1]
    seen = torch.tensor(reference.visible(mask, sizes[3], sizes[4]))

    def attention(q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        tau = q.shape[-1] ** -0.5 if scale is None else scale
        scores = (tau * q @ k.repeat_interleave(g, 1).mT).masked_fill(~seen, -torch.inf)
        return scores.softmax(-1) @ v.repeat_interleave(g, 1), scores.logsumexp(-1)

    qkv, u = (t["q"], t["k"], t["v"]), (t["uq"], t["uk"], t["uv"])
    o, lse = attention(*qkv)
    first = torch.autograd.grad((o, lse), qkv, (t["do"], t["dlse"]), create_graph=True)
    double = torch.autograd.grad(first, (*qkv, t["do"], t["dlse"]), u)
    _, tangents = torch.func.jvp(attention, tuple(x.detach() for x in qkv), u)
    theirs = (o, lse, *first, *double, *tangents)
    for (name, mine), other in zip(ours.items(), theirs, strict=True):
        np.testing.assert_allclose(mine, other.detach().numpy(), rtol=1e-11, atol=1e-12, err_msg=name)


def test_jax_grad_of_grad() -> None:
    jax = pytest.importorskip("jax")
    *sizes, mask = SHAPES[1]
    a = inputs(*sizes)
    ours = everything(a, mask, None)
    seen = reference.visible(mask, sizes[3], sizes[4])
    g = a["q"].shape[1] // a["k"].shape[1]

    with jax.enable_x64(True):
        np_ = jax.numpy

        def loss(q: Any, k: Any, v: Any, do: Any, dlse: Any) -> Any:
            scores = np_.where(seen, q.shape[-1] ** -0.5 * q @ np_.repeat(k, g, 1).swapaxes(-1, -2), -np_.inf)
            o = jax.nn.softmax(scores) @ np_.repeat(v, g, 1)
            return (o * do).sum() + (jax.nn.logsumexp(scores, axis=-1) * dlse).sum()

        first = jax.grad(loss, (0, 1, 2))

        def along(*operands: Any) -> Any:
            return sum((x * a[u]).sum() for x, u in zip(first(*operands), ("uq", "uk", "uv"), strict=True))

        operands = [np_.asarray(a[name]) for name in ("q", "k", "v", "do", "dlse")]
        theirs = dict(zip(("dq", "dk", "dv"), first(*operands), strict=True))
        theirs |= zip(("gq", "gk", "gv", "gdo", "gdlse"), jax.grad(along, (0, 1, 2, 3, 4))(*operands), strict=True)
        for name, other in theirs.items():
            np.testing.assert_allclose(ours[name], np.asarray(other), rtol=1e-11, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("shape", SHAPES)
def test_central_differences(shape: tuple[Any, ...]) -> None:
    """bob differentiates backward and jvp differentiates forward; the error of a difference falls as its square."""
    *sizes, mask = shape
    a = inputs(*sizes)
    ours = everything(a, mask, None)

    def moved(h: float) -> dict[str, Any]:
        forth = everything(a | {n: a[n] + h * a[f"u{n}"] for n in "qkv"}, mask, None)
        back = everything(a | {n: a[n] - h * a[f"u{n}"] for n in "qkv"}, mask, None)
        return {name: (forth[name] - back[name]) / (2 * h) for name in forth}

    coarse, fine = moved(1e-3), moved(5e-4)
    pairs = {"gq": "dq", "gk": "dk", "gv": "dv", "gdo": "o", "gdlse": "lse", "to": "o", "tlse": "lse"}
    for derivative, of in pairs.items():
        extrapolated = fine[of] + (fine[of] - coarse[of]) / 3
        error = np.linalg.norm(ours[derivative] - extrapolated)
        assert error <= np.linalg.norm(fine[of] - coarse[of]) / 100, derivative


@pytest.mark.parametrize(("M", "N"), [(2, 5), (5, 2), (1, 4), (3, 3)])
def test_causal_is_aligned_at_the_bottom_right(M: int, N: int) -> None:
    seen = reference.visible(Mask(right=0), M, N)
    assert [[bool(s) for s in row] for row in seen] == [[j <= i + N - M for j in range(N)] for i in range(M)]


def test_window_includes_both_ends() -> None:
    seen = reference.visible(Mask(left=3, right=0), 10, 10)
    assert np.flatnonzero(seen[9]).tolist() == [6, 7, 8, 9]
    assert np.flatnonzero(reference.visible(Mask(left=1, right=2), 10, 10)[4]).tolist() == [3, 4, 5, 6]


def test_rows_with_no_key_and_keys_no_query_sees() -> None:
    """Whatever stands there, NaN included, is not read, and the results there are exactly zero."""
    mask = Mask(left=2, right=0)
    a = inputs(1, 2, 1, 7, 4, 3, 3)  # rows 0…2 see no key
    poisoned = {name: x.copy() for name, x in a.items()}
    for name in ("q", "uq", "do", "dlse"):
        poisoned[name][:, :, :3] = np.nan
        a[name][:, :, :3] = 0
    clean, dirty = everything(a, mask, None), everything(poisoned, mask, None)
    for name in clean:
        np.testing.assert_array_equal(clean[name], dirty[name], err_msg=name)
        if name in ("o", "dq", "gq", "gdo", "gdlse", "to", "tlse"):
            assert not dirty[name][:, :, :3].any(), name
    assert (dirty["lse"][:, :, :3] == -np.inf).all()

    a = inputs(1, 2, 2, 3, 9, 3, 3)  # keys 0…3 are seen by no query
    poisoned = {name: x.copy() for name, x in a.items()}
    for name in ("k", "v", "uk", "uv"):
        poisoned[name][:, :, :4] = np.inf
    clean, dirty = everything(a, mask, None), everything(poisoned, mask, None)
    for name in clean:
        np.testing.assert_array_equal(clean[name], dirty[name], err_msg=name)
        if name in ("dk", "dv", "gk", "gv"):
            assert not dirty[name][:, :, :4].any(), name


def test_no_keys_at_all() -> None:
    o, lse = reference.forward(*(np.ones((1, 2, n, 4)) for n in (3, 0, 0)))
    assert not o.any()
    assert (lse == -np.inf).all()


def test_none_is_zero() -> None:
    a = inputs(1, 2, 2, 4, 5, 3, 3)
    zero = a | {name: np.zeros_like(a[name]) for name in ("uq", "uv", "dlse")}
    none = a | {"uq": None, "uv": None, "dlse": None}
    for name, x in everything(zero, Mask(right=0), None).items():
        np.testing.assert_array_equal(everything(none, Mask(right=0), None)[name], x)
