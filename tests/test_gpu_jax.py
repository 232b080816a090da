"""The JAX adapter on a GPU: the values of every engine, on XLA's stream, in XLA's memory."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed")
pytest.importorskip("jax_tvm_ffi", reason="jax-tvm-ffi is not installed")

import gpu  # noqa: E402
import kinds  # noqa: E402
import numpy as np  # noqa: E402
from gpu import Case, each  # noqa: E402
from jax import numpy as jnp  # noqa: E402
from jax_dense import all_links  # noqa: E402

import flashbob_cupy as fb  # noqa: E402
from flashbob_cupy import accuracy, kernels, ops  # noqa: E402
from flashbob_cupy.jax import attention  # noqa: E402
from flashbob_cupy.problem import OUTPUTS  # noqa: E402

pytestmark = pytest.mark.gpu
ALL = (0, 1, 2)


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


@pytest.fixture
def device() -> Any:
    try:
        return jax.devices("cuda")[0]
    except RuntimeError as error:
        pytest.skip(f"this jax has no CUDA: {error}")


def arrays(case: Case, device: Any) -> dict[str, Any]:
    """The inputs on the GPU; None where absent."""
    return {name: None if x is None else jax.device_put(jnp.asarray(x), device) for name, x in case.inputs().items()}


def links(case: Case, x: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Every result of every operation by name, under jit."""
    derived = jax.jit(functools.partial(all_links, **case.options(), **options))
    results = derived(x["q"], x["k"], x["v"], x["do"], x["dlse"], [x["uq"], x["uk"], x["uv"]])
    return {name: a for op in OUTPUTS for name, a in zip(OUTPUTS[op], results[op], strict=False)}


def judge(case: Case, results: dict[str, Any]) -> None:
    wrong = []
    for op in OUTPUTS:
        truth, budgets = gpu.reference_of(case, op)
        for name in OUTPUTS[op]:
            if name != "gdlse" or case.dlse:
                found = accuracy.compare(np.asarray(results[name])[-case.judged :], truth[name], budgets[name])
                if not found.ok:
                    wrong.append(f"{name}: error {found.error:.3g}, budget {found.budget:.3g}")
    assert not wrong, f"{case}: " + "; ".join(wrong)


KERNEL_CASES = (
    Case(200, 333, 64, B=2, Hq=4, Hkv=2, causal=True),
    Case(256, 256, 128, Hq=2, Hkv=2, dtype="float16", dlse=True),
    Case(113, 77, 40, 24, B=2, dtype="float16", window=(20, 3), scale=0.3),
    Case(5, 2, 64, causal=True, deterministic=True),
)
BLOCKED_CASES = (
    Case(100, 133, 64, B=2, Hq=4, Hkv=2, dtype="float32", causal=True, dlse=True),
    Case(100, 133, 24, dtype="float64", causal=True),
    Case(100, 133, 192, 128),
)


# A custom call keeps the plan of its sizes: "sm90-large" would run the tiles of "sm90" again.
@each(*KERNEL_CASES, engines=("sm80", "sm90"))
def test_kernels(case: Case, engine: str, device: Any) -> None:
    jax.clear_caches()  # a compiled program keeps the family it was compiled for
    with gpu.forced(engine):
        for op in OUTPUTS:
            gpu.assert_served(case, op, engine)
        judge(case, links(case, arrays(case, device)))


@each(*BLOCKED_CASES, engines=("blocked",))
def test_blocked(case: Case, engine: str, device: Any) -> None:
    judge(case, links(case, arrays(case, device)))


