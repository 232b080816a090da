"""The JAX recipes run as they are printed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed")
pytest.importorskip("jax_tvm_ffi", reason="jax-tvm-ffi is not installed")

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "recipes_jax.md").read_text(encoding="utf-8")


def test_recipes() -> None:
    names: dict[str, Any] = {}
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)
    for block in blocks:
        exec(compile(block, "docs/recipes_jax.md", "exec"), names)
    assert names["norm"] > 0
    for name in ("product", "diagonal", "penalty_gradient", "meta_gradient", "flow_gradient", "force_gradient"):
        for part in ("qkv", "out"):
            assert bool(jax.numpy.isfinite(names[name][part]).all()), name
            assert bool((names[name][part] != 0).any()), name
