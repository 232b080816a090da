"""Arrays go in and come out without a copy, whatever their kind and however they lie in memory."""

from __future__ import annotations

import gc
import itertools
import time
import weakref
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from kinds import (
    GPU_KINDS,
    GPU_KINDS_AND_DTYPES,
    KINDS,
    KINDS_AND_DTYPES,
    NUMPY_DTYPES,
    OPS,
    OnDevice,
    OnlyDLPack,
    Standard,
    address,
    arguments,
    assert_same,
    bits,
    call,
    empty_results,
    judge,
)

from flashbob_cupy import arrays, kernels, plan
from flashbob_cupy.arrays import View, borrow, numpy_view, overlap, overlaps_itself, row_major, stream_of
from flashbob_cupy.problem import INPUTS, OUTPUTS, Mask

BF16 = np.dtype(ml_dtypes.bfloat16)
ALL_BF16 = np.arange(65536, dtype=np.uint16).view(BF16)


# ---- borrowing ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "dtype"), KINDS_AND_DTYPES)
def test_borrow_describes_and_does_not_copy(name, dtype):
    kind = KINDS[name]()
    data = np.arange(24).reshape(1, 2, 3, 4).astype(NUMPY_DTYPES[dtype])
    x = kind.make(data)
    view = borrow(x, "q")
    assert (view.shape, view.strides, view.dtype, view.device) == ((1, 2, 3, 4), (24, 12, 4, 1), dtype, ("cpu", 0))
    assert view.pointer == (kind.pointer(x) if isinstance(x, kind.type) else address(data))
    back = numpy_view(view)
    assert back.dtype == NUMPY_DTYPES[dtype]
    assert bits(back) == bits(data)