@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
@pytest.mark.parametrize("D", [64, 36])
def test_bit_for_bit_the_array_functions(layout: str, D: int, device: Any) -> None:
    case = Case(130, 150, D, B=2, Hq=4, Hkv=2, causal=True, deterministic=True, dlse=True)
    x = arrays(case, device)
    if layout == "bnhd":
        x = {name: a.swapaxes(1, 2) if a.ndim == 4 else a for name, a in x.items()}
    options = {**case.options(), "layout": layout}
    q, k, v, do, uq, uk, uv, dlse = x.values()
    o, lse = fb.forward(q, k, v, **options)
    bob = fb.bob(q, k, v, do, uq, uk, uv, o, lse, dlse=dlse, **options)
    expected = {"o": o, "lse": lse, "gdlse": bob.gdlse}
    for op, result in (
        ("jvp", fb.jvp(q, k, v, uq, uk, uv, o, lse, **options)),
        ("backward", fb.backward(q, k, v, do, o, lse, dlse=dlse, **options)),
        ("bob", bob),
    ):
        expected |= zip(OUTPUTS[op], result, strict=False)
    actual = links(case, x, layout=layout)
    assert actual.keys() == expected.keys()
    for name, e in expected.items():
        assert kinds.bits(np.asarray(actual[name])) == kinds.bits(np.asarray(e)), name


