"""Speed and memory of one call, measured; shared by `flashbob bench` and tools/gpu_run.py.

On a GPU: time between two CUDA events, the median of several calls after a warm-up, on torch tensors (CuPy arrays where
torch is not installed). On a CPU: wall time on NumPy arrays, or on torch tensors for torch's own implementations.
"""

from __future__ import annotations

import importlib
import importlib.util
import multiprocessing
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from flashbob_cupy import ops
from flashbob_cupy.check import forced_family
from flashbob_cupy.problem import Mask, Problem

OPS = ("forward", "backward", "bob", "jvp", "step")
# Matrix products of 2·M·N·D flop that the schedules of the kernels execute.
PRODUCTS = {"forward": 2, "backward": 5, "bob": 15, "jvp": 5, "step": 22}
DETERMINISTIC_EXTRA = {"bob": 5, "step": 5}
PEERS = {"torch-flash": "FLASH_ATTENTION", "torch-cudnn": "CUDNN_ATTENTION", "torch-math": "MATH"}
FIRST_ORDER_PEERS = ("torch-flash", "torch-cudnn")


@dataclass(frozen=True, slots=True)
class Case:
    """What is measured."""

    op: str
    B: int
    Hq: int
    Hkv: int
    M: int
    N: int
    D: int
    Dv: int
    dtype: str
    causal: bool
    deterministic: bool = False

    def products(self) -> int:
        return PRODUCTS[self.op] + (DETERMINISTIC_EXTRA.get(self.op, 0) if self.deterministic else 0)

    def flop_per_product(self) -> float:
        """Averaged over products of width D and Dv; masked scores are not counted."""
        scores = Mask(right=0 if self.causal else None).visible(self.M, self.N)
        return float(self.B * self.Hq * scores * (self.D + self.Dv))

    def score_bytes(self) -> int:
        """One float32 matrix of scores: what an implementation that stores them needs many times over."""
        return 4 * self.B * self.Hq * self.M * self.N


class Place(Protocol):
    """A kind of array on a device: how to make one, to time a call and to see its memory."""

    def random(self, shape: tuple[int, ...], dtype: str) -> Any: ...
    def time(self, call: Callable[[], object], seconds: float) -> tuple[float, float | None]: ...
    def peak_mib(self, call: Callable[[], object]) -> float | None: ...


def _repeats(one: float, seconds: float) -> int:
    return max(3, min(100, int(seconds / max(one, 1e-6))))


@dataclass(frozen=True, slots=True)
class Events:
    """How a framework spells the few CUDA calls that timing needs."""

    event: Callable[[], Any]
    elapsed_ms: Callable[[Any, Any], float]
    synchronize: Callable[[], object]

    def time(self, call: Callable[[], object], seconds: float) -> tuple[float, float | None]:
        """Median device milliseconds of a call, and the host microseconds it takes to issue one."""
        for _ in range(3):
            call()
        self.synchronize()
        start = time.perf_counter()
        call()
        self.synchronize()
        repeats = _repeats(time.perf_counter() - start, seconds)
        samples = []
        for _ in range(repeats):
            begin, end = self.event(), self.event()
            begin.record()
            call()
            end.record()
            samples.append((begin, end))
        self.synchronize()
        milliseconds = statistics.median(self.elapsed_ms(begin, end) for begin, end in samples)
        # Few enough calls that none waits for a place in the launch queue.
        issued = min(repeats, 20)
        start = time.perf_counter()
        for _ in range(issued):
            call()
        host = (time.perf_counter() - start) / issued
        self.synchronize()
        return milliseconds, host * 1e6


class TorchCuda:
    """torch tensors on the current GPU."""

    def __init__(self) -> None:
        import torch

        self.torch = torch
        self.events = Events(
            lambda: torch.cuda.Event(enable_timing=True), lambda a, b: a.elapsed_time(b), torch.cuda.synchronize
        )

    def random(self, shape: tuple[int, ...], dtype: str) -> Any:
        return self.torch.randn(shape, device="cuda", dtype=getattr(self.torch, dtype))

    def time(self, call: Callable[[], object], seconds: float) -> tuple[float, float | None]:
        return self.events.time(call, seconds)

    def peak_mib(self, call: Callable[[], object]) -> float | None:
        cuda = self.torch.cuda
        cuda.synchronize()
        cuda.reset_peak_memory_stats()
        before = cuda.memory_allocated()
        call()
        cuda.synchronize()
        return float(cuda.max_memory_allocated() - before) / 2**20


