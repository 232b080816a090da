"""Which kernels compute a problem on a device: tiles, macros, shared memory, grids, and the layout of the workspace.

Pure: no CUDA, no arrays, nothing is compiled. `kernels.py` carries a plan out.

Tiles are chosen from one table per kernel family, in order of preference: the first that fits the shared memory of the
device is taken. The formula that says how much each kernel needs stands beside the table.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from flashbob_cupy.errors import UnsupportedError
from flashbob_cupy.problem import AXES, INPUTS, OUTPUTS, Mask, Problem

#: Forces a kernel family ("sm80", "sm90") or the blocked engine ("blocked"): for tests and benchmarks.
FAMILY_VARIABLE = "FLASHBOB_FAMILY"
FAMILIES = ("sm90", "sm80", "blocked")

#: Where the kernels of `cuda/attention.cuh` find each argument and put each result.
FIELDS: dict[str, dict[str, str]] = {
    "forward": {"q": "q", "k": "k", "v": "v", "o": "out_o", "lse": "out_lse"},
    "jvp": {name: name for name in INPUTS["jvp"]} | {"to": "out_o", "tlse": "out_lse"},
    "backward": {name: name for name in INPUTS["backward"]} | {"do": "d", "dq": "out_q", "dk": "out_k", "dv": "out_v"},
    "bob": {name: name for name in INPUTS["bob"]}
    | {"do": "d", "gq": "out_q", "gk": "out_k", "gv": "out_v", "gdo": "out_o", "gdlse": "out_lse"},
}

_MAX_HEAD_DIM = 128
_INT_MAX = 2**31 - 1
_ALIGNMENT = 256  # of every region of the workspace


# ---- devices -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Device:
    """What planning needs to know of a GPU. `arch` is the name its code is compiled for, "" where no kernel runs."""

    arch: str
    capability: tuple[int, int]
    shared_limit: int
    multiprocessors: int


_ARCHES = {
    (8, 0): "sm_80",
    (8, 6): "sm_86",
    (8, 7): "sm_87",
    (8, 9): "sm_89",
    (9, 0): "sm_90a",
    (10, 0): "sm_100a",
    (12, 0): "sm_120a",
}

#: The architectures that kernels are compiled for ahead of time: the most shared memory a block may have on each.
SHARED_LIMITS = {
    "sm_80": 163 << 10,
    "sm_86": 99 << 10,
    "sm_89": 99 << 10,
    "sm_90a": 227 << 10,
    "sm_100a": 227 << 10,
    "sm_120a": 99 << 10,
}


def arch_for(capability: tuple[int, int]) -> str:
    """The architecture name to compile for; "" below compute capability 8.0, which no kernel serves.

    Code for X.y runs on every X.z with z >= y unless the name ends in "a", so an unlisted minor version takes the
    nearest listed one below it, without the "a". Nothing runs across major versions: an unlisted one is named exactly,
    and the compiler says whether it knows it.
    """
    if capability < (8, 0):
        return ""
    if capability in _ARCHES:
        return _ARCHES[capability]
    major, minor = capability
    below = [known for known in _ARCHES if known[0] == major and known[1] < minor]
    return _ARCHES[max(below)].rstrip("a") if below else f"sm_{major}{minor}"


def typical_device(arch: str) -> Device:
    """A device of the given architecture, for compiling ahead of time."""
    if arch not in SHARED_LIMITS:
        raise ValueError(f"arch: expected one of {', '.join(SHARED_LIMITS)}; got {arch!r}")
    capability = next(known for known, name in _ARCHES.items() if name == arch)
    return Device(arch, capability, SHARED_LIMITS[arch], 128)


# ---- tiles ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Tile:
    """The tile of one CTA: QUERIES x KEYS, the depth of its pipeline, and how many warps it has.

    CLUSTER: of how many CTAs, with neighbouring rows, each loads a part of what streams past all of them.
    """

    QUERIES: int
    KEYS: int
    STAGES: int
    WARPS: int
    CLUSTER: int = 1


@dataclass(frozen=True, slots=True)
class Kernel:
    """How a kernel is planned: its tiles by head dimension, in order of preference, and the shared memory of each.

    `tiles` maps the largest head dimension served to the tiles to try, `unfused` the same for a column kernel that
    leaves the gradient of Q to another, where that has better ones; `shared(tile, D, Dv, fused)` is in bytes.
    `by_rows`: one CTA per tile of queries and query head; otherwise one per tile of keys and key head.
    `maps`: the fields (`FIELDS`) of the tensor maps that the kernel takes as its second parameter, in order.
    `few`: tiles with half or a third of the rows a CTA, for problems so small (`small`) that twice as many
    multiprocessors or more then share the work, and for a few rows of many heads.
    `other`: tiles with fewer rows a CTA, for numbers of rows that those fit better.
    `paired`: tiles of clusters, of a row kernel, for rows that see many keys.
    """

    tiles: Mapping[int, tuple[Tile, ...]]
    shared: Callable[[Tile, int, int, int], int]
    by_rows: bool
    maps: tuple[str, ...] = ()
    unfused: Mapping[int, tuple[Tile, ...]] | None = None
    few: Mapping[int, tuple[Tile, ...]] | None = None
    other: Mapping[int, tuple[Tile, ...]] | None = None
    paired: Mapping[int, tuple[Tile, ...]] | None = None

    def blocks(self, problem: Problem, tile: Tile) -> int:
        p = problem
        clusters = -(-p.M // (tile.CLUSTER * tile.QUERIES))
        return p.B * (p.Hq * tile.CLUSTER * clusters if self.by_rows else p.Hkv * -(-p.N // tile.KEYS))

    def small(self, problem: Problem, device: Device, tile: Tile) -> bool:
        """Whether all CTAs run at once, or would if they shared the work evenly.

        The longest CTA then decides how long the kernel takes.
        """
        p = problem
        mask, rows, columns = (p.mask, p.M, p.N) if self.by_rows else (p.mask.transposed(), p.N, p.M)
        work = self.blocks(p, tile) * mask.visible(rows, columns)
        return work <= device.multiprocessors * mask.most_visible(rows, columns) * rows

    def choose(self, problem: Problem, device: Device, D: int, Dv: int, fused: int, name: str) -> Tile:
        """D and Dv as rounded up for the kernel."""

        def candidates(tiles: Mapping[int, tuple[Tile, ...]]) -> tuple[Tile, ...]:
            return tiles[min(width for width in tiles if width >= max(D, Dv))]

        def fitting(tiles: Mapping[int, tuple[Tile, ...]] | None) -> Tile | None:
            if tiles is None or max(tiles) < max(D, Dv):
                return None
            fits = (tile for tile in candidates(tiles) if self.shared(tile, D, Dv, fused) <= device.shared_limit)
            return next(fits, None)

        def padded(tile: Tile) -> int:
            """The rows of all CTAs of a head."""
            rows, size = (problem.M, tile.CLUSTER * tile.QUERIES) if self.by_rows else (problem.N, tile.KEYS)
            return -(-rows // size) * size

        def waiting(tile: Tile) -> float:
            """The keys that pass a CTA of a cluster only because others see them, over those that its rows see."""
            edges = (problem.mask.left, problem.mask.right)
            more = (tile.CLUSTER - 1) * tile.QUERIES / 2 * sum(edge is not None for edge in edges)
            return more * problem.M / max(problem.mask.visible(problem.M, problem.N), 1)

        few = fitting(self.few)
        if few is not None and self.small(problem, device, few):
            return few
        tiles = self.tiles if fused or self.unfused is None else self.unfused
        factors = {fitting(tiles): 1.0, fitting(self.other): _OTHER, few: _FEW}
        paired = fitting(self.paired)
        if paired is not None:
            factors[paired] = _PAIRED * (1 + waiting(paired))
        costs = {tile: factor * padded(tile) for tile, factor in factors.items() if tile is not None}
        if costs:
            return min(costs, key=costs.__getitem__)
        least = min(self.shared(tile, D, Dv, fused) for tile in candidates(tiles))
        raise UnsupportedError(
            f"{name} with head dimensions {D} and {Dv} needs {least} bytes of shared memory per block; this device "
            f"offers {device.shared_limit}. Set {FAMILY_VARIABLE}=blocked to compute in blocks of array code instead."
        )


#: What a row costs in `other` tiles and in those of `few` as against the usual ones, where all multiprocessors are busy
#: (docs/kernels.md): so much less must they have to do.
_OTHER, _FEW = 1.15, 1.5
#: The same of `paired` tiles where no CTA waits for another one's keys.
_PAIRED = 0.96


def _panels(width: int) -> int:
    """Shared-memory tiles are made of panels of 64 columns."""
    return -(-width // 64) * 64


def _row_bytes(queries: tuple[int, int], keys: tuple[int, int]) -> Callable[[Tile, int, int, int], int]:
    """A row kernel holds a tile of query-side rows and streams tiles of key-side rows.

    `queries` and `keys` count the arrays of width D and of width Dv on each side.
    """

    def shared(t: Tile, D: int, Dv: int, fused: int) -> int:
        held = queries[0] * _panels(D) + queries[1] * _panels(Dv)
        streamed = keys[0] * _panels(D) + keys[1] * _panels(Dv)
        return 2 * (t.QUERIES * held + t.STAGES * t.KEYS * streamed)

    return shared


def _column_bytes(keys: tuple[int, int], queries: tuple[int, int], handed: int) -> Callable[[Tile, int, int, int], int]:
    """A column kernel holds a tile of key-side rows and streams query-side rows with their statistics.

    When it is fused it also hands `handed` tiles of scores to the product that makes the gradient of Q.
    """

    def shared(t: Tile, D: int, Dv: int, fused: int) -> int:
        held = keys[0] * _panels(D) + keys[1] * _panels(Dv)
        streamed = queries[0] * _panels(D) + queries[1] * _panels(Dv)
        scores = fused * handed * t.KEYS * _panels(t.QUERIES)
        return 2 * (t.KEYS * held + scores) + t.STAGES * t.QUERIES * (2 * streamed + 16)

    return shared


# mma.sync. Row kernels: a warp owns QUERIES / WARPS queries, 16 or 32. Column kernels: KEYS / WARPS keys.
_SM80 = {
    "forward": Kernel(
        {64: (Tile(128, 64, 2, 4),), 128: (Tile(128, 128, 2, 8), Tile(128, 64, 2, 8))},
        _row_bytes(queries=(1, 0), keys=(1, 1)),
        by_rows=True,
    ),
    "bob_rows": Kernel(
        {64: (Tile(128, 32, 2, 4),), 128: (Tile(128, 64, 2, 8), Tile(128, 32, 2, 8), Tile(64, 32, 2, 4))},
        _row_bytes(queries=(2, 0), keys=(2, 2)),
        by_rows=True,
    ),
    "bob_queries": Kernel(
        {64: (Tile(64, 64, 2, 4),), 128: (Tile(64, 64, 1, 4), Tile(64, 32, 1, 4))},
        _row_bytes(queries=(2, 1), keys=(2, 2)),
        by_rows=True,
    ),
    "backward_rows": Kernel(
        {128: (Tile(64, 64, 2, 4),)},
        _row_bytes(queries=(1, 1), keys=(1, 1)),
        by_rows=True,
    ),
    "backward_columns": Kernel(
        {64: (Tile(32, 128, 2, 4),), 128: (Tile(64, 128, 2, 8), Tile(32, 64, 2, 4))},
        _column_bytes(keys=(1, 1), queries=(1, 1), handed=1),
        by_rows=False,
    ),
    "bob_columns": Kernel(
        {
            64: (Tile(64, 64, 2, 4), Tile(32, 64, 2, 4)),
            128: (Tile(32, 128, 2, 8), Tile(32, 64, 2, 4), Tile(16, 64, 1, 4)),
        },
        _column_bytes(keys=(2, 2), queries=(2, 1), handed=2),
        by_rows=False,
    ),
}


def _hopper_rows_bytes(t: Tile, D: int, Dv: int, fused: int) -> int:
    """Q, UQ; stages of K, UK, V, UV on two rings; a barrier for Q and two for each stage of each ring."""
    d, dv = _panels(D), _panels(Dv)
    return 2 * (2 * t.QUERIES * d + t.STAGES * t.KEYS * 2 * (d + dv)) + 8 + 32 * t.STAGES


def _hopper_forward_bytes(t: Tile, D: int, Dv: int, fused: int) -> int:
    """Q; then stages of K and of V; then a barrier for Q and two for each stage of each ring."""
    d, dv = _panels(D), _panels(Dv)
    return 2 * (t.QUERIES * d + t.STAGES * t.KEYS * (d + dv)) + 8 + 32 * t.STAGES


def _hopper_columns_bytes(t: Tile, D: int, Dv: int, fused: int) -> int:
    """K, UK, V, UV; stages of Q, UQ, dO, statistics; one or two buffers of dS and W; barriers, places."""
    d, dv = _panels(D), _panels(Dv)
    buffers = 2 if fused and d == 64 else 1
    stage = 2 * t.QUERIES * (2 * d + dv) + -(-16 * t.QUERIES // 1024) * 1024
    exchange = fused * buffers * t.KEYS // 64 * 2 * t.QUERIES * 128
    return 2 * t.KEYS * 2 * (d + dv) + t.STAGES * stage + exchange + 24 + 24 * t.STAGES + 16 * buffers


def _hopper_backward_rows_bytes(t: Tile, D: int, Dv: int, fused: int) -> int:
    """Q, dO; then stages of K and of V; then a barrier for Q and dO and two for each stage of each ring."""
    d, dv = _panels(D), _panels(Dv)
    return 2 * (t.QUERIES + t.STAGES * t.KEYS) * (d + dv) + 8 + 32 * t.STAGES


def _hopper_backward_columns_bytes(t: Tile, D: int, Dv: int, fused: int) -> int:
    """K, V; stages of Q, dO, statistics; two buffers of dS; barriers and the CTA's place."""
    d, dv = _panels(D), _panels(Dv)
    exchange = fused * 2 * t.KEYS // 64 * t.QUERIES * 128
    stage = 2 * t.QUERIES * (d + dv) + -(-16 * t.QUERIES // 1024) * 1024
    return 2 * t.KEYS * (d + dv) + t.STAGES * stage + exchange + 8 + 16 * t.STAGES + 32 + 12


def _hopper_queries_bytes(t: Tile, D: int, Dv: int, fused: int) -> int:
    """Q, UQ, dO; a ring of K, UK that is a stage deeper than that of V, UV; barriers as in _hopper_rows_bytes."""
    d, dv = _panels(D), _panels(Dv)
    streamed = t.KEYS * 2 * ((t.STAGES + 1) * d + t.STAGES * dv)
    return 2 * (t.QUERIES * (2 * d + dv) + streamed) + 8 + 16 * (2 * t.STAGES + 1)


# wgmma and TMA. Warps: 4 for each 64 rows of results, and 4 that load.
_SM90 = {
    "forward": Kernel(
        {64: (Tile(192, 128, 2, 16),), 128: (Tile(192, 80, 2, 16),)},
        _hopper_forward_bytes,
        by_rows=True,
        maps=("q", "k", "v"),
        few={64: (Tile(64, 128, 2, 8),), 128: (Tile(64, 80, 2, 8),)},
        other={64: (Tile(128, 128, 2, 12),), 128: (Tile(128, 144, 2, 12),)},
    ),
    "backward_columns": Kernel(
        {64: (Tile(96, 128, 2, 12),), 128: (Tile(48, 128, 3, 12),)},
        _hopper_backward_columns_bytes,
        by_rows=False,
        maps=("q", "d", "k", "v"),
        unfused={64: (Tile(128, 128, 2, 12),), 128: (Tile(80, 128, 2, 12),)},
        few={64: (Tile(96, 64, 2, 8),), 128: (Tile(32, 64, 3, 8),)},
    ),
    "backward_rows": Kernel(
        {16: (Tile(128, 96, 3, 12),), 64: (Tile(192, 80, 3, 16),), 128: (Tile(128, 80, 3, 12),)},
        _hopper_backward_rows_bytes,
        by_rows=True,
        maps=("q", "d", "k", "v"),
        few={64: (Tile(64, 96, 3, 8),), 128: (Tile(64, 80, 3, 8),)},
        other={64: (Tile(128, 96, 3, 12),)},
        paired={64: (), 128: (Tile(128, 80, 3, 12, CLUSTER=2),)},
    ),
    "bob_rows": Kernel(
        {64: (Tile(192, 64, 3, 16),), 128: (Tile(128, 80, 2, 12),)},
        _hopper_rows_bytes,
        by_rows=True,
        maps=("q", "uq", "k", "uk", "v", "uv"),
        few={64: (Tile(64, 80, 3, 8),), 128: (Tile(64, 64, 3, 8),)},
        other={64: (Tile(128, 80, 3, 12),)},
        paired={64: (), 128: (Tile(128, 64, 2, 12, CLUSTER=2),)},
    ),
    "bob_columns": Kernel(
        {64: (Tile(64, 128, 2, 12),), 128: (Tile(48, 128, 2, 12),)},
        _hopper_columns_bytes,
        by_rows=False,
        maps=("q", "uq", "d", "k", "uk", "v", "uv"),
        unfused={64: (Tile(80, 128, 2, 12),), 128: (Tile(48, 128, 2, 12),)},
        few={64: (Tile(64, 64, 3, 8),), 128: (Tile(48, 64, 3, 8),)},
    ),
    "bob_queries": Kernel(
        {64: (Tile(128, 64, 3, 12),), 128: (Tile(128, 48, 2, 12),)},
        _hopper_queries_bytes,
        by_rows=True,
        maps=("q", "uq", "d", "k", "uk", "v", "uv"),
        few={64: (Tile(64, 64, 3, 8),), 128: (Tile(64, 48, 3, 8),)},
        paired={64: (), 128: (Tile(128, 48, 2, 12, CLUSTER=2),)},
    ),
}
_QUERY_SIDE = ("q", "uq", "d")

TABLES: dict[str, dict[str, Kernel]] = {"sm80": _SM80, "sm90": _SM90}

# Head dimensions are rounded up to one of these: each value is a set of specialisations to compile.
HEAD_DIMS = (16, 32, 48, 64, 80, 96, 112, 128)


def _kernels_of(op: str, deterministic: bool) -> tuple[str, ...]:
    """The tiled kernels an operation launches, in order."""
    if op == "forward":
        return ("forward",)
    if op == "jvp":
        return ("bob_rows",)
    if op == "backward":
        return ("backward_columns", "backward_rows") if deterministic else ("backward_columns",)
    return ("bob_rows", "bob_columns", "bob_queries") if deterministic else ("bob_rows", "bob_columns")


# ---- routing -------------------------------------------------------------------------------------------------------
def _family_serves(family: str, problem: Problem, device: Device) -> bool:
    if not device.arch or problem.dtype not in ("float16", "bfloat16") or max(problem.D, problem.Dv) > _MAX_HEAD_DIM:
        return False
    if family == "sm80":
        return True
    # A tensor map has at least one row.
    empty = problem.first_query >= problem.M or problem.first_key >= problem.N
    kernels = _kernels_of(problem.op, problem.deterministic)
    return device.arch == "sm_90a" and not empty and all(name in _SM90 for name in kernels)


def route(problem: Problem, device: Device) -> str:
    """The engine that computes a problem: "sm90", "sm80" or "blocked".

    The variable FLASHBOB_FAMILY names the family to try first; a problem that it cannot serve goes where it would go
    without it, except that "blocked" serves every problem.
    """
    forced = os.environ.get(FAMILY_VARIABLE)
    if forced:
        if forced not in FAMILIES:
            raise ValueError(f"{FAMILY_VARIABLE}: expected one of {', '.join(FAMILIES)}; got {forced!r}")
        if forced == "blocked" or _family_serves(forced, problem, device):
            return forced
    return next((family for family in ("sm90", "sm80") if _family_serves(family, problem, device)), "blocked")


def readable(family: str, shape: tuple[int, ...], strides: tuple[int, ...], pointer: int) -> bool:
    """Whether a kernel may read or write a half-precision array of four axes in place; strides count elements.

    Every load is 16 bytes, and rows are found with a 32-bit stride. The sm90 family reads through tensor maps, which
    take no broadcast or reversed axis.
    """
    if strides[3] != 1 or shape[3] % 8 or pointer % 16 or (shape[2] > 1 and abs(strides[2]) > _INT_MAX):
        return False
    outer = [stride for size, stride in zip(shape[:3], strides[:3], strict=True) if size > 1]
    if family == "sm90" and not all(0 < stride < 2**39 for stride in outer):
        return False
    return all(stride % 8 == 0 for stride in outer)


# ---- plans ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Specialisation:
    """One kernel compiled in one way. `family` is its folder in cuda/, "" for the kernels both families share."""

    family: str
    kernel: str
    macros: tuple[tuple[str, int], ...]
    threads: int
    shared_bytes: int

    @property
    def path(self) -> str:
        return f"{self.family}/{self.kernel}.cu" if self.family else f"{self.kernel}.cu"

    def __str__(self) -> str:
        return f"{self.path} " + " ".join(f"{name}={value}" for name, value in self.macros)


@dataclass(frozen=True, slots=True)
class TensorMap:
    """A tensor map of a launch: the array by its name in `FIELDS`, and the rows of its box."""

    field: str
    rows: int


@dataclass(frozen=True, slots=True)
class Launch:
    specialisation: Specialisation
    blocks: int
    maps: tuple[TensorMap, ...] = ()


@dataclass(frozen=True, slots=True)
class Copy:
    """An array that no kernel can use in place and its padded, contiguous copy in the workspace."""

    name: str
    offset: int
    width: int
    launch: Launch

    def strides(self, shape: tuple[int, ...]) -> tuple[int, int, int]:
        """Of the copy: batch, head, row."""
        return shape[1] * shape[2] * self.width, shape[2] * self.width, self.width


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that is launched for one problem on one device, in order, and the layout of the workspace in bytes.

    `statistics` and `accumulator` are offsets, None where the problem has no use for them.
    """

    family: str
    copies_in: tuple[Copy, ...]
    launches: tuple[Launch, ...]
    copies_out: tuple[Copy, ...]
    workspace: int
    statistics: int | None
    accumulator: int | None
    padded_queries: int
    dim: int
    value_dim: int

    def specialisations(self) -> Iterator[Specialisation]:
        for copy in self.copies_in + self.copies_out:
            yield copy.launch.specialisation
        for launch in self.launches:
            yield launch.specialisation


_COPY_THREADS = 256
_STATISTICS_WARPS = 8
_FINISH_THREADS = 256
_FINISH_NUMBERS = {"sm80": 16, "sm90": 32}  # of the accumulator, a thread


def _copy_launch(shape: tuple[int, ...], width: int, gather: int) -> Launch:
    batches, heads, rows, _ = shape
    per_head = -(-rows * (width // 8) // _COPY_THREADS)
    macros = (("GATHER", gather), ("THREADS", _COPY_THREADS))
    blocks = per_head * heads * batches
    return Launch(Specialisation("", "copy_rows", macros, _COPY_THREADS, 0), _checked(blocks, "copy_rows"))


def _checked(blocks: int, kernel: str) -> int:
    if blocks > _INT_MAX:
        raise UnsupportedError(
            f"{kernel} would take {blocks} thread blocks; a launch holds at most {_INT_MAX}. Split the batch."
        )
    return blocks


def plan(problem: Problem, device: Device, family: str, direct: frozenset[str]) -> Plan:
    """The plan of a problem whose results are not all trivially zero (`Problem.vanishes`).

    `direct` names the arguments and results that a kernel may read or write in place (see `readable`); every other
    half-precision one is copied. Raises UnsupportedError where no tile fits the device or a size passes its limits.
    """
    p = problem
    if max(p.M, p.N, p.Hq, p.B) > _INT_MAX // 2:
        raise UnsupportedError(f"M, N, Hq and B may be at most {_INT_MAX // 2} each; got {p.M}, {p.N}, {p.Hq}, {p.B}")
    mask = p.mask.within(p.M, p.N)
    dim, value_dim = -(-p.D // 8) * 8, -(-p.Dv // 8) * 8
    head_dim = next(d for d in HEAD_DIMS if d >= p.D)
    head_value_dim = next(d for d in HEAD_DIMS if d >= p.Dv)
    common = {
        "HEAD_DIM": head_dim,
        "VALUE_DIM": head_value_dim,
        "BFLOAT16": int(p.dtype == "bfloat16"),
        "MASK_LEFT": int(mask.left is not None),
        "MASK_RIGHT": int(mask.right is not None),
    }
    cotangents = {"HAS_UQ": int(p.uq), "HAS_UK": int(p.uk), "HAS_UV": int(p.uv)}
    fused = int(p.op in ("backward", "bob") and not p.deterministic)

    tiled: list[Launch] = []
    padded = -(-p.M // 16) * 16
    for name in _kernels_of(p.op, p.deterministic):
        kernel = TABLES[family][name]
        tile = kernel.choose(p, device, head_dim, head_value_dim, fused, name)
        macros = common | {"QUERIES": tile.QUERIES, "KEYS": tile.KEYS, "STAGES": tile.STAGES}
        if name.startswith("bob"):
            macros |= cotangents
        if not kernel.by_rows:
            macros["FUSED"] = fused
        if family == "sm80":
            macros["WARPS"] = tile.WARPS
        if family == "sm90" and kernel.by_rows:
            macros["CLUSTER"] = tile.CLUSTER
        # Of a cluster a CTA owns queries of 64 rows that lie together, and loads a part of a tile of keys.
        queries, keys = (64, tile.KEYS // tile.CLUSTER) if tile.CLUSTER > 1 else (tile.QUERIES, tile.KEYS)
        maps = tuple(TensorMap(f, queries if f in _QUERY_SIDE else keys) for f in kernel.maps)
        shared = kernel.shared(tile, head_dim, head_value_dim, fused)
        specialisation = Specialisation(family, name, tuple(sorted(macros.items())), 32 * tile.WARPS, shared)
        tiled.append(Launch(specialisation, _checked(kernel.blocks(p, tile), name), maps))
        padded = max(padded, -(-p.M // tile.QUERIES) * tile.QUERIES)

    layout = _Layout()
    heads = p.B * p.Hq
    statistics = layout.take(16 * heads * padded) if p.op in ("backward", "bob") else None
    accumulator_dim = _panels(head_dim) if family == "sm90" else head_dim
    accumulator = layout.take(4 * heads * padded * accumulator_dim) if fused else None
    launches = tiled
    if p.op == "backward":
        macros = {
            "BFLOAT16": common["BFLOAT16"],
            "VALUE_DIM": head_value_dim,
            "ACCUMULATOR_DIM": accumulator_dim,
            "PAIRS": int(family == "sm90"),
            "WARPS": _STATISTICS_WARPS,
        }
        rows = 32 * _STATISTICS_WARPS // (16 if head_value_dim > 64 else 8)
        launches = [_small_launch("", "statistics", macros, 32 * _STATISTICS_WARPS, -(-padded // rows) * heads), *tiled]
    if fused:
        macros = {"HEAD_DIM": head_dim, "BFLOAT16": common["BFLOAT16"], "THREADS": _FINISH_THREADS}
        per_head = -(-(padded * accumulator_dim) // (_FINISH_THREADS * _FINISH_NUMBERS[family]))
        folder = "sm90" if family == "sm90" else ""
        launches = [*launches, _small_launch(folder, "finish_queries", macros, _FINISH_THREADS, per_head * heads)]

    copies: dict[bool, list[Copy]] = {True: [], False: []}
    for gather, names in ((True, INPUTS[p.op]), (False, OUTPUTS[p.op])):
        for name in names:
            present = name not in ("uq", "uk", "uv") or getattr(p, name)
            if present and len(AXES[name]) == 4 and name not in direct:
                shape = p.shape(name)
                width = -(-shape[3] // 8) * 8
                offset = layout.take(2 * shape[0] * shape[1] * shape[2] * width)
                copies[gather].append(Copy(name, offset, width, _copy_launch(shape, width, int(gather))))
    return Plan(
        family=family,
        copies_in=tuple(copies[True]),
        launches=tuple(launches),
        copies_out=tuple(copies[False]),
        workspace=layout.size,
        statistics=statistics,
        accumulator=accumulator,
        padded_queries=padded,
        dim=dim,
        value_dim=value_dim,
    )


def _small_launch(family: str, kernel: str, macros: dict[str, int], threads: int, blocks: int) -> Launch:
    return Launch(Specialisation(family, kernel, tuple(sorted(macros.items())), threads, 0), _checked(blocks, kernel))


class _Layout:
    """Hands out aligned regions of the workspace."""

    def __init__(self) -> None:
        self.size = 0

    def take(self, nbytes: int) -> int:
        offset = self.size
        self.size += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        return offset


# ---- what is compiled ahead of time --------------------------------------------------------------------------------
def representative_problems() -> Iterator[Problem]:
    """Problems whose plans together use every kernel, mask, option and kind of head dimension."""
    causal, window, full = Mask(right=0), Mask(left=64, right=0), Mask()
    every = {"uq": True, "uk": True, "uv": True}

    def problem(op: str, D: int, Dv: int, dtype: str, mask: Mask, **options: bool) -> Problem:
        return Problem(op, 2, 4, 2, 512, 512, D, Dv, dtype, mask, D**-0.5, **options)

    for D in (64, 128):
        for deterministic in (False, True):
            yield problem("backward", D, D, "bfloat16", causal, deterministic=deterministic)
            yield problem("bob", D, D, "bfloat16", causal, deterministic=deterministic, **every)
        for op in ("forward", "backward", "bob", "jvp"):
            cotangents = every if op in ("bob", "jvp") else {}
            yield problem(op, D, D, "float16", full, **cotangents)
            yield problem(op, D, D, "bfloat16", causal, **cotangents)
    for op in ("forward", "backward", "bob"):
        cotangents = every if op == "bob" else {}
        yield problem(op, 64, 64, "bfloat16", window, **cotangents)
        yield problem(op, 40, 40, "float16", causal, **cotangents)
        yield problem(op, 64, 128, "bfloat16", causal, **cotangents)
        yield problem(op, 128, 32, "float16", full, **cotangents)
    # A window has the most edges: where registers are short they spill first, and where few columns leave many.
    for deterministic in (False, True):
        yield problem("bob", 128, 128, "bfloat16", window, deterministic=deterministic, **every)
        yield problem("bob", 128, 128, "bfloat16", window, deterministic=deterministic, **{**every, "uq": False})
    for D, Dv in ((128, 128), (16, 16), (16, 64)):
        yield problem("forward", D, Dv, "bfloat16", window)
        for deterministic in (False, True):
            yield problem("backward", D, Dv, "bfloat16", window, deterministic=deterministic)
    # Rows that see many keys.
    for mask in (causal, Mask(left=4000, right=0)):
        for op, cotangents in (("jvp", every), ("backward", {}), ("bob", every), ("bob", {**every, "uq": False})):
            p = problem(op, 128, 128, "bfloat16", mask, deterministic=op != "jvp", **cotangents)
            yield dataclasses.replace(p, B=1, Hq=2, Hkv=1, N=4224)
    for missing in every:
        yield problem("bob", 64, 64, "bfloat16", causal, **{**every, missing: False})
        yield problem("bob", 64, 64, "bfloat16", causal, deterministic=True, **{**every, missing: False})


def specialisations(arch: str) -> tuple[Specialisation, ...]:
    """The specialisations that `representative_problems` need on `arch`, in every family it runs, each once."""
    device = typical_device(arch)
    # The problems are small ones on this device, and large ones on a device with one multiprocessor, where shorter ones
    # may have tiles of their own.
    one = dataclasses.replace(device, multiprocessors=1)
    short = (dataclasses.replace(problem, M=100, N=100) for problem in representative_problems())
    found: dict[Specialisation, None] = {}
    planned = itertools.chain(
        itertools.product(representative_problems(), (device, one)), zip(short, itertools.repeat(one))
    )
    for problem, on in planned:
        everything = frozenset(INPUTS[problem.op] + OUTPUTS[problem.op])
        for family in ("sm80", "sm90"):
            if _family_serves(family, problem, on):
                for direct in (everything, frozenset[str]()):
                    found.update(dict.fromkeys(plan(problem, on, family, direct).specialisations()))
    return tuple(found)
