"""Inputs on which attention gradients have gone wrong in other libraries, on every engine of a GPU.

The comment of a test names the public report that it stands for; the sizes are the report's, the expected values ours.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import gpu
import kinds
import numpy as np
import pytest
from gpu import ENGINES, HALF, Case, assert_equal, check, each, judge, nans, run, tensors, torch

import flashbob_cupy as fb
from flashbob_cupy.plan import HEAD_DIMS
from flashbob_cupy.problem import INPUTS, OUTPUTS

BLOCKED = ("blocked",)


# ---- numbers -------------------------------------------------------------------------------------------------------
@each(Case(128, 128, 64, B=32, Hq=8, Hkv=8, dtype="float16", u="q", data="gradient penalty", judged=1), engines=ENGINES)
def test_gradient_penalty(case: Case, engine: str) -> None:
    # pytorch 116350
    check(case, engine)


@each(Case(137, 137, 64, B=8, Hq=8, Hkv=8, dtype="float32", judged=1), engines=BLOCKED)
def test_float32(case: Case, engine: str) -> None:
    # iTransformer 32
    check(case, engine)


SHORT = (1, 2, 3, 15, 16, 17, 31, 32, 33, 63, 65)


@each(*(Case(N, N, dtype=HALF[i % 2]) for i, N in enumerate(SHORT)))
def test_blocks_larger_than_the_sequence(case: Case, engine: str) -> None:
    # jvp_flash_attention 1
    check(case, engine)


@each(*(Case(N, N, dtype="float32") for N in SHORT), engines=BLOCKED)
def test_blocks_larger_than_the_sequence_float32(case: Case, engine: str) -> None:
    # jvp_flash_attention 1
    check(case, engine)


@each(
    *(
        Case(65, 130, Hq=3, Hkv=3, causal=causal, deterministic=deterministic, dlse=True, ops=("backward", "bob"))
        for causal, deterministic in ((False, False), (True, False), (True, True))
    ),
    engines=ENGINES,
)
def test_cotangent_of_the_log_sum_exp(case: Case, engine: str) -> None:
    # flash-attention 141
    check(case, engine)


@each(
    Case(200, 130, causal=True, dlse=True, data="large where no key is seen"),
    Case(200, 130, causal=True, deterministic=True, data="large where no key is seen"),
    Case(70, 33, 40, dtype="float16", window=(8, 0), dlse=True, data="large where no key is seen"),
    engines=ENGINES,
)
def test_queries_that_see_no_key(case: Case, engine: str) -> None:
    # pytorch 41508, brevitas 1591
    results = check(case, engine)
    for name, x in results.items():
        assert x[:, :, case.unread(name) :].isfinite().all(), name


def _surrounded_by_nan(case: Case, name: str, x: Any) -> Any:
    """The same array inside a longer one that holds NaN, with NaN in the rows that must not be read."""
    B, H, rows, *width = x.shape
    longer = torch().full((B, H, rows + 5, *width), float("nan"), dtype=x.dtype, device=x.device)
    inside = longer[:, :, :rows]
    unread = case.unread(name)
    inside[:, :, unread:] = x[:, :, unread:]
    return inside


@each(
    Case(37, 200, window=(3, 0), deterministic=True, dlse=True),
    Case(200, 130, causal=True, deterministic=True, dlse=True),
    Case(130, 130, 128, dtype="float16", deterministic=True),
    engines=ENGINES,
)
def test_rows_that_must_not_be_read(case: Case, engine: str) -> None:
    # pytorch 101967
    x = {name: array for name, array in tensors(case).items() if array is not None}
    for name, array in x.items():
        array[:, :, : case.unread(name)] = 0
    forward = run(replace(case, ops=("forward",)), engine, x)
    x |= {"o": forward["o"], "lse": forward["lse"]}
    expected = run(case, engine, x)
    actual = run(case, engine, {name: _surrounded_by_nan(case, name, array) for name, array in x.items()})
    assert_equal(actual, expected)


@each(*(Case(113, 113, dtype=dtype, causal=True, dlse=True) for dtype in HALF), engines=ENGINES)
def test_results_and_workspaces_full_of_nan(case: Case, engine: str) -> None:
    # tilelang 2461
    check(case, engine, out=True)


VERY_NEGATIVE = [
    Case(N, N, Hq=1, dtype=dtype, data="very negative lse") for N in (64, 65, 127, 704) for dtype in ("float32", *HALF)
]


@each(*(case for case in VERY_NEGATIVE if case.dtype != "float32"))
def test_very_negative_log_sum_exp(case: Case, engine: str) -> None:
    # pytorch 196678: exp(0 - lse) of a padded key overflows
    check(case, engine)


@each(*(case for case in VERY_NEGATIVE if case.dtype == "float32"), engines=BLOCKED)
def test_very_negative_log_sum_exp_float32(case: Case, engine: str) -> None:
    # pytorch 196678
    check(case, engine)


@each(Case(37, 65, data="one key takes all"), engines=ENGINES)
def test_one_key_takes_all(case: Case, engine: str) -> None:
    check(case, engine)


def _width(D: int, N: int) -> Case:
    """One dtype and mask for all widths that share kernels."""
    bucket = next((i for i, width in enumerate(HEAD_DIMS) if width >= D), 0)
    return Case(N, N, D, Hq=1, dtype=HALF[bucket % 2], causal=bucket % 4 > 1)


LENGTHS = (64, 113, 512)


@each(*(_width(D, N) for D in (1, 3, 8, 16, 40, 56, 64, 72, 80, 96, 104, 112, 128) for N in LENGTHS))
def test_head_dimensions(case: Case, engine: str) -> None:
    # flash-attention 2896, 1347
    check(case, engine)


@each(*(_width(D, N) for D in (160, 192, 256) for N in LENGTHS), engines=BLOCKED)
def test_head_dimensions_that_blocks_serve(case: Case, engine: str) -> None:
    # flash-attention 2896, 1347
    check(case, engine)


@each(Case(100, 100, 40, deterministic=True, judged=-1), engines=ENGINES)
def test_default_scale(case: Case, engine: str) -> None:
    # tilelang-ascend 1670: it is that of the caller's D, not of a padded one
    assert_equal(run(replace(case, scale=40**-0.5), engine, tensors(case)), run(case, engine))


@each(*(Case(130, 130, D, Dv, causal=True) for D, Dv in ((64, 32), (32, 64))))
def test_values_of_another_width(case: Case, engine: str) -> None:
    # flash-attention 1487
    check(case, engine)


@each(Case(130, 130, 192, 128, causal=True), engines=BLOCKED)
def test_values_of_another_width_that_blocks_serve(case: Case, engine: str) -> None:
    # flash-attention 1487
    check(case, engine)


@each(
    *(Case(M, N, causal=True) for M, N in ((2, 5), (5, 2), (3, 128), (1, 300))),
    Case(2048, 1024, Hq=1, causal=True),
    engines=ENGINES,
)
def test_causal_is_aligned_at_the_bottom_right(case: Case, engine: str) -> None:
    # flash-attention 282, 951; cutlass 2336. Rows 0 to 2 of (5, 2) see no key.
    check(case, engine)


@each(Case(10, 10, window=(3, 0), causal=True, deterministic=True), engines=ENGINES)
def test_window(case: Case, engine: str) -> None:
    # transformers 29623, vllm 3385: row 9 sees keys 6 to 9
    x = tensors(case)
    expected = check(case, engine, x)
    forward = replace(case, ops=("forward",))
    for key in range(10):
        changed = {**x, "k": x["k"].clone(), "v": x["v"].clone()}
        for name in "kv":
            changed[name][:, :, key] += 1
        result = run(forward, engine, changed)
        same = (result["o"] == expected["o"]).all(-1).all(0).all(0).tolist()
        assert same == [not key <= row <= key + 3 for row in range(10)], f"rows that do not see key {key}"


@each(
    *(Case(70, 70, B=2, Hq=Hq, Hkv=Hkv, causal=True) for Hq, Hkv in ((8, 1), (8, 2), (6, 2), (14, 2), (15, 5))),
    engines=ENGINES,
)
def test_grouped_heads(case: Case, engine: str) -> None:
    # flash-attention 623, ffpa-attn 301
    check(case, engine)


@pytest.mark.gpu
def test_heads_that_cannot_be_grouped() -> None:
    # ffpa-attn 301
    q = torch().zeros(1, 7, 70, 64, dtype=torch().float16, device=gpu.DEVICE)
    with pytest.raises(ValueError, match=r"multiple of .*7.*2"):
        fb.forward(q, q[:, :2], q[:, :2])


@each(
    *(
        Case(2048, 2048, D, Hq=4, Hkv=Hkv, causal=True, deterministic=True, judged=-1)
        for D in (64, 128)
        for Hkv in (4, 1)
    )
)
def test_deterministic(case: Case, engine: str) -> None:
    # flash-attention 414, 2244
    x = tensors(case)
    first = run(case, engine, x)
    for _ in range(29):
        assert_equal(run(case, engine, x, poisoned=False), first)


@each(
    Case(100, 130, causal=True, deterministic=True, dlse=True, judged=-1),
    Case(100, 130, 40, judged=-1),
    engines=ENGINES,
)
def test_zero_cotangents(case: Case, engine: str) -> None:
    # jax-flash-attn2 1
    x = tensors(case)
    zero = {name: None if array is None else torch().zeros_like(array) for name, array in x.items()}
    without = {name: zero[name] for name in ("do", "dlse")}
    results = run(case, engine, {**x, **without})
    for name in ("dq", "dk", "dv", "gq", "gk", "gv"):
        assert not results[name].any(), f"do = 0: {name}"
    without = {name: zero[name] for name in gpu.COTANGENTS}
    results = run(case, engine, {**x, **without})
    for name in results.keys() & {"gq", "gk", "gv", "gdo", "gdlse", "to", "tlse"}:
        assert not results[name].any(), f"U = 0: {name}"


# ---- arrays --------------------------------------------------------------------------------------------------------
def transposed(x: Any) -> Any:
    """(batch, row, head, width) in memory."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def columns_first(x: Any) -> Any:
    """Rows adjacent in memory."""
    return x.transpose(2, 3).contiguous().transpose(2, 3)


