"""CUDA kernels: source text, compilation, caches and launches. The only file that knows how plans reach the GPU.

A kernel is compiled by NVRTC to a cubin from one self-contained text, which needs neither a GPU nor a driver nor any
header but those in `cuda/`. Cubins are kept on disk (`cache_dir`) and shared between processes.

The first call of a problem makes a recipe: kernels loaded, grids and strides laid out as the driver takes them. Every
later call only writes those pointers into it that are new, and launches. Nothing is allocated but the workspace,
nothing waits for the device, and nothing is read from host memory after a launch returns, so calls can be captured in a
CUDA graph.
"""

from __future__ import annotations

import ctypes
import functools
import io
import operator
import os
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from struct import Struct
from typing import Any

from flashbob_cupy import plan as planning
from flashbob_cupy.driver import DriverError, LaunchConfig, driver
from flashbob_cupy.errors import CompileError, UnsupportedError
from flashbob_cupy.plan import FIELDS, Device, Launch, Plan, Specialisation, route, specialisations
from flashbob_cupy.problem import AXES, Problem

__all__ = (
    "Compiled",
    "DriverError",
    "cache_dir",
    "compile",
    "device_info",
    "prepare",
    "source",
    "source_dir",
    "specialisations",
)

CACHE_VARIABLE = "FLASHBOB_CACHE_DIR"
_CACHE_BYTES = 512 << 20

#: Name and strides of each array.
Lies = Mapping[str, tuple[int, ...]]


# ---- source --------------------------------------------------------------------------------------------------------
def source_dir() -> Path:
    """The folder of the CUDA sources: inside an installed package, or `cuda/` of a source tree."""
    package = Path(__file__).resolve().parent
    for folder in (package / "_cuda", package.parent / "cuda"):
        if (folder / "attention.cuh").is_file():
            return folder
    raise CompileError(
        f"the CUDA sources are missing: neither {package / '_cuda'} nor {package.parent / 'cuda'} exists"
    )


_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"')
_ONCE = re.compile(r"^\s*#\s*pragma\s+once\b")


@functools.cache
def source(path: str) -> str:
    """One self-contained text of a kernel file: every include replaced by its text, once.

    `path` is relative to `cuda/`; #line directives make compiler messages name the original file and line.
    """
    root, seen = source_dir(), set[Path]()

    def flatten(file: Path) -> Iterator[str]:
        seen.add(file)
        name = file.relative_to(root).as_posix()
        yield f'#line 1 "{name}"'
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            include = _INCLUDE.match(line)
            if include:
                found = next((f for f in (file.parent / include[1], root / include[1]) if f.is_file()), None)
                if found is None:
                    raise CompileError(f'{name}:{number}: no file "{include[1]}" beside it or in {root}')
                if found.resolve() not in seen:
                    yield from flatten(found.resolve())
                yield f'#line {number + 1} "{name}"'
            else:
                yield "" if _ONCE.match(line) else line

    return "\n".join(flatten((root / path).resolve())) + "\n"


# ---- compilation ---------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Resources:
    """What ptxas reports of a kernel. Anything but zero bytes, and any warning, makes it slow."""

    registers: int
    spill_bytes: int
    stack_bytes: int
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Compiled:
    """A cubin, and what the compiler said; `log` is empty and `resources` None when it came from the cache."""

    code: bytes
    log: str
    resources: Resources | None


def cache_dir() -> Path:
    """Where compiled kernels are kept: FLASHBOB_CACHE_DIR, or the user's cache folder of this platform."""
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        return Path(chosen)
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "flashbob_cupy"


@functools.cache
def _disk_cache(folder: Path) -> Any:
    from cuda.core.utils import FileStreamProgramCache

    try:
        return FileStreamProgramCache(folder, max_size_bytes=_CACHE_BYTES)
    except OSError as error:
        warnings.warn(
            f"compiled kernels are not kept: {folder} cannot be used ({error}). Set {CACHE_VARIABLE} to a folder "
            "that can be written",
            RuntimeWarning,
            stacklevel=2,
        )
        return None


_importing = threading.Lock()  # cuda-core cannot be imported by two threads at once


