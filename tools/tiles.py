"""Time the tiles that a kernel could have on this machine's GPU; write docs/results/tiles-<gpu>.json.

    python tools/tiles.py                                  every kernel of the family that the planner prefers
    python tools/tiles.py --kernel bob_columns --dim 64    one of them
    python tools/tiles.py --batch 1 --heads 4 --length 1024   the tiles of small problems
    python tools/tiles.py --list [--arch sm_90a]           the candidates and how they compile; no GPU

The tables of flashbob_cupy/plan.py are chosen from these measurements by hand. A candidate differs from the planned
tile in at most two of the rows of a CTA, the rows that stream past and the stages, or in whether CTAs form clusters,
fits the shared memory and compiles without spills or warnings. What is timed is the whole operation, because a tile of
one kernel can cost another one; the candidates take turns, so that clocks that drift do so for all of them.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import multiprocessing
import os
import re
import statistics
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from flashbob_cupy import kernels, ops, plan  # noqa: E402
from flashbob_cupy.errors import CompileError  # noqa: E402
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
ROUNDS, SECONDS = 3, 0.05


@dataclasses.dataclass(frozen=True)
class Size:
    """B, heads and tokens of the problem that is timed."""

    batch: int
    heads: int
    length: int

    def problem(self, kernel: str, D: int) -> Problem:
        op, deterministic = TIMED[kernel]
        every = dict.fromkeys(("uq", "uk", "uv"), op in ("bob", "jvp"))
        B, H, N = self.batch, self.heads, self.length
        return Problem(op, B, H, H, N, N, D, D, "bfloat16", Mask(right=0), D**-0.5, deterministic, **every)


def candidates(p: Problem, family: str, kernel: str, device: plan.Device) -> list[plan.Tile]:
    """The planned tile first, then those that differ from it in one number, and in the stages besides."""
    entry = plan.TABLES[family][kernel]
    fused = int(not TIMED[kernel][1])
    first = entry.choose(p, device, p.D, p.D, fused, kernel)
    # A warp of the portable family may own 16 or 32 rows of results.
    found = [first, *(dataclasses.replace(first, WARPS=warps) for warps in (4, 8) if family == "sm80")]
    found += [dataclasses.replace(first, CLUSTER=size) for size in (1, 2) if family == "sm90" and entry.by_rows]
    for own, stream, stages in itertools.product((0, -64, 64), (0, -64, -32, -16, 16, 32, 64), (0, -1, 1)):
        if 0 in (own, stream, stages):
            queries, keys = (own, stream) if entry.by_rows else (stream, own)
            found.append(
                resized(first, family, entry, first.QUERIES + queries, first.KEYS + keys, first.STAGES + stages)
            )
    unit = 64 if family == "sm90" else 16
    return [
        tile
        for tile in dict.fromkeys(found)
        if min(tile.QUERIES, tile.KEYS) >= 16
        and (tile.QUERIES if entry.by_rows else tile.KEYS) % unit == 0
        and tile.STAGES >= 1
        and entry.shared(tile, p.D, p.D, fused) <= device.shared_limit
    ]


def resized(tile: plan.Tile, family: str, entry: plan.Kernel, queries: int, keys: int, stages: int) -> plan.Tile:
    """A tile of these sizes; a warpgroup of Hopper's always owns 64 rows of results, and one more loads."""
    warps = 4 * ((queries if entry.by_rows else keys) // 64 + 1) if family == "sm90" else tile.WARPS
    return dataclasses.replace(tile, QUERIES=queries, KEYS=keys, STAGES=stages, WARPS=warps)


@contextlib.contextmanager
def planned(family: str, kernel: str, tile: plan.Tile) -> Iterator[None]:
    """Plan the kernel with this tile alone."""
    table, entry = plan.TABLES[family], plan.TABLES[family][kernel]
    only = {128: (tile,)}
    table[kernel] = dataclasses.replace(entry, tiles=only, unfused=None, few=None, other=None, paired=None)
    ops._calls.clear()
    try:
        yield
    finally:
        table[kernel] = entry
        ops._calls.clear()


def specialisation(p: Problem, family: str, kernel: str, tile: plan.Tile, device: plan.Device) -> plan.Specialisation:
    everything = frozenset(INPUTS[p.op] + OUTPUTS[p.op])
    with planned(family, kernel, tile):
        found = plan.plan(p, device, family, everything).specialisations()
    return next(s for s in found if s.kernel == kernel and s.family == family)


def verdict(one: plan.Specialisation, arch: str, compiling: Future[kernels.Compiled]) -> str:
    """Empty, or why the candidate is none. Launches in this process take what was compiled."""
    try:
        compiled = compiling.result()
    except CompileError as error:
        reason = re.search(r'static assertion failed with "([^"]*)"', str(error))
        return reason[1] if reason else str(error).splitlines()[0]
    resources = compiled.resources
    if resources is None or resources.spill_bytes or resources.stack_bytes or resources.warnings:
        return "spills or warnings"
    kernels._cubins((one, arch), lambda: compiled.code)
    return ""


Job = tuple[str, int]  # kernel, head dimension


def usable(
    size: Size, family: str, jobs: list[Job], device: plan.Device, pool: Executor
) -> Iterator[tuple[Job, list[plan.Tile]]]:
    """Of one kernel after another the candidates that compile as they should; the next ones compile meanwhile.

    Raises RuntimeError where the planned tile, the first of each, is none.
    """

    def submit(job: Job) -> list[tuple[plan.Tile, plan.Specialisation, Future[kernels.Compiled]]]:
        kernel, p = job[0], size.problem(*job)
        every = [
            (tile, specialisation(p, family, kernel, tile, device)) for tile in candidates(p, family, kernel, device)
        ]
        return [(tile, one, pool.submit(kernels.compile, one, device.arch, cached=False)) for tile, one in every]

    for job, compiling in [(job, submit(job)) for job in jobs]:
        found: list[plan.Tile] = []
        for tile, one, future in compiling:
            reason = verdict(one, device.arch, future)
            print(f"{family} {job[0]} D={job[1]} {dataclasses.astuple(tile)} {reason or 'compiles'}", file=sys.stderr)
            if not reason:
                found.append(tile)
            elif not found:
                raise RuntimeError(
                    f"the tile that is planned for {job[0]} at D={job[1]}, {tile}, is no candidate: {reason}"
                )
        yield job, found


def measure(size: Size, family: str, job: Job, tiles: list[plan.Tile]) -> list[dict[str, Any]]:
    from flashbob_cupy import bench
    from flashbob_cupy.check import forced_family

    kernel, D = job
    p = size.problem(kernel, D)
    case = bench.Case(p.op, p.B, p.Hq, p.Hkv, p.M, p.N, D, D, p.dtype, True, p.deterministic)
    place = bench.TorchCuda()
    times: dict[plan.Tile, list[float]] = {tile: [] for tile in tiles}
    with forced_family(family):
        call = bench.library_call(case, place)
        for _ in range(ROUNDS):
            for tile in tiles:
                with planned(family, kernel, tile):
                    times[tile].append(place.time(call, SECONDS)[0])
    return [
        {
            "family": family, "kernel": kernel, "op": p.op, "deterministic": p.deterministic, "B": p.B, "H": p.Hq,
            "D": D, "N": p.N, "tile": dataclasses.asdict(tile), "planned": tile == tiles[0],
            "ms": round(statistics.median(found), 4),
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
    parser.add_argument("--batch", type=int, default=4, help="batch size (default: 4)")
    parser.add_argument("--heads", type=int, default=12, help="heads (default: 12)")
    parser.add_argument("--length", type=int, default=4096, help="tokens (default: 4096)")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds it may take (default: 300)")
    arguments = parser.parse_args()
    device = plan.typical_device(arguments.arch) if arguments.list else kernels.device_info(0)
    family = arguments.family or ("sm90" if device.arch == "sm_90a" else "sm80")
    jobs = list(itertools.product(arguments.kernel or TIMED, arguments.dim or (64, 128)))
    size = Size(arguments.batch, arguments.heads, arguments.length)
    end = time.monotonic() + arguments.limit
    # In threads of one process, 16 cores have taken longer than one core alone would (docs/kernels.md, "Compiling").
    # One core is left to the process that measures.
    workers = max((os.cpu_count() or 1) - (not arguments.list), 1)
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        found = usable(size, family, jobs, device, pool)
        if arguments.list:
            print(f"{sum(len(tiles) for _, tiles in found)} candidates for {len(jobs)} kernels and head dimensions")
            return 0
        try:
            return record(size, family, found, end)
        finally:
            pool.shutdown(cancel_futures=True)


def record(size: Size, family: str, found: Iterator[tuple[Job, list[plan.Tile]]], end: float) -> int:
    """Measure, print and keep the results of earlier runs of other problems."""
    import torch

    name = re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower()).strip("-")
    path = ROOT / "docs" / "results" / f"tiles-{name}.json"
    rows: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
    for (kernel, D), tiles in found:
        if time.monotonic() > end:
            print(f"stopped before {kernel} D={D}")
            return 1
        measured = measure(size, family, (kernel, D), tiles)
        same = {key: measured[0][key] for key in ("family", "kernel", "B", "H", "D", "N")}
        rows = [row for row in rows if any(row[key] != value for key, value in same.items())] + measured
        for row in sorted(measured, key=lambda row: row["ms"]):
            mark = "  <- planned" if row["planned"] else ""
            print(f"{kernel:17} D={D:<4} {tuple(row['tile'].values())!s:22} {row['ms']:9.3f} ms{mark}", flush=True)
        path.write_text("[\n " + ",\n ".join(map(json.dumps, rows)) + "\n]\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
