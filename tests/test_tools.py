"""Scripts for developers, as far as they go without a GPU."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from flashbob_cupy import kernels
from flashbob_cupy import plan as planning
from flashbob_cupy.problem import INPUTS, OUTPUTS, Mask, Problem

ROOT = Path(__file__).resolve().parents[1]
COMPARE = ROOT / "tools" / "compare.py"


def _tool(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def everything(p: Problem) -> frozenset[str]:
    return frozenset(INPUTS[p.op] + OUTPUTS[p.op])


# ---- compare.py ----------------------------------------------------------------------------------------------------
def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(COMPARE), *arguments], capture_output=True, text=True, check=False)


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout")
def test_a_revision_is_timed_beside_this_checkout() -> None:
    small = ("--device", "cpu", "--dim", "16", "--length", "64", "--batch", "1", "--heads", "1", "--rounds", "1")
    done = _run("HEAD", *small, "--op", "forward", "--dtype", "float32")
    assert done.returncode == 0, done.stderr
    number = r"(\d+(?:\.\d+)?(?:e-\d+)?)"
    lines = re.findall(
        rf"^forward +D=16 +N=64 +(\w+) +HEAD {number} ms, this {number} ms, ratio {number}$", done.stdout, re.M
    )
    assert [kind for kind, *_ in lines] == ["first", "sustained"]
    for _, before, now, ratio in lines:
        assert float(before) > 0
        assert float(ratio) == pytest.approx(float(now) / float(before), abs=2e-3)


def test_what_is_to_be_compared_must_be_named() -> None:
    done = _run("--device", "cpu")
    assert done.returncode == 2
    assert "name a revision of git, or a tile" in done.stderr
    assert _run("--tile", "bob_rows=1,2").returncode == 2
    done = _run("no-such-revision", "--device", "cpu")
    assert done.returncode == 1
    assert done.stderr.startswith("no-such-revision: ")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("kernel", "sizes", "threads"),
    [
        ("bob_rows", [128, 80, 3], 384),
        ("bob_rows", [192, 64, 2], 512),
        ("bob_rows", [128, 64, 2, 2], 384),
        ("bob_columns", [48, 64, 2], 256),
    ],
)
def test_the_tile_of_a_side_is_planned(
    monkeypatch: pytest.MonkeyPatch, kernel: str, sizes: list[int], threads: int
) -> None:
    device = dataclasses.replace(planning.typical_device("sm_90a"), multiprocessors=132)
    monkeypatch.setattr(kernels, "device_info", lambda _: device)
    table = planning.TABLES["sm90"]
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    before = table[kernel]
    p = Problem("bob", 4, 12, 12, 4096, 4096, 64, 64, "bfloat16", Mask(right=0), 0.125, uq=True, uk=True, uv=True)
    with _tool("compare").tile_planned(kernel, 64, sizes):
        made = planning.plan(p, device, "sm90", everything(p))
    assert table[kernel] is before
    one = next(s for s in made.specialisations() if s.kernel == kernel)
    macros = dict(one.macros)
    assert [macros[name] for name in ("QUERIES", "KEYS", "STAGES")] == sizes[:3]
    assert macros.get("CLUSTER", 1) == (sizes[3] if len(sizes) > 3 else 1)
    assert one.threads == threads


def test_a_kernel_that_has_no_clusters_is_not_given_any(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "device_info", lambda _: planning.typical_device("sm_90a"))
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    with pytest.raises(
        SystemExit, match=r"sm90/bob_columns.cu: expected a tile without clusters; got \[48, 128, 2, 2\]"
    ):
        _tool("compare").tile_planned("bob_columns", 64, [48, 128, 2, 2])


# ---- tiles.py ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("heads", [12, 1])
@pytest.mark.parametrize(
    ("family", "arch"), [("sm80", "sm_80"), ("sm80", "sm_86"), ("sm90", "sm_90a")], ids=lambda x: str(x)
)
def test_tiles_to_measure_hold_the_planned_one_and_fit(family: str, arch: str, heads: int) -> None:
    tiles, device = _tool("tiles"), planning.typical_device(arch)
    assert set(tiles.TIMED) == set(planning.TABLES[family])
    for kernel, D in itertools.product(tiles.TIMED, (64, 128)):
        p = tiles.Size(4, heads, 1024).problem(kernel, D)
        found = tiles.candidates(p, family, kernel, device)
        made = planning.plan(p, device, family, everything(p))
        launched = next(s for s in made.specialisations() if s.kernel == kernel and s.family == family)
        macros = dict(launched.macros)
        first = {name: macros.get(name, 1) for name in ("QUERIES", "KEYS", "STAGES", "CLUSTER")}
        assert dataclasses.asdict(found[0]) == first | {"WARPS": launched.threads // 32}
        assert len(set(found)) == len(found) > 1
        for tile in found[1:]:
            with tiles.planned(family, kernel, tile):
                made = planning.plan(p, device, family, everything(p))
            assert all(s.shared_bytes <= device.shared_limit for s in made.specialisations())
        again = planning.plan(p, device, family, everything(p))
        assert launched in again.specialisations(), "the table is as it was"


def test_measurements_never_go_without_the_planned_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    tiles, device = _tool("tiles"), planning.typical_device("sm_90a")
    size, job = tiles.Size(4, 12, 1024), ("bob_rows", 64)
    planned = tiles.candidates(size.problem(*job), "sm90", job[0], device)[0]
    bad: set[int] = set()

    def compile(one: planning.Specialisation, arch: str, *, cached: bool) -> kernels.Compiled:
        assert not cached, "what comes from the cache has no report"
        return kernels.Compiled(b"", "", kernels.Resources(168, 4 if dict(one.macros)["STAGES"] in bad else 0, 0, ()))

    monkeypatch.setattr(kernels, "compile", compile)
    monkeypatch.setattr(kernels, "_cubins", kernels._Once())
    with ThreadPoolExecutor() as pool:
        assert dict(tiles.usable(size, "sm90", [job], device, pool))[job][0] == planned
        bad.add(planned.STAGES + 1)
        assert dict(tiles.usable(size, "sm90", [job], device, pool))[job][0] == planned
        bad.add(planned.STAGES)
        with pytest.raises(RuntimeError, match=r"planned for bob_rows at D=64, Tile.* is no candidate: spills"):
            list(tiles.usable(size, "sm90", [job], device, pool))


# ---- gpu_run.py ----------------------------------------------------------------------------------------------------
@pytest.fixture
def gpu_run(monkeypatch, tmp_path):
    module = _tool("gpu_run")
    for name, content in (("cuda/sm80/a.cu", "x"), ("cuda/b.cuh", "y"), ("flashbob_cupy/c.py", "z")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "RESULTS", tmp_path / "docs" / "results")
    module.RESULTS.mkdir(parents=True)
    return module


def test_the_gpu_run_counts_tests_that_record_numbers(gpu_run, tmp_path):
    test = tmp_path / "test_number.py"
    test.write_text("def test_number(record_property):\n    record_property('host_us', 1.0)\n")
    config = ["-c", str(ROOT / "pyproject.toml"), f"--rootdir={tmp_path}"]
    command = [*gpu_run.PYTEST, *config, f"--junitxml={tmp_path / 'report.xml'}", str(test)]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
    assert 'name="host_us"' in (tmp_path / "report.xml").read_text()


def test_record_of_other_sources_is_found_out(gpu_run, tmp_path, capsys):
    assert gpu_run.check() == 1
    assert "no record" in capsys.readouterr().out
    tests = {"passed": 3, "failed": 0, "skipped": 0}
    record = {"date": "2000-01-01", "sources": gpu_run.source_hash(), "tests": tests, "measurements": [{"op": "bob"}]}
    path = gpu_run.RESULTS / "gpu.json"
    path.write_text(json.dumps(record))
    (gpu_run.RESULTS / "tiles-gpu.json").write_text("[]")  # of tools/tiles.py
    assert gpu_run.check() == 0
    path.write_text(json.dumps(record | {"tests": tests | {"failed": 1}}))
    assert gpu_run.check() == 1
    path.write_text(json.dumps(record | {"measurements": []}))
    assert gpu_run.check() == 1
    path.write_text(json.dumps(record))
    (tmp_path / "flashbob_cupy" / "__pycache__").mkdir()
    (tmp_path / "flashbob_cupy" / "__pycache__" / "c.pyc").write_bytes(b"compiled")
    assert gpu_run.check() == 0, "only sources count"
    for changed in ("cuda/sm80/a.cu", "cuda/b.cuh", "flashbob_cupy/c.py"):
        before = (tmp_path / changed).read_text()
        (tmp_path / changed).write_text(before + " ")
        assert gpu_run.check() == 1, changed
        (tmp_path / changed).write_text(before)
    (tmp_path / "cuda" / "b.cuh").rename(tmp_path / "cuda" / "renamed.cuh")
    assert gpu_run.check() == 1


def test_record_check_needs_the_standard_library_alone():
    command = [sys.executable, "-I", "-S", str(ROOT / "tools" / "gpu_run.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1)
    assert done.stderr == ""
    assert "docs/results" in done.stdout
