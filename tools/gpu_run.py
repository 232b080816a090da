"""Run the GPU tests and a short benchmark on this machine's GPU; write docs/results/<gpu>.json.

    python tools/gpu_run.py                 tests and benchmark: a complete record (a few minutes)
    python tools/gpu_run.py --tests         the tests only; a benchmark of the same sources is kept
    python tools/gpu_run.py --bench         the benchmark only; test counts of the same sources are kept
    python tools/gpu_run.py --check         no GPU: is a committed record of the current sources?

`--check` uses the standard library alone and exits with 1 unless a record is of the current sources, complete and free
of failures.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import importlib.util
import itertools
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results"
HASHED = {"cuda": ("*.cu", "*.cuh"), "flashbob_cupy": ("*.py",)}
VERSIONS = ("numpy", "torch", "cupy-cuda13x", "cupy-cuda12x", "cuda-core", "cuda-bindings")
LENGTHS = (256, 1024, 4096, 8192, 16384)
WIDTHS = (64, 128)
# The older report format is the one in which tests may record numbers of their own.
PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "junit_family=xunit1")
# What an implementation that stores scores may take: it keeps about ten float32 matrices of them for a double backward.
SCORE_MATRICES, MEMORY_SHARE = 12, 0.8
# Long calls reach the power limit of a card within tenths of a second, and its clocks fall: they are measured once
# more, for RESTED_S after a pause, where they run as a call among others does.
LONG, PAUSE_S, RESTED_S = 16384, 1.2, 0.1


def source_hash() -> str:
    """sha256 over the path and content of every source file, in the order of their paths."""
    files = sorted(
        path for folder, patterns in HASHED.items() for pattern in patterns for path in (ROOT / folder).rglob(pattern)
    )
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0")
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def records() -> list[Path]:
    """The committed records; the measurements of tools/tiles.py lie beside them."""
    return sorted(path for path in RESULTS.glob("*.json") if not path.name.startswith("tiles-"))


def check() -> int:
    """Say for each record whether it is of the current sources."""
    current = source_hash()
    good = False
    for path in records():
        record = json.loads(path.read_text())
        name = path.relative_to(ROOT)
        if record.get("sources") != current:
            print(f"{name} ({record.get('date')}) is of other sources: run tools/gpu_run.py on that GPU and commit it")
        elif not record.get("tests") or not record.get("measurements"):
            print(f"{name} is incomplete: run tools/gpu_run.py with neither --tests nor --bench")
        elif record["tests"]["failed"]:
            print(f"{name} is of these sources, with {record['tests']['failed']} failed test(s)")
        else:
            print(f"{name} ({record['date']}) is of these sources: {record['tests']['passed']} tests passed")
            good = True
    if not records():
        print("docs/results holds no record: run tools/gpu_run.py on a GPU machine and commit it")
    return 0 if good else 1


def run_tests() -> dict[str, int]:
    """Run `pytest -m gpu` and count."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        subprocess.run([*PYTEST, "-m", "gpu", f"--junitxml={report}"], cwd=ROOT, check=False)
        if not report.exists():
            raise SystemExit("pytest wrote no report")
        suites = ElementTree.parse(report).getroot().iter("testsuite")
        totals = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
        for suite in suites:
            for name in totals:
                totals[name] += int(suite.get(name, 0))
    failed = totals["failures"] + totals["errors"]
    return {"passed": totals["tests"] - failed - totals["skipped"], "failed": failed, "skipped": totals["skipped"]}


def cases() -> Iterator[Any]:
    """The benchmark: every op and length, the longest first, and the deterministic double backward."""
    from flashbob_cupy import bench

    for N, D in itertools.product(sorted(LENGTHS, reverse=True), WIDTHS):
        for op, deterministic in [*((op, False) for op in bench.OPS), ("bob", True)]:
            yield bench.Case(op, 4, 12, 12, N, N, D, D, "bfloat16", causal=True, deterministic=deterministic)


