"""The four functions compute what they say, on CPU arrays; every rule is checked through the public interface."""

from __future__ import annotations

import inspect
import pickle
import types
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given as sampled
from hypothesis import settings
from hypothesis import strategies as st
from kinds import NUMPY_DTYPES, OPS, arguments, assert_same, bits, call, dtype_of, empty_results, judge

import flashbob_cupy as fb
from flashbob_cupy import arrays, blocked, ops
from flashbob_cupy.problem import AXES, INPUTS, OUTPUTS, Mask, Problem


def with_forward(op, given, **options):
    """The arguments with the o and lse that belong to the options."""
    if "o" in given:
        result = fb.forward(given["q"], given["k"], given["v"], **options)
        given = {**given, "o": result.o, "lse": result.lse}
    return given


# ---- right numbers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
@pytest.mark.parametrize(
    ("options", "mask"),
    [
        ({}, Mask()),
        ({"causal": True}, Mask(right=0)),
        ({"window": (3, 1)}, Mask(3, 1)),
        ({"window": [None, 2], "scale": 0.3}, Mask(None, 2)),
        ({"window": (np.int64(2), 5), "causal": True, "scale": np.float32(1.5)}, Mask(2, 0)),
        ({"window": (None, None), "scale": -1}, Mask()),
        ({"scale": 0}, Mask()),
        ({"deterministic": True, "causal": True}, Mask(right=0)),
    ],
)
@pytest.mark.parametrize("op", OPS)
def test_within_budget(op, options, mask, dtype):
    given = with_forward(op, arguments(op, dtype, M=33, N=39), **options)
    if "dlse" in given:
        given["dlse"] = np.sin(np.arange(given["lse"].size)).reshape(given["lse"].shape).astype(given["lse"].dtype)
    result = call(op, given, **options)
    for name, x in zip(OUTPUTS[op], result, strict=False):
        assert x.dtype == NUMPY_DTYPES[dtype_of(name, dtype)]
    judge(op, given, result, mask, options.get("scale"))


SHAPES = st.fixed_dictionaries(
    {
        "B": st.integers(1, 2),
        "group": st.integers(1, 3),
        "Hkv": st.integers(1, 2),
        "M": st.integers(1, 40),
        "N": st.integers(1, 40),
        "D": st.integers(1, 20),
        "Dv": st.integers(1, 20),
    }
)
BOUND = st.none() | st.integers(0, 45)


@settings(max_examples=60, deadline=None)
@sampled(
    SHAPES, st.sampled_from(OPS), st.sampled_from(list(NUMPY_DTYPES)), st.booleans(), BOUND, BOUND,
    st.sets(st.sampled_from(["uq", "uk", "uv"])), st.booleans(), st.integers(0, 2**32),
)  # fmt: skip
def test_within_budget_whatever_the_shape(shape, op, dtype, causal, left, right, absent, with_dlse, seed):
    sizes = {**shape, "Hq": shape["group"] * shape["Hkv"]}
    del sizes["group"]
    options = {"causal": causal, "window": (left, right)}
    given = with_forward(op, arguments(op, dtype, seed=seed, **sizes), **options)
    given.update({name: None for name in absent if name in given})
    if "dlse" in given and with_dlse:
        given["dlse"] = np.cos(np.arange(given["lse"].size)).reshape(given["lse"].shape).astype(given["lse"].dtype)
    mask = Mask(left, min(right, 0) if causal and right is not None else 0 if causal else right)
    judge(op, given, call(op, given, **options), mask)


@pytest.mark.parametrize("op", OPS)
def test_default_scale_is_of_the_width_given(op):
    # tilelang-ascend 1670
    given = arguments(op, D=40)
    assert_same(call(op, given, scale=40**-0.5), call(op, given))


