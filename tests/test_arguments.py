"""Every wrong argument gives its own error, before anything is computed or written."""

from __future__ import annotations

import re
import warnings

import numpy as np
import pytest
from kinds import OPS, OnDevice, OnlyDLPack, arguments, call, empty_results

from flashbob_cupy import blocked
from flashbob_cupy.problem import AXES, INPUTS, OPTIONAL, OUTPUTS

REQUIRED = [(op, name) for op in OPS for name in INPUTS[op] if name not in OPTIONAL]
EVERY = [(op, name) for op in OPS for name in INPUTS[op]]
#: The arguments that give an axis its size; all later ones have to agree.
DEFINES = {"B": "q", "Hq": "q", "M": "q", "D": "q", "Hkv": "k", "N": "k", "Dv": "v"}


@pytest.fixture(autouse=True)
def _nothing_runs(monkeypatch):
    for op in OPS:
        given = arguments(op)  # makes o and lse while the engine can still run
        monkeypatch.setitem(PREPARED, op, given)

    def started(*args, **options):
        raise AssertionError("the engine was started before every check had passed")

    for op in OPS:
        monkeypatch.setattr(blocked, op, started)


PREPARED: dict[str, dict] = {}


def prepared(op, **changes):
    given = dict(PREPARED[op])
    if "dlse" in changes or "dlse" not in given:
        return {**given, **changes}
    return {**given, "dlse": given["lse"], **changes}


def refuse(error, *parts):
    """The error, with every part in its message, in this order."""
    return pytest.raises(error, match="(?s)" + ".*".join(re.escape(part) for part in parts))


def test_the_arguments_are_otherwise_right():
    for op in OPS:
        with pytest.raises(AssertionError, match="the engine was started"):
            call(op, prepared(op))


# ---- TypeError: not an array, wrong dtype, mixed kinds --------------------------------------------------------------


@pytest.mark.parametrize(("op", "name"), REQUIRED)
def test_missing_array(op, name):
    with refuse(TypeError, name, "NoneType" if name == "q" else f"required by {op}; got None"):
        call(op, prepared(op, **{name: None}))


@pytest.mark.parametrize(
    "thing", [3.5, "q", [[1.0]], object(), np.float32, np.float32(1)], ids=lambda x: type(x).__name__
)
@pytest.mark.parametrize(("op", "name"), EVERY)
def test_not_an_array(op, name, thing):
    with refuse(TypeError, f"{name} must be an array", "got "):
        call(op, prepared(op, **{name: thing}))


@pytest.mark.parametrize("dtype", ["int32", "uint16", "bool", "complex64", ">f4"])
@pytest.mark.parametrize("op", OPS)
def test_dtype_that_is_not_offered(op, dtype):
    given = prepared(op)
    came = "byte-swapped float32" if dtype == ">f4" else dtype
    with refuse(TypeError, "q must be float16, bfloat16, float32 or float64", came):
        call(op, {**given, "q": np.zeros(given["q"].shape, dtype)})


@pytest.mark.parametrize(("op", "name"), [(op, name) for op, name in EVERY if name != "q" and len(AXES[name]) == 4])
def test_dtype_unlike_q(op, name):
    given = prepared(op)
    with refuse(TypeError, f"{name} must be float32 like q", "float64"):
        call(op, {**given, name: given[name].astype(np.float64)})


@pytest.mark.parametrize(("op", "name"), [(op, name) for op, name in EVERY if len(AXES[name]) == 3])
def test_dtype_of_row_numbers(op, name):
    given = prepared(op)
    with refuse(TypeError, f"{name} must be float32 when q is float32", "float16"):
        call(op, {**given, name: given[name].astype(np.float16)})
    for other in AXES:
        if other in given and len(AXES[other]) == 4:
            given[other] = given[other].astype(np.float64)
    for other in ("lse", "dlse"):
        if other in given and other != name:
            given[other] = given[other].astype(np.float64)
    with refuse(TypeError, f"{name} must be float64 when q is float64", "float32"):
        call(op, given)