def run_benchmark(memory_bytes: int, limit_s: float) -> tuple[list[dict[str, object]], list[str]]:
    """Measure every case on every family and every peer that can run it, until `limit_s` seconds have passed.

    Returns the measurements, and one line for each measurement of the library that could not be taken.
    """
    import torch

    from flashbob_cupy import bench

    measurements: list[dict[str, object]] = []
    failures: list[str] = []
    end = time.monotonic() + limit_s
    for case in cases():
        families = [family for family in bench.families(case) if family != "blocked"]
        for impl in [*families, *bench.peers(case, "cuda")]:
            if case.op == "step" and impl in families and not has_torch_adapter():
                continue
            stores_scores = impl == "torch-math"
            if stores_scores and SCORE_MATRICES * case.score_bytes() > MEMORY_SHARE * memory_bytes:
                continue
            if time.monotonic() > end:
                return measurements, [*failures, f"stopped after {limit_s:.0f} s, before {impl} {case}"]
            try:
                record = bench.measure(case, impl, "cuda")
                if case.N >= LONG and impl == families[0]:
                    record["rested_ms"] = rested_ms(case, impl)
            except (RuntimeError, NotImplementedError) as error:
                message = f"{impl} {case.op} N={case.N} D={case.D}: {str(error).splitlines()[0]}"
                print(message, file=sys.stderr)
                if impl in families:
                    failures.append(message)
                continue
            finally:
                torch.cuda.empty_cache()
            measurements.append(record)
            figures = f"{record['ms']:9.3f} ms  {record['tflops'] or 0:6.1f} TFLOP/s  {record['host_us']:7.1f} µs host"
            kind = f"{case.op}{' det' if case.deterministic else ''}"
            print(
                f"{impl:12} {kind:9} N={case.N:<6} D={case.D:<4} {figures}  {record['peak_mib']:8.0f} MiB", flush=True
            )
    return measurements, failures


def rested_ms(case: Any, family: str) -> float:
    """Median device milliseconds of the first calls after a pause."""
    from compare import milliseconds

    from flashbob_cupy import bench
    from flashbob_cupy.check import forced_family

    place = bench.TorchCuda()
    with forced_family(family):
        call = bench.library_call(case, place)
        call()
        place.torch.cuda.synchronize()
        time.sleep(PAUSE_S)
        milliseconds(call, place, 0)
        return float(f"{statistics.median(milliseconds(call, place, RESTED_S)):.4g}")


def matmul_tflops(size: int = 8192) -> float:
    """What this card reaches in a large bfloat16 matrix product, timed like everything else."""
    from flashbob_cupy import bench

    place = bench.TorchCuda()
    a, b = (place.random((size, size), "bfloat16") for _ in range(2))
    milliseconds, _ = place.time(lambda: a @ b, 0.2)
    return round(2 * size**3 / milliseconds / 1e9, 1)


def has_torch_adapter() -> bool:
    return importlib.util.find_spec("flashbob_cupy.torch") is not None


def versions() -> dict[str, str]:
    found = {}
    for name in VERSIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def driver_version() -> str:
    """The driver's own version, from the kernel module."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return "unknown"
    match = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", text)
    return match.group() if match else "unknown"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--check", action="store_true", help="compare the committed records with the sources; no GPU")
    only.add_argument("--tests", action="store_true", help="run the tests only")
    only.add_argument("--bench", action="store_true", help="run the benchmark only")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the record (default: docs/results)")
    parser.add_argument("--limit", type=float, default=150.0, help="seconds the benchmark may take (default: 150)")
    arguments = parser.parse_args()
    if arguments.check:
        return check()

    sys.path.insert(0, str(ROOT))
    from flashbob_cupy import doctor

    gpu = doctor.usable_gpu()
    if gpu is None:
        report = doctor.examine()
        print(f"no usable GPU. {report.verdict} {report.fix}", file=sys.stderr)
        return 3
    path = arguments.output / (re.sub(r"[^a-z0-9]+", "-", gpu.name.lower()).strip("-") + ".json")
    committed = RESULTS / path.name
    before = json.loads(committed.read_text()) if committed.exists() else {}
    current = source_hash()
    kept = before if before.get("sources") == current else {}
    record: dict[str, Any] = {
        "device": gpu.describe(),
        "driver": driver_version(),
        "versions": versions(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "sources": current,
        "tests": kept.get("tests"),
        "matmul_tflops": kept.get("matmul_tflops"),
        "measurements": kept.get("measurements", []),
    }
    failures: list[str] = []
    if not arguments.bench:
        record["tests"] = run_tests()
        print(record["tests"])
    if not arguments.tests:
        record["matmul_tflops"] = matmul_tflops()
        record["measurements"], failures = run_benchmark(gpu.memory_bytes, arguments.limit)
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = ",\n  ".join(json.dumps(row) for row in record.pop("measurements"))
    head = json.dumps(record, indent=1)[:-2]
    path.write_text(f'{head},\n "measurements": [\n  {rows}\n ]\n}}\n')
    print("\n".join([*failures, str(path)]))
    return 1 if failures or (record["tests"] and record["tests"]["failed"]) else 0


if __name__ == "__main__":
    sys.exit(main())
