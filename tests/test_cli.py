"""The `flashbob` command: what it prints, what it refuses, and its exit codes."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner

from flashbob_cupy import check, cli, doctor, kernels, plan, reference
from flashbob_cupy.driver import DriverError
from flashbob_cupy.errors import CompileError
from flashbob_cupy.plan import Device
from flashbob_cupy.problem import Mask

ROOT = Path(__file__).resolve().parent.parent
REAL = ROOT / "tests" / "data" / "minilm_attention.npz"


def flashbob(*arguments):
    return CliRunner().invoke(cli.main, [str(a) for a in arguments])


def document(result):
    """stdout is one JSON document and nothing else."""
    return json.loads(result.stdout)


def refused(result, *words):
    """One message on stderr that holds `words`, nothing on stdout, exit code 2."""
    assert result.exit_code == cli.USAGE, result.output
    assert result.stdout == ""
    assert result.stderr.count("Error:") == 1
    for word in words:
        assert word in result.stderr


@pytest.fixture
def tensors():
    """A small problem: grouped heads, M != N, D != Dv."""
    case = check.Case(4, 2, 10, 13, 8, 16, "float32")
    return case.inputs(0)


def double_backward(tensors, mask, scale=None):
    arrays = [tensors[name] for name in check.INPUTS]
    gradients = reference.bob(*arrays, mask=mask, scale=scale)[:4]
    return {name: g.astype(tensors["q"].dtype) for name, g in zip(check.OUTPUTS["bob"], gradients, strict=True)}


def save(folder, arrays, name="file.npz"):
    np.savez(folder / name, **arrays)
    return folder / name


# ------------------------------------------------------------------------------------------------ check --input


def test_real_tensors_are_within_budget():
    result = flashbob("check", "--input", REAL, "--device", "cpu", "--json")
    assert result.exit_code == 0, result.output
    found = document(result)
    assert found["passed"] is True
    outputs = [row["output"] for row in found["results"]]
    assert outputs == [name for names in check.OUTPUTS.values() for name in names]
    for row in found["results"]:
        assert 0 < row["error"] <= row["budget"]
        assert row["ratio"] == pytest.approx(row["error"] / row["budget"])
        assert row["source"] == "blocked on cpu"


def test_table_for_people(tmp_path, tensors):
    result = flashbob("check", "--input", save(tmp_path, tensors), "--device", "cpu")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0].startswith("file.npz: q (1, 4, 10, 8), k (1, 2, 13, 8), v (1, 2, 13, 16) float32")
    assert "not causal" in lines[0]
    assert lines[1].split() == ["computed", "by", "op", "output", "error", "budget", "ratio"]
    assert lines[-1] == "11 of 11 results within budget"
    assert result.stderr == ""


@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
@pytest.mark.parametrize(
    ("recorded", "mask"),
    [
        ({}, Mask()),
        ({"causal": True}, Mask(right=0)),
        ({"window": np.array([2, 1])}, Mask(2, 1)),
        ({"causal": True, "window": np.array([3, 5])}, Mask(3, 0)),
        ({"scale": 0.7}, Mask()),
    ],
    ids=["plain", "causal", "window", "causal-window", "scale"],
)
def test_candidates_are_judged_with_the_recorded_options(tmp_path, tensors, recorded, mask, layout):
    arrays = tensors | double_backward(tensors, mask, recorded.get("scale"))
    if layout == "bnhd":
        arrays = {name: a.swapaxes(1, 2) for name, a in arrays.items()}
    path = save(tmp_path, arrays | recorded | {"layout": layout})
    result = flashbob("check", "--input", path, "--device", "cpu", "--json")
    assert result.exit_code == 0, result.output
    judged = [row["output"] for row in document(result)["results"] if row["source"] == "file"]
    assert judged == ["gq", "gk", "gv", "gdo"]


def test_command_line_options_come_before_recorded_ones(tmp_path, tensors):
    path = save(tmp_path, tensors | double_backward(tensors, Mask(3, 0), 0.5) | {"causal": False, "scale": 2.0})
    right = ("--causal", "--scale", "0.5", "--window", "3", "none", "--device", "cpu")
    assert flashbob("check", "--input", path, *right).exit_code == 0
    assert flashbob("check", "--input", path, "--device", "cpu").exit_code == cli.FAILED


@pytest.mark.parametrize("name", ["gq", "gk", "gv", "gdo"])
@pytest.mark.parametrize("fault", ["nan", "scaled", "one entry"])
def test_wrong_candidate_fails(tmp_path, tensors, name, fault):
    candidates = double_backward(tensors, Mask())
    wrong = candidates[name]
    if fault == "nan":
        wrong[0, 0, 0, 0] = np.nan
    elif fault == "scaled":
        wrong *= np.float32(1.001)
    else:
        wrong[0, -1, -1, -1] += np.float32(0.1)
    result = flashbob("check", "--input", save(tmp_path, tensors | candidates), "--device", "cpu", "--json")
    assert result.exit_code == cli.FAILED
    (row,) = (row for row in document(result)["results"] if not row["ok"])
    assert (row["source"], row["output"]) == ("file", name)
    assert row["error"] is None if fault == "nan" else row["error"] > row["budget"]


def test_given_o_and_lse_are_used_and_judged(tmp_path, tensors):
    o, lse = (a.astype(np.float32) for a in reference.forward(tensors["q"], tensors["k"], tensors["v"]))
    result = flashbob("check", "--input", save(tmp_path, tensors | {"o": o, "lse": lse}), "--device", "cpu", "--json")
    assert result.exit_code == 0, result.output
    assert [row["output"] for row in document(result)["results"] if row["source"] == "file"] == ["o", "lse"]
    # A wrong lse must reach the library's own backward.
    path = save(tmp_path, tensors | {"o": o, "lse": lse + np.float32(0.01)})
    rows = document(flashbob("check", "--input", path, "--device", "cpu", "--json"))["results"]
    failed = {(row["source"], row["output"]) for row in rows if not row["ok"]}
    assert {("file", "lse"), ("blocked on cpu", "dv"), ("blocked on cpu", "gq")} <= failed
    assert ("blocked on cpu", "o") not in failed


def test_first_gradients_are_judged(tmp_path, tensors):
    first = reference.backward(*(tensors[name] for name in ("q", "k", "v", "do")))
    named = {name: g.astype(np.float32) for name, g in zip(check.OUTPUTS["backward"], first, strict=True)}
    result = flashbob("check", "--input", save(tmp_path, tensors | named), "--device", "cpu", "--json")
    assert result.exit_code == 0, result.output
    assert [row["output"] for row in document(result)["results"] if row["source"] == "file"] == ["dq", "dk", "dv"]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_safetensors_with_options_in_metadata(tmp_path, dtype):
    numpy = pytest.importorskip("safetensors.numpy")
    case = check.Case(2, 1, 9, 9, 8, 8, dtype)
    arrays = case.inputs(1)
    arrays |= double_backward(arrays, Mask(4, 0), 0.5)
    metadata = {"causal": "True", "scale": "0.5", "window": "[4, null]", "layout": "bhnd"}
    numpy.save_file(arrays, tmp_path / "x.safetensors", metadata)
    result = flashbob("check", "--input", tmp_path / "x.safetensors", "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert f"{dtype}, causal, scale 0.5, window (4, ∞)" in result.stdout


def test_bfloat16_in_npz(tmp_path):
    arrays = check.Case(1, 1, 5, 5, 8, 8, "bfloat16").inputs(2)
    assert arrays["q"].dtype == ml_dtypes.bfloat16
    result = flashbob("check", "--input", save(tmp_path, arrays), "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert "bfloat16" in result.stdout


def test_other_arrays_are_named(tmp_path, tensors):
    result = flashbob("check", "--input", save(tmp_path, tensors | {"bias": np.zeros(3)}), "--device", "cpu")
    assert result.exit_code == 0
    assert result.stderr == "Not judged: bias\n"


# ---------------------------------------------------------------------------------------------- check: refusals


def test_missing_arrays(tmp_path, tensors):
    del tensors["do"], tensors["uk"]
    refused(flashbob("check", "--input", save(tmp_path, tensors)), "lacks do, uk", "it holds q, k, v, uq, uv")


@pytest.mark.parametrize(
    ("name", "bad", "words"),
    [
        ("k", np.zeros((1, 3, 13, 8), np.float32), ("v must have shape", "Hkv = 3")),
        ("do", np.zeros((1, 4, 10, 8), np.float32), ("do must have shape", "(1, 4, 10, 8)")),
        ("uq", np.zeros((4, 10, 8), np.float32), ("uq", "axes")),
        ("v", np.zeros((1, 2, 13, 16), np.float64), ("v must be float32", "float64")),
        ("q", np.zeros((1, 4, 10, 8), np.int32), ("q must be", "int32")),
        ("uv", np.full((1, 2, 13, 16), np.nan, np.float32), ("uv holds 416 NaN",)),
        ("k", np.full((1, 2, 13, 8), np.inf, np.float32), ("k holds 208 NaN or infinite",)),
        ("gq", np.zeros((1, 4, 9, 8), np.float32), ("gq must have shape (1, 4, 10, 8)", "(1, 4, 9, 8)")),
        ("gdo", np.zeros((1, 4, 10, 16), np.int8), ("gdo must be", "int8")),
        ("lse", np.zeros((1, 10, 4), np.float32), ("lse must have shape (1, 4, 10)",)),
        ("lse", np.zeros((1, 4, 10), np.float64), ("lse must be float32",)),
        ("causal", np.array(2), ("causal = 2",)),
        ("scale", np.array("big"), ("scale = 'big'",)),
        ("window", np.array([1, 2, 3]), ("window = [1, 2, 3]",)),
        ("window", np.array([-1, 2]), ("window left", "-1")),
        ("layout", np.array("nhd"), ("layout = 'nhd'",)),
    ],
)
def test_bad_content(tmp_path, tensors, name, bad, words):
    refused(flashbob("check", "--input", save(tmp_path, tensors | {name: bad}), "--device", "cpu"), *words)


def test_files_that_are_not_what_they_seem(tmp_path):
    (tmp_path / "x.npz").write_text("no zip archive")
    refused(flashbob("check", "--input", tmp_path / "x.npz"), "x.npz cannot be read")
    (tmp_path / "x.safetensors").write_bytes(b"\xff" * 16)
    refused(flashbob("check", "--input", tmp_path / "x.safetensors"), "x.safetensors")
    (tmp_path / "x.pt").write_bytes(b"")
    refused(flashbob("check", "--input", tmp_path / "x.pt"), "expected a file named .npz or .safetensors")
    refused(flashbob("check", "--input", tmp_path / "absent.npz"), "does not exist")
    np.savez(tmp_path / "objects.npz", q=np.array([{}], dtype=object))
    refused(flashbob("check", "--input", tmp_path / "objects.npz"), "cannot be read")


def test_bad_options():
    refused(flashbob("check", "--causal"), "give --input FILE")
    refused(flashbob("check", "--input", REAL, "--window", "wide", "0"), "'wide'")
    refused(flashbob("check", "--input", REAL, "--scale", "nan"), "scale must be finite")
    refused(flashbob("check", "--device", "tpu"), "tpu")


@pytest.mark.parametrize("command", ["check", "bench"])
def test_no_gpu_where_one_is_asked_for(monkeypatch, command):
    monkeypatch.setattr(doctor, "usable_gpu", lambda: None)
    result = flashbob(command, "--device", "cuda")
    assert result.exit_code == cli.NO_GPU
    assert result.stdout == ""
    assert result.stderr.startswith("Error: no usable GPU.")


# -------------------------------------------------------------------------------------------------- check: grid


def test_grid_is_within_budget_and_covers_every_option():
    result = flashbob("check", "--device", "cpu", "--json")
    assert result.exit_code == 0, result.stderr
    rows = document(result)["results"]
    outputs = sum(map(len, check.OUTPUTS.values()))
    assert len(rows) == outputs * len(check.grid())
    problems = {row["problem"] for row in rows}
    assert len(problems) == len(check.grid()), "two problems of the grid are the same"
    for word in (
        "float16",
        "bfloat16",
        "float32",
        "float64",
        "window",
        "bnhd",
        "deterministic",
        "Dv=",
        "M=",
        "scale 0.",
    ):
        assert any(word in problem for problem in problems)


def test_grid_reports_the_worst_and_fails(monkeypatch):
    cases = check.grid()[:2]
    monkeypatch.setattr(check, "grid", lambda: cases)
    run = check.Engine.run

    def spoiled(self, inputs, options, deterministic=False):
        results = run(self, inputs, options, deterministic)
        if options.causal:
            results["gk"] = results["gk"] * np.float32(1.5)
        return results

    monkeypatch.setattr(check.Engine, "run", spoiled)
    result = flashbob("check", "--device", "cpu")
    assert result.exit_code == cli.FAILED
    lines = [line.split() for line in result.stdout.splitlines()]
    assert [line[4] for line in lines if line[-1] == "FAILED"] == ["gk"]
    assert lines[-1][:3] == ["21", "of", "22"]
    assert cases[1].describe() in result.stderr


def test_a_nan_ratio_is_the_worst():
    good, bad = (check.Result("x", "bob", "gq", r, 1.0, r, r <= 1, "p") for r in (0.5, float("nan")))
    for order in ([good, bad], [bad, good]):
        assert cli._worst(order) == [bad]


@pytest.mark.parametrize(
    ("arch", "dtype", "D", "serving"),
    [
        ("sm_90a", "bfloat16", 64, {"sm90", "sm80", "blocked"}),
        ("sm_86", "float16", 64, {"sm80", "blocked"}),
        ("sm_90a", "float16", 160, {"blocked"}),
        ("sm_90a", "float32", 64, {"blocked"}),
    ],
)
def test_engines_of_a_gpu(monkeypatch, arch, dtype, D, serving):
    """Which engines are judged on a GPU, and that asking for one leaves no trace."""
    monkeypatch.setattr(kernels, "device_info", lambda index: plan.typical_device(arch))
    monkeypatch.delenv(plan.FAMILY_VARIABLE, raising=False)
    case = check.Case(2, 1, 40, 40, D, D, dtype)
    inputs = case.inputs(0)
    problem = case.options.problem(inputs["q"], inputs["k"], inputs["v"])
    engines = [check.Engine(name, "cuda", np.asarray, np.asarray) for name in plan.FAMILIES]
    assert {engine.name for engine in engines if engine.serves(problem)} == serving
    assert plan.FAMILY_VARIABLE not in os.environ
    monkeypatch.setenv(plan.FAMILY_VARIABLE, "blocked")
    with engines[0].selected():
        assert os.environ[plan.FAMILY_VARIABLE] == engines[0].name
    assert os.environ[plan.FAMILY_VARIABLE] == "blocked"


# ------------------------------------------------------------------------------------------------------- doctor


def test_doctor_reports_and_judges():
    result = flashbob("doctor", "--json")
    found = document(result)
    assert (result.exit_code == 0) == found["healthy"]
    names = [probe["name"] for probe in found["probes"]]
    for name in (
        "python",
        "flashbob_cupy",
        "numpy",
        "driver",
        "cupy",
        "cuda-core",
        "nvrtc",
        "kernel cache",
        "gpu record",
    ):
        assert name in names
    assert {probe["status"] for probe in found["probes"]} <= {"ok", "absent", "broken"}
    assert found["verdict"]
    text = flashbob("doctor")
    assert text.exit_code == result.exit_code
    assert found["verdict"] in text.stdout


def test_a_probe_that_raises_is_a_finding(monkeypatch):
    def broken():
        raise OSError("the disk is on fire\nand more")

    monkeypatch.setattr(doctor, "_cache", broken)
    monkeypatch.setattr(doctor, "gpus", tuple)
    result = flashbob("doctor", "--json")
    assert result.exit_code == cli.FAILED
    probes = {probe["name"]: probe for probe in document(result)["probes"]}
    assert probes["kernel cache"]["status"] == "broken"
    assert probes["kernel cache"]["value"] == "OSError: the disk is on fire"


def gpu(arch="sm_90a"):
    capability = next((c for c, name in plan._ARCHES.items() if name == arch), (7, 5))
    return doctor.Gpu("NVIDIA H200", 141 << 30, Device(arch, capability, 227 << 10, 132))


@pytest.mark.parametrize(
    ("present", "states", "cuda", "verdict", "fix"),
    [
        ((), {"driver": "absent"}, 13000, "CPU arrays work; there is no GPU", ""),
        ((), {"driver": "broken"}, 13000, "driver does not", "Repair or update the driver"),
        ((gpu(""),), {}, 13000, "older than Ampere", "newer GPU"),
        ((gpu(),), {"cupy": "absent", "nvrtc": "absent"}, 13000, "waits for cupy, nvrtc", "flashbob-cupy[cu13]"),
        ((gpu(),), {"cuda-core": "absent"}, 12080, "waits for cuda-core", "flashbob-cupy[cu12]"),
        ((gpu(),), {"nvrtc": "broken"}, 12080, "held up by nvrtc", "new virtual environment"),
        ((gpu(),), {}, 13000, "Ready: NVIDIA H200", ""),
    ],
)
def test_verdicts(monkeypatch, present, states, cuda, verdict, fix):
    names = ("driver", "cupy", "cuda-core", "nvrtc")
    probes = {name: doctor.Probe(name, states.get(name, "ok"), "found") for name in names}
    monkeypatch.setattr(doctor, "driver", lambda: type("Driver", (), {"version": cuda}))
    said, mended, usable = doctor._judge(probes, present)
    assert verdict in said
    assert (fix in mended) if fix else mended == ""
    assert usable == said.startswith("Ready")


@pytest.mark.parametrize("cause", [OSError("no such file"), None])
def test_absent_and_broken_drivers_differ(monkeypatch, cause):
    def fail():
        raise DriverError("no answer") from cause

    monkeypatch.setattr(doctor, "driver", fail)
    assert doctor._driver().status == ("absent" if cause else "broken")
    assert doctor.gpus() == ()
    assert doctor.usable_gpu() is None


# ----------------------------------------------------------------------------------------------- kernels, cache


@pytest.fixture
def one_kernel(monkeypatch, tmp_path):
    """A private cache, and the cheapest kernel as the only one."""
    monkeypatch.setenv(kernels.CACHE_VARIABLE, str(tmp_path / "cache"))
    spec = next(spec for spec in plan.specialisations("sm_80") if spec.kernel == "copy_rows")
    monkeypatch.setattr(cli, "specialisations", lambda arch: (spec,))
    return spec


def test_kernels_list():
    result = flashbob("kernels", "list", "--json")
    assert result.exit_code == 0
    found = document(result)["kernels"]
    assert {row["arch"] for row in found} == {"sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a"}
    one = flashbob("kernels", "list", "--arch", "sm_80").stdout.splitlines()
    assert len(one) == 1 + sum(row["arch"] == "sm_80" for row in found)
    refused(flashbob("kernels", "list", "--arch", "sm_70"), "sm_70")


def test_kernels_compile_and_cache(one_kernel, tmp_path):
    pytest.importorskip("cuda.core", reason="compiling needs cuda-core and NVRTC")
    compile_one = ("kernels", "compile", "--arch", "sm_80", "--arch", "sm_90a", "--json")
    assert flashbob("cache", "path").stdout.strip() == str(tmp_path / "cache")
    first = document(flashbob(*compile_one))
    assert [row["state"] for row in first["kernels"]] == ["compiled"] * 2
    assert all(row["registers"] > 0 and row["spill_bytes"] == 0 for row in first["kernels"])
    assert [row["state"] for row in document(flashbob(*compile_one))["kernels"]] == ["cached"] * 2
    info = document(flashbob("cache", "info", "--json"))
    assert info["files"] >= 2
    assert info["bytes"] > 0
    (tmp_path / "cache" / "notes.txt").write_text("not a kernel")
    assert flashbob("cache", "clear").exit_code == 0
    assert (tmp_path / "cache" / "notes.txt").exists()
    assert [row["state"] for row in document(flashbob(*compile_one))["kernels"]] == ["compiled"] * 2


def test_compile_in_processes(one_kernel):
    pytest.importorskip("cuda.core", reason="compiling needs cuda-core and NVRTC")
    result = flashbob("kernels", "compile", "--arch", "sm_80", "--arch", "sm_86", "--jobs", "2", "--no-cache")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1].startswith("2 of 2 kernels compiled")
    assert document(flashbob("cache", "info", "--json"))["files"] == 0


def test_no_compiler_is_one_message(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.core", None)
    result = flashbob("kernels", "compile")
    assert result.exit_code == cli.FAILED
    assert result.stdout == ""
    assert result.stderr == "Error: compiling needs cuda-core and NVRTC: pip install flashbob-cupy[cu13], or [cu12]\n"


@pytest.mark.parametrize(
    "outcome",
    [
        CompileError("error: expected a ;"),
        kernels.Resources(255, 8, 0, ()),
        kernels.Resources(255, 0, 16, ()),
        kernels.Resources(255, 0, 0, ("(C7510) Potential Performance Loss: wgmma serialized",)),
    ],
    ids=["refused", "spill", "local memory", "warning"],
)
def test_a_bad_kernel_fails(monkeypatch, one_kernel, outcome):
    monkeypatch.setitem(sys.modules, "cuda.core", object())

    def compiled(spec, arch, *, cached):
        if isinstance(outcome, Exception):
            raise outcome
        return kernels.Compiled(b"", "log", outcome)

    monkeypatch.setattr(kernels, "compile", compiled)
    result = flashbob("kernels", "compile", "--arch", "sm_80", "--json")
    assert result.exit_code == cli.FAILED
    assert [row["state"] for row in document(result)["kernels"]] == ["FAILED"]
    assert "sm_80 copy_rows" in result.stderr


def test_cache_clear_of_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv(kernels.CACHE_VARIABLE, str(tmp_path / "absent"))
    assert "does not exist" in flashbob("cache", "clear").stdout
    assert document(flashbob("cache", "info", "--json")) == {"path": str(tmp_path / "absent"), "files": 0, "bytes": 0}


# -------------------------------------------------------------------------------------------- bench

FIELDS = (
    *("op", "impl", "B", "Hq", "Hkv", "M", "N", "D", "Dv", "dtype", "causal", "deterministic"),
    *("ms", "products", "tflops", "host_us", "peak_mib"),
)


def test_bench_measures_the_library_and_its_peers():
    ops = ("--op", "jvp", "--op", "bob")
    result = flashbob("bench", "--device", "cpu", "-n", "256", "--heads", "2", "--dim", "16", *ops, "--json")
    assert result.exit_code == 0, result.output
    rows = document(result)["measurements"]
    own = [row for row in rows if row["impl"] == "blocked"]
    assert [(row["op"], row["products"]) for row in own] == [("jvp", 5), ("bob", 15)]
    for row in rows:
        assert tuple(row) == FIELDS
        assert row["ms"] > 0
    assert {row["impl"] for row in rows} - {"blocked"} <= {"torch-math"}
    text = flashbob("bench", "--device", "cpu", "-n", "16", "--heads", "1", "--dim", "8", "--op", "jvp")
    assert "peak_mib" in text.stdout