@pytest.mark.parametrize(("M", "N", "sees"), [(2, 5, [4, 5]), (5, 2, [0, 0, 0, 1, 2]), (3, 3, [1, 2, 3]), (1, 7, [7])])
def test_causal_is_aligned_at_the_bottom_right(M, N, sees):
    # flash-attention 282: with equal scores, o is the mean of the values a query sees
    q, k = np.zeros((1, 1, M, 4)), np.zeros((1, 1, N, 4))
    v = np.arange(1.0, N + 1).reshape(1, 1, N, 1)
    o, lse = fb.forward(q, k, v, causal=True)
    assert np.allclose(o[0, 0, :, 0], [(n + 1) / 2 if n else 0 for n in sees], rtol=1e-15, atol=0)
    with np.errstate(divide="ignore"):
        assert np.allclose(lse[0, 0], np.log(sees), rtol=1e-15, atol=1e-15)


def test_window_and_causal():
    # transformers 29623: row 9 sees keys 6 ... 9
    q = k = np.zeros((1, 1, 10, 4))
    v = np.eye(10).reshape(1, 1, 10, 10)
    o, _ = fb.forward(q, k, v, causal=True, window=(3, 0))
    assert np.flatnonzero(o[0, 0, 9]).tolist() == [6, 7, 8, 9]
    assert np.flatnonzero(o[0, 0, 1]).tolist() == [0, 1]
    o, _ = fb.forward(q, k, v, window=(0, 2))
    assert np.flatnonzero(o[0, 0, 4]).tolist() == [4, 5, 6]


@pytest.mark.parametrize(("Hq", "Hkv"), [(8, 1), (8, 2), (6, 2), (14, 2), (15, 5)])
@pytest.mark.parametrize("op", OPS)
def test_grouped_heads(op, Hq, Hkv):
    # flash-attention 623
    given = arguments(op, Hq=Hq, Hkv=Hkv)
    judge(op, given, call(op, given), Mask())


# ---- rows and keys that nothing belongs to --------------------------------------------------------------------------


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("poison", [np.nan, np.inf, 1e4])
def test_what_no_one_sees_has_no_influence(op, poison):
    # pytorch 41508, 101967: queries 0-2 see no key of 4; with a window, keys 0-1 of the other are seen by no query
    for sizes, options, first_query, first_key in (
        ({"M": 7, "N": 4}, {"causal": True}, 3, 0),
        ({"M": 5, "N": 9}, {"window": (2, 0)}, 0, 2),
    ):
        given = with_forward(op, arguments(op, **sizes), **options)
        if "dlse" in given:
            given["dlse"] = np.ones_like(given["lse"])
        expected = call(op, given, **options)
        poisoned = {name: None if x is None else x.copy() for name, x in given.items()}
        for name, x in poisoned.items():
            if x is not None:
                x[:, :, : first_query if "M" in AXES[name] else first_key] = poison
        actual = call(op, poisoned, **options)
        assert_same(actual, expected)
        for name, x in zip(OUTPUTS[op], actual, strict=False):
            unseen = x[:, :, : first_query if "M" in AXES[name] else first_key]
            assert (unseen == (-np.inf if name == "lse" else 0)).all()
            assert np.isfinite(x[:, :, unseen.shape[2] :]).all()
        if op == "bob":
            assert bits(actual.gdlse) == bits(expected.gdlse)
            assert (actual.gdlse[:, :, :first_query] == 0).all()


@pytest.mark.parametrize("op", OPS)
def test_results_do_not_depend_on_what_out_held(op):
    given = with_forward(op, arguments(op, M=113, N=113), causal=True)
    expected = call(op, given, causal=True)
    out = empty_results(op, M=113, N=113)
    for x in out:
        x.fill(np.nan)
    assert_same(call(op, given, causal=True, out=out), expected)


# ---- nothing to compute ---------------------------------------------------------------------------------------------


@pytest.fixture
def no_engine(monkeypatch):
    made = {op: arguments(op) for op in OPS}  # o and lse come from the engine

    def started(*args, **options):
        raise AssertionError("the engine was started although every result is known")

    for op in OPS:
        monkeypatch.setattr(blocked, op, started)
    return made


EMPTY = [{"B": 0}, {"Hq": 0, "Hkv": 0}, {"Hq": 0}, {"M": 0}, {"N": 0}, {"M": 0, "N": 0}]


