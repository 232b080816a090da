"""Run NVIDIA's compute-sanitizer (memcheck and racecheck) on a small problem of every kernel of this GPU.

    python tools/sanitize.py [--sanitizer PATH]

Exits with 1 if a tool reports an error, a result is wrong or a kernel was not run, 2 if the sanitizer cannot be used
here, 3 without a GPU. `--run` is what the tools watch: the problems themselves.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ("memcheck", "racecheck")
LIMIT_S = 110
SHOWN_LINES = 60
PLACES = ("compute-sanitizer", "/usr/local/cuda/bin/compute-sanitizer")


def run() -> int:
    """A few tiles with ragged ends, masked and not, on every kernel family; the results are judged too."""
    sys.path.insert(0, str(ROOT))
    from flashbob_cupy import check, kernels

    engines = check.engines("cuda")
    if not engines:
        print("no usable GPU: see `flashbob doctor`", file=sys.stderr)
        return 3
    names = ("sm80", "sm90") if kernels.device_info(0).arch == "sm_90a" else ("sm80",)
    families = [engine for engine in engines if engine.name in names]
    import cupy

    # Every array is an allocation of its own, so that memcheck knows its end.
    cupy.cuda.set_allocator(None)
    run_kernels: set[str] = set()
    load = kernels._load

    def note(specialisation: kernels.Specialisation, index: int) -> int:
        run_kernels.add(specialisation.path)
        return load(specialisation, index)

    kernels._load = note  # type: ignore[assignment]

    causal = check.Options(causal=True)
    cases = (
        check.Case(2, 1, 150, 170, 64, 64, "bfloat16", causal),
        check.Case(2, 1, 150, 170, 128, 128, "float16", causal),
        check.Case(2, 1, 150, 170, 64, 64, "float16", causal, deterministic=True),
        check.Case(1, 1, 150, 170, 128, 128, "bfloat16", causal, deterministic=True),
        check.Case(2, 1, 250, 170, 128, 128, "bfloat16", deterministic=True),  # in clusters
        check.Case(1, 1, 70, 70, 36, 20, "bfloat16", check.Options(window=(9, 0))),
    )
    results = [result for seed, case in enumerate(cases) for result in check.run_case(case, seed, families)]
    bad = [result for result in results if not result.ok]
    for result in bad:
        numbers = f"error {result.error:.2g}, budget {result.budget:.2g}"
        print(f"{result.source} {result.output}: {numbers}, {result.problem}")
    sources = {path.relative_to(ROOT / "cuda").as_posix() for path in (ROOT / "cuda").rglob("*.cu")}
    missed = {path for path in sources if "/" not in path or path.startswith(names)} - run_kernels
    if missed:
        print(f"not run: {', '.join(sorted(missed))}")
    print(f"{len(results)} results of {len(run_kernels)} kernels, families {', '.join(names)}")
    return 1 if bad or missed else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--sanitizer", help="path of the compute-sanitizer program")
    parser.add_argument("--run", action="store_true", help="run the problems without a sanitizer")
    arguments = parser.parse_args()
    if arguments.run:
        return run()
    wanted = [arguments.sanitizer] if arguments.sanitizer else PLACES
    program = next(filter(None, map(shutil.which, wanted)), None)
    if program is None:
        print(f"{wanted[0]} was not found: install it, or give --sanitizer PATH", file=sys.stderr)
        return 2

    # Once without a tool: it fills the kernel cache, and its failure says more than theirs.
    plain = subprocess.run([sys.executable, __file__, "--run"], cwd=ROOT, check=False)
    if plain.returncode:
        return plain.returncode
    start = time.monotonic()
    options = ["--error-exitcode", "9", "--report-api-errors", "no"]
    watched = {
        tool: subprocess.Popen(
            [program, "--tool", tool, *options, sys.executable, __file__, "--run"],
            cwd=ROOT,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "4"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for tool in TOOLS
    }
    status = 0
    for tool, process in watched.items():
        try:
            output, _ = process.communicate(timeout=max(1.0, LIMIT_S - (time.monotonic() - start)))
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
            output += f"\nstopped after {LIMIT_S} s"
        lines = output.splitlines()
        summary = next((line for line in reversed(lines) if re.search(r"SUMMARY", line)), "no summary")
        clean = process.returncode == 0 and re.search(r"SUMMARY: 0 (errors|hazards)", summary)
        if not clean:
            print("\n".join(lines[:SHOWN_LINES]))
            status = max(status, 2 if "not supported" in output else 1)
        verdict = "clean" if clean else f"exit code {process.returncode}"
        print(f"{tool}: {verdict} after {time.monotonic() - start:.0f} s. {summary.strip('= ')}", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
