"""Attention and its derivatives in blocks of plain array code: one source for NumPy and CuPy.

This is the engine for CPU arrays and, on a GPU, the route for float32, float64 and wide heads. The four functions
write into arrays given by the caller. Every 4-D array is in the order batch, head, row, width and may have any
strides; lse and dlse are (B, Hq, M). Half-precision blocks are converted to float32 on the way in and rounded once on
the way out, so all arithmetic is float32 (float64 for float64). A bfloat16 array is either a NumPy array of
`ml_dtypes.bfloat16` or, for both libraries, a uint16 view of the same bits.

How the work is cut: a unit is a rectangle of (batch entry, key head) pairs. Inside it, query blocks hold one or more
query heads of each group, folded into the rows, so K and V are never expanded and the sum over a group is part of the
matrix product. Nothing of size M × N exists; scratch stays under `scratch_bytes`, which must hold at least three
numbers per query of one group and one smallest tile.

On a CPU the units are spread over as many threads as NumPy's OpenBLAS has (NumPy releases the interpreter lock), and
OpenBLAS is held to one thread meanwhile: its own threads only divide products, and stall when several callers compete
for them. With another BLAS the units run one after the other. Within a unit the order of every sum is fixed, so
results do not depend on timing.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from .problem import Problem

Array: TypeAlias = Any  # numpy.ndarray or cupy.ndarray

#: Scratch in bytes when neither `scratch_bytes` nor FLASHBOB_SCRATCH_MIB is given.
SCRATCH_BYTES = 256 << 20

# Rows and columns of a tile. On a CPU four float32 tiles of this size fit a core's share of the cache; on a GPU a
# tile has to be large enough to keep the matrix products, not the launches, in charge.
_CPU_BLOCK = 256
_GPU_BLOCK = 2048


def forward(
    problem: Problem, q: Array, k: Array, v: Array, o: Array, lse: Array, *, scratch_bytes: int | None = None
) -> None:
    """Write o and the natural-log lse (-inf on rows with no key)."""
    inputs = {"q": q, "k": k, "v": v}
    _execute(problem, inputs, {"o": o, "lse": lse}, _Worker.forward, scratch_bytes)


def backward(
    problem: Problem,
    q: Array,
    k: Array,
    v: Array,
    do: Array,
    o: Array,
    lse: Array,
    dlse: Array | None,
    dq: Array,
    dk: Array,
    dv: Array,
    *,
    scratch_bytes: int | None = None,
) -> None:
    """Write dq, dk and dv."""
    inputs = {"q": q, "k": k, "v": v, "do": do, "o": o, "lse": lse, "dlse": dlse}
    _execute(problem, inputs, {"gq": dq, "gk": dk, "gv": dv}, _Worker.backward, scratch_bytes)


def bob(
    problem: Problem,
    q: Array,
    k: Array,
    v: Array,
    do: Array,
    uq: Array | None,
    uk: Array | None,
    uv: Array | None,
    o: Array,
    lse: Array,
    dlse: Array | None,
    gq: Array,
    gk: Array,
    gv: Array,
    gdo: Array,
    gdlse: Array | None = None,
    *,
    scratch_bytes: int | None = None,
) -> None:
    """Write gq, gk, gv, gdo and, where wanted, gdlse (= α). Cotangents that are None are zero and cost nothing."""
    inputs = {"q": q, "k": k, "v": v, "do": do, "uq": uq, "uk": uk, "uv": uv, "o": o, "lse": lse, "dlse": dlse}
    outputs = {"gq": gq, "gk": gk, "gv": gv, "to": gdo, "tlse": gdlse}
    _execute(problem, inputs, outputs, _Worker.bob, scratch_bytes)


def jvp(
    problem: Problem,
    q: Array,
    k: Array,
    v: Array,
    uq: Array | None,
    uk: Array | None,
    uv: Array | None,
    o: Array,
    lse: Array,
    to: Array,
    tlse: Array,
    *,
    scratch_bytes: int | None = None,
) -> None:
    """Write to and tlse, the derivatives of o and lse along (uq, uk, uv). Directions that are None cost nothing."""
    inputs = {"q": q, "k": k, "v": v, "uq": uq, "uk": uk, "uv": uv, "o": o, "lse": lse}
    _execute(problem, inputs, {"to": to, "tlse": tlse}, _Worker.jvp, scratch_bytes)


# ---- bfloat16 and conversions ------------------------------------------------------------------------------------


def load(xp: Any, target: Array, source: Array) -> None:
    """Convert `source` into the float array `target` of the same shape. uint16 means the bits of bfloat16."""
    if source.dtype == np.uint16:
        bits = target.view(np.uint32)
        xp.copyto(bits, source)
        xp.left_shift(bits, 16, out=bits)
    else:
        xp.copyto(target, source, casting="unsafe")


def store(xp: Any, target: Array, source: Array) -> None:
    """Round the float array `source` once into `target`, to nearest even. uint16 means the bits of bfloat16."""
    if target.dtype == np.uint16:
        bits = source.view(np.uint32)
        rounded = xp.right_shift(bits, 16)
        rounded &= 1
        rounded += 0x7FFF
        rounded += bits
        # Rounding up could carry a NaN's payload into infinity: keep its high bits and make it quiet instead.
        xp.copyto(rounded, bits | 0x400000, where=source != source)
        rounded >>= 16
        xp.copyto(target, rounded, casting="unsafe")
    else:
        xp.copyto(target, source, casting="unsafe")


# ---- the mask: its one place --------------------------------------------------------------------------------------


class _Band:
    """Which keys a block of queries sees, which queries see a block of keys, and what a tile has to hide."""

    def __init__(self, problem: Problem) -> None:
        self.shift = problem.N - problem.M
        self.left, self.right = problem.mask.left, problem.mask.right
        self.first_query, self.queries_end = problem.first_query, problem.M
        self.first_key, self.keys_end = problem.first_key, problem.N

    def keys(self, i0: int, i1: int) -> tuple[int, int]:
        start = self.first_key if self.left is None else max(self.first_key, i0 + self.shift - self.left)
        end = self.keys_end if self.right is None else min(self.keys_end, i1 + self.shift + self.right)
        return start, end

    def queries(self, j0: int, j1: int) -> tuple[int, int]:
        start = self.first_query if self.right is None else max(self.first_query, j0 - self.shift - self.right)
        end = self.queries_end if self.left is None else min(self.queries_end, j1 - self.shift + self.left)
        return start, end

    def hidden(self, xp: Any, i0: int, i1: int, j0: int, j1: int) -> Array | None:
        """The entries of a tile that are masked, (queries, keys); None where every entry is visible."""
        diagonal, key = xp.arange(i0, i1)[:, None] + self.shift, xp.arange(j0, j1)[None, :]
        beyond = None
        if self.right is not None and j1 - 1 > i0 + self.shift + self.right:
            beyond = key > diagonal + self.right
        if self.left is not None and j0 < i1 - 1 + self.shift - self.left:
            before = key < diagonal - self.left
            beyond = before if beyond is None else xp.logical_or(beyond, before, out=before)
        return beyond

    def alone(self, i0: int, i1: int) -> list[slice]:
        """The queries of a block that see exactly one key."""
        if self.keys_end - self.first_key == 1 or self.left == self.right == 0:
            return [slice(0, i1 - i0)]
        found = []
        if self.right is not None:
            found.append(self.first_key - self.right - self.shift)
        if self.left == 0:
            found.append(self.keys_end - 1 - self.shift)
        return [slice(i - i0, i - i0 + 1) for i in found if i0 <= i < i1]


# ---- how the work is cut ------------------------------------------------------------------------------------------


class _Unit(NamedTuple):
    """A rectangle of (batch entry, key head) pairs."""

    b0: int
    b1: int
    h0: int
    h1: int


@dataclass(frozen=True, slots=True)
class _Plan:
    heads: int  # pairs in a unit, at most
    group: int  # query heads of a group folded into the rows of a tile
    queries: int
    keys: int
    fused: bool  # gq accumulates over the key blocks of the column pass; otherwise a pass by rows makes it
    workers: int


def _plan(problem: Problem, on_gpu: bool, scratch: int) -> _Plan:
    p = problem
    size = 8 if p.dtype == "float64" else 4
    pairs = p.B * p.Hkv
    M, N = p.M - p.first_query, p.N - p.first_key
    block = _GPU_BLOCK if on_gpu else _CPU_BLOCK
    tile = block * block
    queries = min(M, max(block, tile // min(N, block)))
    group = min(p.group, max(1, block // queries))
    keys = min(N, max(block, tile // (group * queries)))
    heads = min(pairs, max(1, tile // (group * queries * keys)))
    workers = 1 if on_gpu else min(-(-pairs // heads), _BLAS.threads())

    # gq needs a float32 accumulator of its own only when the result cannot hold one.
    accumulator = p.group * p.M * p.D * size if p.dtype in ("float16", "bfloat16") else 0
    fused = accumulator <= scratch // 2

    def needed() -> int:
        rows, width = group * queries, 4 * (p.D + p.Dv)
        blocks = 6 * rows * keys + (rows + keys) * width  # tiles, mask and transposed copies; operands and sums
        return workers * heads * (size * (blocks + 3 * p.group * p.M) + (accumulator if fused else 0))

    while needed() > scratch:
        if heads > 1:
            heads //= 2
        elif workers > 1 and (workers > 2 or queries * keys <= 64 * 64):
            workers //= 2
        elif max(group * queries, keys) > 1:
            if keys >= group * queries:
                keys = (keys + 1) // 2
            elif group > 1:
                group = (group + 1) // 2
            else:
                queries = (queries + 1) // 2
        else:
            raise ValueError(f"scratch_bytes must be at least {needed()} for this problem; got {scratch}")
    return _Plan(heads, group, queries, keys, fused, workers)


def _units(problem: Problem, heads: int) -> list[_Unit]:
    B, H = problem.B, problem.Hkv
    step_b, step_h = (heads // H, H) if heads >= H else (1, heads)
    return [_Unit(b0, b1, h0, h1) for b0, b1 in _cut(0, B, step_b) for h0, h1 in _cut(0, H, step_h)]


def _cut(start: int, end: int, step: int) -> Iterator[tuple[int, int]]:
    for at in range(start, end, step):
        yield at, min(end, at + step)


def _execute(
    problem: Problem,
    inputs: dict[str, Array | None],
    outputs: dict[str, Array | None],
    task: Callable[[_Worker, _Unit], None],
    scratch_bytes: int | None,
) -> None:
    given = {name: x for name, x in inputs.items() if x is not None}
    results = {name: x for name, x in outputs.items() if x is not None}
    xp = _library(results)
    if problem.vanishes:
        for name, out in results.items():
            out[...] = -math.inf if name == "lse" else 0
        return
    for name, out in results.items():
        unseen = problem.first_key if name in ("gk", "gv") else problem.first_query
        out[:, :, :unseen] = -math.inf if name == "lse" else 0
    if problem.first_query == problem.M:
        for name, out in results.items():
            if name in ("gk", "gv"):
                out[...] = 0
        return

    plan = _plan(problem, xp is not np, _scratch(scratch_bytes))
    units = _units(problem, plan.heads)
    arrays = {name: _grouped(problem, name, x) for name, x in {**given, **results}.items()}
    if plan.workers == 1:
        worker = _Worker(problem, xp, arrays, plan)
        with _quiet(), _true_float32(xp):
            for unit in units:
                task(worker, unit)
        return

    idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
    for _ in range(plan.workers):
        idle.put(_Worker(problem, xp, arrays, plan))

    def run(unit: _Unit) -> None:
        worker = idle.get()
        try:
            with _quiet():  # error states belong to a thread
                task(worker, unit)
        finally:
            idle.put(worker)

    with _BLAS.one_thread(), ThreadPoolExecutor(plan.workers) as pool:
        for done in [pool.submit(run, unit) for unit in units]:
            done.result()


def _library(arrays: dict[str, Array]) -> Any:
    if type(next(iter(arrays.values()))).__module__.startswith("cupy"):
        import cupy

        return cupy
    return np


def _scratch(scratch_bytes: int | None) -> int:
    if scratch_bytes is not None:
        return scratch_bytes
    setting = os.environ.get("FLASHBOB_SCRATCH_MIB")
    if setting is None:
        return SCRATCH_BYTES
    try:
        return int(setting) << 20
    except ValueError:
        raise ValueError(f"FLASHBOB_SCRATCH_MIB must be a whole number of MiB; got {setting!r}") from None


def _quiet() -> contextlib.AbstractContextManager[None]:
    """An exponential that underflows and a result that overflows its dtype are values here, not warnings."""
    return np.errstate(all="ignore")


class _OpenBLAS:
    """The number of threads of the OpenBLAS that NumPy calls; always one where there is none."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.holders = 0
        self.configured = 1

    @functools.cached_property
    def calls(self) -> tuple[Callable[[], int], Callable[[int], None]] | None:
        core = sys.modules.get("numpy._core._multiarray_umath") or sys.modules.get("numpy.core._multiarray_umath")
        try:
            library = ctypes.CDLL(core.__file__ if core else None)
        except (OSError, TypeError):
            return None
        for prefix in ("scipy_openblas", "openblas"):
            for suffix in ("64_", ""):
                get = getattr(library, f"{prefix}_get_num_threads{suffix}", None)
                set_ = getattr(library, f"{prefix}_set_num_threads{suffix}", None)
                if get and set_:
                    return get, set_
        return None

    def threads(self) -> int:
        with self.lock:
            if self.calls is None:
                return 1
            return self.configured if self.holders else max(1, self.calls[0]())

    @contextlib.contextmanager
    def one_thread(self) -> Iterator[None]:
        """Hold OpenBLAS to one thread, and give back what was set once the last of concurrent holders is done."""
        assert self.calls is not None
        get, set_ = self.calls
        with self.lock:
            if self.holders == 0:
                self.configured = get()
                set_(1)
            self.holders += 1
        try:
            yield
        finally:
            with self.lock:
                self.holders -= 1
                if self.holders == 0:
                    set_(self.configured)


