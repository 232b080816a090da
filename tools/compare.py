"""Time operations of this checkout against those of another revision, or a kernel's planned tile against another one.

    python tools/compare.py main                               the double backward, N=16384, against branch main
    python tools/compare.py HEAD~3 --op jvp --dim 64 --length 4096
    python tools/compare.py --tile bob_rows=192,64,3 --op jvp --dim 64   QUERIES, KEYS, STAGES against the planned tile
    python tools/compare.py --tile bob_rows=128,64,2,2 --op jvp --dim 128   and of clusters of two CTAs

Cards of one type differ by more than most changes do, and a warm one from itself when it was cool. So both sides run in
one go, each in a process of its own, and take turns, first one and then the other leading: `first` is the median of the
calls of a tenth of a second after a pause, `sustained` that of calls without pauses.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAUSE_S, FIRST_S, SUSTAINED_S = 1.0, 0.1, 0.5
ANSWER = "answer: "


# ---- one side ------------------------------------------------------------------------------------------------------
def serve() -> int:
    """Answer requests on standard input, a JSON value a line: first the case, then how many seconds to time it for."""
    from flashbob_cupy import bench

    asked = json.loads(sys.stdin.readline())
    folder = Path(asked.pop("folder"))
    if not Path(bench.__file__).is_relative_to(folder):
        raise SystemExit(f"the library of {folder} was asked for, that of {bench.__file__} was found")
    place = bench._place(asked.pop("device"), torch_tensors=False)
    with ExitStack() as stack:
        for kernel, sizes in asked.pop("tiles").items():
            stack.enter_context(tile_planned(kernel, asked["D"], sizes))
        call = bench.library_call(bench.Case(**asked), place)
        call()
        answer(None)
        for line in sys.stdin:
            answer(milliseconds(call, place, json.loads(line)))
    return 0


def answer(value: object) -> None:
    print(ANSWER + json.dumps(value), flush=True)


def tile_planned(kernel: str, D: int, sizes: list[int]) -> AbstractContextManager[None]:
    """Plan the kernel with a tile of these sizes alone, in the family of the GPU."""
    import tiles

    from flashbob_cupy import kernels, plan

    family = "sm90" if kernels.device_info(0).arch == "sm_90a" else "sm80"
    queries, keys, stages, cluster = (*sizes, 1)[:4]
    entry = plan.TABLES[family][kernel]
    if cluster > 1 and not (family == "sm90" and entry.by_rows):
        raise SystemExit(
            f"{family}/{kernel}.cu: expected a tile without clusters; got {sizes}. Leave out the last number"
        )
    first = entry.tiles[min(width for width in entry.tiles if width >= D)][0]
    chosen = tiles.resized(first, family, entry, queries, keys, stages)
    return tiles.planned(family, kernel, dataclasses.replace(chosen, CLUSTER=cluster))


def milliseconds(call: Callable[[], object], place: Any, seconds: float) -> list[float]:
    """Of every call in the given time, one at least; on a GPU between two events."""
    samples: list[float] = []
    events = getattr(place, "events", None)
    while not samples or sum(samples) < 1e3 * seconds:
        if events is None:
            start = time.perf_counter()
            call()
            samples.append(1e3 * (time.perf_counter() - start))
            continue
        marks = [(events.event(), events.event()) for _ in range(4)]  # a few at once, so that the GPU never waits
        for begin, end in marks:
            begin.record()
            call()
            end.record()
        events.synchronize()
        samples += [events.elapsed_ms(begin, end) for begin, end in marks]
    return samples


# ---- both ----------------------------------------------------------------------------------------------------------
class Side:
    """A process that has the library of one folder."""

    def __init__(self, name: str, folder: Path, tiles: dict[str, list[int]]) -> None:
        self.name, self.folder, self.tiles = name, folder, tiles
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve"],
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH")))),
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, value: object) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(value) + "\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith(ANSWER):
                return json.loads(line.removeprefix(ANSWER))
        raise RuntimeError(f"{self.name}: its process ended; what it said stands above")

    def __enter__(self) -> Side:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


@contextmanager
def revision(name: str) -> Iterator[Path]:
    """The library of a revision, in a folder for the time being."""
    packed = subprocess.run(
        ["git", "archive", name, "cuda", "flashbob_cupy"], cwd=ROOT, capture_output=True, check=False
    )
    if packed.returncode:
        raise SystemExit(f"{name}: {packed.stderr.decode().strip()}")
    with tempfile.TemporaryDirectory() as folder, tarfile.open(fileobj=BytesIO(packed.stdout)) as files:
        files.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))  # from 3.11.4 on
        yield Path(folder)


def compare(sides: list[Side], case: dict[str, Any], rounds: int) -> dict[str, dict[str, float]]:
    """Medians by side, first and sustained."""
    for side in sides:
        side.ask({**case, "tiles": side.tiles, "folder": str(side.folder)})
    found: dict[str, dict[str, list[float]]] = {side.name: {"first": [], "sustained": []} for side in sides}
    for turn, (kind, seconds) in itertools.product(range(rounds), (("first", FIRST_S), ("sustained", SUSTAINED_S))):
        for side in sides if turn % 2 == 0 else sides[::-1]:
            if kind == "first":
                time.sleep(PAUSE_S)
                side.ask(0)
            found[side.name][kind].append(statistics.median(side.ask(seconds)))
    return {name: {kind: statistics.median(taken) for kind, taken in kinds.items()} for name, kinds in found.items()}


def tile(text: str) -> tuple[str, list[int]]:
    kernel, _, sizes = text.partition("=")
    numbers = [int(size) for size in sizes.split(",")]
    if len(numbers) not in (3, 4):
        raise ValueError(text)
    return kernel, numbers


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("revision", nargs="?", help="of git; default: this checkout itself, for --tile")
    parser.add_argument(
        "--tile", action="append", type=tile, default=[], help="KERNEL=QUERIES,KEYS,STAGES[,CLUSTER] of this side"
    )
    parser.add_argument("--op", action="append", choices=("forward", "backward", "bob", "jvp"), help="default: bob")
    parser.add_argument("--dim", action="append", type=int, help="head dimension (default: 64 and 128)")
    parser.add_argument("--length", action="append", type=int, help="tokens (default: 16384)")
    parser.add_argument("--batch", type=int, default=4, help="batch size (default: 4)")
    parser.add_argument("--heads", type=int, default=12, help="heads (default: 12)")
    parser.add_argument("--dtype", default="bfloat16", help="default: bfloat16")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--rounds", type=int, default=4, help="turns of each side (default: 4)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.serve:
        return serve()
    if not a.revision and not a.tile:
        parser.error("name a revision of git, or a tile")

    with ExitStack() as stack:
        other = stack.enter_context(revision(a.revision)) if a.revision else ROOT
        for op, D, N in itertools.product(a.op or ["bob"], a.dim or [64, 128], a.length or [16384]):
            case = {
                "op": op, "B": a.batch, "Hq": a.heads, "Hkv": a.heads, "M": N, "N": N, "D": D, "Dv": D,
                "dtype": a.dtype, "causal": True, "deterministic": a.deterministic, "device": a.device,
            }  # fmt: skip
            with Side(a.revision or "planned", other, {}) as theirs, Side("this", ROOT, dict(a.tile)) as ours:
                found = compare([theirs, ours], case, a.rounds)
            before, now = found[theirs.name], found[ours.name]
            for kind in ("first", "sustained"):
                print(
                    f"{op:9} D={D:<4} N={N:<7} {kind:10} {theirs.name} {before[kind]:.4g} ms, "
                    f"this {now[kind]:.4g} ms, ratio {now[kind] / before[kind]:.3f}",
                    flush=True,
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