@pytest.mark.parametrize(("op", "name"), [(op, name) for op, name in EVERY if name != "q"])
def test_mixed_kinds(op, name):
    given = prepared(op)
    with refuse(TypeError, f"{name} must be a NumPy array like q", "OnlyDLPack"):
        call(op, {**given, name: OnlyDLPack(given[name])})
    torch = pytest.importorskip("torch", reason="torch is not installed")
    with refuse(TypeError, f"{name} must be a NumPy array like q", "torch"):
        call(op, {**given, name: torch.from_numpy(given[name])})
    tensors = {other: None if x is None else torch.from_numpy(x) for other, x in given.items()}
    with refuse(TypeError, f"{name} must be a torch array like q", "NumPy"):
        call(op, {**tensors, name: given[name]})


def test_masked_array():
    given = prepared("forward")
    with refuse(TypeError, "k is a masked array", "k.filled"):
        call("forward", {**given, "k": np.ma.masked_array(given["k"])})


@pytest.mark.parametrize("option", ["causal", "deterministic"])
@pytest.mark.parametrize("value", [1, 0, None, "yes", np.True_])
@pytest.mark.parametrize("op", OPS)
def test_switches_are_bools(op, option, value):
    with refuse(TypeError, f"{option} must be True or False", repr(value)):
        call(op, prepared(op), **{option: value})


@pytest.mark.parametrize("value", [True, "0.5", [0.5], 1j, np.ones(1)], ids=repr)
@pytest.mark.parametrize("op", OPS)
def test_scale_is_a_number(op, value):
    with refuse(TypeError, "scale must be", type(value).__name__):
        call(op, prepared(op), scale=value)


def test_right_type_after_wrong_type_and_back():
    # 1 == True == 1.0: a check that passed for one must not be taken as passed for the others.
    for _ in range(2):
        for options in ({"causal": True}, {"scale": 1.0}, {"scale": 1}, {"window": (1, 1)}, {"deterministic": False}):
            with pytest.raises(AssertionError, match="the engine was started"):
                call("bob", prepared("bob"), **options)
        for options in ({"causal": 1}, {"scale": True}, {"window": (1, True)}, {"deterministic": 0}):
            with pytest.raises(TypeError, match=next(iter(options))):
                call("bob", prepared("bob"), **options)


# ---- ValueError: shapes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "name", "axis"),
    [(op, name, axis) for op, name in EVERY for axis in AXES[name] if DEFINES[axis] != name],
)
@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
def test_wrong_size_of_an_axis(op, name, axis, layout):
    given = prepared(op)
    if layout == "bnhd":
        given = {key: x.swapaxes(1, 2) if x.ndim == 4 else x for key, x in given.items()}
    axes = AXES[name] if layout == "bhnd" or len(AXES[name]) == 3 else tuple(AXES[name][i] for i in (0, 2, 1, 3))
    wanted = given[name].shape
    shape = tuple(size + 1 if a == axis else size for a, size in zip(axes, wanted, strict=True))
    with refuse(
        ValueError, f"{name} must have shape ({', '.join(axes)})", str(wanted[axes.index(axis)]), f"got {shape}"
    ):
        call(op, {**given, name: np.zeros(shape, given[name].dtype)}, layout=layout)


@pytest.mark.parametrize(("op", "name"), EVERY)
def test_wrong_number_of_axes(op, name):
    given = prepared(op)
    axes = f"{name} must have the {len(AXES[name])} axes ({', '.join(AXES[name])})"
    fewer, more = given[name][0], np.stack([given[name]] * 3)
    with refuse(ValueError, axes, f"got {fewer.ndim} axes", str(fewer.shape)):
        call(op, {**given, name: fewer})
    with refuse(ValueError, axes, f"got {more.ndim} axes", str(more.shape), "Fold"):
        call(op, {**given, name: more})


@pytest.mark.parametrize("op", OPS)
def test_heads_that_do_not_divide(op):
    given = prepared(op)
    for name, x in given.items():
        if "Hq" in AXES[name]:
            given[name] = np.zeros((x.shape[0], 7, *x.shape[2:]), x.dtype)
    with refuse(ValueError, "heads of q", "multiple", "k and v", "Hq = 7", "Hkv = 2"):
        call(op, given)


def test_shape_errors_name_the_other_layout():
    given = prepared("forward")
    with refuse(ValueError, "v must have shape", "pass layout='bnhd'"):
        call("forward", {**given, "v": given["v"].swapaxes(1, 2)})