@pytest.mark.parametrize("name", [name for name in KINDS if name != "jax"])  # JAX arrays cannot be views
def test_borrow_views(name):
    kind = KINDS[name]()
    data = np.arange(120, dtype=np.float32).reshape(2, 3, 4, 5)
    views = [data[:, ::2], data.transpose(3, 1, 0, 2), data[1:, :, 1:3, ::3], np.broadcast_to(data[:1], data.shape)]
    if name != "torch":  # torch has no negative strides
        views += [data[::-1, :, :, ::-1]]
    for x in views:
        if not x.flags.writeable and name == "torch":
            borrowed = kind.make(data)[:1].expand(2, 3, 4, 5)
        elif not x.flags.writeable and name == "oldest dlpack":
            continue  # NumPy refuses to export it
        else:
            borrowed = kind.make(x)
        view = borrow(borrowed, "q")
        assert view.strides == tuple(stride // 4 for stride in x.strides)
        assert view.pointer == address(x)
        assert np.array_equal(numpy_view(view), x)


def test_views_keep_memory_alive():
    data = np.ones((1, 1, 2, 3), np.float32)
    gone = weakref.ref(data)
    view = numpy_view(borrow(OnlyDLPack(data), "q"))
    del data
    gc.collect()
    assert gone() is not None
    assert view.sum() == 6
    del view
    gc.collect()
    assert gone() is None


def test_borrowing_frees_what_the_producer_made():
    released = []

    class Counted(OnlyDLPack):
        def __dlpack__(self, **options):
            fresh = self.data.copy()
            weakref.finalize(fresh, released.append, 1)
            return fresh.__dlpack__(max_version=options.get("max_version"))

    for _ in range(3):
        borrow(Counted(np.ones((1, 1, 2, 3), np.float32)), "q")
    gc.collect()
    assert len(released) == 3


def test_every_bfloat16_pattern_from_torch():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    x = torch.from_numpy(ALL_BF16.view(np.uint16).copy()).view(torch.bfloat16).view(1, 1, 256, 256)
    view = numpy_view(borrow(x, "q"))
    assert view.dtype == BF16
    assert address(view) == x.data_ptr()
    assert bits(view) == bits(ALL_BF16)


def test_every_bfloat16_pattern_from_jax():
    jax = pytest.importorskip("jax", reason="jax is not installed")
    x = jax.device_put(ALL_BF16.reshape(1, 1, 256, 256))
    view = numpy_view(borrow(x, "q"))
    assert view.dtype == BF16
    assert address(view) == x.unsafe_buffer_pointer()
    assert bits(view) == bits(ALL_BF16)


@pytest.mark.parametrize("name", ["numpy", "torch", "jax"])
def test_every_bfloat16_pattern_goes_through_a_call(name):
    # With one key, o = v exactly, NaN payloads aside: every finite pattern has to come back as it went in.
    kind = KINDS[name]()
    v = ALL_BF16.reshape(256, 1, 1, 256)
    v = v[np.isfinite(v.astype(np.float32)).all(axis=(1, 2, 3))]
    assert len(v) == 254
    zero = np.zeros((254, 1, 1, 8), BF16)
    o = kind.numpy(call("forward", {"q": kind.make(zero), "k": kind.make(zero), "v": kind.make(v)}).o)
    assert o.dtype == BF16
    assert np.array_equal(o.astype(np.float32), v.astype(np.float32))


class Bfloat16Library(Standard):
    """A library whose arrays travel as DLPack bfloat16, which NumPy can neither export nor import."""

    def __dlpack__(self, *, stream=None, max_version=None):
        return arrays._exportable(self.data).__dlpack__(max_version=max_version)

    def __array_namespace__(self, *, api_version=None):
        return SimpleNamespace(from_dlpack=lambda x: Bfloat16Library(numpy_view(borrow(Unknown(x), "x"))))


class Unknown(OnlyDLPack):
    def __init__(self, exporter):
        self.exporter = exporter

    def __dlpack__(self, **options):
        return self.exporter.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.exporter.__dlpack_device__()


@pytest.mark.parametrize("op", OPS)
def test_bfloat16_of_a_library_that_only_has_dlpack(op):
    given = arguments(op, "bfloat16")
    expected = call(op, given)
    wrapped = {name: None if x is None else Bfloat16Library(x) for name, x in given.items()}
    assert_same([x.data for x in call(op, wrapped)], expected)


# ---- results --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "dtype"), KINDS_AND_DTYPES)
@pytest.mark.parametrize("op", OPS)
def test_same_kind_out_and_same_numbers(name, dtype, op):
    kind = KINDS[name]()
    given = arguments(op, dtype)
    expected = call(op, given, causal=True)
    actual = call(op, {arg: None if x is None else kind.make(x) for arg, x in given.items()}, causal=True)
    assert type(actual) is type(expected)
    assert all(isinstance(x, kind.type) for x in actual)
    assert_same([kind.numpy(x) for x in actual], expected)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", [name for name in KINDS if name != "jax"])
def test_out_is_written_in_place_and_returned(name, op):
    kind = KINDS[name]()
    given = arguments(op)
    expected = call(op, given)
    made = {key: None if x is None else kind.make(x) for key, x in given.items()}
    memory = empty_results(op)
    out = [kind.make(x) for x in memory]
    actual = call(op, made, out=out)
    assert all(a is x for a, x in zip(actual, out, strict=True))
    assert_same(memory, expected)
    partly = [None, *out[1:]]
    memory[1].fill(-77)
    actual = call(op, made, out=tuple(partly))
    assert isinstance(actual[0], kind.type)
    assert actual[1] is out[1]
    assert_same([kind.numpy(actual[0]), *memory[1:]], expected)


@pytest.mark.parametrize("op", ["backward", "bob"])
def test_out_may_be_interleaved_slices_of_one_buffer(op):
    given = arguments(op, Hkv=4, N=5, Dv=8)
    expected = call(op, given)
    packed = np.full((2, 5, 3, 4, 8), np.nan, np.float32)
    slices = [packed[:, :, i].swapaxes(1, 2) for i in range(3)]
    rest = [None] * (len(expected) - 3)
    actual = call(op, given, out=[*slices, *rest])
    assert_same([np.ascontiguousarray(x) for x in actual], expected)
    assert not np.isnan(packed).any()


def test_out_in_the_layout_of_the_call_and_as_a_column():
    given = arguments("forward", layout="bnhd")
    expected = call("forward", given, layout="bnhd")
    o, lse = np.zeros((2, 5, 4, 6), np.float32), np.zeros((2, 4, 5, 1), np.float32)
    actual = call("forward", given, layout="bnhd", out=(o, lse))
    assert actual.o is o
    assert actual.lse is lse
    assert_same([o, lse[..., 0]], expected)


def test_jax_results_are_not_copied():
    jax = pytest.importorskip("jax", reason="jax is not installed")
    for dtype in (jax.numpy.float32, jax.numpy.bfloat16, jax.numpy.float16):
        like = jax.numpy.zeros(3, dtype)
        kind = arrays.kind_of(like, "q")
        raw = kind.allocator((3, 5), like.dtype.name, ("cpu", 0))()
        result = kind.finish(raw, like)
        assert result.dtype == dtype
        assert result.unsafe_buffer_pointer() == kind.pointer(raw)


def test_new_torch_tensors_are_contiguous():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    kind = arrays.kind_of(torch.empty(0), "q")
    for shape in itertools.chain.from_iterable(itertools.product((0, 1, 2, 3), repeat=axes) for axes in (1, 3, 4)):
        made = [kind.allocator(shape, "float32", ("cpu", 0))() for _ in range(2)]
        for x in made:
            assert (x.shape, x.stride(), x.dtype) == (shape, row_major(shape), torch.float32)
        assert 0 in shape or made[0].data_ptr() != made[1].data_ptr()


# ---- how arrays lie in memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
@pytest.mark.parametrize("op", ["backward", "bob"])
def test_transposed_do(op, dtype):
    # flash-attention 355: do as a transposed view, with one key head
    given = arguments(op, dtype, Hkv=1)
    expected = call(op, given)
    given["do"] = np.ascontiguousarray(given["do"].swapaxes(1, 2)).swapaxes(1, 2)
    assert not given["do"].flags.c_contiguous
    assert_same(call(op, given), expected)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", ["numpy", "torch", "only dlpack"])
def test_broadcast_arrays(op, name):
    # xformers 282, pytorch 141147: stride 0 everywhere, as out.sum().backward() makes
    kind = KINDS[name]()
    given = arguments(op)
    for arg, x in given.items():
        if arg in ("do", "uq", "uk", "uv"):
            given[arg] = np.full(x.shape, 0.75, np.float32)
    expected = call(op, given)
    for arg, x in given.items():
        if x is None:
            continue
        if arg in ("do", "uq", "uk", "uv"):
            one = np.full(1, 0.75, np.float32)
            given[arg] = kind.make(np.lib.stride_tricks.as_strided(one, x.shape, (0, 0, 0, 0)))
        else:
            given[arg] = kind.make(x)
    assert_same([kind.numpy(x) for x in call(op, given)], expected)


@pytest.mark.parametrize("which", list(itertools.product([False, True], repeat=3)))
def test_all_combinations_of_views(which):
    # pytorch (ROCm) 3230: only some of q, k, v are contiguous, N = 62
    given = arguments("bob", M=62, N=62)
    expected = call("bob", given)
    for name, as_view in zip("qkv", which, strict=True):
        if as_view:
            given[name] = np.ascontiguousarray(given[name].swapaxes(1, 2)).swapaxes(1, 2)
    assert_same(call("bob", given), expected)


@pytest.mark.parametrize("op", OPS)
def test_slices_of_longer_buffers(op):
    # pytorch 146377
    given = arguments(op, B=1, Hq=2, Hkv=1, M=1024, N=992)
    expected = call(op, given)
    for name in ("k", "v", "uk", "uv"):
        if name in given:
            x = given[name]
            buffer = np.full((1, 1, 1024, x.shape[3]), np.nan, x.dtype)
            buffer[:, :, :992] = x
            given[name] = buffer[:, :, :992]
    assert_same(call(op, given), expected)


@pytest.mark.parametrize(
    ("dtype", "offset"), [("float32", 1), ("float32", 2), ("float32", 3), ("bfloat16", 1), ("bfloat16", 7)]
)
@pytest.mark.parametrize("op", OPS)
def test_element_offsets_into_one_buffer(op, dtype, offset):
    # pytorch 183484
    given = arguments(op, dtype)
    expected = call(op, given)
    for name, x in given.items():
        if x is not None:
            buffer = np.zeros(x.size + 64, x.dtype)
            start = -address(buffer) % 64 // x.itemsize + offset
            given[name] = buffer[start : start + x.size].reshape(x.shape)
            given[name][...] = x
            assert address(given[name]) % 64 == offset * x.itemsize
    assert_same(call(op, given), expected)


@pytest.mark.parametrize("op", OPS)
def test_fortran_order_reversed_axes_and_read_only(op):
    given = arguments(op)
    expected = call(op, given)
    fortran = {name: None if x is None else np.asfortranarray(x) for name, x in given.items()}
    assert_same(call(op, fortran), expected)
    reverse = (slice(None, None, -1),) * 4
    reversed_twice = {
        name: None if x is None else x[reverse[: x.ndim]].copy()[reverse[: x.ndim]] for name, x in given.items()
    }
    assert min(reversed_twice["q"].strides) < 0
    assert_same(call(op, reversed_twice), expected)
    for x in given.values():
        if x is not None:
            x.flags.writeable = False
    assert_same(call(op, given), expected)


@pytest.mark.parametrize("op", [op for op in OPS if "lse" in INPUTS[op]])
def test_lse_as_a_column_and_with_padded_strides(op):
    given = arguments(op)
    if "dlse" in given:
        given["dlse"] = np.cos(given["lse"])
    expected = call(op, given)
    padded = np.full((*given["lse"].shape[:2], 128), np.nan, np.float32)
    padded[..., :5] = given["lse"]
    assert_same(call(op, {**given, "lse": given["lse"][..., None]}), expected)
    assert_same(call(op, {**given, "lse": padded[..., :5]}), expected)
    assert_same(call(op, {**given, "lse": padded[..., :5, None]}), expected)
    if "dlse" in given:
        assert_same(call(op, {**given, "dlse": given["dlse"][..., None]}), expected)


@pytest.mark.parametrize("op", OPS)
def test_layouts_agree(op):
    given = arguments(op)
    expected = call(op, given, causal=True)
    swapped = {
        name: x if x is None or x.ndim == 3 else np.ascontiguousarray(x.swapaxes(1, 2)) for name, x in given.items()
    }
    actual = call(op, swapped, causal=True, layout="bnhd")
    assert all(x.flags.c_contiguous for x in actual)
    assert_same([x.swapaxes(1, 2) if x.ndim == 4 else x for x in actual], expected)


# ---- overlap --------------------------------------------------------------------------------------------------------


def test_overlap_is_exact():
    buffer = np.zeros(1000, np.float32)

    def view(start, shape, strides):
        return View(address(buffer) + 4 * start, shape, strides, "float32", ("cpu", 0), buffer)

    rows = view(0, (10, 10), (20, 1))
    assert overlap(rows, rows)
    assert not overlap(rows, view(10, (10, 10), (20, 1)))
    assert overlap(rows, view(9, (10, 10), (20, 1)))
    assert not overlap(rows, view(200, (5,), (1,)))
    assert overlap(rows, view(199, (100,), (-1,)))
    assert not overlap(view(0, (100,), (2,)), view(1, (100,), (2,)))
    assert not overlap(rows, view(0, (0, 10), (20, 1)))
    assert overlap(view(3, (2, 3), (0, 0)), rows)


def test_overlap_with_itself():
    def view(shape, strides):
        return View(1 << 20, shape, strides, "float32", ("cuda", 0), None)

    assert not overlaps_itself(view((2, 3, 4), row_major((2, 3, 4))))
    assert not overlaps_itself(view((4, 3, 2), (1, 4, 12)))
    assert not overlaps_itself(view((2, 3), (-3, 1)))
    assert not overlaps_itself(view((1, 3), (0, 1)))
    assert not overlaps_itself(view((0, 3), (0, 0)))
    assert overlaps_itself(view((2, 3), (0, 1)))
    assert overlaps_itself(view((2, 3), (2, 1)))
    assert overlaps_itself(view((3, 3), (1, 1)))


# ---- streams --------------------------------------------------------------------------------------------------------


class _Protocol:
    def __cuda_stream__(self):
        return (0, 4096)


class _TorchStream:
    cuda_stream = 4096
    device = type("device", (), {"index": 3})


class _CupyStream:
    ptr = 4096
    device_id = -1


@pytest.mark.parametrize(
    ("stream", "expected"),
    [
        (0, (0, None)),
        (1, (0, None)),
        (2, (2, None)),
        (4096, (4096, None)),
        (_Protocol(), (4096, None)),
        (_TorchStream(), (4096, 3)),
        (_CupyStream(), (4096, None)),
    ],
    ids=["null", "legacy", "per thread", "handle", "protocol", "torch", "cupy"],
)
def test_stream_handles(stream, expected):
    assert stream_of(stream) == expected


@pytest.fixture
def launches(monkeypatch):
    """A pretended GPU: everything up to the launch happens, and what would be launched is returned."""
    made = []

    class Recipe:
        workspace = 0

        def __init__(self, problem, lies, device):
            self.of = problem, lies, device

        def recipe(self, pointers):
            return self

        def run(self, pointers, base, stream):
            problem, lies, device = self.of
            made.append((problem, lies, dict(zip(lies, pointers, strict=True)), stream, device))

    class NoStream:
        def __init__(self, stream, device):
            made.append(("current", stream, device))

        def __enter__(self):
            return self

        def __exit__(self, *error):
            made.append("restored")

    monkeypatch.setattr(kernels, "device_info", lambda index: plan.typical_device("sm_80"))
    monkeypatch.setattr(kernels, "prepare", Recipe)
    monkeypatch.setattr(arrays, "cupy_stream", NoStream)
    monkeypatch.setattr(arrays._held, "until_now", lambda owners: made.append(("held", len(owners))))
    monkeypatch.setattr("flashbob_cupy.ops._calls", {})
    return made


@pytest.mark.parametrize(
    ("stream", "handle", "asked"), [(None, 0, 1), (0, 0, 1), (1, 0, 1), (2, 2, 2), (4096, 4096, 4096)]
)
@pytest.mark.parametrize("op", OPS)
def test_work_goes_on_the_stream_that_the_producers_were_told_of(launches, op, stream, handle, asked):
    given = {name: None if x is None else OnDevice(x, 2, 1) for name, x in arguments(op, "float16").items()}
    out = [OnDevice(x, 2, 1) for x in empty_results(op, "float16")]
    results = call(op, given, out=out, stream=stream, layout="bhnd", causal=True)
    assert all(a is b for a, b in zip(results, out, strict=True))
    current, (problem, lies, pointers, on, device), held, restored = launches
    assert current == ("current", handle, 1)
    assert (on, device, restored) == (handle, 1, "restored")
    assert (problem.op, problem.dtype, problem.mask.right) == (op, "float16", 0)
    assert all(x.streams == [asked] for x in given.values() if x is not None)
    assert all(asked in x.streams for x in out)
    assert held == ("held", sum(x is not None for x in given.values()) + len(out))
    assert list(lies) == [name for name in INPUTS[op] + OUTPUTS[op] if name not in ("dlse", "gdlse")]
    for name, x in zip(lies, [x for x in given.values() if x is not None] + out, strict=True):
        assert lies[name] == row_major(problem.shape(name))
        assert pointers[name] == address(x.data)


def test_kernels_see_axes_in_one_order(launches):
    given = {name: OnDevice(x) for name, x in arguments("forward", "float16", layout="bnhd").items()}
    o, lse = np.zeros((2, 5, 4, 6), np.float16), np.zeros((2, 4, 5, 1), np.float32)
    call("forward", given, out=[OnDevice(o), OnDevice(lse)], layout="bnhd")
    problem, lies, *_ = launches[1]
    assert problem.shape("q") == (2, 4, 5, 8)
    assert lies == {
        "q": (160, 8, 32, 1), "k": (112, 8, 16, 1), "v": (84, 6, 12, 1), "o": (120, 6, 24, 1), "lse": (20, 5, 1),
    }  # fmt: skip


def test_stream_of_another_device(launches):
    given = {name: OnDevice(x, 2, 1) for name, x in arguments("forward").items()}
    out = [OnDevice(x, 2, 1) for x in empty_results("forward")]
    with pytest.raises(ValueError, match=r"stream must be on cuda:1 like q; got a stream of cuda:3"):
        call("forward", given, out=out, stream=_TorchStream())
    assert launches == []


# ---- on a GPU -------------------------------------------------------------------------------------------------------


def moved(kind, given):
    return {name: None if x is None else kind.make(x) for name, x in given.items()}


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "dtype"), GPU_KINDS_AND_DTYPES)
@pytest.mark.parametrize("op", OPS)
def test_gpu_same_kind_out_and_right(name, dtype, op):
    kind = GPU_KINDS[name]()
    given = arguments(op, dtype, M=70, N=130)
    result = call(op, moved(kind, given))
    assert all(isinstance(x, kind.type) for x in result)
    judge(op, given, [kind.numpy(x) for x in result], Mask())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("name", ["cupy", "torch"])
