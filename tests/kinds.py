"""Arrays for tests: the arguments of every operation, in every kind of array that a CPU has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import flashbob_cupy
from flashbob_cupy import accuracy, arrays
from flashbob_cupy.problem import AXES, INPUTS, OUTPUTS, Mask, axes_of

OPS = tuple(INPUTS)
SIZES = {"B": 2, "Hq": 4, "Hkv": 2, "M": 5, "N": 7, "D": 8, "Dv": 6}
NUMPY_DTYPES = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}


def row_dtype(dtype: str) -> str:
    return "float64" if dtype == "float64" else "float32"


def dtype_of(name: str, dtype: str) -> str:
    return row_dtype(dtype) if len(AXES[name]) == 3 else dtype


def arguments(op: str, dtype: str = "float32", layout: str = "bhnd", seed: int = 0, **sizes: int) -> dict[str, Any]:
    """NumPy arguments of `op`, with o and lse of a forward without options; dlse is None."""
    sizes = {**SIZES, **sizes}
    rng = np.random.default_rng(seed)
    given: dict[str, Any] = {}
    for name in ("q", "k", "v", "do", "uq", "uk", "uv"):
        shape = tuple(sizes[axis] for axis in axes_of(name, layout))
        given[name] = rng.standard_normal(shape).astype(NUMPY_DTYPES[dtype])
    if {"o", "lse"} & set(INPUTS[op]):
        given["o"], given["lse"] = flashbob_cupy.forward(given["q"], given["k"], given["v"], layout=layout)
    given["dlse"] = None
    return {name: given[name] for name in INPUTS[op]}


def call(op: str, given: dict[str, Any], **options: Any) -> Any:
    """Call the public function; the entries of `given` are named as its arguments."""
    positional = [given[name] for name in INPUTS[op] if name != "dlse"]
    if given.get("dlse") is not None:
        options["dlse"] = given["dlse"]
    return getattr(flashbob_cupy, op)(*positional, **options)


def empty_results(op: str, dtype: str = "float32", **sizes: int) -> list[Any]:
    """NumPy arrays of the shapes of the results, without gdlse, full of a number that no result has."""
    sizes = {**SIZES, **sizes}
    return [
        np.full([sizes[axis] for axis in AXES[name]], -77.0, NUMPY_DTYPES[dtype_of(name, dtype)])
        for name in OUTPUTS[op][:4]
    ]


class OnlyDLPack:
    """An array of a library that offers DLPack and nothing else."""

    def __init__(self, data: np.ndarray[Any, Any]) -> None:
        self.data = data

    def __dlpack__(self, *, stream: Any = None, max_version: Any = None) -> Any:
        assert stream is None, "a CPU array has no stream"
        return self.data.__dlpack__(max_version=max_version)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.data.__dlpack_device__()


class Standard(OnlyDLPack):
    """An array of a library that follows the array API standard."""

    def __array_namespace__(self, *, api_version: str | None = None) -> Any:
        return SimpleNamespace(from_dlpack=lambda x: Standard(np.from_dlpack(x)))


class Oldest(OnlyDLPack):
    """An array of a library from before DLPack 1.0."""

    def __dlpack__(self, *, stream: Any = None) -> Any:
        return self.data.__dlpack__()


class OnDevice:
    """An array that says it is on another device, for checks; its memory is on the CPU.

    `streams` are the ones it was asked to be ready on.
    """

    def __init__(self, data: np.ndarray[Any, Any], device_type: int = 2, device_id: int = 0) -> None:
        self.data = data
        self.device = (device_type, device_id)
        self.streams: list[Any] = []

    def __dlpack__(self, *, stream: Any = None, max_version: Any = None) -> Any:
        self.streams.append(stream)
        capsule = self.data.__dlpack__(max_version=max_version)
        tensor, _ = arrays._open_capsule(capsule)
        tensor.device_type, tensor.device_id = self.device
        return capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device


@dataclass(frozen=True)
class KindOfArray:
    make: Callable[[np.ndarray[Any, Any]], Any]
    numpy: Callable[[Any], np.ndarray[Any, Any]]
    pointer: Callable[[Any], int]
    type: type


def address(x: np.ndarray[Any, Any]) -> int:
    return int(x.__array_interface__["data"][0])


def _torch() -> KindOfArray:
    torch = pytest.importorskip("torch", reason="torch is not installed")

    def make(x: np.ndarray[Any, Any]) -> Any:
        return torch.from_numpy(x.view(np.uint16)).view(torch.bfloat16) if x.dtype == bf16 else torch.from_numpy(x)

    def back(x: Any) -> np.ndarray[Any, Any]:
        return x.view(torch.uint16).numpy().view(bf16) if x.dtype == torch.bfloat16 else x.numpy()

    bf16 = NUMPY_DTYPES["bfloat16"]
    return KindOfArray(make, back, lambda x: int(x.data_ptr()), torch.Tensor)


def _jax() -> KindOfArray:
    jax = pytest.importorskip("jax", reason="jax is not installed")
    return KindOfArray(jax.numpy.asarray, np.asarray, lambda x: x.unsafe_buffer_pointer(), jax.Array)


KINDS: dict[str, Callable[[], KindOfArray]] = {
    "numpy": lambda: KindOfArray(lambda x: x, lambda x: x, address, np.ndarray),
    "torch": _torch,
    "jax": _jax,
    "only dlpack": lambda: KindOfArray(OnlyDLPack, np.asarray, address, np.ndarray),
    "oldest dlpack": lambda: KindOfArray(Oldest, np.asarray, address, np.ndarray),
    "array api": lambda: KindOfArray(Standard, lambda x: x.data, lambda x: address(x.data), Standard),
}


def _cupy() -> KindOfArray:
    import cupy

    return KindOfArray(cupy.asarray, cupy.asnumpy, lambda x: int(x.data.ptr), cupy.ndarray)


def _torch_gpu() -> KindOfArray:
    cpu = _torch()
    import torch

    if not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    return KindOfArray(lambda x: cpu.make(x).cuda(), lambda x: cpu.numpy(x.cpu()), cpu.pointer, cpu.type)


def _jax_gpu() -> KindOfArray:
    cpu = _jax()
    import jax

    try:
        device = jax.devices("cuda")[0]
    except RuntimeError:
        pytest.skip("this jax has no CUDA")
    return KindOfArray(lambda x: jax.device_put(x, device), cpu.numpy, cpu.pointer, cpu.type)


GPU_KINDS: dict[str, Callable[[], KindOfArray]] = {"cupy": _cupy, "torch": _torch_gpu, "jax": _jax_gpu}

_DTYPES = {
    "cupy": tuple(NUMPY_DTYPES),
    "numpy": tuple(NUMPY_DTYPES),
    "torch": tuple(NUMPY_DTYPES),
    "jax": ("float16", "bfloat16", "float32"),  # float64 is a mode of the whole process
}
GPU_KINDS_AND_DTYPES = [(name, dtype) for name in GPU_KINDS for dtype in _DTYPES[name]]
#: NumPy, which the others wrap, exports no bfloat16.
KINDS_AND_DTYPES = [(name, dtype) for name in KINDS for dtype in _DTYPES.get(name, ("float16", "float32", "float64"))]


def bits(x: np.ndarray[Any, Any]) -> bytes:
    return np.ascontiguousarray(x).tobytes()


def assert_same(actual: Any, expected: Any) -> None:
    """Results of NumPy arrays, equal bit for bit."""
    assert len(actual) == len(expected)
    for name, a, e in zip(expected._fields, actual, expected, strict=True):
        assert a.shape == e.shape, name
        assert a.dtype == e.dtype, name
        assert bits(a) == bits(e), name


def judge(op: str, given: dict[str, Any], result: Any, mask: Mask, scale: float | None = None) -> None:
    """Every output of `op`, as NumPy arrays, is within the budget computed from the data."""
    inputs = {name: given[name] for name in ("q", "k", "v", "do", "uq", "uk", "uv") if name in given}
    options: dict[str, Any] = {"dlse": given.get("dlse"), "mask": mask, "scale": scale}
    truth = accuracy.truth(op, **inputs, **options)
    budgets = accuracy.budgets(op, **inputs, **options, expected=truth)
    outputs = dict(zip(OUTPUTS[op], result, strict=False))
    if op == "bob" and given.get("dlse") is not None:
        outputs["gdlse"] = result.gdlse
    for name, actual in outputs.items():
        comparison = accuracy.compare(actual, truth[name], budgets[name])
        assert comparison.ok, (name, comparison)