_BLAS = _OpenBLAS()


@contextlib.contextmanager
def _true_float32(xp: Any) -> Iterator[None]:
    """CUPY_TF32=1 lets CuPy round float32 operands to 10 bits; here float32 means float32."""
    if xp is np:
        yield
        return
    from cupy._core import get_compute_type, set_compute_type
    from cupy._core._routines_linalg import COMPUTE_TYPE_DEFAULT

    before = get_compute_type(np.float32)
    set_compute_type(np.float32, COMPUTE_TYPE_DEFAULT)
    try:
        yield
    finally:
        set_compute_type(np.float32, before)


def _grouped(problem: Problem, name: str, x: Array) -> Array:
    """A query-side array as (B, Hkv, group, rows, ...); splitting an axis is always a view."""
    if name in ("k", "v", "uk", "uv", "gk", "gv"):
        return x
    return x.reshape(problem.B, problem.Hkv, problem.group, *x.shape[2:])


# ---- the mathematics ----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Rows:
    """A block of queries: operands (heads, rows, width), statistics (heads, rows, 1)."""

    at: tuple[slice, ...]  # into a (B, Hkv, group, M, ...) array
    span: tuple[int, int]
    q: Array
    uq: Array | None = None
    do: Array | None = None
    L: Array | None = None
    D: Array | None = None
    alpha: Array | None = None
    epsilon: Array | None = None


