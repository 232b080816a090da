"""GPU tests run where a GPU can be used, and say why not elsewhere."""

from __future__ import annotations

import functools
import importlib
import os

import pytest

REQUIRE = "FLASHBOB_REQUIRE_GPU"
# CuPy, JAX and torch share the GPU here; unasked, JAX takes most of its memory.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


@functools.cache
def why_no_gpu() -> str | None:
    """What is missing to run GPU tests, or None."""
    for module in ("cupy", "cuda.core", "cuda.bindings.nvrtc"):
        try:
            importlib.import_module(module)
        except ImportError as error:
            return f"{module} cannot be imported ({error}); install flashbob-cupy[cu13] or [cu12]"
    from flashbob_cupy.driver import DriverError, driver

    try:
        driver().device(0)
    except DriverError as error:
        return f"no usable GPU: {error}"
    return None


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is None:
        return
    reason = why_no_gpu()
    if reason is None:
        return
    if os.environ.get(REQUIRE) == "1":
        pytest.fail(f"{REQUIRE}=1, but {reason}", pytrace=False)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def prepared(request: pytest.FixtureRequest) -> None:
    """Kernels and references of the cases of all selected GPU tests, made on every core before the first one runs."""
    import gpu

    chosen = (item.callspec.params for item in request.session.items if hasattr(item, "callspec"))
    gpu.prepare((x["case"], x["engine"]) for x in chosen if {"case", "engine"} <= x.keys())
