"""Time the tiles that a kernel could have on this machine's GPU; write docs/results/tiles-<gpu>.json.

    python tools/tiles.py                                  every kernel of the family that the planner prefers
    python tools/tiles.py --kernel bob_columns --dim 64    one of them
    python tools/tiles.py --list [--arch sm_90a]           the candidates and how they compile; no GPU

The tables of flashbob_cupy/plan.py are chosen from these measurements by hand. A candidate differs from the planned
tile in one size, in its stages, or in both, fits the shared memory and compiles without spills or warnings. What is
timed is the whole operation, because a tile of one kernel can cost another one; the candidates take turns, so that
clocks that drift do so for all of them.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import re
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from flashbob_cupy import kernels, ops, plan  # noqa: E402
from flashbob_cupy.errors import CompileError, UnsupportedError  # noqa: E402
from flashbob_cupy.problem import INPUTS, OUTPUTS, Mask, Problem  # noqa: E402

# The operation in which a kernel is timed, and whether deterministically.
TIMED = {
    "forward": ("forward", False),
    "bob_rows": ("jvp", False),
    "backward_columns": ("backward", False),
    "backward_rows": ("backward", True),
    "bob_columns": ("bob", False),
    "bob_queries": ("bob", True),
}
SIZE_STEPS = (-64, -32, -16, 16, 32, 64)
ROUNDS = 3


def problem(kernel: str, D: int, N: int) -> Problem:
    op, deterministic = TIMED[kernel]
    every = dict.fromkeys(("uq", "uk", "uv"), op in ("bob", "jvp"))
    return Problem(op, 4, 12, 12, N, N, D, D, "bfloat16", Mask(right=0), D**-0.5, deterministic, **every)


def candidates(family: str, kernel: str, D: int, device: plan.Device) -> list[plan.Tile]:
    """The planned tile first, then those that differ from it in one number, and in the stages besides."""
    entry = plan.TABLES[family][kernel]
    fused = not TIMED[kernel][1]
    first = entry.choose(device, D, D, int(fused), True, kernel)
    # A warp of the portable family may own 16 or 32 rows of results; a warpgroup of the other always owns 64.
    sizes = [first, *(dataclasses.replace(first, WARPS=warps) for warps in (4, 8) if family == "sm80")]
    for name in ("QUERIES", "KEYS"):
        for step in SIZE_STEPS:
            changes = {name: getattr(first, name) + step}
            if family == "sm90" and entry.by_rows and name == "QUERIES":
                changes["WARPS"] = 4 * (changes["QUERIES"] // 64 + 1)
            sizes.append(dataclasses.replace(first, **changes))
    found = [dataclasses.replace(t, STAGES=t.STAGES + more) for t, more in itertools.product(sizes, (0, -1, 1))]
    return [
        tile
        for tile in dict.fromkeys(found)
        if min(tile.QUERIES, tile.KEYS) >= 16
        and tile.STAGES >= 1
        and entry.shared(tile, D, D, int(fused)) <= device.shared_limit
    ]


@contextlib.contextmanager
def planned(family: str, kernel: str, tile: plan.Tile) -> Iterator[None]:
    """Plan the kernel with this tile alone."""
    table, entry = plan.TABLES[family], plan.TABLES[family][kernel]
    only = {128: (tile,)}
    table[kernel] = dataclasses.replace(entry, tiles=only, unfused=None, without_uv=None)
    ops._calls.clear()
    try:
        yield
    finally:
        table[kernel] = entry
        ops._calls.clear()


def compiles(family: str, kernel: str, tile: plan.Tile, D: int, device: plan.Device) -> str:
    """Empty, or why the candidate is none."""
    p = problem(kernel, D, 1024)
    everything = frozenset(INPUTS[p.op] + OUTPUTS[p.op])
    try:
        with planned(family, kernel, tile):
            found = plan.plan(p, device, family, everything).specialisations()
            wanted = next(s for s in found if s.kernel == kernel and s.family == family)
    except UnsupportedError as error:
        return str(error)
    try:
        resources = kernels.compile(wanted, device.arch, cached=False).resources
    except CompileError as error:
        reason = re.search(r'static assertion failed with "([^"]*)"', str(error))
        return reason[1] if reason else str(error).splitlines()[0]
    if resources is None or resources.spill_bytes or resources.stack_bytes or resources.warnings:
        return "spills or warnings"
    return ""


def usable(family: str, kernel: str, D: int, device: plan.Device) -> list[plan.Tile]:
    found = []
    for tile in candidates(family, kernel, D, device):
        reason = compiles(family, kernel, tile, D, device)
        print(f"{family} {kernel} D={D} {dataclasses.astuple(tile)} {reason or 'compiles'}", file=sys.stderr)
        if not reason:
            found.append(tile)
    return found


def measure(family: str, kernel: str, D: int, N: int, device: plan.Device) -> list[dict[str, Any]]:
    from flashbob_cupy import bench
    from flashbob_cupy.check import forced_family

    p = problem(kernel, D, N)
    case = bench.Case(p.op, p.B, p.Hq, p.Hkv, N, N, D, D, p.dtype, True, p.deterministic)
    place = bench.TorchCuda()
    tiles = usable(family, kernel, D, device)
    times: dict[plan.Tile, list[float]] = {tile: [] for tile in tiles}
    with forced_family(family):
        call = bench.library_call(case, place)
        for _ in range(ROUNDS):
            for tile in tiles:
                with planned(family, kernel, tile):
                    times[tile].append(place.time(call, 0.1)[0])
    return [
        {
            "family": family, "kernel": kernel, "op": p.op, "deterministic": p.deterministic, "D": D, "N": N,
            "tile": dataclasses.asdict(tile), "planned": tile == tiles[0], "ms": round(statistics.median(found), 4),
        }
        for tile, found in times.items()
    ]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--list", action="store_true", help="list the candidates; no GPU")
    parser.add_argument("--arch", default="sm_90a", choices=sorted(plan.SHARED_LIMITS), help="with --list")
    parser.add_argument("--family", choices=sorted(plan.TABLES), help="default: the one the planner prefers")
    parser.add_argument("--kernel", action="append", choices=sorted(TIMED), help="default: all")
    parser.add_argument("--dim", action="append", type=int, choices=(64, 128), help="default: both")
    parser.add_argument("--length", type=int, default=16384, help="tokens (default: 16384)")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds it may take (default: 300)")
    arguments = parser.parse_args()
    device = plan.typical_device(arguments.arch) if arguments.list else kernels.device_info(0)
    family = arguments.family or ("sm90" if device.arch == "sm_90a" else "sm80")
    pairs = list(itertools.product(arguments.kernel or TIMED, arguments.dim or (64, 128)))
    if arguments.list:
        count = sum(len(usable(family, kernel, D, device)) for kernel, D in pairs)
        print(f"{count} candidates for {len(pairs)} kernels and head dimensions")
        return 0
    import torch

    name = re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower()).strip("-")
    path = ROOT / "docs" / "results" / f"tiles-{name}.json"
    rows: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
    end = time.monotonic() + arguments.limit
    for kernel, D in pairs:
        if time.monotonic() > end:
            print(f"stopped after {arguments.limit:.0f} s, before {kernel} D={D}")
            break
        found = measure(family, kernel, D, arguments.length, device)
        same = {"family": family, "kernel": kernel, "D": D, "N": arguments.length}
        rows = [row for row in rows if any(row[key] != value for key, value in same.items())] + found
        for row in sorted(found, key=lambda row: row["ms"]):
            mark = "  <- planned" if row["planned"] else ""
            print(f"{kernel:17} D={D:<4} {tuple(row['tile'].values())!s:22} {row['ms']:9.3f} ms{mark}", flush=True)
        path.write_text("[\n " + ",\n ".join(map(json.dumps, rows)) + "\n]\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