def reversed_heads_in_memory(x: Any) -> Any:
    """(head, batch, row, width) in memory: strides in no usual order."""
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def at_offset(offset: int) -> Callable[[Any], Any]:
    """So many elements past an aligned address."""

    def place(x: Any) -> Any:
        buffer = torch().full((x.numel() + 16,), float("nan"), dtype=x.dtype, device=x.device)
        view = buffer[offset : offset + x.numel()].view(x.shape)
        view.copy_(x)
        return view

    place.__name__ = f"at_offset_{offset}"
    return place


def of_four_axes(place: Callable[[Any], Any], x: dict[str, Any], names: Any = None) -> dict[str, Any]:
    chosen = x.keys() if names is None else names
    return {k: place(a) if k in chosen and a is not None and a.ndim == 4 else a for k, a in x.items()}


def with_forward(case: Case, engine: str) -> dict[str, Any]:
    """Inputs, o and lse."""
    x = tensors(case)
    return x | run(replace(case, ops=("forward",)), engine, x)


@each(Case(65, 130, B=2, Hq=4, Hkv=1, causal=True, deterministic=True, judged=-1), engines=ENGINES)
def test_transposed_cotangent_of_the_output(case: Case, engine: str) -> None:
    # flash-attention 355
    x = with_forward(case, engine)
    assert_equal(run(case, engine, of_four_axes(transposed, x, ["do"])), run(case, engine, x))


