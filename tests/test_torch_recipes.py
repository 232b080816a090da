"""The recipes run as they are printed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "recipes.md").read_text(encoding="utf-8")


def test_recipes() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    before = None
    for block in blocks:
        exec(compile(block, "docs/recipes.md", "exec"), names)
        if "model" in names and before is None:
            before = [p.detach().clone() for p in names["model"].parameters()]
    assert any(not torch.equal(p, b) for p, b in zip(names["model"].parameters(), before, strict=True))
    for module in (names["model"], names["flow"], names["embed"]):
        assert all(p.grad is not None and p.grad.isfinite().all() for p in module.parameters())
    assert names["norm"] > 0