@pytest.mark.parametrize(("name", "axis"), [("q", "D"), ("v", "Dv")])
def test_width_zero(name, axis):
    given = prepared("forward")
    changed = ("q", "k") if axis == "D" else ("v",)
    with refuse(ValueError, f"{name} must have a last axis {axis} of 1 or more", "0)"):
        call("forward", {**given, **{other: given[other][..., :0] for other in changed}})


def test_strides_between_elements():
    record = np.zeros((2, 4, 5, 8), np.dtype([("x", np.float32), ("y", np.int8)]))
    with refuse(ValueError, "q must have strides that are multiples of its 4-byte items", "5"):
        call("forward", prepared("forward", q=record["x"]))


# ---- ValueError: devices --------------------------------------------------------------------------------------------


def on_device(given, **devices):
    return {name: None if x is None else OnDevice(x, *devices.get(name, (2, 0))) for name, x in given.items()}


@pytest.mark.parametrize(("op", "name"), [(op, name) for op, name in EVERY if name != "q"])
def test_two_devices(op, name):
    given = prepared(op)
    with refuse(ValueError, f"{name} must be on cuda:0 like q", "got cuda:1"):
        call(op, on_device(given, **{name: (2, 1)}))
    with refuse(ValueError, f"{name} must be on cuda:0 like q", "got cpu"):
        call(op, on_device(given, **{name: (1, 0)}))
    with refuse(ValueError, f"{name} must be on cpu like q", "got cuda:1"):
        call(op, on_device(given, **{other: (1, 0) for other in given if other != name}, **{name: (2, 1)}))


def test_device_that_is_not_offered():
    with refuse(ValueError, "q must be on a CPU or a CUDA device", "DLPack device type 10"):
        call("forward", on_device(prepared("forward"), q=(10, 0)))


# ---- ValueError: options --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e39])
@pytest.mark.parametrize("op", OPS)
def test_scale_is_finite(op, value):
    with refuse(ValueError, "scale must be finite", "3.4e+38", "float32", str(value)):
        call(op, prepared(op), scale=value)


@pytest.mark.parametrize("op", OPS)
def test_layout(op):
    with refuse(ValueError, "layout must be bhnd or bnhd", "'bdnh'"):
        call(op, prepared(op), layout="bdnh")
    with refuse(TypeError, "layout must be a string", "NoneType"):
        call(op, prepared(op), layout=None)
    with refuse(TypeError, "layout must be a string", "list"):
        call(op, prepared(op), layout=["bhnd"])


@pytest.mark.parametrize(
    ("window", "error", "parts"),
    [
        (3, TypeError, ("window must be None or a pair", "3 (int)")),
        ("30", TypeError, ("window must be None or a pair", "str")),
        ((3,), ValueError, ("window must have 2 entries", "got 1")),
        ((1, 2, 3), ValueError, ("window must have 2 entries", "got 3")),
        ((-1, 0), ValueError, ("window left must be 0 or more", "None for unbounded", "-1")),
        ((0, -2), ValueError, ("window right must be 0 or more", "-2")),
        ((1.5, 0), TypeError, ("window left must be an integer or None", "1.5")),
        ((0, True), TypeError, ("window right must be an integer or None", "True")),
        (([], 0), TypeError, ("window left must be an integer or None", "list")),
    ],
)
@pytest.mark.parametrize("op", OPS)
def test_window(op, window, error, parts):
    with refuse(error, *parts):
        call(op, prepared(op), window=window)


@pytest.mark.parametrize("op", OPS)
def test_stream(op):
    with refuse(ValueError, "stream must be None for arrays on the CPU"):
        call(op, prepared(op), stream=0)
    with refuse(ValueError, "stream must be a handle of 0 or more", "-3"):
        call(op, prepared(op), stream=-3)
    for thing in ("default", 1.0, True, object()):
        with refuse(TypeError, "stream must be an integer handle", type(thing).__name__):
            call(op, prepared(op), stream=thing)


# ---- out= -----------------------------------------------------------------------------------------------------------


def untouched(results):
    return all((x == x.dtype.type(-77)).all() for x in results if x is not None)