@each(Case(65, 130, B=2, Hq=4, Hkv=2, causal=True, deterministic=True, judged=-1), engines=ENGINES)
@pytest.mark.parametrize("place", [transposed, columns_first, reversed_heads_in_memory, at_offset(1), at_offset(7)])
def test_strides_of_everything(case: Case, engine: str, place: Callable[[Any], Any]) -> None:
    # pytorch 183484 at offsets 1 and 7. Results lie the same way.
    x = with_forward(case, engine)
    expected = run(case, engine, x)
    given = of_four_axes(place, x)
    actual: dict[str, Any] = {}
    with gpu.forced(engine):
        for op in case.ops:
            names = OUTPUTS[op][:4]
            out = [place(nans(case, name)) if len(expected[name].shape) == 4 else nans(case, name) for name in names]
            kinds.call(op, {name: given.get(name) for name in INPUTS[op]}, out=out, **case.options())
            actual |= zip(names, out, strict=True)
    assert_equal(actual, {name: expected[name] for name in actual})


@each(Case(65, 130, 40, causal=True, dtype="float16"), engines=ENGINES)
def test_a_result_that_no_kernel_can_write(case: Case, engine: str) -> None:
    """The gradient of Q, summed in float32, goes through a copy as well."""
    x = of_four_axes(at_offset(1), with_forward(case, engine))
    with gpu.forced(engine):
        given = {name: x.get(name) for name in INPUTS["bob"]}
        out = [at_offset(1)(nans(case, name)) for name in OUTPUTS["bob"][:4]]
        kinds.call("bob", given, out=out, **case.options())
    judge(replace(case, ops=("bob",)), dict(zip(OUTPUTS["bob"], out, strict=False)))