@dataclass(slots=True)
class _Keys:
    """A block of keys: operands (heads, keys, width)."""

    at: tuple[slice, ...]  # into a (B, Hkv, N, ...) array
    span: tuple[int, int]
    k: Array
    v: Array
    uk: Array | None
    uv: Array | None


def _T(x: Array) -> Array:
    return x.swapaxes(-1, -2)


class _Worker:
    """One thread's scratch, and the four operations on one unit.

    τ is folded into whichever block is loaded less often: the queries in a pass by rows, the keys in a pass by
    columns. Then scores, their tangents and the gradient of the other side carry it already.
    """

    def __init__(self, problem: Problem, xp: Any, arrays: dict[str, Array], plan: _Plan) -> None:
        self.p, self.xp, self.arrays, self.plan = problem, xp, arrays, plan
        self.band = _Band(problem)
        self.dtype = np.float64 if problem.dtype == "float64" else np.float32
        self.buffers: dict[str, Array] = {}

    # -- scratch and operands

    def buffer(self, slot: str, *shape: int) -> Array:
        """Uninitialised scratch; the same slot is the same memory."""
        size = math.prod(shape)
        if slot not in self.buffers or self.buffers[slot].size < size:
            self.buffers.pop(slot, None)
            self.buffers[slot] = self.xp.empty(size, dtype=self.dtype)
        return self.buffers[slot][:size].reshape(shape)

    def zeros(self, slot: str, *shape: int) -> Array:
        out = self.buffer(slot, *shape)
        out.fill(0)
        return out

    def load(self, name: str, at: tuple[slice, ...], factor: float = 1.0) -> Array | None:
        """A block of an input in the working precision, contiguous, as (heads, rows, width)."""
        if name not in self.arrays:
            return None
        source = self.arrays[name][at]
        block = self.buffer(name, *source.shape)
        load(self.xp, block, source)
        if factor != 1.0:
            block *= factor
        return block.reshape(source.shape[0] * source.shape[1], -1, source.shape[-1])

    def column(self, name: str, at: tuple[slice, ...]) -> Array:
        """One number per query, as (heads, rows, 1)."""
        source = self.arrays[name][at]
        return source.reshape(source.shape[0] * source.shape[1], -1, 1)

    def rows(self, unit: _Unit, first: int, end: int, names: tuple[str, ...], factor: float = 1.0) -> Iterator[_Rows]:
        """The query blocks of first … end, with the operands asked for."""
        b0, b1, h0, h1 = unit
        for g0, g1 in _cut(0, self.p.group, self.plan.group):
            for i0, i1 in _cut(first, end, self.plan.queries):
                at = (slice(b0, b1), slice(h0, h1), slice(g0, g1), slice(i0, i1))
                rows = _Rows(at, (i0, i1), self.load("q", at, factor))
                if "uq" in names:
                    rows.uq = self.load("uq", at, factor)
                if "do" in names:
                    rows.do = self.load("do", at)
                if "lse" in names:
                    L = self.column("lse", at).astype(self.dtype)
                    # A row with no key: exp(S - inf) is 0, exp(-inf + inf) is not a number.
                    self.xp.copyto(L, math.inf, where=self.xp.isneginf(L))
                    rows.L = L
                yield rows

    def keys(self, unit: _Unit, first: int, end: int, factor: float = 1.0) -> Iterator[_Keys]:
        """The key blocks of first … end."""
        b0, b1, h0, h1 = unit
        for j0, j1 in _cut(first, end, self.plan.keys):
            at = (slice(b0, b1), slice(h0, h1), slice(j0, j1))
            k, uk = self.load("k", at, factor), self.load("uk", at, factor)
            yield _Keys(at, (j0, j1), k, self.load("v", at), uk, self.load("uv", at))

    # -- products and tiles

    def product(self, a: Array, b: Array, out: Array) -> Array:
        # CuPy copies transposed operands of batched products but not of single ones.
        if out.shape[0] == 1:
            self.xp.matmul(a[0], b[0], out=out[0])
        else:
            self.xp.matmul(a, b, out=out)
        return out

    def add(self, target: Array, a: Array, b: Array) -> None:
        """target += a b, where target may be a block of a result."""
        product = self.product(a, b, self.buffer("product", a.shape[0], a.shape[1], b.shape[2]))
        target += product.reshape(target.shape)

    def scores(self, slot: str, a: Array, b: Array) -> Array:
        """The tile a bᵀ."""
        return self.product(a, _T(b), self.buffer(slot, a.shape[0], a.shape[1], b.shape[1]))

    def hidden(self, rows: _Rows, keys: _Keys) -> Array | None:
        return self.band.hidden(self.xp, *rows.span, *keys.span)

    def hide(self, tile: Array, hidden: Array | None, value: float) -> Array:
        """Select masked entries away, so that nothing behind the mask is ever an operand."""
        if hidden is not None:
            split = tile.reshape(tile.shape[0], -1, *hidden.shape)
            self.xp.copyto(split, value, where=hidden)
        return tile

    def settle(self, block: Array, rows: _Rows) -> Array:
        """Select 0 for queries that see one key: what vanishes there should leave no rounding of its terms behind."""
        for alone in self.band.alone(*rows.span):
            block.reshape(block.shape[0], -1, rows.span[1] - rows.span[0], block.shape[2])[:, :, alone] = 0
        return block

    def S(self, rows: _Rows, keys: _Keys, hidden: Array | None) -> Array:
        """The scores: the one place for whatever changes them."""
        return self.hide(self.scores("P", rows.q, keys.k), hidden, -math.inf)

    def P(self, rows: _Rows, keys: _Keys, hidden: Array | None) -> Array:
        S = self.S(rows, keys, hidden)
        S -= rows.L
        return self.xp.exp(S, out=S)

    def F(self, rows: _Rows, keys: _Keys, hidden: Array | None) -> Array | None:
        """The tangent of the scores; None where it is zero."""
        if rows.uq is None and keys.uk is None:
            return None
        if rows.uq is None:
            F = self.scores("F", rows.q, keys.uk)
        else:
            F = self.scores("F", rows.uq, keys.k)
            if keys.uk is not None:
                F += self.scores("X", rows.q, keys.uk)
        return self.hide(F, hidden, 0.0)

    def row_sum(self, a: Array, b: Array) -> Array:
        """Σ a∘b along the rows, (heads, rows, 1); b may be overwritten."""
        self.xp.multiply(a, b, out=b)
        return b.sum(axis=-1, keepdims=True)

    # -- forward

    def forward(self, unit: _Unit) -> None:
        xp, p = self.xp, self.p
        for rows in self.rows(unit, p.first_query, p.M, ("q",), p.scale):
            heads, count, _ = rows.q.shape
            O = self.zeros("gdo", heads, count, p.Dv)
            total = self.zeros("total", heads, count, 1)
            top = self.buffer("top", heads, count, 1)
            top.fill(-math.inf)
            for keys in self.keys(unit, *self.band.keys(*rows.span)):
                S = self.S(rows, keys, self.hidden(rows, keys))
                new_top = xp.maximum(top, S.max(axis=-1, keepdims=True))
                # While a row has seen no key its maximum is -inf: subtract 0, never -inf.
                shift = xp.where(xp.isneginf(new_top), xp.zeros_like(new_top), new_top)
                S -= shift
                P = xp.exp(S, out=S)
                decay = xp.exp(top - shift)
                total *= decay
                total += P.sum(axis=-1, keepdims=True)
                O *= decay
                self.add(O, P, keys.v)
                top[...] = new_top
            empty = total == 0
            total_or_one = xp.where(empty, xp.ones_like(total), total)
            O /= total_or_one
            L = xp.where(empty, xp.full_like(top, -math.inf), top + xp.log(total_or_one))
            self.put("o", rows.at, O)
            self.put("lse", rows.at, L)

    def put(self, name: str, at: tuple[slice, ...], value: Array) -> None:
        """Round a finished block into its result."""
        if name in self.arrays:
            target = self.arrays[name][at]
            store(self.xp, target, value.reshape(target.shape))

    # -- the pass by rows: jvp, and what bob's other passes need of it

    def tangent(self, unit: _Unit, rows: _Rows) -> tuple[Array, Array]:
        """gdO = (P∘F) V + P UV − α O and α, for one query block."""
        heads, count, _ = rows.q.shape
        gdO = self.zeros("gdo", heads, count, self.p.Dv)
        alpha = self.zeros("alpha", heads, count, 1)
        moves = rows.uq is not None or "uk" in self.arrays
        for keys in self.keys(unit, *self.band.keys(*rows.span)):
            hidden = self.hidden(rows, keys)
            P, F = self.P(rows, keys, hidden), self.F(rows, keys, hidden)
            if F is not None:
                F *= P
                alpha += F.sum(axis=-1, keepdims=True)
                self.add(gdO, self.settle(F, rows), keys.v)
            if keys.uv is not None:
                self.add(gdO, P, keys.uv)
        if moves:
            O = self.load("o", rows.at)
            O *= alpha
            gdO -= self.settle(O, rows)
        return gdO, alpha

    def jvp(self, unit: _Unit) -> None:
        for rows in self.rows(unit, self.p.first_query, self.p.M, ("q", "uq", "lse"), self.p.scale):
            gdO, alpha = self.tangent(unit, rows)
            self.put("to", rows.at, gdO)
            self.put("tlse", rows.at, alpha)

    # -- backward and bob

    def backward(self, unit: _Unit) -> None:
        statistics = self.statistics(unit)
        for rows in self.rows(unit, self.p.first_query, self.p.M, ("q", "do", "lse"), self.p.scale):
            rows.D = self.D(rows)
            self.keep(statistics, rows)
            if not self.plan.fused:
                self.by_rows(unit, rows, self.backward_tile)
        self.by_columns(unit, statistics, self.backward_tile)

    def bob(self, unit: _Unit) -> None:
        statistics = self.statistics(unit)
        for rows in self.rows(unit, self.p.first_query, self.p.M, ("q", "uq", "do", "lse"), self.p.scale):
            gdO, rows.alpha = self.tangent(unit, rows)
            self.put("to", rows.at, gdO)
            self.put("tlse", rows.at, rows.alpha)
            rows.epsilon = self.row_sum(rows.do, gdO)
            rows.D = self.D(rows)
            self.keep(statistics, rows)
            if not self.plan.fused:
                self.by_rows(unit, rows, self.bob_tile)
        self.by_columns(unit, statistics, self.bob_tile)

    def D(self, rows: _Rows) -> Array:
        D = self.row_sum(rows.do, self.load("o", rows.at))
        return D - self.column("dlse", rows.at) if "dlse" in self.arrays else D

    def statistics(self, unit: _Unit) -> Array:
        """D, α and ε of every query of the unit: all that one pass hands to the next."""
        return self.buffer("statistics", 3, unit.b1 - unit.b0, unit.h1 - unit.h0, self.p.group, self.p.M)

    def keep(self, statistics: Array, rows: _Rows) -> None:
        for kept, x in zip(statistics, (rows.D, rows.alpha, rows.epsilon), strict=True):
            if x is not None:
                target = kept[(slice(None), slice(None), *rows.at[2:])]
                target[...] = x.reshape(target.shape)

    def recall(self, statistics: Array, rows: _Rows) -> None:
        kept = statistics[(slice(None), slice(None), slice(None), *rows.at[2:])]
        rows.D, rows.alpha, rows.epsilon = kept.reshape(3, rows.q.shape[0], rows.q.shape[1], 1)

    def by_rows(self, unit: _Unit, rows: _Rows, tile: _Tile) -> None:
        """gq of one query block, over all its keys."""
        gq = self.zeros("gq", *rows.q.shape)
        for keys in self.keys(unit, *self.band.keys(*rows.span)):
            tile(rows, keys, gq, None, None)
        gq *= self.p.scale
        self.put("gq", rows.at, gq)

    def by_columns(self, unit: _Unit, statistics: Array, tile: _Tile) -> None:
        """gk and gv of every key block, over all its queries; gq is accumulated on the way where it can be."""
        p, b, h = self.p, unit.b1 - unit.b0, unit.h1 - unit.h0
        everything = (slice(unit.b0, unit.b1), slice(unit.h0, unit.h1), slice(None), slice(p.first_query, p.M))
        gQ = result = None
        if self.plan.fused:
            # The result itself is the accumulator where its dtype is the working precision.
            result = self.arrays["gq"][everything]
            gQ = result if result.dtype == self.dtype else self.buffer("gq", *result.shape)
            gQ[...] = 0
        for keys in self.keys(unit, p.first_key, p.N, p.scale):
            count = keys.span[1] - keys.span[0]
            gK, gV = self.zeros("gk", b * h, count, p.D), self.zeros("gv", b * h, count, p.Dv)
            for rows in self.rows(unit, *self.band.queries(*keys.span), ("q", "uq", "do", "lse")):
                self.recall(statistics, rows)
                i0, i1 = (i - p.first_query for i in rows.span)
                gq = None if gQ is None else gQ[:, :, rows.at[2], i0:i1]
                tile(rows, keys, gq, gK, gV)
            gK *= p.scale
            self.put("gk", keys.at, gK)
            self.put("gv", keys.at, gV)
        if gQ is not None and gQ is not result:
            store(self.xp, result, gQ)

    def backward_tile(self, rows: _Rows, keys: _Keys, gq: Array | None, gk: Array | None, gv: Array | None) -> None:
        hidden = self.hidden(rows, keys)
        P = self.P(rows, keys, hidden)
        if gv is not None:
            self.add(gv, _T(P), rows.do)
        dS = self.hide(self.scores("X", rows.do, keys.v), hidden, 0.0)
        dS -= rows.D
        dS *= P
        if "dlse" not in self.arrays:
            self.settle(dS, rows)
        if gq is not None:
            self.add(gq, dS, keys.k)
        if gk is not None:
            self.add(gk, _T(dS), rows.q)

    def bob_tile(self, rows: _Rows, keys: _Keys, gq: Array | None, gk: Array | None, gv: Array | None) -> None:
        xp = self.xp
        hidden = self.hidden(rows, keys)
        P, F = self.P(rows, keys, hidden), self.F(rows, keys, hidden)
        if "dlse" not in self.arrays:
            self.settle(P, rows)
        if F is not None:
            F -= rows.alpha
            if gv is not None:
                PF = self.settle(xp.multiply(P, F, out=self.buffer("T", *P.shape)), rows)
                self.add(gv, _T(PF), rows.do)
            X = self.hide(self.scores("X", rows.do, keys.v), hidden, 0.0)
            X -= rows.D
            dS = xp.multiply(P, X, out=self.buffer("T", *P.shape))
            if gq is not None and keys.uk is not None:
                self.add(gq, dS, keys.uk)
            if gk is not None and rows.uq is not None:
                self.add(gk, _T(dS), rows.uq)
            C = xp.multiply(F, X, out=F)
            C -= rows.epsilon
            if keys.uv is not None:
                C += self.hide(self.scores("X", rows.do, keys.uv), hidden, 0.0)
        else:
            C = self.hide(self.scores("X", rows.do, keys.uv), hidden, 0.0)
            C -= rows.epsilon
        W = xp.multiply(C, P, out=C)
        if gq is not None:
            self.add(gq, W, keys.k)
        if gk is not None:
            self.add(gk, _T(W), rows.q)


_Tile: TypeAlias = Callable[[_Rows, _Keys, "Array | None", "Array | None", "Array | None"], None]
