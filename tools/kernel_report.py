"""Compile every kernel for every architecture and report registers, spills and shared memory; no GPU is needed.

    python tools/kernel_report.py [--arch ARCH] [--json]

Exits with 1 on a register spill, local memory, or a warning of the compiler (serialised wgmma, C75xx, among them): this
is `flashbob kernels compile` on every core, with nothing taken from the cache.
"""

import os
import sys

from flashbob_cupy.cli import main

if __name__ == "__main__":
    main(["kernels", "compile", "--no-cache", "--jobs", str(os.cpu_count() or 1), *sys.argv[1:]])
