"""`flashbob_cupy.jax.attention`: values, errors, and what reaches the engines."""

from __future__ import annotations

import functools
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed")
pytest.importorskip("jax_tvm_ffi", reason="jax-tvm-ffi is not installed")

import kinds  # noqa: E402
import numpy as np  # noqa: E402
from jax import numpy as jnp  # noqa: E402
from jax_dense import all_links, like, qkv  # noqa: E402

import flashbob_cupy as fb  # noqa: E402
from flashbob_cupy import kernels, ops, plan  # noqa: E402
from flashbob_cupy.errors import UnsupportedError  # noqa: E402
from flashbob_cupy.jax import attention, custom_call, lowering  # noqa: E402
from flashbob_cupy.problem import Mask  # noqa: E402

ALL = (0, 1, 2)
DTYPES = ("float16", "bfloat16", "float32", "float64")


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The problem, inputs and outputs of every engine call, in order."""
    seen: list[Any] = []
    compute = ops.compute_in_blocks

    def watch(problem: Any, inputs: Any, outputs: Any, stream: int) -> None:
        seen.append((problem, inputs, outputs))
        compute(problem, inputs, outputs, stream)

    monkeypatch.setattr(ops, "compute_in_blocks", watch)
    return seen


def as_numpy(x: Any) -> Any:
    return None if x is None else np.asarray(x)


# -------------------------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize("with_dlse", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_within_budget(dtype: str, causal: bool, with_dlse: bool) -> None:
    q, k, v = qkv(2, 4, 2, 33, 45, 16, 8, dtype=dtype)
    u = like([q, k, v])
    (do,) = like(qkv(2, 4, 4, 33, 33, 8, 8, dtype=dtype)[:1], 2)
    dlse = jnp.asarray(like([jnp.zeros((2, 4, 33))], 3)[0], kinds.row_dtype(dtype)) if with_dlse else None
    results = jax.jit(functools.partial(all_links, causal=causal))(q, k, v, do, dlse, u)
    arrays = {"q": q, "k": k, "v": v, "do": do, "uq": u[0], "uk": u[1], "uv": u[2], "dlse": dlse}
    given = {name: as_numpy(x) for name, x in arrays.items()}
    for op, result in results.items():
        wanted = {name: given[name] for name in kinds.INPUTS[op] if name in given and given[name] is not None}
        found = ops.BobResult(*map(as_numpy, result[:4])) if op == "bob" else tuple(map(as_numpy, result))
        if op == "bob" and with_dlse:
            found.gdlse = as_numpy(result[4])
        kinds.judge(op, wanted, found, Mask(right=0 if causal else None))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, {"causal": True, "layout": "bnhd"}, {"window": (2, 1), "scale": 0.3}], ids=str)
def test_bit_for_bit_the_array_functions(options: dict[str, Any], dtype: str) -> None:
    q, k, v = qkv(dtype=dtype, layout=options.get("layout", "bhnd"))
    u = like([q, k, v])
    o, lse = fb.forward(q, k, v, **options)
    do, dlse = like([o, lse], 2)
    expected = {
        "forward": (o, lse),
        "jvp": fb.jvp(q, k, v, *u, o, lse, **options),
        "backward": fb.backward(q, k, v, do, o, lse, dlse=dlse, **options),
        "bob": (bob := fb.bob(q, k, v, do, *u, o, lse, dlse=dlse, **options)),
    }
    expected["bob"] = (*bob, bob.gdlse)
    for wrap in (lambda f: f, jax.jit):
        actual = wrap(functools.partial(all_links, **options))(q, k, v, do, dlse, u)
        for op in expected:
            for a, e in zip(actual[op], expected[op], strict=True):
                assert a.dtype == e.dtype
                assert kinds.bits(np.asarray(a)) == kinds.bits(np.asarray(e)), op


def test_returns_o_or_both() -> None:
    x = qkv()
    o = attention(*x)
    both = attention(*x, return_lse=True)
    assert isinstance(o, jax.Array)
    assert (o.shape, both[1].shape) == ((2, 4, 5, 3), (2, 4, 5))
    assert bool((o == both[0]).all())


def test_numpy_arrays_are_arrays() -> None:
    x = qkv(dtype="float32")
    assert bool((attention(*map(np.asarray, x)) == attention(*x)).all())


def test_rows_without_a_key_have_no_derivatives() -> None:
    q, k, v = qkv(1, 1, 1, 5, 2)
    q = q.at[:, :, :3].set(jnp.nan)
    o, lse = attention(q, k, v, causal=True, return_lse=True)
    assert bool((o[:, :, :3] == 0).all())
    assert bool((lse[:, :, :3] == -jnp.inf).all())
    loss = lambda *x: jnp.sin(attention(*x, causal=True)).sum()  # noqa: E731
    second = jax.grad(lambda *x: sum((g**2).sum() for g in jax.grad(loss, ALL)(*x)), ALL)
    for first_or_second in (jax.grad(loss, ALL), second):
        gradients = first_or_second(q, k, v)
        assert bool((gradients[0][:, :, :3] == 0).all())
        assert all(bool(jnp.isfinite(g).all()) for g in gradients)


@pytest.mark.parametrize("sizes", [{"B": 0}, {"Hq": 0, "Hkv": 0}, {"M": 0}, {"N": 0}], ids=str)
def test_nothing_to_compute(sizes: dict[str, int], calls: list[Any]) -> None:
    x = qkv(**sizes)
    o, lse = jax.jit(functools.partial(attention, return_lse=True))(*x)
    assert o.size == 0 or bool((o == 0).all())
    assert lse.size == 0 or bool((lse == -jnp.inf).all())
    loss = lambda *x: jnp.sin(attention(*x)).sum()  # noqa: E731
    second = jax.grad(lambda *x: sum((g**2).sum() for g in jax.grad(loss, ALL)(*x)), ALL)(*x)
    assert [g.shape for g in second] == [a.shape for a in x]
    assert all(bool((g == 0).all()) for g in second)
    assert calls == []


def test_deterministic_reaches_the_engine(calls: list[Any]) -> None:
    jax.grad(lambda q: attention(q, *qkv()[1:], deterministic=True).sum())(qkv()[0])
    assert [problem.deterministic for problem, _, _ in calls] == [True, True]


# --------------------------------------------------------------------------------------------- what reaches the engines


def test_zero_copy_under_jit(calls: list[Any]) -> None:
    x = qkv(dtype="bfloat16")
    o, lse = jax.jit(functools.partial(attention, return_lse=True))(*x)
    jax.block_until_ready(o)
    ((_, inputs, outputs),) = calls
    assert [inputs[name].pointer for name in "qkv"] == [a.unsafe_buffer_pointer() for a in x]
    assert [outputs[name].pointer for name in ("o", "lse")] == [a.unsafe_buffer_pointer() for a in (o, lse)]


def test_a_cpu_program_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise one that is still running at the end ends the process."""
    done: list[bool] = []
    monkeypatch.setattr(ops, "compute_in_blocks", lambda *_: (time.sleep(0.2), done.append(True)))
    jax.jit(functools.partial(attention, scale=0.4321))(*qkv())
    assert done == [True]


