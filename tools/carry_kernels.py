"""Compile kernels with the installed NVRTC into a folder, for the kernel tests of a machine that has another one.

    python tools/carry_kernels.py FOLDER [--arch sm_90a]

No GPU is needed. On the GPU machine: FLASHBOB_CARRIED_KERNELS=FOLDER pytest tests/test_gpu_kernels.py
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from flashbob_cupy import kernels
from flashbob_cupy.plan import SHARED_LIMITS, Specialisation, specialisations


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--arch", choices=list(SHARED_LIMITS), default="sm_90a")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)

    def carry(one: Specialisation) -> dict[str, str]:
        code = kernels.compile(one, arguments.arch).code
        name = sha256(code) + ".cubin"
        (arguments.folder / name).write_bytes(code)
        source = sha256(kernels.source(one.path).encode())
        return {"arch": arguments.arch, "kernel": str(one), "source": source, "file": name}

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        entries = list(pool.map(carry, specialisations(arguments.arch)))
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
