"""The adapter on four CPU devices, which a process has to ask for before it starts JAX."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("jax", reason="JAX is not installed")
pytest.importorskip("jax_tvm_ffi", reason="jax-tvm-ffi is not installed")


def test_on_four_devices() -> None:
    tests = Path(__file__).parent
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests / "jax_four_devices.py")]
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tests.parent, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert " passed" in run.stdout
