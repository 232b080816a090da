"""The judge itself: what a budget allows, what it forbids, and what a comparison notices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from engine import DTYPES, NUMPY, OPS, case

from flashbob_cupy import accuracy, reference
from flashbob_cupy.problem import OUTPUTS, Mask


def operands(op: str, arrays: dict[str, Any]) -> dict[str, Any]:
    names = {"forward": "q k v", "backward": "q k v do dlse", "jvp": "q k v uq uk uv"}
    return {n: arrays.get(n) for n in names.get(op, "q k v do uq uk uv dlse").split()}


@pytest.mark.parametrize("dtype", DTYPES)
def test_truth_rounded_once_passes_and_a_missing_term_fails(dtype: str) -> None:
    a = case(48, 40, 16, 8, Hq=2, Hkv=1, dtype=dtype, mask=Mask(right=3), dlse=True).arrays
    for op in OPS:
        truth = accuracy.truth(op, **operands(op, a), mask=Mask(right=3))
        budgets = accuracy.budgets(op, **operands(op, a), mask=Mask(right=3))
        assert list(truth) == list(budgets) == list(OUTPUTS[op])
        for name, x in truth.items():
            stored = NUMPY[dtype if x.ndim == 4 or dtype == "float64" else "float32"]
            rounded = x.astype(stored)
            assert accuracy.compare(rounded, x, budgets[name]).ok
            assert not accuracy.compare(rounded * stored(1.0625), x, budgets[name]).ok, name
    without = reference.bob(*(a[n] for n in ("q", "k", "v", "do", "uq", "uk")), None, mask=Mask(right=3))
    budgets = accuracy.budgets("bob", **operands("bob", a), mask=Mask(right=3))
    truth = accuracy.truth("bob", **operands("bob", a), mask=Mask(right=3))
    for name, wrong in zip(("gq", "gk", "gdo"), (without[0], without[1], without[3]), strict=True):
        assert not accuracy.compare(wrong, truth[name], budgets[name]).ok, name


def test_float32_budget_forbids_tf32() -> None:
    """Operands rounded to 10 bits, as tensor cores do with float32 by default in some libraries."""
    a = case(64, 64, 64).arrays
    truth, budgets = accuracy.truth("bob", **operands("bob", a)), accuracy.budgets("bob", **operands("bob", a))
    coarse = {n: x if x is None else x.astype(np.float16) for n, x in operands("bob", a).items()}
    for name, x in accuracy.truth("bob", **coarse).items():
        assert accuracy.compare(x, truth[name], budgets[name]).ratio > 10, name


def test_half_precision_budget_is_a_few_roundings() -> None:
    """Plain inputs: the error of the operands and the rounding of the result are both about one unit."""
    for dtype, unit in (("float16", 2.0**-11), ("bfloat16", 2.0**-8)):
        a = case(96, 96, 32, dtype=dtype).arrays
        truth, budgets = accuracy.truth("bob", **operands("bob", a)), accuracy.budgets("bob", **operands("bob", a))
        for name in ("gq", "gk", "gv", "gdo"):
            assert unit < budgets[name][0, 0] / np.linalg.norm(truth[name]) < 4 * unit, name


def test_a_truth_of_zero_by_cancellation_has_a_small_budget() -> None:
    """One key: dq, dk, gq, gk and gv are exactly zero, and an evaluation is only allowed its rounding errors."""
    a = case(3, 1, 32).arrays
    truth, budgets = accuracy.truth("bob", **operands("bob", a)), accuracy.budgets("bob", **operands("bob", a))
    size = float(np.linalg.norm(a["do"]) * np.linalg.norm(a["v"]) * np.linalg.norm(a["uk"]))
    for name in ("gq", "gk"):
        assert np.abs(truth[name]).max() < 1e-13 * size
        assert 0 < budgets[name][0, 0] < 1e-5 * size, name


def test_a_truth_of_zero_without_any_term_allows_nothing() -> None:
    a = case(6, 6, 8, without=("uq", "uk", "uv")).arrays
    for name, budget in accuracy.budgets("bob", **operands("bob", a)).items():
        assert not budget.any(), name


def test_subnormal_results_are_allowed_their_spacing() -> None:
    a = case(8, 8, 16, dtype="float16").arrays
    a["do"] = a["do"] * np.float16(2e-7)
    truth, budgets = accuracy.truth("backward", **operands("backward", a)), None
    budgets = accuracy.budgets("backward", **operands("backward", a))
    for name, x in truth.items():
        assert accuracy.compare(x.astype(np.float16), x, budgets[name]).ok, name


def test_blocks_give_the_dense_truth(monkeypatch: pytest.MonkeyPatch) -> None:
    a = case(50, 41, 8, 6, Hq=4, Hkv=2, mask=Mask(left=9, right=2), dlse=True).arrays
    for op in OPS:
        dense = accuracy.truth(op, **operands(op, a), mask=Mask(left=9, right=2))
        with monkeypatch.context() as patch:
            patch.setattr(accuracy, "_DENSE", 0)
            blocks = accuracy.truth(op, **operands(op, a), mask=Mask(left=9, right=2))
        budgets = accuracy.budgets(op, **operands(op, a), mask=Mask(left=9, right=2), dtype="float64")
        assert list(blocks) == list(dense)
        for name in dense:
            assert accuracy.compare(blocks[name], dense[name], budgets[name]).ok, name


@pytest.mark.parametrize("mask", [Mask(), Mask(right=0), Mask(left=4, right=1)])
def test_strips_do_not_change_budgets(monkeypatch: pytest.MonkeyPatch, mask: Mask) -> None:
    """Strips reorder float32 sums, far below the roundings of float16 operands."""
    a = case(29, 23, 8, Hq=2, Hkv=1, dtype="float16", mask=mask).arrays
    for op in OPS:
        whole = accuracy.budgets(op, **operands(op, a), mask=mask)
        with monkeypatch.context() as patch:
            patch.setattr(accuracy, "_STRIP", 4 * 23)
            strips = accuracy.budgets(op, **operands(op, a), mask=mask)
        for name in whole:
            if name not in ("lse", "tlse", "gdlse"):
                np.testing.assert_allclose(strips[name], whole[name], rtol=1e-2, err_msg=name)


def test_one_wrong_head_is_not_hidden_by_the_others() -> None:
    truth = np.ones((4, 8, 100, 16))
    budget = np.full((4, 8), 1e-3 * np.sqrt(1600))
    actual = truth.copy()
    actual[2, 5] *= 1.01
    found = accuracy.compare(actual, truth, budget)
    assert not found.ok
    np.testing.assert_allclose([found.error, found.budget, found.ratio], [1e-2, 1e-3, 10])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_not_a_number_and_infinity_fail(bad: float) -> None:
    truth = np.ones((1, 1, 4, 4))
    actual = truth.copy()
    actual[0, 0, 3, 3] = bad
    found = accuracy.compare(actual, truth, np.full((1, 1), 1e30))
    assert not found.ok
    assert found.ratio == np.inf


def test_infinities_have_to_match() -> None:
    truth = np.array([[[-np.inf, 1.0]]])
    assert accuracy.compare(truth, truth, 0.0).ok
    assert not accuracy.compare(np.array([[[np.inf, 1.0]]]), truth, 1.0).ok
    assert not accuracy.compare(np.array([[[-1e30, 1.0]]]), truth, 1.0).ok


def test_zero_budget_needs_equality_and_empty_results_pass() -> None:
    truth = np.zeros((1, 2, 3, 4))
    assert accuracy.compare(truth, truth, np.zeros((1, 2))).ok
    assert not accuracy.compare(truth + 1e-300, truth, np.zeros((1, 2))).ok
    assert accuracy.compare(np.zeros((0, 2, 3, 4)), np.zeros((0, 2, 3, 4)), np.zeros((0, 2))).ok


def test_shapes_have_to_match() -> None:
    with pytest.raises(ValueError, match=r"shape of truth, \(1, 1, 2, 2\); got \(1, 1, 2, 1\)"):
        accuracy.compare(np.zeros((1, 1, 2, 1)), np.zeros((1, 1, 2, 2)), 1.0)