def test_a_step_of_second_order_takes_one_call_of_each(calls: list[Any]) -> None:
    x = qkv()
    loss = lambda *x: (attention(*x) * qkv(seed=3)[0][..., :3]).sum()  # noqa: E731
    step = jax.jit(jax.grad(lambda *x: sum((g**2).sum() for g in jax.grad(loss, ALL)(*x)), ALL))
    jax.block_until_ready(step(*x))
    assert [problem.op for problem, _, _ in calls] == ["forward", "backward", "bob"]


@pytest.mark.parametrize("along", [(0,), (1,), (2,), (0, 2)], ids=str)
def test_zero_tangents_skip_their_work(along: tuple[int, ...], calls: list[Any]) -> None:
    x = qkv()

    def some(*moving: Any) -> Any:
        y = list(x)
        for place, value in zip(along, moving, strict=True):
            y[place] = value
        return (attention(*y) ** 2).sum()

    moving = tuple(x[place] for place in along)
    jax.jvp(jax.grad(some), moving, moving)
    for problem, inputs, _ in calls:
        assert not problem.dlse
        if problem.op in ("jvp", "bob"):
            present = tuple(place for place, name in enumerate(("uq", "uk", "uv")) if name in inputs)
            assert present == along
    assert {"jvp", "bob"} <= {problem.op for problem, _, _ in calls}