@each(Case(65, 65, B=2, Hq=4, Hkv=2, dtype="float32", judged=-1), engines=BLOCKED)
@pytest.mark.parametrize("offset", [1, 2, 3])
def test_float32_at_offsets(case: Case, engine: str, offset: int) -> None:
    # pytorch 183484
    x = with_forward(case, engine)
    assert_equal(run(case, engine, of_four_axes(at_offset(offset), x)), run(case, engine, x))


@each(Case(65, 130, B=2, Hq=4, Hkv=2, causal=True, deterministic=True, judged=-1), engines=ENGINES)
def test_broadcast_cotangents(case: Case, engine: str) -> None:
    # xformers 282, pytorch 141147: stride 0, as the gradient of a sum has
    x = with_forward(case, engine)
    broadcast, plain = dict(x), dict(x)
    for name in ("do", "uq", "uk", "uv"):
        broadcast[name] = x[name][:1, :1, :1, :1].expand(x[name].shape)
        plain[name] = broadcast[name].contiguous()
    assert_equal(run(case, engine, broadcast), run(case, engine, plain))


@each(Case(4096, 3968, deterministic=True, causal=True, judged=-1), engines=ENGINES)
def test_keys_and_values_that_are_part_of_a_buffer(case: Case, engine: str) -> None:
    # pytorch 146377
    x = with_forward(case, engine)
    part = dict(x)
    for name in ("k", "v"):
        shape = list(x[name].shape)
        shape[2] = 4096
        part[name] = torch().full(shape, float("nan"), dtype=x[name].dtype, device=x[name].device)[:, :, :3968]
        part[name].copy_(x[name])
    assert_equal(run(case, engine, part), run(case, engine, x))


@each(Case(62, 62, 64, 48, B=2, causal=True, deterministic=True, judged=-1), engines=ENGINES)
def test_every_combination_of_views(case: Case, engine: str) -> None:
    # pytorch 3230
    x = with_forward(case, engine)
    expected = run(case, engine, x)
    for count in range(1, 4):
        for names in itertools.combinations("qkv", count):
            assert_equal(run(case, engine, of_four_axes(columns_first, x, names), poisoned=False), expected)


@each(Case(65, 130, B=2, Hq=4, Hkv=2, causal=True, deterministic=True, dlse=True, judged=-1), engines=ENGINES)
def test_heads_after_rows(case: Case, engine: str) -> None:
    def swap(x: dict[str, Any]) -> dict[str, Any]:
        return {name: a.transpose(1, 2).contiguous() if a.ndim == 4 else a for name, a in x.items()}

    x = with_forward(case, engine)
    actual = run(case, engine, swap(x), layout="bnhd")
    assert all(a.is_contiguous() for a in actual.values())
    assert_equal(swap(actual), run(case, engine, x))


