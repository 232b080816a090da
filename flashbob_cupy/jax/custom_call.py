"""Custom calls of XLA, which arrive in Python as pointers and a stream.

One is registered with jax-tvm-ffi for each distinct set of options; sizes are read from the buffers, which arrive as
one tensor each. Nothing is passed as an attribute: jax-tvm-ffi 0.1 hands over strings that it has freed, and never
frees numbers.
"""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Sequence
from typing import Any

from flashbob_cupy import arrays, kernels, ops, plan
from flashbob_cupy.arrays import Layout, View
from flashbob_cupy.problem import INPUTS, OUTPUTS, Problem, axes_of

try:
    import jax_tvm_ffi
    import tvm_ffi
except ImportError as error:
    raise ImportError(f"flashbob_cupy.jax needs jax-tvm-ffi: pip install flashbob-cupy[jax] ({error})") from error


def lie(problem: Problem, name: str, layout: str, device: tuple[str, int]) -> Layout:
    """How XLA lays an argument or a result: contiguous in the caller's axis order."""
    shape = tuple(getattr(problem, axis) for axis in axes_of(name, layout))
    return ops.logical(name, Layout(shape, arrays.row_major(shape), problem.dtype_of(name), device), layout)


_targets: dict[Any, str] = {}
_registering = threading.Lock()


def target(platform: str, inputs: tuple[str, ...], layout: str, problem: Problem) -> str:
    """The name of the custom call for a problem whose sizes are left open."""
    key = (platform, inputs, layout, problem)
    with _registering:
        if key not in _targets:
            _targets[key] = _register(platform, inputs, layout, problem)
        return _targets[key]


def _register(platform: str, inputs: tuple[str, ...], layout: str, problem: Problem) -> str:
    # A program may come from JAX's compilation cache on disk: the name has to be the same in every process.
    mask = problem.mask
    name = (
        f"flashbob_cupy {problem.op}({', '.join(inputs)}) {problem.dtype} {layout} left={mask.left} right={mask.right} "
        f"scale={problem.scale!r} deterministic={problem.deterministic}"
    )
    call = _Call(problem, inputs, layout)
    function = tvm_ffi.convert(call.on_gpu if platform == "cuda" else call.on_cpu)
    arguments = [*(["ctx.stream"] if platform == "cuda" else []), "args", "rets"]
    jax_tvm_ffi.register_ffi_target(name, function, arguments, platform="gpu" if platform == "cuda" else "cpu")
    return name


class _Call:
    """A custom call."""

    def __init__(self, problem: Problem, inputs: tuple[str, ...], layout: str) -> None:
        self._open = problem
        self._layout = layout
        self._places = tuple(inputs.index(name) for name in ("q", "k", "v"))
        self._axes = [axis for name in ("q", "k", "v") for axis in axes_of(name, layout)]
        self._prepared: dict[Any, _Prepared] = {}

    def on_cpu(self, *tensors: Any) -> None:
        self._prepare(tensors, ("cpu", 0)).run(tensors, 0)

    def on_gpu(self, stream: int, *tensors: Any) -> None:
        self._prepare(tensors, ("cuda", tensors[0].device.index)).run(tensors, stream)

    def _prepare(self, tensors: tuple[Any, ...], device: tuple[str, int]) -> _Prepared:
        q, k, v = self._places
        sizes = tensors[q].shape + tensors[k].shape + tensors[v].shape
        key = (sizes, device, os.environ.get(plan.FAMILY_VARIABLE))
        prepared = self._prepared.get(key)
        if prepared is None:
            problem = dataclasses.replace(self._open, **dict(zip(self._axes, sizes, strict=True)))
            prepared = self._prepared.setdefault(key, _Prepared(problem, self._layout, device))
        return prepared


class _Prepared:
    """What is known of a call before its pointers and its stream."""

    def __init__(self, problem: Problem, layout: str, device: tuple[str, int]) -> None:
        self._problem = problem
        absent = {name for name in ("uq", "uk", "uv", "dlse") if not getattr(problem, name)}
        absent |= set() if problem.dlse else {"gdlse"}
        names = [name for name in INPUTS[problem.op] + OUTPUTS[problem.op] if name not in absent]
        self._lies = {name: lie(problem, name, layout, device) for name in names}
        self._kernels: kernels.Prepared | None = None
        if device[0] == "cuda" and plan.route(problem, kernels.device_info(device[1])) != "blocked":
            strides = {name: lie.strides for name, lie in self._lies.items()}
            self._kernels = kernels.prepare(problem, strides, device[1])

    def run(self, tensors: Sequence[Any], stream: int) -> None:
        pointers = [tensor.data_ptr() for tensor in tensors]
        if self._kernels is None:
            given = zip(pointers, self._lies.items(), strict=True)
            views: dict[str, View | None] = {name: View(pointer, *lie, None) for pointer, (name, lie) in given}
            ops.compute_in_blocks(self._problem, views, views, stream)
            return
        count = len(self._lies)
        workspace, base = (tensors[count].shape[0], pointers[count]) if len(tensors) > count else (0, 0)
        pointers = pointers[:count]
        recipe = self._kernels.recipe(pointers)
        if recipe.workspace > workspace:
            raise RuntimeError(
                f"{self._problem.op} needs {recipe.workspace} bytes of workspace on this GPU and was compiled for "
                f"{workspace}: all GPUs of a program must be alike, and {plan.FAMILY_VARIABLE} must not change"
            )
        recipe.run(pointers, base, stream)