@pytest.mark.parametrize("sizes", EMPTY, ids=str)
@pytest.mark.parametrize("with_out", [False, True])
@pytest.mark.parametrize("op", OPS)
def test_zero_sizes(no_engine, op, sizes, with_out):
    given = arguments(op, **sizes)
    out = empty_results(op, **sizes) if with_out else None
    results = call(op, given, out=out)
    for name, x, form in zip(OUTPUTS[op], results, empty_results(op, **sizes), strict=False):
        assert x.shape == form.shape
        assert x.dtype == form.dtype
        assert (x == (-np.inf if name == "lse" else 0)).all()
    if with_out:
        assert all(a is b for a, b in zip(results, out, strict=True))


@pytest.mark.parametrize("sizes", EMPTY, ids=str)
def test_zero_sizes_in_torch(no_engine, sizes):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    given = {name: x if x is None else torch.from_numpy(x) for name, x in arguments("bob", **sizes).items()}
    for x, form in zip(call("bob", given), empty_results("bob", **sizes), strict=True):
        assert tuple(x.shape) == form.shape
        assert (x == 0).all()


@pytest.mark.parametrize("op", ["bob", "jvp"])
def test_no_cotangent_at_all(no_engine, op):
    given = no_engine[op]
    given.update(dict.fromkeys(("uq", "uk", "uv")))
    if "dlse" in given:
        given["dlse"] = given["lse"]
    out = empty_results(op)
    for results in (call(op, given), call(op, given, out=out)):
        for x, form in zip(results, out, strict=False):
            assert x.shape == form.shape
            assert not np.any(x)
    if op == "bob":
        assert not np.any(results.gdlse)
        assert results.gdlse.shape == given["lse"].shape


@pytest.mark.parametrize("op", ["bob", "jvp"])
def test_none_is_the_same_as_zeros(op):
    given = arguments(op)
    for names in (("uq",), ("uk",), ("uv",), ("uq", "uk"), ("uk", "uv"), ("uq", "uv"), ("uq", "uk", "uv")):
        zeros = call(op, {**given, **{name: np.zeros_like(given[name]) for name in names}})
        absent = call(op, {**given, **dict.fromkeys(names)})
        for a, z in zip(absent, zeros, strict=True):
            assert np.array_equal(a, z)


# ---- results --------------------------------------------------------------------------------------------------------


def test_results_are_named_and_unpack():
    given = arguments("bob")
    o, lse = fb.forward(given["q"], given["k"], given["v"])
    dq, dk, dv = call("backward", arguments("backward"))
    gq, gk, gv, gdo = result = call("bob", given)
    to, tlse = call("jvp", arguments("jvp"))
    assert [x.shape for x in (o, dq, dk, dv)] == [given[name].shape for name in ("do", "q", "k", "v")]
    assert [x.shape for x in (gq, gk, gv, gdo, to)] == [given[name].shape for name in ("q", "k", "v", "do", "do")]
    assert lse.shape == tlse.shape == (2, 4, 5)
    assert fb.BobResult._fields == ("gq", "gk", "gv", "gdo")
    assert fb.BackwardResult._fields == ("dq", "dk", "dv")
    assert fb.ForwardResult._fields == ("o", "lse")
    assert fb.JvpResult._fields == ("to", "tlse")
    assert result.gdlse is None


def test_gradient_of_dlse():
    # flash-attention 141
    given = arguments("bob", M=65, N=130, Hq=3, Hkv=3)
    given["dlse"] = np.cos(given["lse"])
    gq, gk, gv, gdo = result = call("bob", given)
    judge("bob", given, result, Mask())
    assert result.gdlse.dtype == np.float32
    tangent = call("jvp", {name: given[name] for name in INPUTS["jvp"]})
    assert np.allclose(result.gdlse, tangent.tlse, rtol=1e-4, atol=1e-5)
    copied = pickle.loads(pickle.dumps(result))
    assert np.array_equal(copied.gdlse, result.gdlse)
    five = [*empty_results("bob", M=65, N=130, Hq=3, Hkv=3), np.zeros((2, 3, 65), np.float32)]
    into = call("bob", given, out=five)
    assert into.gdlse is five[4]
    assert_same(into, result)
    assert bits(five[4]) == bits(result.gdlse)
    four = call("bob", given, out=five[:4])
    assert bits(four.gdlse) == bits(result.gdlse)
    assert len((gq, gk, gv, gdo)) == len(result)