def compile(specialisation: Specialisation, arch: str, *, cached: bool = True) -> Compiled:
    """Compile one kernel for an architecture such as "sm_90a"; no GPU or driver is needed.

    `cached=False` neither reads nor writes a cache, so that `log` and `resources` are always there.

    Raises:
        CompileError: NVRTC is not installed, or refuses the kernel; the message holds its log with file and line.
    """
    text = source(specialisation.path)
    try:
        with _importing:
            from cuda.bindings import nvrtc
            from cuda.core import Program, ProgramOptions
    except ImportError as error:
        raise CompileError(
            "compiling kernels needs cuda-core, cuda-bindings and NVRTC: install flashbob-cupy[cu13] or "
            f"flashbob-cupy[cu12] ({error})"
        ) from error
    log = io.StringIO()
    try:
        # Where there is a driver, NVRTC keeps a cache of its own since 12.9, and says nothing of what it finds there.
        _, *version = nvrtc.nvrtcVersion()
        options = ProgramOptions(
            name=specialisation.path.replace("/", "_"),
            arch=arch,
            define_macro=[(name, str(value)) for name, value in specialisation.macros],
            ptxas_options=["-v"],
            no_cache=not cached and tuple(version) >= (12, 9),
        )
        cache = _disk_cache(cache_dir()) if cached else None
        code = bytes(Program(text, "c++", options).compile("cubin", logs=log, cache=cache).code)
    except Exception as error:  # cuda-core has no common base for the errors of NVRTC and of finding it
        raise CompileError(
            f"{specialisation} for {arch} does not compile.\n{error}\n{log.getvalue()}".rstrip()
        ) from error
    said = log.getvalue().strip()
    return Compiled(code, said, read_resources(said) if said else None)


def read_resources(log: str) -> Resources:
    """Registers, spills, stack and warnings in a ptxas log of one kernel."""

    def largest(pattern: str) -> int:
        return max((int(number) for number in re.findall(pattern, log)), default=0)

    spills = largest(r"(\d+) bytes spill stores") + largest(r"(\d+) bytes spill loads")
    said = tuple(line.strip() for line in log.splitlines() if re.search(r"warning|\bC75\d\d\b", line, re.IGNORECASE))
    return Resources(largest(r"Used (\d+) registers"), spills, largest(r"(\d+) bytes stack frame"), said)


class _Once:
    """Calls a function at most once per key, also when threads ask for the same key at the same time."""

    def __init__(self) -> None:
        self._values: dict[Any, Any] = {}
        self._locks: dict[Any, threading.Lock] = {}
        self._guard = threading.Lock()

    def __call__(self, key: Any, make: Callable[[], Any]) -> Any:
        with self._guard:
            if key in self._values:
                return self._values[key]
            lock = self._locks.setdefault(key, threading.Lock())
        with lock:
            if key not in self._values:
                self._values[key] = make()
        return self._values[key]


_cubins = _Once()
_loaded = _Once()


def _load(specialisation: Specialisation, index: int) -> int:
    """The driver's handle of a kernel, ready for launches on a device."""

    def make() -> int:
        arch = driver().device(index).arch
        code = _cubins((specialisation, arch), lambda: compile(specialisation, arch).code)
        return driver().load(code, specialisation.kernel, index, specialisation.shared_bytes)

    return int(_loaded((specialisation, index), make))


def device_info(index: int) -> Device:
    """Compile target, compute capability, shared memory and multiprocessors of a CUDA device.

    Raises:
        DriverError: no driver, or no such device.
    """
    return driver().device(index)


# ---- launches ------------------------------------------------------------------------------------------------------
# The structs of cuda/attention.cuh and cuda/copy_rows.cu, field by field.
_VIEWS = ("q", "k", "v", "d", "uq", "uk", "uv", "o", "lse", "dlse", "out_q", "out_k", "out_v", "out_o", "out_lse")
_WORDS_OF_VIEW = 4
_STATISTICS_WORD = len(_VIEWS) * _WORDS_OF_VIEW
_ATTENTION = Struct("=" + "Qqqq" * len(_VIEWS) + "QQ" + "14i" + "f4x")
_COPY = Struct("=" + "Qqqq" * 2 + "q" + "4i")
_MAP_BYTES = 128
_MAPS_KEPT = 64  # of one array, and combinations of them in one recipe
_ALIGNMENTS_KEPT = 64