@pytest.mark.parametrize("op", OPS)
def test_out_is_a_sequence_of_the_results(op):
    results = empty_results(op)
    for thing in (results[0], 3, {"a": results[0]}):
        with refuse(TypeError, "out must be None or a tuple", OUTPUTS[op][0], type(thing).__name__):
            call(op, prepared(op), out=thing)
    for wrong in (results[:-1], [*results, None, None]):
        with refuse(ValueError, f"out must have {len(results)} entries", f"got {len(wrong)}"):
            call(op, prepared(op), out=wrong)
    if op == "bob":
        with refuse(ValueError, "out must have 4 entries", "got 5"):
            call(op, prepared(op, dlse=None), out=[*results, None])


@pytest.mark.parametrize(("op", "place"), [(op, i) for op in OPS for i in range(len(OUTPUTS[op][:4]))])
def test_out_of_the_wrong_form(op, place):
    results, name = empty_results(op), f"out ({OUTPUTS[op][place]})"

    def refused(error, replacement, *parts):
        changed = [replacement if i == place else x for i, x in enumerate(results)]
        with refuse(error, name, *parts):
            call(op, prepared(op), out=changed)
        assert untouched(results)

    x = results[place]
    refused(ValueError, np.zeros((*x.shape[:-1], x.shape[-1] + 1), x.dtype), f"= {x.shape}", f"{x.shape[-1] + 1})")
    refused(TypeError, x.astype(np.float16), "must be float32", "got float16")
    refused(TypeError, 3.0, "must be an array", "float")
    refused(TypeError, OnlyDLPack(x), "must be a NumPy array like q", "OnlyDLPack")
    read_only = x.copy()
    read_only.flags.writeable = False
    refused(ValueError, read_only, "must be writable", "read-only")
    broadcast = np.lib.stride_tricks.as_strided(x, x.shape, (0, *x.strides[1:]))
    refused(ValueError, broadcast, "must not overlap itself", "strides (0")


@pytest.mark.parametrize(("op", "name"), [(op, name) for op, name in EVERY])
def test_out_over_an_input(op, name):
    given, results = prepared(op), empty_results(op)
    place = next((i for i, output in enumerate(OUTPUTS[op][:4]) if AXES[output] == AXES[name]), None)
    if place is None:  # no result has this shape: let one lie in the middle of a buffer of the argument
        place, size = 0, max(results[0].size, given[name].size)
        buffer = np.zeros(size, np.float32)
        given[name] = buffer[-given[name].size :].reshape(given[name].shape)
        results[0] = buffer[: results[0].size].reshape(results[0].shape)
    else:
        results[place] = given[name]
    for alone in (results, [x if i == place else None for i, x in enumerate(results)]):
        with refuse(ValueError, f"out ({OUTPUTS[op][place]}) must not share memory with"):
            call(op, given, out=alone)
    if op != "forward":
        assert untouched([x for i, x in enumerate(results) if i != place])


def test_out_over_another_result():
    given, results = prepared("backward"), empty_results("backward")
    buffer = np.full(results[1].size + results[2].size - 1, -77.0, np.float32)
    dk = buffer[: results[1].size].reshape(results[1].shape)
    dv = buffer[-results[2].size :].reshape(results[2].shape)
    with refuse(ValueError, "out (dv) must not share memory with out (dk)"):
        call("backward", given, out=(None, dk, dv))
    assert untouched([buffer])
    with pytest.raises(AssertionError, match="the engine was started"):
        call("backward", given, out=(None, dk, results[2]))
    with refuse(ValueError, "out (dv) must not share memory with out (dk)"):  # also after a call that was right
        call("backward", given, out=(None, dk, dv))


def test_out_on_another_device_or_read_only_by_dlpack():
    given = on_device(prepared("forward"))
    results = [OnDevice(x, 2, 1) for x in empty_results("forward")]
    with refuse(ValueError, "out (o) must be on cuda:0 like q", "cuda:1"):
        call("forward", given, out=results)
    locked = empty_results("forward")
    for x in locked:
        x.flags.writeable = False
    with refuse(ValueError, "out (o) must be writable"):
        call("forward", given, out=[OnDevice(x) for x in locked])