def test_the_cotangent_of_o_alone_takes_a_jvp(calls: list[Any]) -> None:
    x = qkv()
    backward = lambda do: jax.vjp(attention, *x)[1](do)  # noqa: E731
    do = attention(*x)
    jax.vjp(backward, do)[1](tuple(x))
    assert "bob" not in {problem.op for problem, _, _ in calls}


def test_first_calls_in_threads() -> None:
    q, k, v = qkv(2, 4, 2, 64, 64, 16, 16, dtype="float32")
    start = Barrier(8)

    def first(_: int) -> Any:
        start.wait()
        return jax.jit(jax.grad(lambda q: jnp.sin(attention(q, k, v, scale=0.77)).sum()))(q)

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(first, range(8)))
    assert all(bool((r == results[0]).all()) for r in results)
    assert bool((results[0] != 0).any())


class Tensor(SimpleNamespace):
    """What jax-tvm-ffi hands over."""

    def data_ptr(self) -> int:
        return int(self.pointer)


@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
@pytest.mark.parametrize("D", [64, 20])
def test_kernels_get_pointers_stream_and_workspace(layout: str, D: int, monkeypatch: pytest.MonkeyPatch) -> None:
    device = plan.typical_device("sm_90a")
    prepared: list[Any] = []
    ran: list[Any] = []
    recipe = SimpleNamespace(workspace=0, run=lambda *arguments: ran.append(arguments))

    def prepare(problem: Any, strides: Any, index: int) -> Any:
        prepared.append((problem, strides, index))
        return SimpleNamespace(recipe=lambda pointers: recipe)

    handlers: dict[str, Callable[..., None]] = {}

    def register(name: str, function: Any, arguments: list[str], platform: str) -> None:
        assert (arguments, platform) == (["ctx.stream", "args", "rets"], "gpu")
        handlers[name] = function

    monkeypatch.setattr(lowering, "_first_gpu", lambda: 0)
    monkeypatch.setattr(kernels, "device_info", lambda index: device)
    monkeypatch.setattr(kernels, "prepare", prepare)
    monkeypatch.setattr(custom_call.tvm_ffi, "convert", lambda function: function)
    monkeypatch.setattr(custom_call.jax_tvm_ffi, "register_ffi_target", register)
    monkeypatch.setattr(custom_call, "_targets", {})
    q, k, v = qkv(2, 4, 2, 48, 80, D, D, dtype="bfloat16", layout=layout)
    loss = lambda *x: (attention(*x, layout=layout) ** 2).sum()  # noqa: E731
    second = jax.grad(lambda *x: sum((g**2).sum() for g in jax.grad(loss, ALL)(*x)), ALL)
    text = jax.jit(second).trace(q, k, v).lower(lowering_platforms=("cuda",)).as_text()

    (name,) = (name for name in handlers if " bob(" in name)
    assert name in text
    (line,) = (line for line in text.splitlines() if f'@"{name}"' in line)
    results = line.rpartition("->")[2]
    sizes = [
        tuple(map(int, part.split("x")[:-1])) for part in results.replace("tensor<", "").strip(" ()>").split(">, ")
    ]
    (size,) = sizes[-1]
    shapes = {"q": q.shape, "k": k.shape, "v": v.shape, "lse": (2, 4, 48)}
    shapes |= {"uq": q.shape, "uk": k.shape, "uv": v.shape, "do": q.shape, "o": q.shape}
    given = [shapes[n] for n in kinds.INPUTS["bob"] if n in shapes] + sizes
    tensors = [
        Tensor(shape=shape, pointer=256 * (place + 1), device=SimpleNamespace(index=3))
        for place, shape in enumerate(given)
    ]
    recipe.workspace = size
    handlers[name](77, *tensors)
    ((problem, strides, index),) = prepared
    *pointers, base = (t.data_ptr() for t in tensors)
    assert ran == [(pointers, base, 77)]
    assert index == 3
    assert (problem.op, problem.B, problem.Hq, problem.Hkv, problem.M, problem.N) == ("bob", 2, 4, 2, 48, 80)
    assert tuple(strides) == ("q", "k", "v", "do", "uq", "uk", "uv", "o", "lse", "gq", "gk", "gv", "gdo")
    assert strides["q"] == ((4 * 48 * D, 48 * D, D, 1) if layout == "bhnd" else (48 * 4 * D, D, 4 * D, 1))
    # What the kernels will ask for when they see the arrays themselves.
    direct = frozenset(
        name
        for name, lie in strides.items()
        if len(lie) == 3 or plan.readable("sm90", problem.shape(name), lie, pointers[0])
    )
    assert plan.plan(problem, device, "sm90", direct).workspace == size
    recipe.workspace = size + 1
    with pytest.raises(RuntimeError, match=f"bob needs {size + 1} bytes of workspace on this GPU and was compiled for"):
        handlers[name](77, *tensors)