@pytest.mark.parametrize("op", OPS)
def test_gpu_out_is_written_in_place_and_returned(name, op, dtype):
    kind = GPU_KINDS[name]()
    given = moved(kind, arguments(op, dtype))
    out = [kind.make(x) for x in empty_results(op, dtype)]
    actual = call(op, given, out=out, deterministic=True)
    assert all(a is x for a, x in zip(actual, out, strict=True))
    expected = call(op, given, deterministic=True)
    for a, e in zip(actual, expected, strict=True):
        assert bits(kind.numpy(a)) == bits(kind.numpy(e))


@pytest.mark.gpu
@pytest.mark.parametrize("name", GPU_KINDS)
def test_gpu_every_bfloat16_pattern(name):
    import cupy

    kind = GPU_KINDS[name]()
    x = kind.make(ALL_BF16.reshape(1, 1, 256, 256))
    view = borrow(x, "q")
    assert view.dtype == "bfloat16"
    assert view.pointer == kind.pointer(x)
    assert bits(cupy.asnumpy(arrays.cupy_view(view))) == bits(ALL_BF16)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("name", ["cupy", "torch"])
def test_gpu_work_follows_the_current_stream(name, dtype):
    # cupy 5970: the inputs are still being produced on a side stream when the call is made
    import cupy

    kind = GPU_KINDS[name]()
    given = arguments("bob", dtype, M=256, N=256, D=64, Dv=64)
    ready = moved(kind, given)
    expected = [kind.numpy(x) for x in call("bob", ready, deterministic=True)]
    if name == "cupy":
        stream = cupy.cuda.Stream(non_blocking=True)
        busy = cupy.ones((2048, 2048), np.float32)
    else:
        import torch

        stream = torch.cuda.Stream()
        busy = torch.ones((2048, 2048), device="cuda")
    current = stream if name == "cupy" else torch.cuda.stream(stream)
    cupy.cuda.Device().synchronize()
    for _ in range(100):
        with current:
            _ = busy @ busy  # keeps the stream behind while the inputs below are still wrong
            late = {key: None if x is None else 0 * x for key, x in ready.items()}
            for key, x in late.items():
                if x is not None:
                    x += ready[key]
            result = call("bob", late, deterministic=True)
        stream.synchronize()
        for a, e in zip(result, expected, strict=True):
            assert bits(kind.numpy(a)) == bits(e)