class CupyCuda:
    """CuPy arrays on the current GPU; its pool keeps no record of a peak."""

    def __init__(self) -> None:
        import cupy

        self.cupy = cupy
        self.events = Events(
            cupy.cuda.Event, cupy.cuda.get_elapsed_time, lambda: cupy.cuda.get_current_stream().synchronize()
        )

    def random(self, shape: tuple[int, ...], dtype: str) -> Any:
        import ml_dtypes

        kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
        return self.cupy.random.standard_normal(shape, dtype="float32").astype(kind)

    def time(self, call: Callable[[], object], seconds: float) -> tuple[float, float | None]:
        return self.events.time(call, seconds)

    def peak_mib(self, call: Callable[[], object]) -> float | None:
        return None


class Cpu:
    """NumPy arrays, or torch tensors for torch's own implementations."""

    def __init__(self, torch: Any = None) -> None:
        self.torch = torch

    def random(self, shape: tuple[int, ...], dtype: str) -> Any:
        if self.torch is not None:
            return self.torch.randn(shape, dtype=getattr(self.torch, dtype))
        import ml_dtypes

        kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
        return np.random.default_rng().standard_normal(shape, dtype="float32").astype(kind)

    def time(self, call: Callable[[], object], seconds: float) -> tuple[float, float | None]:
        start = time.perf_counter()
        call()
        repeats = _repeats(time.perf_counter() - start, seconds)
        samples = []
        for _ in range(repeats):
            start = time.perf_counter()
            call()
            samples.append(time.perf_counter() - start)
        return statistics.median(samples) * 1e3, None

    def peak_mib(self, call: Callable[[], object]) -> float | None:
        """Growth of the process while its first call runs, where Linux lets the high-water mark be reset."""
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            return None
        before = _status_kib("VmRSS")
        call()
        return max(0.0, (_status_kib("VmHWM") - before) / 1024)


def _status_kib(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1])
    raise KeyError(field)


def _inputs(case: Case, place: Place) -> dict[str, Any]:
    query, key = (case.B, case.Hq, case.M), (case.B, case.Hkv, case.N)
    shapes = {"q": (*query, case.D), "k": (*key, case.D), "v": (*key, case.Dv), "do": (*query, case.Dv)}
    shapes.update(uq=shapes["q"], uk=shapes["k"], uv=shapes["v"])
    return {name: place.random(shape, case.dtype) for name, shape in shapes.items()}


def library_call(case: Case, place: Place) -> Callable[[], object]:
    """One call of the library's `case.op` on fresh random inputs."""
    x = _inputs(case, place)
    options: dict[str, Any] = {"causal": case.causal, "deterministic": case.deterministic}
    if case.op == "step":
        attention = importlib.import_module("flashbob_cupy.torch").attention
        return _autograd_step(lambda q, k, v: attention(q, k, v, **options), x)
    q, k, v, do, u = x["q"], x["k"], x["v"], x["do"], (x["uq"], x["uk"], x["uv"])
    o, lse = ops.forward(q, k, v, **options)
    calls: dict[str, Callable[[], object]] = {
        "forward": lambda: ops.forward(q, k, v, **options),
        "backward": lambda: ops.backward(q, k, v, do, o, lse, **options),
        "bob": lambda: ops.bob(q, k, v, do, *u, o, lse, **options),
        "jvp": lambda: ops.jvp(q, k, v, *u, o, lse, **options),
    }
    return calls[case.op]


def _autograd_step(attention: Callable[[Any, Any, Any], Any], x: dict[str, Any]) -> Callable[[], object]:
    import torch

    leaves = [x[name].detach().requires_grad_() for name in ("q", "k", "v", "do")]
    u = [x["uq"], x["uk"], x["uv"]]

    def call() -> object:
        o = attention(*leaves[:3])
        first = torch.autograd.grad(o, leaves[:3], leaves[3], create_graph=True)
        return torch.autograd.grad(first, leaves, u)

    return call