# -------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"q": [1.0]}, TypeError, r"q must be a JAX array; got builtins\.list"),
        ({"v": None}, TypeError, r"v must be a JAX array; got builtins\.NoneType"),
        ({"k": jnp.ones((2, 2, 7, 4), jnp.float16)}, TypeError, "k must be float32 like q; got float16"),
        (
            {"q": jnp.ones((2, 4, 5, 4), jnp.int32)},
            TypeError,
            "q must be float16, bfloat16, float32 or float64; got int32",
        ),
        ({"q": jnp.ones((4, 5, 4), jnp.float32)}, ValueError, r"q must have the 4 axes \(B, Hq, M, D\)"),
        (
            {"k": jnp.ones((2, 2, 7, 5), jnp.float32)},
            ValueError,
            r"k must have shape \(B, Hkv, N, D\).*got \(2, 2, 7, 5\)",
        ),
        ({"causal": 1}, TypeError, "causal must be True or False; got 1"),
        ({"scale": "big"}, TypeError, "scale must be None"),
        ({"window": (1, -1)}, ValueError, "window right must be 0 or more"),
        ({"layout": "bhdn"}, ValueError, "layout must be bhnd or bnhd; got 'bhdn'"),
        ({"deterministic": None}, TypeError, "deterministic must be True or False; got None"),
        ({"return_lse": 2}, TypeError, "return_lse must be True or False; got 2"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else None,
)
def test_errors(change: dict[str, Any], kind: type[Exception], message: str) -> None:
    arguments = dict(zip("qkv", qkv(dtype="float32"), strict=True)) | change
    with pytest.raises(kind, match=message):
        attention(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), **arguments)


def test_a_traced_scale_is_refused() -> None:
    x = qkv()
    with pytest.raises(TypeError, match=r"scale must be None \(1/sqrt\(D\)\) or a real number"):
        jax.jit(lambda scale: attention(*x, scale=scale))(0.5)


def test_other_platforms_are_refused() -> None:
    x = qkv(dtype="float32")
    with pytest.raises(UnsupportedError, match="offered on CPUs and NVIDIA GPUs; JAX asked for it on tpu"):
        jax.jit(attention).trace(*x).lower(lowering_platforms=("tpu",))


def test_an_error_in_the_engine_reaches_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise MemoryError("no more blocks")

    monkeypatch.setattr(ops, "compute_in_blocks", fail)
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match="no more blocks"):  # JAX raises either
        jax.block_until_ready(attention(*qkv()))


def test_says_what_to_install() -> None:
    script = "import sys; sys.modules['jax_tvm_ffi'] = None; import flashbob_cupy.jax"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert "ImportError: flashbob_cupy.jax needs jax-tvm-ffi: pip install flashbob-cupy[jax]" in run.stderr
