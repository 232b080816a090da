"""Properties of the public functions that need no reference implementation, over shapes and options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from engine import NUMPY
from hypothesis import given, settings
from hypothesis import strategies as st

import flashbob_cupy as fb
from flashbob_cupy import accuracy
from flashbob_cupy.problem import Mask

COTANGENTS = ("uq", "uk", "uv")
properties = settings(max_examples=25, deadline=None, derandomize=True)


@dataclass
class Draw:
    """Inputs of `bob` and its options."""

    arrays: dict[str, Any]
    options: dict[str, Any]

    @property
    def mask(self) -> Mask:
        left, right = self.options["window"] or (None, None)
        return Mask(left, 0 if self.options["causal"] else right)

    def forward(self, **changed: Any) -> Any:
        a = {**self.arrays, **changed}
        return fb.forward(a["q"], a["k"], a["v"], **self.options)

    def bob(self, **changed: Any) -> dict[str, Any]:
        a = {**self.arrays, **changed}
        o, lse = self.forward(**changed)
        names = ("q", "k", "v", "do", *COTANGENTS)
        return fb.bob(*(a[n] for n in names), o, lse, **self.options)._asdict()

    def backward(self) -> dict[str, Any]:
        a = self.arrays
        o, lse = self.forward()
        return fb.backward(a["q"], a["k"], a["v"], a["do"], o, lse, **self.options)._asdict()

    def budgets(self, op: str, **changed: Any) -> dict[str, Any]:
        """What rounding may do, one absolute norm per output."""
        names = {"forward": "q k v", "backward": "q k v do"}.get(op, "q k v do uq uk uv").split()
        a = {name: x for name, x in {**self.arrays, **changed}.items() if name in names}
        heads = accuracy.budgets(op, **a, mask=self.mask, scale=self.options["scale"])
        return {name: float(np.linalg.norm(budget)) for name, budget in heads.items()}


@st.composite
def draws(draw: st.DrawFn, dtypes: tuple[str, ...] = tuple(NUMPY), keys: int | None = None) -> Draw:
    dtype = draw(st.sampled_from(dtypes))
    B, Hkv, group = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    M, N = draw(st.integers(1, 20)), draw(st.integers(1, 20)) if keys is None else keys
    D, Dv = draw(st.integers(1, 17)), draw(st.integers(1, 17))
    bound = st.none() | st.integers(0, 6)
    options = {
        "causal": draw(st.booleans()),
        "window": draw(st.none() | st.tuples(bound, bound)),
        "scale": draw(st.none() | st.just(0.0) | st.floats(0.01, 1) | st.floats(-1, -0.01)),
    }
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shapes = {"q": (B, Hkv * group, M, D), "k": (B, Hkv, N, D), "v": (B, Hkv, N, Dv), "do": (B, Hkv * group, M, Dv)}
    shapes |= {f"u{name}": shapes[name] for name in "qkv"}
    return Draw({name: rng.standard_normal(shape).astype(NUMPY[dtype]) for name, shape in shapes.items()}, options)


def inner(a: Any, b: Any) -> float:
    return float(np.sum(a.astype(np.float64) * b.astype(np.float64)))


def norm(x: Any) -> float:
    return float(np.linalg.norm(x.astype(np.float64)))


@properties
@given(d=draws(dtypes=("bfloat16", "float32", "float64")), exponent=st.integers(-6, 6))
def test_linear_in_the_cotangents(d: Draw, exponent: int) -> None:
    """Scaling U by a power of two scales every result exactly; float16 would leave its range of exponents."""
    factor = 2.0**exponent
    once = d.bob()
    scaled = d.bob(**{name: (d.arrays[name] * d.arrays[name].dtype.type(factor)) for name in COTANGENTS})
    zero = d.bob(**{name: np.zeros_like(d.arrays[name]) for name in COTANGENTS})
    none = d.bob(**dict.fromkeys(COTANGENTS))
    for name, x in once.items():
        np.testing.assert_array_equal(scaled[name], x * x.dtype.type(factor), err_msg=name)
        assert not zero[name].any(), name
        assert not none[name].any(), name


@properties
@given(d=draws(), seed=st.integers(0, 2**32 - 1))
def test_symmetric(d: Draw, seed: int) -> None:
    """⟨W, (gq, gk, gv)(U)⟩ = ⟨U, (gq, gk, gv)(W)⟩: rounding moves each side by no more than budget times norm."""
    rng = np.random.default_rng(seed)
    U = {name: d.arrays[name] for name in COTANGENTS}
    W = {name: rng.standard_normal(x.shape).astype(x.dtype) for name, x in U.items()}
    of_u, of_w, budget_u, budget_w = d.bob(), d.bob(**W), d.budgets("bob"), d.budgets("bob", **W)
    difference, allowed = 0.0, 0.0
    for u in COTANGENTS:
        g = f"g{u[1]}"
        difference += inner(W[u], of_u[g]) - inner(U[u], of_w[g])
        allowed += norm(W[u]) * budget_u[g] + norm(U[u]) * budget_w[g]
    assert abs(difference) <= allowed


@properties
@given(d=draws(dtypes=("float64",)))
def test_gdo_is_a_central_difference_of_o(d: Draw) -> None:
    """Halving the step divides the error of a difference by four, until rounding of o over the step is larger."""

    def difference(h: float) -> Any:
        forth, back = (
            d.forward(**{n: d.arrays[n] + sign * h * d.arrays[f"u{n}"] for n in "qkv"}).o for sign in (1, -1)
        )
        return (forth - back) / (2 * h)

    gdo = d.bob()["gdo"]
    coarse, fine = difference(2e-4), difference(1e-4)
    rounding = d.budgets("forward")["o"] / 1e-4
    assert norm(gdo - fine) <= norm(fine - coarse) + rounding
    assert norm(fine - coarse) <= 1e-3 * norm(gdo) + rounding  # so the line above says something


@properties
@given(d=draws(keys=1), exponent=st.integers(0, 4))
def test_one_key(d: Draw, exponent: int) -> None:
    """o = v, dq = dk = 0, gq = gk = gv = 0 and gdo = uv, however large the logits are."""
    d.arrays["q"] = d.arrays["q"] * d.arrays["q"].dtype.type(4.0**exponent)
    a = d.arrays
    group, M = a["q"].shape[1] // a["k"].shape[1], a["q"].shape[2]
    right = d.mask.right
    alive = np.arange(M)[:, None] >= (0 if right is None else M - 1 - right)
    if d.mask.left is not None:
        assert alive[-1]
    results = {**d.forward()._asdict(), **d.backward(), **d.bob()}
    budgets = {**d.budgets("backward"), **d.budgets("bob")}
    v, uv = (np.where(alive, np.repeat(x, group, axis=1), 0).astype(x.dtype) for x in (a["v"], a["uv"]))
    np.testing.assert_array_equal(results["o"], v)
    for name in ("dq", "dk", "gq", "gk", "gv"):
        assert norm(results[name]) <= budgets[name], name
    assert norm(results["gdo"] - uv) <= budgets["gdo"]


@properties
@given(d=draws(), seed=st.integers(0, 2**32 - 1))
def test_adding_one_vector_to_every_key_changes_nothing(d: Draw, seed: int) -> None:
    """Σ_j dk_j = 0 per key head; and along a uk that is the same for all keys, o does not move."""
    N = d.arrays["k"].shape[2]
    total = np.sum(d.backward()["dk"].astype(np.float64), axis=2)
    assert norm(total) <= np.sqrt(N) * d.budgets("backward")["dk"]

    uk = np.broadcast_to(d.arrays["uk"][:, :, :1], d.arrays["uk"].shape)
    moved = {"uq": None, "uk": uk, "uv": None}
    assert norm(d.bob(**moved)["gdo"]) <= d.budgets("bob", **moved)["gdo"]