@pytest.mark.parametrize("op", OPS)
def test_the_same_from_many_threads(op):
    forms = [{"M": 30 + i % 4, "N": 50 - i % 3} for i in range(24)]
    given = [arguments(op, **sizes) for sizes in forms]
    expected = [call(op, x) for x in given]
    with ThreadPoolExecutor(8) as pool:
        for actual, e in zip(pool.map(lambda x: call(op, x), given), expected, strict=True):
            assert_same(actual, e)


def test_changing_shapes_do_not_fill_the_memory(monkeypatch):
    calls = {}
    monkeypatch.setattr(ops, "_calls", calls)
    monkeypatch.setattr(ops, "_MOST_CALLS", 5)
    for n in range(1, 20):
        x = np.ones((1, 1, n, 2), np.float32)
        fb.forward(x, x, x)
        assert 1 <= len(calls) <= 5


def test_repeated_calls_are_cheap(monkeypatch):
    # What is done for every call before the engine: a fixed number of Python calls, none per element or per check.
    torch = pytest.importorskip("torch", reason="torch is not installed")
    monkeypatch.setattr(blocked, "bob", lambda *args: None)
    given = {name: None if x is None else torch.from_numpy(x) for name, x in arguments("bob").items()}
    call("bob", given)
    checks = []
    monkeypatch.setattr(ops, "make_problem", lambda *args, **options: checks.append(args))
    call("bob", {**given, "uq": given["uq"].clone()})
    assert checks == []
    kind = arrays.kind_of(given["q"], "q")
    assert kind._guards is not None  # with the torch that the tests are for, one call looks at all the tensors
    monkeypatch.setattr(kind, "read", lambda *args: checks.append(args))
    call("bob", {**given, "uq": given["uq"].clone()})
    assert checks == []


@pytest.mark.parametrize("guarded", [True, False])
def test_what_was_accepted_before_is_looked_at_again(monkeypatch, guarded):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    given = {name: torch.from_numpy(x) for name, x in arguments("forward", M=8, N=8).items()}
    if not guarded:
        monkeypatch.setattr(arrays.kind_of(given["q"], "q"), "_guards", None)
    monkeypatch.setattr(ops, "_calls", {})
    q = given["q"]
    expected = call("forward", given)
    changed = torch.empty_strided(q.shape, (2 * q.stride(0), *q.stride()[1:3], 1)).copy_(q)
    for x in (q.clone(), changed, q.swapaxes(1, 2).contiguous().swapaxes(1, 2), torch.nn.Parameter(q, False)):
        o, lse = call("forward", {**given, "q": x})
        assert type(o) is type(lse) is torch.Tensor
        assert o.is_contiguous()
        assert torch.equal(o, expected.o)
        assert torch.equal(lse, expected.lse)
    with torch.no_grad():
        assert torch.equal(call("forward", given).o, expected.o)
        with pytest.raises(TypeError, match="q requires grad"):
            call("forward", {**given, "q": q.clone().requires_grad_()})
    with torch.inference_mode():
        assert torch.equal(call("forward", {**given, "q": q.clone()}).o, expected.o)
    assert call("forward", {**given, "q": q[:, :2]}).o.shape[1] == 2
    with torch.autograd.forward_ad.dual_level():
        assert torch.equal(call("forward", given).o, expected.o)
        with pytest.raises(TypeError, match="q carries a forward-mode tangent"):
            call("forward", {**given, "q": torch.autograd.forward_ad.make_dual(q, q)})
    for bad, error, message in (
        (q.clone().requires_grad_(), TypeError, "q requires grad"),
        (torch._neg_view(q), TypeError, "q has its negative bit set"),
        (q.to_sparse(), TypeError, "q must be a dense tensor"),
        (q.to("meta"), ValueError, "q must be on a CPU or a CUDA device"),
        (q.double(), TypeError, "k must be float64 like q"),
        (q[..., 0], ValueError, "q must have the 4 axes"),
        (q.numpy(), TypeError, "k must be a NumPy array like q"),
    ):
        with pytest.raises(error, match=message):
            call("forward", {**given, "q": bad})
    with pytest.raises(TypeError, match=r"q is inside torch\.func"):
        torch.func.vmap(lambda x: call("forward", {**given, "q": x}).o)(q[None])
    assert torch.equal(call("forward", given).o, expected.o)