@each(Case(1, 1, 128, B=8300, Hq=16, Hkv=16, data="small integers", scale=0.125, judged=-1))
def test_workspaces_past_2_to_the_31(case: Case, engine: str) -> None:
    # flash-attention 2260: with one key every result is known, and with these inputs exactly
    x = tensors(case)
    results = run(case, engine, x)
    known = {"o": x["v"], "dv": x["do"], "gdo": x["uv"], "to": x["uv"]}
    for name, array in results.items():
        if name in known:
            assert (array == known[name]).all(), name
        elif name not in ("lse", "tlse"):
            assert not array.any(), name


@each(Case(2, 2, 128, B=8300, Hq=16, Hkv=16, judged=1))
def test_the_last_rows_of_workspaces_past_2_to_the_31(case: Case, engine: str) -> None:
    # flash-attention 2260
    check(case, engine)


@each(Case(300, 300, 128, B=2, causal=True, deterministic=True, judged=-1))
def test_rows_far_apart(case: Case, engine: str) -> None:
    """Offsets of more than 2^31 elements inside one head, batch and tensor."""
    B, H, M, D = 2, 2, 300, 128
    x = with_forward(case, engine)
    pool = torch().empty(2_300_000_000, dtype=torch().bfloat16, device=gpu.DEVICE)
    far = dict(x)
    for name in ("q", "do", "uq"):
        for strides in ((1_100_000_000, 550_000_000, 1_800_000, 1), (D, B * D, 7_600_000, 1)):
            assert sum((n - 1) * s for n, s in zip((B, H, M, D), strides, strict=True)) > 2**31
            far[name] = pool.as_strided((B, H, M, D), strides)
            far[name].copy_(x[name])
            expected = run(case, engine, x)
            assert_equal(run(case, engine, far, poisoned=False), expected)
            far[name] = x[name]


@each(Case(16, 16, 16, B=35000, Hq=2, Hkv=2, dtype="float16", judged=2), engines=ENGINES)
def test_more_heads_than_a_grid_has(case: Case, engine: str) -> None:
    # cupy 7539
    check(case, engine)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(0, 8, 16, 64), (1, 0, 16, 64), (1, 8, 0, 64)], ids=str)
@pytest.mark.parametrize("op", gpu.OPS)
def test_empty(op: str, shape: tuple[int, int, int, int]) -> None:
    # numpy 29872, cupy 2095
    x = torch().zeros(shape, dtype=torch().bfloat16, device=gpu.DEVICE)
    given: dict[str, Any] = dict.fromkeys(INPUTS[op], x) | {"dlse": None, "lse": x[..., 0].float()}
    result = kinds.call(op, {name: given[name] for name in INPUTS[op]})
    for name, array in zip(OUTPUTS[op], result, strict=False):
        assert tuple(array.shape) == (shape[:3] if name in ("lse", "tlse") else shape), name


@pytest.mark.gpu
@pytest.mark.parametrize("op", gpu.OPS)
def test_no_key(op: str) -> None:
    # numpy 29872, cupy 2095
    x = torch().randn(1, 8, 16, 64, device=gpu.DEVICE).half()
    none = x[:, :, :0]
    given = {name: none if name in ("k", "v", "uk", "uv") else x for name in INPUTS[op]}
    given |= {name: x[..., 0].float() if name == "lse" else None for name in ("lse", "dlse") if name in given}
    result = dict(zip(OUTPUTS[op], kinds.call(op, given), strict=False))
    for name, array in result.items():
        expected = -np.inf if name == "lse" else 0
        rows = 0 if name in ("dk", "dv", "gk", "gv") else 16
        assert array.shape[2] == rows, name
        assert (array == expected).all(), name
