"""Importing costs little, loads no framework, and leaves a process that can fork."""

from __future__ import annotations

import subprocess
import sys

import flashbob_cupy


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_loads_no_framework_and_no_engine():
    loaded = run("import sys, flashbob_cupy; print(*{name.partition('.')[0] for name in sys.modules})").split()
    assert "numpy" in loaded
    assert not {"torch", "jax", "jaxlib", "cupy", "cupy_backends", "cuda", "click", "ml_dtypes"} & set(loaded)


def test_import_takes_less_than_300_ms():
    code = "import time; t = time.perf_counter(); import flashbob_cupy; print(time.perf_counter() - t)"
    # The best of a few: the first one reads the files from disk, and a busy machine disturbs any.
    assert min(float(run(code)) for _ in range(4)) < 0.3


def test_computing_on_numpy_arrays_loads_no_framework():
    loaded = run(
        "import sys, numpy as np, flashbob_cupy as fb\n"
        "x = np.ones((1, 1, 4, 8), np.float32)\n"
        "fb.bob(x, x, x, x, x, x, x, *fb.forward(x, x, x))\n"
        "print(*{name.partition('.')[0] for name in sys.modules})"
    ).split()
    assert not {"torch", "jax", "cupy", "cuda"} & set(loaded)


def test_fork_and_use_in_the_child():
    run(
        "import os, numpy as np, flashbob_cupy as fb\n"
        "x = np.random.default_rng(0).standard_normal((2, 2, 300, 16)).astype(np.float32)\n"
        "def compute():\n"
        "    return b''.join(r.tobytes() for r in fb.bob(x, x, x, x, x, x, x, *fb.forward(x, x, x)))\n"
        "before = compute()\n"  # the engine has worked in the parent, with whatever threads it uses
        "read, write = os.pipe()\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    os.write(write, b'same' if compute() == before else b'other')\n"
        "    os._exit(0)\n"
        "_, status = os.waitpid(child, 0)\n"
        "assert status == 0, status\n"
        "assert os.read(read, 10) == b'same'\n"
    )


def test_everything_in_all_is_there_and_documented():
    for name in flashbob_cupy.__all__:
        assert getattr(flashbob_cupy, name).__doc__, name
    assert flashbob_cupy.__version__.count(".") == 2