@pytest.mark.gpu
@pytest.mark.parametrize("name", GPU_KINDS)
def test_gpu_stream_argument(name):
    import cupy

    kind = GPU_KINDS[name]()
    given = arguments("bob", "float16", M=100, N=100)
    ready = moved(kind, given)
    expected = [kind.numpy(x) for x in call("bob", ready, deterministic=True)]
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    before = cupy.cuda.get_current_stream().ptr, cupy.cuda.Device().id
    for given_stream, waited_for in ((stream, stream), (stream.ptr, stream), (0, cupy.cuda.Stream.null)):
        result = call("bob", ready, stream=given_stream, deterministic=True)
        assert (cupy.cuda.get_current_stream().ptr, cupy.cuda.Device().id) == before
        waited_for.synchronize()
        for a, e in zip(result, expected, strict=True):
            assert bits(kind.numpy(a)) == bits(e)


@pytest.mark.gpu
def test_gpu_mixed_with_cpu():
    import cupy

    given = arguments("forward")
    with pytest.raises(TypeError, match="k must be a NumPy array like q; got a CuPy array"):
        call("forward", {**given, "k": cupy.asarray(given["k"])})
    kind = GPU_KINDS["torch"]()
    import torch

    tensors = {name: torch.from_numpy(x) for name, x in given.items()}
    with pytest.raises(ValueError, match="k must be on cpu like q; got cuda:0"):
        call("forward", {**tensors, "k": kind.make(given["k"])})


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["cupy", "torch"])
def test_gpu_two_devices(name):
    # cupy 5379
    import cupy

    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    kind = GPU_KINDS[name]()
    given = arguments("bob", "float16")
    expected = [kind.numpy(x) for x in call("bob", moved(kind, given), deterministic=True)]
    here = moved(kind, given)
    if name == "cupy":
        with cupy.cuda.Device(1):
            there = {key: None if x is None else cupy.asarray(x) for key, x in given.items()}
    else:
        there = {key: None if x is None else x.to("cuda:1") for key, x in here.items()}
    with pytest.raises(ValueError, match="v must be on cuda:0 like q; got cuda:1"):
        call("bob", {**here, "v": there["v"]})
    result = call("bob", there, deterministic=True)
    assert cupy.cuda.Device().id == 0
    for a, e in zip(result, expected, strict=True):
        assert bits(kind.numpy(a)) == bits(e)


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [{"B": 0}, {"M": 0}, {"N": 0}], ids=str)
@pytest.mark.parametrize("name", GPU_KINDS)
def test_gpu_zero_sizes(name, sizes, monkeypatch):
    def started(*args):
        raise AssertionError("a kernel was launched although every result is known")

    monkeypatch.setattr(kernels, "prepare", started)
    monkeypatch.setattr("flashbob_cupy.ops._calls", {})
    kind = GPU_KINDS[name]()
    given = moved(kind, arguments("bob", "bfloat16", **sizes))
    for x, form in zip(call("bob", given), empty_results("bob", **sizes), strict=True):
        assert tuple(x.shape) == form.shape
        assert not np.any(kind.numpy(x).astype(np.float32))
    o, lse = (kind.numpy(x) for x in call("forward", {key: given[key] for key in "qkv"}))
    assert not np.any(o.astype(np.float32))
    assert (lse == -np.inf).all()