def test_out_in_jax():
    jnp = pytest.importorskip("jax.numpy", reason="jax is not installed")
    given = {name: jnp.asarray(x) for name, x in prepared("forward").items()}
    with refuse(TypeError, "out (o) must be an array that can be written to", "JAX"):
        call("forward", given, out=[jnp.asarray(x) for x in empty_results("forward")])


# ---- arrays that only an adapter can take ---------------------------------------------------------------------------


@pytest.fixture
def torch():
    return pytest.importorskip("torch", reason="torch is not installed")


def tensors(torch, op):
    return {name: torch.from_numpy(x) for name, x in prepared(op).items() if x is not None}


@pytest.mark.parametrize(("op", "name"), EVERY)
def test_torch_tensor_that_requires_grad(torch, op, name):
    given = tensors(torch, op)
    given[name] = given[name].clone().requires_grad_()
    with refuse(TypeError, f"{name} requires grad", "flashbob_cupy.torch.attention", f"{name}.detach()"):
        call(op, given)
    with torch.no_grad(), refuse(TypeError, f"{name} requires grad"):
        call(op, given)
    part_of_a_graph = {**given, name: given[name] * 2}
    with refuse(TypeError, f"{name} requires grad"):
        call(op, part_of_a_graph)


def test_torch_out_that_requires_grad(torch):
    results = [torch.from_numpy(x).requires_grad_() for x in empty_results("forward")]
    with refuse(TypeError, "out (o) requires grad"):
        call("forward", tensors(torch, "forward"), out=results)


def test_torch_func(torch):
    given = tensors(torch, "forward")

    def of(q):
        return call("forward", {**given, "q": q}).o.sum()

    with refuse(TypeError, "q is inside torch.func", "flashbob_cupy.torch.attention"):
        torch.func.grad(of)(given["q"])
    with refuse(TypeError, "q is inside torch.func", "flashbob_cupy.torch.attention"):
        torch.func.jvp(of, (given["q"],), (given["q"],))
    with refuse(TypeError, "q is inside torch.func", "flashbob_cupy.torch.attention"):
        torch.func.vmap(of)(given["q"][None])


def test_torch_forward_mode(torch):
    forward_ad = torch.autograd.forward_ad
    given = tensors(torch, "forward")
    with forward_ad.dual_level():
        given["k"] = forward_ad.make_dual(given["k"], torch.ones_like(given["k"]))
        with refuse(TypeError, "k carries a forward-mode tangent", "flashbob_cupy.torch.attention"):
            call("forward", given)


def test_torch_tensors_without_plain_memory(torch):
    from torch._subclasses.fake_tensor import FakeTensorMode

    given = tensors(torch, "forward")
    with FakeTensorMode():
        fake = torch.empty(given["v"].shape)
    v = given["v"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # quantized tensors are on their way out of torch
        quantized = torch.quantize_per_tensor(v, 0.1, 0, torch.qint8)
    for bad, error, parts in (
        (fake, TypeError, ("v must be a plain torch tensor", "FakeTensor")),
        (v.to("meta"), ValueError, ("v must be on cpu like q", "meta")),
        (v.to_sparse(), TypeError, ("v must be a dense tensor", "sparse_coo", "to_dense")),
        (quantized, TypeError, ("v must be float32 like q", "qint8")),
        (torch.complex(v, v).conj().imag, TypeError, ("v has its negative bit set", "resolve_neg")),
    ):
        with refuse(error, *parts):
            call("forward", {**given, "v": bad})
    with refuse(ValueError, "q must be on a CPU or a CUDA device", "meta"):
        call("forward", {name: x.to("meta") for name, x in given.items()})


def test_jax_tracers():
    jax = pytest.importorskip("jax", reason="jax is not installed")
    given = {name: jax.numpy.asarray(x) for name, x in prepared("forward").items()}

    def of(k):
        return call("forward", {**given, "k": k}).o.sum()

    for transformed in (jax.jit(of), jax.grad(of), jax.vmap(of)):
        with refuse(TypeError, "k is a JAX tracer", "flashbob_cupy.jax.attention"):
            transformed(given["k"])
    with refuse(TypeError, "q is a JAX tracer", "flashbob_cupy.jax.attention"):
        jax.jit(lambda q: call("forward", {**given, "q": q}).o)(given["q"])
