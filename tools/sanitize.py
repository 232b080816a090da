"""Run NVIDIA's compute-sanitizer (memcheck, then racecheck) on a small problem of every kernel of this GPU.

    python tools/sanitize.py [--sanitizer PATH]

Exits non-zero if either tool reports anything. `--run` is what the tools watch: the problems themselves.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ("memcheck", "racecheck")


def run() -> int:
    """A few tiles with a ragged end, masked and not, on every kernel family; the results are judged too."""
    sys.path.insert(0, str(ROOT))
    from flashbob_cupy import check

    options = check.Options(causal=True)
    cases = [
        check.Case(2, 1, 150, 170, D, D, dtype, options, deterministic)
        for D, dtype, deterministic in ((64, "bfloat16", False), (128, "float16", False), (64, "float16", True))
    ]
    cases.append(check.Case(1, 1, 70, 70, 40, 24, "bfloat16"))
    families = [engine for engine in check.engines("cuda") if engine.name != "blocked"]
    if not families:
        print("no usable GPU: see `flashbob doctor`", file=sys.stderr)
        return 3
    results = (result for seed, case in enumerate(cases) for result in check.run_case(case, seed, families))
    bad = [result for result in results if not result.ok]
    for result in bad:
        print(
            f"{result.source} {result.output}: error {result.error:.2g}, budget {result.budget:.2g}: {result.problem}"
        )
    return 1 if bad else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--sanitizer", default="compute-sanitizer", help="path of the compute-sanitizer program")
    parser.add_argument("--run", action="store_true", help="run the problems without a sanitizer")
    arguments = parser.parse_args()
    if arguments.run:
        return run()
    program = shutil.which(arguments.sanitizer)
    if program is None:
        print(f"{arguments.sanitizer} was not found: install it, or give --sanitizer PATH", file=sys.stderr)
        return 2
    status = 0
    for tool in TOOLS:
        command = [program, "--tool", tool, "--error-exitcode", "1", sys.executable, __file__, "--run"]
        done = subprocess.run(command, cwd=ROOT, check=False)
        print(f"{tool}: {'clean' if done.returncode == 0 else f'exit code {done.returncode}'}", flush=True)
        status = status or done.returncode
    return status


if __name__ == "__main__":
    sys.exit(main())