@pytest.mark.gpu
def test_gpu_graph_capture():
    # cupy 4567: capture, then replay with new inputs in the same memory
    torch = pytest.importorskip("torch", reason="torch is not installed")
    kind = GPU_KINDS["torch"]()
    one, two = (arguments("bob", "bfloat16", M=300, N=300, D=64, Dv=64, seed=seed) for seed in (1, 2))
    memory = moved(kind, one)

    def step():
        q, k, v = (memory[name] for name in "qkv")
        o, lse = call("forward", {"q": q, "k": k, "v": v}, causal=True)
        with_forward = {**memory, "o": o, "lse": lse}
        first = call(
            "backward", {name: with_forward[name] for name in INPUTS["backward"]}, causal=True, deterministic=True
        )
        return (o, *first, *call("bob", with_forward, causal=True, deterministic=True))

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for given in (two, one):
        for name, x in given.items():
            if x is not None:
                memory[name].copy_(kind.make(x))
        expected = [kind.numpy(x) for x in step()]
        for x in captured:
            x.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        for x, e in zip(captured, expected, strict=True):
            assert bits(kind.numpy(x)) == bits(e)


@pytest.mark.gpu
def test_gpu_host_time_of_a_repeated_call():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    kind = GPU_KINDS["torch"]()
    given = moved(kind, arguments("bob", "bfloat16", M=128, N=128, D=64, Dv=64))
    for _ in range(20):
        call("bob", given, causal=True)
    best = np.inf
    for _ in range(20):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(20):  # few enough that the queue of launches never fills
            call("bob", given, causal=True)
        best = min(best, (time.perf_counter() - start) / 20)
    assert best < 80e-6