@pytest.mark.parametrize("lacking", ["_dynamo", "check"])
def test_a_torch_without_guards(lacking):
    torch = pytest.importorskip("torch", reason="torch is not installed")

    class Accepting:
        def __init__(self, *tensors, **options):
            self.check = lambda *tensors: True

    guards = types.SimpleNamespace(guards=types.SimpleNamespace(TensorGuards=Accepting))
    inner = types.SimpleNamespace(**({} if lacking == "_dynamo" else {"_dynamo": guards}))
    changed = types.SimpleNamespace(**{**vars(torch), "_C": inner})
    assert arrays._tensor_guards(changed) is None


def test_the_family_is_read_again_at_every_call(monkeypatch):
    monkeypatch.setenv("FLASHBOB_FAMILY", "sm80")
    read = ops._reader("FLASHBOB_FAMILY")
    before = read()
    monkeypatch.setenv("FLASHBOB_FAMILY", "sm90")
    assert read() != before
    monkeypatch.delenv("FLASHBOB_FAMILY")
    assert read() is None
    monkeypatch.setattr(ops.os, "environ", {"FLASHBOB_FAMILY": "sm80"})  # a mapping without anything behind it
    assert ops._reader("FLASHBOB_FAMILY")() == "sm80"


# ---- what is promised in the signatures -----------------------------------------------------------------------------


@pytest.mark.parametrize("op", OPS)
def test_signature(op):
    parameters = inspect.signature(getattr(fb, op)).parameters
    positional = [name for name, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == [name for name in INPUTS[op] if name != "dlse"]
    keywords = {name: p.default for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY}
    assert keywords == {
        **({"dlse": None} if "dlse" in INPUTS[op] else {}),
        "causal": False,
        "scale": None,
        "window": None,
        "layout": "bhnd",
        "stream": None,
        "out": None,
        "deterministic": False,
    }
    text = getattr(fb, op).__doc__
    for name in (*parameters, *(x for x in OUTPUTS[op] if x != "gdlse"), "Raises:"):
        assert name in text, name


def test_mask_says_exactly_which_rows_and_keys_are_unseen():
    for M in range(5):
        for N in range(5):
            for left in (None, *range(6)):
                for right in (None, *range(6)):
                    i, j = np.arange(M)[:, None], np.arange(N)[None, :]
                    seen = np.ones((M, N), bool)
                    if left is not None:
                        seen &= j >= i + N - M - left
                    if right is not None:
                        seen &= j <= i + N - M + right
                    rows, keys = seen.any(axis=1), seen.any(axis=0)
                    for mask in (Mask(left, right), Mask(left, right).within(M, N)):
                        p = Problem("forward", 1, 1, 1, M, N, 1, 1, "float32", mask, 1.0)
                        assert rows.tolist() == [r >= p.first_query for r in range(M)]
                        assert keys.tolist() == [c >= p.first_key for c in range(N)]
                    bounded = Mask(left, right).within(M, N)
                    if bounded.left is None and bounded.right is None and M and N:
                        assert seen.all()
                    if M and N and seen.all():
                        assert bounded == Mask()


def test_problems_are_keys():
    p = Problem("bob", 1, 6, 2, 3, 4, 5, 6, "bfloat16", Mask(right=0), 0.5, uq=True)
    assert {p: 1}[Problem("bob", 1, 6, 2, 3, 4, 5, 6, "bfloat16", Mask(right=0), 0.5, uq=True)] == 1
    assert (p.group, p.lse_dtype) == (3, "float32")
    assert Problem("bob", 0, 0, 0, 3, 4, 5, 6, "float64", Mask(), 0.5).group == 1
