"""What is installed, and what an import costs."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

import flashbob_cupy

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
FRAMEWORKS = ("torch", "jax", "jaxlib", "cupy", "cuda", "click", "transformers")


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[<>=\[ ]", requirement)[0] for requirement in requirements}


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_base_install_is_small():
    assert names(PROJECT["dependencies"]) == {"numpy", "click", "ml-dtypes"}


@pytest.mark.parametrize("extra", ["cu12", "cu13"])
def test_gpu_extras_bring_the_compiler_and_the_runtime(extra):
    found = names(PROJECT["optional-dependencies"][extra])
    assert {"cuda-core", "cuda-bindings", f"cupy-cuda{extra[2:]}x"} < found
    assert any(name.startswith("nvidia-cuda-nvrtc") for name in found)


def test_version_is_one():
    assert metadata.version("flashbob-cupy") == flashbob_cupy.__version__


def test_license_is_apache_2():
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text
    assert "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text


@pytest.mark.parametrize("module", ["flashbob_cupy", "flashbob_cupy.cli", "flashbob_cupy.doctor"])
def test_import_brings_no_framework(module):
    allowed = {"click"} if module.endswith("cli") else set()
    code = f"import sys, {module}; print(*sorted({{m.partition('.')[0] for m in sys.modules}} & set({FRAMEWORKS})))"
    assert set(run(code).split()) <= allowed


def test_import_is_quick():
    """Beside NumPy, whose own import time is not ours, in the best of three processes."""
    code = "import numpy, time; t = time.perf_counter(); import flashbob_cupy; print(time.perf_counter() - t)"
    assert min(float(run(code)) for _ in range(3)) < 0.3


def test_cuda_folder_is_no_package():
    """It would hide NVIDIA's `cuda` package from anything that runs in the repository root."""
    assert not (ROOT / "cuda" / "__init__.py").exists()
    assert {path.suffix for path in (ROOT / "cuda").rglob("*") if path.is_file()} <= {".cu", ".cuh", ".md"}


def test_types_are_published():
    assert (Path(flashbob_cupy.__file__).parent / "py.typed").exists()


def test_help_works_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "flashbob_cupy", "--help"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0
    assert done.stdout.startswith("Usage: flashbob ")