def peer_call(case: Case, peer: str, place: Place) -> Callable[[], object]:
    """One call of PyTorch's scaled_dot_product_attention, restricted to one of its implementations."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    x = _inputs(case, place)
    if case.M != case.N and case.causal:
        raise ValueError("PyTorch aligns a causal mask top-left: measure with M = N")
    options = {"is_causal": case.causal, "enable_gqa": case.Hq != case.Hkv}

    def attention(q: Any, k: Any, v: Any) -> Any:
        with sdpa_kernel(getattr(SDPBackend, PEERS[peer])):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)

    leaves = [x[name].requires_grad_() for name in ("q", "k", "v")]
    if case.op == "forward":
        return lambda: attention(*(leaf.detach() for leaf in leaves))
    if case.op == "backward":
        o = attention(*leaves)
        return lambda: torch.autograd.grad(o, leaves, x["do"], retain_graph=True)
    if case.op == "step":
        return _autograd_step(attention, x)
    if case.op == "bob":
        do = x["do"].requires_grad_()
        first = torch.autograd.grad(attention(*leaves), leaves, do, create_graph=True)
        u = [x["uq"], x["uk"], x["uv"]]
        return lambda: torch.autograd.grad(first, [*leaves, do], u, retain_graph=True)
    raise ValueError(f"{peer} has no {case.op}")


def measure(case: Case, impl: str, device: str, seconds: float = 0.2) -> dict[str, object]:
    """Measure one implementation of one case.

    `impl` is a kernel family or engine ("sm80", "sm90", "blocked") or a peer ("torch-flash", "torch-cudnn",
    "torch-math"). Raises whatever the implementation raises, out-of-memory errors among it.
    """
    is_peer = impl in PEERS
    place = _place(device, torch_tensors=is_peer or case.op == "step")
    context: AbstractContextManager[None] = nullcontext() if is_peer or device == "cpu" else forced_family(impl)
    with context:
        call = peer_call(case, impl, place) if is_peer else library_call(case, place)
        if device == "cuda":
            call()  # compiles; on a CPU it would leave memory behind that the next call takes without growing
        peak = place.peak_mib(call)
        milliseconds, host = place.time(call, seconds)
    # How many products a peer's double backward executes is not known.
    products = None if is_peer and case.op in ("bob", "step") else case.products()
    return {
        "op": case.op,
        "impl": impl,
        "B": case.B,
        "Hq": case.Hq,
        "Hkv": case.Hkv,
        "M": case.M,
        "N": case.N,
        "D": case.D,
        "Dv": case.Dv,
        "dtype": case.dtype,
        "causal": case.causal,
        "deterministic": case.deterministic,
        "ms": _rounded(milliseconds),
        "products": products,
        "tflops": None if products is None else _rounded(products * case.flop_per_product() / milliseconds / 1e9),
        "host_us": None if host is None else round(host, 1),
        "peak_mib": None if peak is None else round(peak, 1),
    }


def measure_apart(case: Case, impl: str) -> dict[str, object]:
    """`measure` on the CPU in a process of its own: memory that earlier calls left behind would hide the peak."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measure, case, impl, "cpu").result()


def _rounded(x: float) -> float:
    """Four significant digits: more is noise."""
    return float(f"{x:.4g}")


def _place(device: str, torch_tensors: bool) -> Place:
    if device == "cuda":
        return TorchCuda() if torch_with_cuda() else CupyCuda()
    if torch_tensors:
        import torch

        return Cpu(torch)
    return Cpu()


def torch_with_cuda() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return bool(torch.cuda.is_available())


def families(case: Case) -> list[str]:
    """The kernel families of this GPU that serve `case`, the planner's own choice first."""
    from flashbob_cupy import kernels, plan

    shape = {axis: getattr(case, axis) for axis in ("B", "Hq", "Hkv", "M", "N", "D", "Dv", "dtype", "deterministic")}
    mask = Mask(right=0) if case.causal else Mask()
    # A step ends in the double backward.
    op = "bob" if case.op == "step" else case.op
    problem = Problem(op=op, **shape, mask=mask, scale=1.0, uq=True, uk=True, uv=True)
    device = kernels.device_info(0)
    found = [plan.route(problem, device)]
    for family in plan.FAMILIES:
        with forced_family(family):
            if family not in found and plan.route(problem, device) == family:
                found.append(family)
    return found


def peers(case: Case, device: str) -> list[str]:
    """The installed implementations that can run `case`, in the order of PEERS."""
    if importlib.util.find_spec("torch") is None or case.op == "jvp" or case.deterministic:
        return []
    if device == "cuda" and not torch_with_cuda():
        return []
    first_order = FIRST_ORDER_PEERS if device == "cuda" and case.op in ("forward", "backward") else ()
    return [*first_order, "torch-math"]