def _pack_attention(problem: Problem, plan: Plan, strides: Mapping[str, tuple[int, int, int]]) -> bytes:
    """The struct with every pointer null."""
    p = problem
    mask = p.mask.within(p.M, p.N)
    far = p.M + p.N  # as good as unbounded, on either side

    def bound(value: int | None) -> int:
        return 0 if value is None else max(-far, min(far, value))

    views = (number for field in _VIEWS for number in (0, *strides.get(field, (0, 0, 0))))
    return _ATTENTION.pack(
        *views, 0, 0,
        p.B, p.Hq, p.Hkv, p.group, p.M, p.N, plan.dim, plan.value_dim, plan.padded_queries,
        p.first_query, p.first_key, p.N - p.M, bound(mask.left), bound(mask.right), p.scale,
    )  # fmt: skip


class _Buffer:
    """Memory that launches read their parameters from, writable as 64-bit words or bytes; 64-byte aligned."""

    def __init__(self, content: bytes) -> None:
        size = -(-len(content) // 8) * 8
        self._raw = (ctypes.c_uint8 * (size + 64))()
        start = -ctypes.addressof(self._raw) % 64
        self.address = ctypes.addressof(self._raw) + start
        self.bytes = memoryview(self._raw).cast("B")[start : start + size]
        self.bytes[: len(content)] = content
        self.words = self.bytes.cast("Q")


class _MapSource:
    """Tensor maps of one array, encoded when its pointer is new: loops use the same few pointers again and again."""

    def __init__(
        self,
        slot: int,
        shift: int,
        shape: tuple[int, int, int, int],
        strides: tuple[int, int, int],
        rows: int,
        bf16: bool,
    ) -> None:
        self.slot = slot  # the word of the attention parameters that holds the pointer
        self._arguments = (shape, strides, rows, bf16)
        self._shift = shift
        self._maps: dict[int, bytes] = {}

    def encoded(self, pointer: int) -> bytes:
        found = self._maps.get(pointer)
        if found is None:
            found = driver().tensor_map(pointer + self._shift, *self._arguments)
            _keep(self._maps, pointer, found)
        return found


def _keep(maps: dict[Any, bytes], key: object, value: bytes) -> None:
    if len(maps) >= _MAPS_KEPT:
        maps.pop(next(iter(maps)))
    maps[key] = value


class Recipe:
    """A plan with everything but pointers and stream filled in, for one device, set of strides and alignment.

    `lies` and `pointers` describe the arrays that there are: name and strides, and an address of the right alignment.
    `run` takes pointers in the order of `lies`.
    """

    def __init__(self, problem: Problem, family: str, lies: Lies, pointers: Sequence[int], index: int) -> None:
        in_place = frozenset(
            name
            for (name, strides), pointer in zip(lies.items(), pointers, strict=True)
            if len(AXES[name]) == 3 or planning.readable(family, problem.shape(name), strides, pointer)
        )
        plan = planning.plan(problem, driver().device(index), family, in_place)
        for name, pointer in zip(lies, pointers, strict=True):
            if len(AXES[name]) == 3 and pointer % 4:
                raise ValueError(f"{name}: float32 numbers must start at a multiple of 4 bytes; got {pointer:#x}")
        found = tuple(dict.fromkeys(plan.specialisations()))
        if len(found) > 1:  # NVRTC compiles in parallel; a warm cache makes the threads pointless but cheap
            with ThreadPoolExecutor(len(found)) as pool:
                list(pool.map(lambda s: _load(s, index), found))

        #: Bytes of device memory that `run` needs, from an address that is a multiple of 16.
        self.workspace = plan.workspace
        self._lock = threading.Lock()
        self._index = index
        self._context = driver().primary_context(index)
        copies = {copy.name: copy for copy in plan.copies_in + plan.copies_out}
        strides: dict[str, tuple[int, int, int]] = {}
        for name, own in lies.items():
            shape = problem.shape(name)
            strides[FIELDS[problem.op][name]] = (
                copies[name].strides(shape) if name in copies else (own[0], own[1], own[2])
            )

        # Pointers: where each comes from, by its place among the arguments or its offset in the workspace.
        place = {name: i for i, name in enumerate(lies)}
        attention = _Buffer(_pack_attention(problem, plan, strides))
        self._attention = attention.words
        self._arguments: list[tuple[Any, int, int]] = []  # words, word, place
        self._regions: list[tuple[Any, int, int]] = []  # words, word, offset
        word = {field: i * _WORDS_OF_VIEW for i, field in enumerate(_VIEWS)}
        for name in lies:
            field = FIELDS[problem.op][name]
            if name in copies:
                self._regions.append((attention.words, word[field], copies[name].offset))
            else:
                self._arguments.append((attention.words, word[field], place[name]))
        for i, offset in enumerate((plan.statistics, plan.accumulator)):
            if offset is not None:
                self._regions.append((attention.words, _STATISTICS_WORD + i, offset))

        maps = _Buffer(bytes(_MAP_BYTES * sum(len(launch.maps) for launch in plan.launches)))
        self._maps = maps.bytes
        self._sources: list[tuple[int, _MapSource]] = []  # where in the maps, of what
        self._combinations: dict[tuple[int, ...], bytes] = {}
        self._keep: list[Any] = [attention, maps]
        self._launches: list[tuple[Any, int, int, int, str]] = []  # config words, config, kernel, parameters, name
        fields = {FIELDS[problem.op][name]: name for name in lies}
        next_map = 0
        for copy in plan.copies_in:
            self._add(copy.launch, [self._copy_parameters(problem, lies, copy, place, gather=True)])
        for launch in plan.launches:
            parameters = [attention.address]
            if launch.maps:
                parameters.append(maps.address + next_map)
                self._add_maps(problem, launch, next_map, fields, word, strides)
                next_map += _MAP_BYTES * len(launch.maps)
            self._add(launch, parameters)
        for copy in plan.copies_out:
            self._add(copy.launch, [self._copy_parameters(problem, lies, copy, place, gather=False)])
        self._mapped_words = tuple(dict.fromkeys(source_of_map.slot for _, source_of_map in self._sources))
        self._pointers: list[int] | None = None
        self._base = 0

    def _copy_parameters(
        self, problem: Problem, lies: Lies, copy: planning.Copy, place: Mapping[str, int], gather: bool
    ) -> int:
        shape = problem.shape(copy.name)
        own, padded = lies[copy.name], copy.strides(shape)
        sides = ((0, *own[:3]), (0, *padded))
        source_side, result_side = sides if gather else sides[::-1]
        content = _COPY.pack(*source_side, *result_side, own[3], shape[1], shape[2], shape[3], copy.width)
        buffer = _Buffer(content)
        self._keep.append(buffer)
        caller, ours = (0, _WORDS_OF_VIEW) if gather else (_WORDS_OF_VIEW, 0)
        self._arguments.append((buffer.words, caller, place[copy.name]))
        self._regions.append((buffer.words, ours, copy.offset))
        return buffer.address

    def _add_maps(
        self,
        problem: Problem,
        launch: Launch,
        start: int,
        fields: Mapping[str, str],
        word: Mapping[str, int],
        strides: Mapping[str, tuple[int, int, int]],
    ) -> None:
        """Row coordinate 0 of a map is the first row that may be read: rows before it are outside and read as zeros."""
        for i, tensor_map in enumerate(launch.maps):
            name = fields.get(tensor_map.field)
            if name is None:
                continue
            axes, shape = AXES[name], problem.shape(name)
            first = problem.first_query if axes[2] == "M" else problem.first_key
            batch, head, row = strides[tensor_map.field]
            # The stride of an axis of one entry is never used, but it is checked.
            legal = (
                batch if shape[0] > 1 else 8 * shape[3],
                head if shape[1] > 1 else 8 * shape[3],
                row if shape[2] > 1 else 8 * shape[3],
            )
            width = -(-shape[3] // 8) * 8
            source_of_map = _MapSource(
                word[tensor_map.field], 2 * first * row, (shape[0], shape[1], shape[2] - first, width), legal,
                tensor_map.rows, problem.dtype == "bfloat16",
            )  # fmt: skip
            self._sources.append((start + i * _MAP_BYTES, source_of_map))

    def _add(self, launch: Launch, parameters: list[int]) -> None:
        pointers = (ctypes.c_void_p * len(parameters))(*parameters)
        config = LaunchConfig()
        config.blocks[:] = (launch.blocks, 1, 1)
        config.threads[:] = (launch.specialisation.threads, 1, 1)
        config.shared_bytes = launch.specialisation.shared_bytes
        words = memoryview(config).cast("B").cast("Q")
        self._keep += [pointers, config]
        kernel = _load(launch.specialisation, self._index)
        address = ctypes.addressof(config)
        self._launches.append((words, address, kernel, ctypes.addressof(pointers), str(launch.specialisation)))

    def run(self, pointers: list[int], base: int, stream: int) -> None:
        """Launch on arrays at these addresses, with a workspace at `base`. The list must not change afterwards."""
        cuda = driver()
        launch = cuda.launch
        pushed = cuda.current_context() != self._context
        with self._lock:  # the buffers are shared by the threads that call this recipe
            if pushed:
                cuda.push_context(self._context)
            try:
                if pointers != self._pointers or base != self._base:
                    self._point(pointers, base)
                for words, config, kernel, parameters, name in self._launches:
                    words[_STREAM_WORD] = stream
                    code = launch(config, kernel, parameters, None)
                    if code:
                        raise DriverError(
                            f"{name} could not be launched on device {self._index}: {cuda.describe(code)}. The driver "
                            "also reports faults of earlier work here"
                        )
            finally:
                if pushed:
                    cuda.pop_context()

    def _point(self, pointers: list[int], base: int) -> None:
        if base & 15:
            raise ValueError(f"workspace: expected an address that is a multiple of 16; got {base:#x}")
        self._pointers = None  # until everything is written
        for words, word, place in self._arguments:
            words[word] = pointers[place]
        for words, word, offset in self._regions:
            words[word] = base + offset
        if self._sources:
            attention = self._attention
            key = tuple([attention[word] for word in self._mapped_words])
            maps = self._combinations.get(key)
            if maps is None:
                for start, source_of_map in self._sources:
                    self._maps[start : start + _MAP_BYTES] = source_of_map.encoded(attention[source_of_map.slot])
                _keep(self._combinations, key, bytes(self._maps))
            else:
                self._maps[:] = maps
        self._pointers, self._base = pointers, base


class Prepared:
    """A problem on arrays that lie in one way on one device: a recipe for each alignment of their addresses."""

    def __init__(self, problem: Problem, lies: Lies, device: int) -> None:
        self._family = route(problem, driver().device(device))
        if self._family == "blocked":
            raise UnsupportedError(f"no kernel computes {problem.op} of this problem on device {device}; blocks do")
        self._problem = problem
        self._lies = lies
        self._device = device
        self._aligned: Recipe | None = None
        self._others: dict[tuple[int, ...], Recipe] = {}

    def recipe(self, pointers: list[int]) -> Recipe:
        """The recipe for arrays at these addresses, in the order of `lies`; it is made when the alignment is new.

        Raises:
            UnsupportedError: no tile fits the device.
            CompileError: NVRTC is missing or refuses a kernel.
        """
        if functools.reduce(operator.or_, pointers) & 15:
            alignment = tuple([pointer & 15 for pointer in pointers])
            found = self._others.get(alignment)
            if found is None:
                if len(self._others) >= _ALIGNMENTS_KEPT:
                    self._others.clear()
                found = self._others[alignment] = self._make(pointers)
            return found
        if self._aligned is None:
            self._aligned = self._make(pointers)
        return self._aligned

    def _make(self, pointers: list[int]) -> Recipe:
        return Recipe(self._problem, self._family, self._lies, pointers, self._device)


_STREAM_WORD = LaunchConfig.stream.offset // 8


def prepare(problem: Problem, lies: Lies, device: int) -> Prepared:
    """Everything that is done once for a problem and a way that its arrays lie in memory.

    `lies` maps the names of the arrays that there are, inputs and outputs as in problem.INPUTS and problem.OUTPUTS, to
    their strides in elements, in axis order (batch, head, row, width) whatever the caller's layout.

    Raises:
        UnsupportedError: the blocked engine serves this problem.
        DriverError: the driver is missing.
    """
    return Prepared(problem, lies, device)
