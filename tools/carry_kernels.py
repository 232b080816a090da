"""Compile kernels with the installed NVRTC into a folder, for the kernel tests of a machine that has another one.

    python tools/carry_kernels.py FOLDER [--arch sm_90a]

No GPU is needed. On the GPU machine: FLASHBOB_CARRIED_KERNELS=FOLDER pytest tests/test_gpu_kernels.py
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from flashbob_cupy import kernels
from flashbob_cupy.plan import SHARED_LIMITS, specialisations


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--arch", choices=list(SHARED_LIMITS), default="sm_90a")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)

    wanted = specialisations(arguments.arch)
    # Processes: NVRTC compiles one kernel at a time in each.
    with ProcessPoolExecutor(os.cpu_count(), mp_context=multiprocessing.get_context("spawn")) as pool:
        codes = [made.code for made in pool.map(kernels.compile, wanted, itertools.repeat(arguments.arch))]
    entries: list[dict[str, str]] = []
    for one, code in zip(wanted, codes, strict=True):
        name = sha256(code) + ".cubin"
        (arguments.folder / name).write_bytes(code)
        source = sha256(kernels.source(one.path).encode())
        entries.append({"arch": arguments.arch, "kernel": str(one), "source": source, "file": name})

    (arguments.folder / "manifest.json").write_text(
        json.dumps({"nvrtc": nvrtc_version(), "kernels": entries}, indent=1)
    )
    print(f"{len(entries)} kernels for {arguments.arch} of NVRTC {nvrtc_version()} are in {arguments.folder}")
    return 0


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def nvrtc_version() -> str:
    from cuda.bindings import nvrtc

    _, major, minor = nvrtc.nvrtcVersion()
    return f"{major}.{minor}"


if __name__ == "__main__":
    sys.exit(main())
