"""The PyTorch adapter on a GPU: derivatives, CUDA graphs, streams, threads, memory, host time."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch import func  # noqa: E402
from torch.autograd import gradcheck, gradgradcheck  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402
from torch_dense import dense, leaves, like, qkv  # noqa: E402

from flashbob_cupy import accuracy  # noqa: E402
from flashbob_cupy.hvp import hvp  # noqa: E402
from flashbob_cupy.problem import OUTPUTS, Mask  # noqa: E402
from flashbob_cupy.torch import attention, installed  # noqa: E402

pytestmark = pytest.mark.gpu

DTYPES = ("float16", "bfloat16", "float32", "float64")


@pytest.fixture(autouse=True)
def torch_sees_the_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("this PyTorch has no CUDA")


def on_gpu(tensors: list[Any], device: str = "cuda") -> list[Any]:
    return [x.to(device) for x in tensors]


def chain(inputs: list[Any], do: Any, u: list[Any], **options: Any) -> list[Any]:
    """o, first and second derivatives."""
    o = attention(*inputs, **options)
    first = torch.autograd.grad(o, inputs, do, create_graph=True)
    return [o, *first, *torch.autograd.grad(first, inputs, u)]


def problem(dtype: str = "bfloat16", device: str = "cuda", **sizes: int) -> tuple[list[Any], Any, list[Any]]:
    sizes = {"B": 2, "Hq": 4, "Hkv": 2, "M": 200, "N": 200, "D": 64, "Dv": 64} | sizes
    inputs = on_gpu(qkv(**sizes, dtype=getattr(torch, dtype)), device)
    do = torch.randn(*inputs[0].shape[:3], sizes["Dv"], device=device).to(inputs[0].dtype)
    return [x.requires_grad_() for x in inputs], do, like_on(inputs)


def like_on(tensors: list[Any]) -> list[Any]:
    return [torch.randn(x.shape, device=x.device).to(x.dtype) for x in tensors]


def numpy(x: Any) -> Any:
    return x.detach().double().cpu().numpy()


# ------------------------------------------------------------------------------------------------------- derivatives


@pytest.mark.parametrize("options", [{}, {"causal": True, "window": (2, None), "scale": 0.3}], ids=str)
def test_gradcheck(options: dict[str, Any]) -> None:
    inputs = leaves(on_gpu(qkv(1, 2, 1, 3, 5, 4, 3)))
    function = lambda q, k, v: attention(q, k, v, return_lse=True, **options)  # noqa: E731
    assert gradcheck(function, inputs, check_forward_ad=True, nondet_tol=1e-12)
    assert gradgradcheck(function, inputs, check_fwd_over_rev=True, nondet_tol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
def test_derivatives_are_within_budget(dtype: str, causal: bool) -> None:
    inputs, do, u = problem(dtype, M=130, N=190)
    results = chain(inputs, do, u, causal=causal)
    operands = dict(zip(("q", "k", "v", "do", "uq", "uk", "uv"), map(numpy, (*inputs, do, *u)), strict=True))
    mask = Mask(right=0 if causal else None)
    for op, taken, found in (("forward", 3, results[:1]), ("backward", 4, results[1:4]), ("bob", 7, results[4:])):
        given = dict(list(operands.items())[:taken])
        truth = accuracy.truth(op, **given, mask=mask)
        budgets = accuracy.budgets(op, **given, mask=mask, dtype=dtype, expected=truth)
        for name, result in zip(OUTPUTS[op], found, strict=False):
            verdict = accuracy.compare(numpy(result), truth[name], budgets[name])
            assert verdict.ok, f"{op} {name}: {verdict}"


@pytest.mark.parametrize("name", ["hessian", "jvp of grad", "grad of jvp", "per-sample"])
def test_transforms(name: str) -> None:
    x = tuple(on_gpu(qkv(2, 2, 1, 3, 4, 8, 8)))
    u = tuple(on_gpu(like(qkv(2, 2, 1, 3, 4, 8, 8))))

    def derivative(function: Callable[..., Any]) -> Any:
        loss = lambda q, k, v: function(q, k, v).sin().sum()  # noqa: E731
        return {
            "hessian": lambda: func.hessian(loss, (0, 1, 2))(*x),
            "jvp of grad": lambda: func.jvp(func.grad(loss, (0, 1, 2)), x, u),
            "grad of jvp": lambda: func.grad(lambda *y: func.jvp(loss, y, u)[1], (0, 1, 2))(*x),
            "per-sample": lambda: func.vmap(func.grad(loss, (0, 1, 2)))(*x),
        }[name]()

    torch.testing.assert_close(derivative(attention), derivative(dense))


def test_autocast_serves_half_precision() -> None:
    inputs = leaves(on_gpu(qkv(2, 4, 4, 64, 64, 32, 32, dtype=torch.float32)))
    with torch.autocast("cuda", torch.bfloat16), installed(strict=True):
        o = torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=True)
    first = torch.autograd.grad(o.float().square().mean(), inputs, create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in first), inputs)
    assert o.dtype == torch.bfloat16
    assert all(g.dtype == torch.float32 and g.isfinite().all() and g.any() for g in second)


def test_compiled_first_order() -> None:
    inputs, do, _ = problem("float32")
    torch._dynamo.reset()
    function = torch.compile(lambda q, k, v: attention(q * 2, k, v, causal=True).sin(), fullgraph=True)
    eager = torch.autograd.grad(attention(inputs[0] * 2, *inputs[1:], causal=True).sin(), inputs, do)
    torch.testing.assert_close(torch.autograd.grad(function(*inputs), inputs, do), eager)


# ------------------------------------------------------------------------------------------- graphs, streams, threads


# A leaf belongs to the stream that used it first, that of the call before the capture; nothing is accumulated in it.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_chain_is_captured_in_a_graph_and_replayed(dtype: str) -> None:
    # Work that ran on any other stream than the capturing one would not be replayed: this is also the proof that every
    # kernel of the chain runs on the caller's stream.
    inputs, do, u = problem(dtype)
    options = {"causal": True, "deterministic": True}
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        chain(inputs, do, u, **options)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain(inputs, do, u, **options)
    for seed in range(3):
        torch.manual_seed(seed)
        with torch.no_grad():
            for x in (*inputs, do, *u):
                x.copy_(torch.randn_like(x))
        for x in captured:
            x.detach().fill_(torch.nan)
        graph.replay()
        for replayed, eager in zip(captured, chain(inputs, do, u, **options), strict=True):
            assert torch.equal(replayed, eager)


def test_inputs_still_being_produced_on_a_side_stream() -> None:
    inputs, do, u = problem("float16", M=512, N=512)
    expected = chain(inputs, do, u, deterministic=True)
    busy = torch.randn(4096, 4096, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    for _ in range(20):
        with torch.cuda.stream(stream):
            late = [torch.full_like(x, torch.nan) for x in inputs]
            busy @ busy
            with torch.no_grad():
                for x, y in zip(late, inputs, strict=True):
                    x.copy_(y)
            results = chain([x.requires_grad_() for x in late], do, u, deterministic=True)
            different = torch.stack([(a != b).any() for a, b in zip(results, expected, strict=True)]).any()
        torch.cuda.current_stream().wait_stream(stream)
        assert not different.item()


def test_threads_with_streams_of_their_own() -> None:
    inputs, do, u = problem("bfloat16", M=136, N=72)
    torch.cuda.synchronize()

    def work(_: int) -> list[Any]:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            results = chain([x.detach().requires_grad_() for x in inputs], do, u, deterministic=True)
        stream.synchronize()
        return results

    with ThreadPoolExecutor(8) as pool:
        every = list(pool.map(work, range(24)))
    expected = chain(inputs, do, u, deterministic=True)
    assert all(torch.equal(a, b) for results in every for a, b in zip(results, expected, strict=True))


def test_two_devices() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    results = []
    for device in ("cuda:0", "cuda:1"):
        inputs, do, u = problem("bfloat16", "cuda:0")
        moved = [x.detach().to(device).requires_grad_() for x in inputs]
        torch.manual_seed(0)
        do, u = torch.randn(do.shape).to(device, do.dtype), [torch.randn(x.shape).to(device, x.dtype) for x in u]
        results.append(chain(moved, do, u, deterministic=True))
        assert torch.cuda.current_device() == 0
    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(*results, strict=True))


# --------------------------------------------------------------------------------------------------- memory and time


def test_memory_does_not_grow_with_queries_times_keys() -> None:
    N = 8192
    inputs, do, u = problem("bfloat16", B=1, Hq=12, Hkv=12, M=N, N=N)
    chain(inputs, do, u, causal=True)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    chain(inputs, do, u, causal=True)
    one_score_matrix = 12 * N * N * 2
    assert torch.cuda.max_memory_allocated() - before < one_score_matrix / 4


def test_a_gradient_penalty_in_half_precision_at_full_size() -> None:
    q, k, v = leaves(on_gpu(qkv(32, 8, 8, 128, 128, 64, 64, dtype=torch.float16)))
    o = attention(q, k, v)
    (dq,) = torch.autograd.grad(o, q, torch.ones_like(o), create_graph=True)
    penalty = dq.square().sum() / 32
    (uq,) = torch.autograd.grad(penalty, dq, retain_graph=True)
    second = torch.autograd.grad(penalty, (q, k, v))
    few = slice(0, 32, 8)
    names = {"q": q, "k": k, "v": v, "do": torch.ones_like(o), "uq": uq}
    operands = {name: numpy(x[few]) for name, x in names.items()}
    truth = accuracy.truth("bob", **operands)
    budgets = accuracy.budgets("bob", **operands, dtype="float16", expected=truth)
    for name, result in zip(OUTPUTS["bob"], second, strict=False):
        assert accuracy.compare(numpy(result[few]), truth[name], budgets[name]).ok


class _EmptyGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arrays: Any) -> Any:
        ctx.save_for_backward(*arrays)
        return tuple(map(torch.empty_like, arrays[:3]))

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return tuple(map(torch.empty_like, ctx.saved_tensors))


class _Empty(torch.autograd.Function):
    """What PyTorch itself takes for a function that is differentiated twice, whatever it computes."""

    @staticmethod
    def forward(ctx: Any, *arrays: Any) -> Any:
        ctx.save_for_backward(*arrays)
        return torch.empty_like(arrays[0])

    @staticmethod
    def backward(ctx: Any, do: Any) -> Any:
        return _EmptyGradient.apply(*ctx.saved_tensors, do)


def test_a_hessian_vector_product_stays_in_the_calling_thread() -> None:
    inputs, _, u = problem()
    threads = set()

    def loss(leaves: list[Any]) -> Any:
        o = attention(*leaves)
        o.register_hook(lambda _: threads.add(threading.get_ident()))
        return o.square().mean()

    hvp(loss, inputs, u)
    assert threads == {threading.get_ident()}


def test_host_time_of_a_second_order_step(record_property: Callable[[str, object], None]) -> None:
    inputs, do, u = problem("bfloat16", B=4, Hq=12, Hkv=12, M=256, N=256)

    def step() -> None:
        chain(inputs, do, u, causal=True)

    def in_one_thread() -> None:
        with torch.autograd.set_multithreading_enabled(False):
            step()

    def materialising() -> None:
        with sdpa_kernel(SDPBackend.MATH):
            o = torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=True)
            first = torch.autograd.grad(o, inputs, do, create_graph=True)
            torch.autograd.grad(first, inputs, u)

    def empty() -> None:
        first = torch.autograd.grad(_Empty.apply(*inputs), inputs, do, create_graph=True)
        torch.autograd.grad(first, inputs, u)

    steps = {
        "host_us": step, "one_thread_host_us": in_one_thread, "empty_functions_host_us": empty,
        "pytorch_math_host_us": materialising,
    }  # fmt: skip
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(200):
        for name, one in steps.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            one()
            times[name].append((time.perf_counter() - start) * 1e6)
    medians = {name: round(statistics.median(taken[50:]), 1) for name, taken in times.items()}
    for name, microseconds in medians.items():
        record_property(name, microseconds)
    print(f"forward, backward and double backward through autograd, median microseconds of the host: {medians}")
    # The aim is 450. How long both take depends on the machine, and on what else it does.
    assert medians["host_us"] < min(1500, medians["pytorch_math_host_us"])