def test_zero_copy_on_a_stream_of_xla(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    run = kernels.Recipe.run

    def watch(self: Any, pointers: list[int], base: int, stream: int) -> None:
        seen.append((pointers, stream))
        run(self, pointers, base, stream)

    monkeypatch.setattr(kernels.Recipe, "run", watch)
    x = arrays(Case(64, 64), device)
    q, k, v = (x[name] for name in "qkv")
    o, lse = jax.jit(functools.partial(attention, return_lse=True))(q, k, v)
    jax.block_until_ready((o, lse))
    ((pointers, stream),) = seen
    assert stream != 0
    assert pointers == [a.unsafe_buffer_pointer() for a in (q, k, v, o, lse)]


def test_inputs_still_being_produced(device: Any) -> None:
    """Work before and after is on the same stream: nothing has to wait, and nothing is read too early."""
    x = arrays(Case(256, 256, B=2), device)
    big = jax.device_put(jnp.ones((4096, 4096), jnp.float32) / 4096, device)

    @jax.jit
    def produce(q: Any, big: Any) -> Any:
        for _ in range(8):
            big = big @ big
        return q * big[0, 0].astype(q.dtype) * 4096

    @jax.jit
    def use(q: Any) -> Any:
        second = jax.grad(lambda q: (jax.grad(lambda q: jnp.sin(attention(q, x["k"], x["v"])).sum())(q) ** 2).sum())
        return second(q) + 1

    use(x["q"]).block_until_ready()
    expected = use(produce(x["q"], big).block_until_ready())
    fused = jax.jit(lambda q, big: use(produce(q, big)))
    for _ in range(30):
        late = use(produce(x["q"], big))
        together = fused(x["q"], big)
        # gQ is summed in an order that changes from run to run.
        for found in (late, together):
            difference = jnp.linalg.norm((found - expected).astype(jnp.float32))
            assert difference <= jnp.finfo(jnp.bfloat16).eps * jnp.linalg.norm(expected.astype(jnp.float32))


def test_loops_and_vmap(device: Any) -> None:
    x = arrays(Case(64, 96, 32, B=2, Hq=4, Hkv=2, dtype="float32"), device)

    def looped(q: Any) -> Any:
        step = lambda c, _: (q + attention(c, x["k"], x["v"]), None)  # noqa: E731
        return (jax.lax.scan(step, q, None, length=3)[0] ** 2).sum()

    def unrolled(q: Any) -> Any:
        c = q
        for _ in range(3):
            c = q + attention(c, x["k"], x["v"])
        return (c**2).sum()

    many = jnp.stack([x["q"], 2 * x["q"], -x["q"]])
    second = lambda f: jax.jit(jax.vmap(lambda q: jax.jvp(jax.grad(f), (q,), (x["uq"],))[1]))(many)  # noqa: E731
    a, b = second(looped), second(unrolled)
    assert jnp.linalg.norm(a - b) <= jnp.sqrt(jnp.finfo(jnp.float32).eps) * jnp.linalg.norm(b)


def test_no_scores_in_memory(device: Any) -> None:
    N, H = 32768, 4
    q, k, v = (jax.random.normal(jax.random.key(i), (1, H, N, 64), jnp.bfloat16) for i in range(3))
    q, k, v = (jax.device_put(a, device) for a in (q, k, v))
    loss = lambda *x: (attention(*x, causal=True).astype(jnp.float32) ** 2).sum()  # noqa: E731
    second = jax.jit(jax.grad(lambda *x: sum((g.astype(jnp.float32) ** 2).sum() for g in jax.grad(loss, ALL)(*x)), ALL))
    compiled = second.lower(q, k, v).compile()
    scores = 2 * N * N  # of one head
    assert compiled.memory_analysis().temp_size_in_bytes < scores
    assert all(bool(jnp.isfinite(g).all()) for g in compiled(q, k, v))


def test_every_gpu() -> None:
    devices = jax.devices("cuda")
    if len(devices) < 2:
        pytest.skip("needs two GPUs")
    case = Case(200, 333, B=4, Hq=4, Hkv=2, causal=True, deterministic=True)
    on_each = [links(case, arrays(case, device)) for device in devices[:2]]
    for name, a in on_each[0].items():
        assert kinds.bits(np.asarray(a)) == kinds.bits(np.asarray(on_each[1][name])), name
    mesh = jax.make_mesh((2,), ("x",), devices=devices[:2], axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    split = {name: None if x is None else jax.device_put(jnp.asarray(x), sharding) for name, x in case.inputs().items()}
    for name, a in links(case, split).items():
        assert kinds.bits(np.asarray(a)) == kinds.bits(np.asarray(on_each[0][name])), name


def test_the_blocked_engine_leaves_the_device_alone(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA's current device and stream are as before, and the engine is on XLA's stream."""
    import cupy

    streams: list[tuple[int, int]] = []
    compute = ops.compute_in_blocks

    def watch(problem: Any, inputs: Any, outputs: Any, stream: int) -> None:
        before = cupy.cuda.runtime.getDevice(), cupy.cuda.get_current_stream().ptr
        compute(problem, inputs, outputs, stream)
        assert before == (cupy.cuda.runtime.getDevice(), cupy.cuda.get_current_stream().ptr)
        streams.append((stream, before[1]))

    monkeypatch.setattr(ops, "compute_in_blocks", watch)
    x = arrays(Case(64, 64, dtype="float32"), device)
    jax.block_until_ready(jax.jit(attention)(x["q"], x["k"], x["v"]))
    ((stream, _),) = streams
    assert stream != 0


def test_compiled_programs_survive_the_process(tmp_path: Path, device: Any) -> None:
    """JAX keeps compiled programs on disk; the custom calls in them must mean the same in another process."""
    environment = {**os.environ, "JAX_PLATFORMS": "cuda"}
    script = """
import sys, jax
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
from jax import numpy as jnp, monitoring
from flashbob_cupy.jax import attention
hits = []
monitoring.register_event_listener(lambda event, **_: hits.append(event) if event.endswith("cache_hits") else None)
if sys.argv[2] == "again":  # other calls come first
    attention(*[jnp.ones((1, 1, 2, 2))] * 3, scale=0.25)
    hits.clear()
q = jnp.arange(24.0).reshape(1, 2, 3, 4) / 9
print(float(jax.jit(lambda q: jax.grad(lambda q: jnp.sin(attention(q, q, q)).sum())(q).sum())(q)), len(hits) > 0)
"""

    def run(which: str) -> list[str]:
        command = [sys.executable, "-c", script, str(tmp_path), which]
        return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout.split()

    first, again = run("first"), run("again")
    assert (first[1], again[1]) == ("False", "True")
    assert first[0] == again[0]
