"""How the primitives are computed: as a custom call of XLA, on the device or split over devices.

XLA is asked for the results and for the workspace, so all memory is its own.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
from jax import numpy as jnp
from jax._src.dispatch import prim_requires_devices_during_lowering
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import NamedSharding, PartitionSpec

from flashbob_cupy import kernels, plan
from flashbob_cupy.errors import UnsupportedError
from flashbob_cupy.jax import custom_call
from flashbob_cupy.problem import INPUTS, OUTPUTS, Problem, axes_of


def tell_devices(primitive: Primitive) -> None:
    """Have a primitive lowered with the devices known, which splitting its work over them needs."""
    prim_requires_devices_during_lowering.add(primitive)


def register(op: str, primitive: Primitive) -> None:
    """Define how a primitive of the chain is computed on every platform."""
    tell_devices(primitive)
    for platform in ("cpu", "cuda"):
        compute = mlir.lower_fun(functools.partial(_call, op, platform), multiple_results=True)
        rule = functools.partial(_lower_for_cpu, compute) if platform == "cpu" else compute
        mlir.register_lowering(primitive, rule, platform=platform)
    mlir.register_lowering(primitive, _refuse_platform)


def _lower_for_cpu(compute: Any, context: Any, *arrays: Any, **parameters: Any) -> Any:
    # A CPU program with a Python callback is waited for by whoever starts it. Otherwise one that is still running when
    # the interpreter exits, because nobody used its result, would end the process when it next comes to Python.
    context.module_context.add_host_callback(_nothing)
    return compute(context, *arrays, **parameters)


def _nothing(*_: Any) -> None:
    """Is never called."""


def _refuse_platform(context: Any, *_: Any, **__: Any) -> Any:
    platforms = ", ".join(context.module_context.platforms)
    raise UnsupportedError(f"attention is offered on CPUs and NVIDIA GPUs; JAX asked for it on {platforms}")


def _call(op: str, platform: str, *given: Any, names: tuple[str, ...], options: Any) -> list[Any]:
    names = tuple({"tq": "uq", "tk": "uk", "tv": "uv"}.get(name, name) for name in names)
    shapes = {name: x.shape for name, x in zip(names, given, strict=True)}
    head = axes_of("q", options.layout).index("Hq")
    return list(_partitioned(op, platform, names, options, shapes["q"][head], shapes["k"][head])(*given))


@functools.cache
def _partitioned(op: str, platform: str, names: tuple[str, ...], options: Any, Hq: int, Hkv: int) -> Any:
    """The computation, which on several devices is split by batch and key head the way its arguments are."""
    results = [name for name in OUTPUTS[op] if name != "gdlse" or "dlse" in names]
    # A factor is the same number of equal parts in every array that has it: a key head, and its query heads (h g).
    query_heads = "h" if Hq == Hkv else "g" if Hkv == 1 else "(h g)"
    factor = {"B": "b", "Hq": query_heads, "Hkv": "h", "M": "m", "N": "n", "D": "d", "Dv": "w"}

    def rule(of: Sequence[str]) -> str:
        return ", ".join(" ".join(factor[axis] for axis in axes_of(name, options.layout)) for name in of)

    def compute(*given: Any) -> tuple[Any, ...]:
        return _compute(op, platform, dict(zip(names, given, strict=True)), options)

    def partition(mesh: Any, arguments: Any, _: Any) -> Any:
        spec = arguments[names.index("q")].sharding.spec
        split = dict(zip(axes_of("q", options.layout), (*spec, *[None] * 4), strict=False))
        heads = split["Hq"] if isinstance(split["Hq"], tuple) else (split["Hq"],)
        # A key head stays with all its query heads. An uneven batch is padded, which does no harm.
        parts = math.prod(mesh.shape[axis] for axis in heads if axis is not None)
        split["Hkv"] = split["Hq"] = None if Hkv % parts else split["Hq"]

        def shardings(of: Sequence[str]) -> tuple[NamedSharding, ...]:
            kept = {axis: split[axis] for axis in ("B", "Hq", "Hkv")}
            specs = (PartitionSpec(*map(kept.get, axes_of(name, options.layout))) for name in of)
            return tuple(NamedSharding(mesh, spec) for spec in specs)

        return mesh, compute, shardings(results), shardings(names)

    sharding_rule = f"{rule(names)} -> {rule(results)}"
    function = custom_partitioning(compute)
    function.def_partition(
        partition=partition,
        sharding_rule=sharding_rule,
        need_replication_factors=tuple(sorted(set("mgdnw") & set(sharding_rule), key=sharding_rule.index)),
        **({"g": Hq // Hkv} if query_heads == "(h g)" else {}),
    )
    return function


def _compute(op: str, platform: str, by_name: dict[str, Any], options: Any) -> tuple[Any, ...]:
    sizes = {
        axis: size
        for name in ("q", "k", "v")
        for axis, size in zip(axes_of(name, options.layout), by_name[name].shape, strict=True)
    }
    problem = Problem(
        op=op,
        **sizes,
        dtype=by_name["q"].dtype.name,
        mask=options.mask,
        scale=options.scale,
        deterministic=options.deterministic,
        **{name: name in by_name for name in ("uq", "uk", "uv", "dlse")},
    )
    outputs = [name for name in OUTPUTS[op] if name != "gdlse" or problem.dlse]
    results = [
        jax.ShapeDtypeStruct([sizes[axis] for axis in axes_of(name, options.layout)], problem.dtype_of(name))
        for name in outputs
    ]
    if problem.vanishes:
        fills = [-math.inf if name == "lse" else 0.0 for name in outputs]
        return tuple(jnp.full(x.shape, fill, x.dtype) for x, fill in zip(results, fills, strict=True))
    if "do" in INPUTS[op] and "do" not in by_name:
        by_name["do"] = jnp.zeros_like(by_name["o"])
    inputs = tuple(name for name in INPUTS[op] if name in by_name)
    workspace = _workspace(problem, options.layout, (*inputs, *outputs)) if platform == "cuda" else 0
    if workspace:
        results.append(jax.ShapeDtypeStruct((workspace,), "uint8"))
    target = custom_call.target(
        platform, inputs, options.layout, dataclasses.replace(problem, B=0, Hq=0, Hkv=0, M=0, N=0, D=0, Dv=0)
    )
    given = jax.ffi.ffi_call(target, results)(*(by_name[name] for name in inputs))
    return tuple(given)[: len(outputs)]


def _workspace(problem: Problem, layout: str, names: Sequence[str]) -> int:
    """Bytes that the kernels of this machine's first GPU need beyond arguments and results."""
    device = kernels.device_info(_first_gpu())
    family = plan.route(problem, device)
    if family == "blocked":
        return 0
    lies = {name: custom_call.lie(problem, name, layout, ("cuda", 0)) for name in names}
    in_place = frozenset(
        name for name, lie in lies.items() if len(lie.shape) == 3 or plan.readable(family, lie.shape, lie.strides, 0)
    )
    return plan.plan(problem, device, family, in_place).workspace


def _first_gpu() -> int:
    index = jax.local_devices(backend="cuda")[0].local_hardware_id
    return 0 if index is None else int(index)
