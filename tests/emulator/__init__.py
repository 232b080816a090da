"""Runs the kernels of cuda/ on a CPU. See README.md.

`run` launches one kernel on NumPy arrays; `execute` carries out everything a plan launches for one operation.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import hashlib
import os
import re
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from ctypes import c_char_p, c_float, c_int, c_longlong, c_uint, c_ulonglong, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import launching
import numpy as np

from flashbob_cupy import driver, kernels
from flashbob_cupy import plan as planning
from flashbob_cupy.problem import Problem

HERE = Path(__file__).parent
CUDA = HERE.parents[1] / "cuda"
# The two files with inline assembly, and what stands for them.
REPLACED = {CUDA / "ptx.cuh": HERE / "ptx.cuh", CUDA / "sm90" / "hopper.cuh": HERE / "hopper.cuh"}

_MAP_MAGIC = 0x70616D726F736E74
_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"')
_FLAGS = ("-std=c++17", "-shared", "-fPIC", "-fno-strict-aliasing", "-Wno-unknown-pragmas")


class EmulatorError(AssertionError):
    """A kernel broke a rule of the machine; the message says which, where, and by which thread."""


@functools.cache
def compiler() -> str | None:
    """A C++17 compiler, or None."""
    chosen = os.environ.get("CXX")
    return next((found for name in (chosen, "g++", "c++", "clang++") if name and (found := shutil.which(name))), None)


@functools.cache
def _cache() -> Path:
    folder = Path(tempfile.gettempdir()) / f"flashbob-emulator-{os.getuid() if hasattr(os, 'getuid') else 0}"
    folder.mkdir(exist_ok=True, mode=0o700)
    return folder


def _build(source: str, flags: Sequence[str], name: str) -> Path:
    """Compile a source into a shared library, or find it compiled already."""
    cxx = compiler()
    if cxx is None:
        raise RuntimeError("no C++ compiler was found")
    command = [cxx, *_FLAGS, *flags]
    key = hashlib.sha256("\0".join([*command, source]).encode()).hexdigest()[:24]
    library = _cache() / f"{name}-{key}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=_cache()) as folder:
            path, output = Path(folder) / f"{name}.cpp", Path(folder) / "library.so"
            path.write_text(source)
            done = subprocess.run([*command, "-o", str(output), str(path)], capture_output=True, text=True)
            if done.returncode:
                raise EmulatorError(f"{name} does not compile for the emulator:\n{done.stderr[:6000]}")
            output.replace(library)
    return library


@functools.cache
def _runtime() -> ctypes.CDLL:
    source = (HERE / "runtime.cpp").read_text()
    library = ctypes.CDLL(str(_build(source, ("-O3", "-march=native", "-Wall"), "runtime")), ctypes.RTLD_GLOBAL)
    library.emu_allocate.restype = c_void_p
    library.emu_allocate.argtypes = (c_ulonglong, c_uint, c_char_p)
    library.emu_free.argtypes = (c_void_p,)
    library.emu_message.restype = c_char_p
    library.emu_run.argtypes = (c_void_p, c_void_p, c_uint, c_uint, c_uint, c_int, c_int, c_uint, c_uint, c_int)
    return library


def flatten(path: Path, seen: set[Path]) -> str:
    """The text of a kernel with its includes in place, each once, and the two assembly files replaced."""
    path = path.resolve()
    if path in seen:
        return ""
    seen.add(path)
    actual = REPLACED.get(path, path)
    lines = [f'#line 1 "{actual.name if actual == path else actual.parent.name + "/" + actual.name}"']
    for number, line in enumerate(actual.read_text().splitlines(), 1):
        if match := _INCLUDE.match(line):
            beside, root = path.parent / match[1], CUDA / match[1]
            found = beside if beside.exists() else root
            lines += [flatten(found, seen), f'#line {number + 1} "{actual.name}"']
        elif line.strip() != "#pragma once":
            lines.append(line)
    return "\n".join(lines)


# ---- the parameter -------------------------------------------------------------------------------------------------
class View(ctypes.Structure):
    _fields_ = (("data", c_void_p), ("batch", c_longlong), ("head", c_longlong), ("row", c_longlong))


@functools.cache
def attention_type() -> type[ctypes.Structure]:
    """`struct Attention`, read from cuda/attention.cuh."""
    text = re.sub(r"//.*", "", (CUDA / "attention.cuh").read_text())
    body = re.search(r"struct Attention \{(.*?)\};", text, re.S)
    assert body is not None
    types: dict[str, Any] = {"View": View, "float4*": c_void_p, "float*": c_void_p, "int": c_int, "float": c_float}
    fields = []
    for declaration in body[1].split(";"):
        if declaration.strip():
            kind, names = declaration.split(None, 1)
            fields += [(name.strip(), types[kind]) for name in names.split(",")]
    return type("Attention", (ctypes.Structure,), {"_fields_": tuple(fields)})


# ---- memory --------------------------------------------------------------------------------------------------------
class _Memory:
    """Copies of arrays that end at unmapped pages; arrays that overlap stay so."""

    def __init__(self, arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
        spans = sorted((*np.lib.array_utils.byte_bounds(x), name) for name, x in arrays.items() if x.size)
        merged: list[list[Any]] = []
        for low, high, name in spans:
            if merged and low < merged[-1][1]:
                merged[-1][1] = max(high, merged[-1][1])
                merged[-1][2] += "/" + name
            else:
                merged.append([low, high, name])
        self._regions = []
        for low, high, name in merged:
            address = _runtime().emu_allocate(high - low, low % 16, name.encode())
            ctypes.memmove(address, low, high - low)
            self._regions.append((low, high, address, name))

    def address(self, x: np.ndarray[Any, Any]) -> int:
        at = x.__array_interface__["data"][0]
        # An array with nothing in it has a pointer that must not be followed.
        return next((address + at - low for low, high, address, _ in self._regions if low <= at < high), 16)

    def __enter__(self) -> _Memory:
        return self

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        touched = []
        for low, high, address, name in self._regions:
            if failure is None:
                ctypes.memmove(low, address, high - low)
            if _runtime().emu_free(address):
                touched.append(name)
        if touched and failure is None:
            raise EmulatorError(f"memory before or after {', '.join(touched)} was overwritten")


def _encoded(pointer: int, shape: Sequence[int], strides: Sequence[int], rows: int, size: int) -> bytes:
    """What runtime.cpp takes for a tensor map; shape and strides (in bytes) in the order batch, head, row, width."""
    if not 0 < rows <= 256:
        raise EmulatorError(f"a tensor map with a box of {rows} rows: 1 to 256")
    if pointer % 16 or any(s % 16 or not 0 < s < 2**40 for s in strides[:3]):
        raise EmulatorError(f"a tensor map with base {pointer:#x} and strides {strides}: not positive multiples of 16")
    if min(shape) <= 0:
        raise EmulatorError(f"a tensor map of shape {shape}: nothing in it")
    return struct.pack("=16Q", _MAP_MAGIC, pointer, *reversed(shape), *reversed(strides[:3]), 64, rows, size, *[0] * 4)


@dataclass(frozen=True)
class TensorMap:
    """A tensor map over `array` (batch, head, row, width) from row `first` on, with boxes of 64 columns x `rows`."""

    array: np.ndarray[Any, Any]
    rows: int
    first: int = 0

    def encoded(self, memory: _Memory) -> bytes:
        x = self.array
        if x.strides[3] != x.itemsize:
            raise EmulatorError(f"a tensor map over an array whose last stride is {x.strides[3]} bytes")
        strides = [s if n > 1 else 16 for s, n in zip(x.strides[:3], x.shape[:3], strict=True)]
        shape = (*x.shape[:2], x.shape[2] - self.first, x.shape[3])
        return _encoded(memory.address(x) + self.first * x.strides[2], shape, strides, self.rows, x.itemsize)


# ---- one launch ----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Kernel:
    file: str
    library: Any
    entry: int
    cluster: int  # CTAs


@functools.cache
def _kernel(file: str, macros: tuple[tuple[str, int], ...], arch: int, stamp: tuple[int, ...]) -> _Kernel:
    path = CUDA / file
    name = path.stem
    prelude = (HERE / "prelude.h").read_text().replace("#pragma once", "")
    source = (
        f'#line 1 "prelude.h"\n{prelude}\n{flatten(path, set())}\n'
        f'extern "C" void emu_entry(void** arguments) {{ emu_call({name}, arguments); }}\n'
        'extern "C" unsigned emu_attention_size() { return sizeof(Attention); }\n'
    )
    # NVRTC contracts a product and a sum into one rounding: kernels must be right with that, too.
    flags = ["-O1", "-march=native", "-ffp-contract=fast", "-fexpensive-optimizations", "-g1"]
    flags += [f"-D__CUDA_ARCH__={arch}", *(f"-D{key}={value}" for key, value in macros)]
    if "clang" not in str(compiler()):
        flags.append("-ftrivial-auto-var-init=pattern")
    _runtime()
    library = ctypes.CDLL(str(_build(source, flags, name)))
    if library.emu_attention_size() != ctypes.sizeof(attention_type()):
        raise EmulatorError("struct Attention of cuda/attention.cuh was not understood")
    entry = ctypes.cast(library.emu_entry, c_void_p).value or 0
    return _Kernel(file, library, entry, dict(macros).get("CLUSTER", 1))


def _stamp() -> tuple[int, ...]:
    """Changes when a source does, so that one process can run a kernel before and after an edit."""
    paths = [*CUDA.rglob("*.cu*"), *HERE.glob("*.[ch]*")]
    return tuple(p.stat().st_mtime_ns for p in sorted(paths))


def _launch(
    kernel: _Kernel, arguments: int, grid: tuple[int, int, int], threads: int, shared: int, seed: int, races: bool
) -> None:
    if _runtime().emu_run(kernel.entry, arguments, *grid, kernel.cluster, threads, shared, seed, int(races)):
        raise EmulatorError(f"{kernel.file}: {_located(_runtime().emu_message().decode(), kernel.library)}")


def run(
    file: str,
    macros: Mapping[str, int],
    attention: Mapping[str, Any],
    grid: int | tuple[int, ...],
    threads: int,
    shared_bytes: int,
    maps: Sequence[TensorMap] | None = None,
    *,
    arch: int | None = None,
    seed: int = 0,
    races: bool = True,
) -> None:
    """Launch the kernel cuda/`file` and wait for it.

    Args:
        macros: CLUSTER, if there, says how many CTAs a cluster has.
        attention: The fields of `struct Attention`: numbers, arrays and None. A four-axis array (batch, head, row,
            width) or three-axis array (batch, head, row) of any strides becomes a View; `statistics` and `accumulator`
            are contiguous. Arrays are changed in place. A field that is not named is zero.
        maps: The tensor maps of the second parameter, in order.
        seed: Not 0: threads run in a random order.
        races: Whether accesses to shared memory that no barrier orders are errors.

    Raises:
        EmulatorError: the kernel broke a rule.
    """
    if arch is None:
        arch = 900 if "sm90" in file else 800
    kernel = _kernel(file, tuple(sorted(macros.items())), arch, _stamp())
    arrays = {name: x for name, x in attention.items() if isinstance(x, np.ndarray)}
    arrays |= {f"map {i}": m.array for i, m in enumerate(maps or ())}
    with _Memory(arrays) as memory:
        parameter = attention_type()()
        for name, value in attention.items():
            if value is None:
                continue
            if not isinstance(value, np.ndarray):
                setattr(parameter, name, value)
            elif isinstance(getattr(parameter, name), View):
                strides = [s // value.itemsize for s in value.strides[:3]]
                setattr(parameter, name, View(memory.address(value), *strides))
            else:
                setattr(parameter, name, memory.address(value))
        content = b"".join(m.encoded(memory) for m in maps or ())
        storage = ctypes.create_string_buffer(content, len(content) + 64)
        start = -ctypes.addressof(storage) % 64
        ctypes.memmove(ctypes.addressof(storage) + start, content, len(content))
        arguments = (c_void_p * 2)(ctypes.addressof(parameter), ctypes.addressof(storage) + start)
        x, y, z = (*((grid,) if isinstance(grid, int) else grid), 1, 1)[:3]
        _launch(kernel, ctypes.addressof(arguments), (x, y, z), threads, shared_bytes, seed, races)


# ---- a whole operation ---------------------------------------------------------------------------------------------
class _Driver:
    """Stands for flashbob_cupy.driver.Driver: `load` takes what `compile` below made, `launch` runs it here and now."""

    def __init__(self, arch: str, shared_limit: int | None, multiprocessors: int) -> None:
        known = dataclasses.replace(planning.typical_device(arch), multiprocessors=multiprocessors)
        self._device = known if shared_limit is None else dataclasses.replace(known, shared_limit=shared_limit)
        self._kernels: list[_Kernel] = []
        self.launched: list[str] = []
        self.seed, self.races = 0, True

    def device(self, index: int) -> planning.Device:
        return self._device

    def primary_context(self, index: int) -> int:
        return 1

    def current_context(self) -> int:
        return 1

    def compile(self, specialisation: planning.Specialisation, arch: str) -> kernels.Compiled:
        number = int("".join(filter(str.isdigit, arch))) * 10
        kernel = _kernel(specialisation.path, specialisation.macros, number, _stamp())
        self._kernels.append(kernel)
        return kernels.Compiled(str(len(self._kernels)).encode(), "", None)

    def load(self, code: bytes, entry: str, index: int, shared_bytes: int) -> int:
        if shared_bytes > self._device.shared_limit:
            raise EmulatorError(f"{entry} takes {shared_bytes} bytes of shared memory")
        return int(code)

    def launch(self, config: int, handle: int, parameters: int, extra: None) -> int:
        c = driver.LaunchConfig.from_address(config)
        kernel = self._kernels[handle - 1]
        self.launched.append(kernel.file)
        _launch(kernel, parameters, tuple(c.blocks), c.threads[0], c.shared_bytes, self.seed, self.races)
        return 0

    def tensor_map(
        self,
        pointer: int,
        shape: tuple[int, int, int, int],
        strides: tuple[int, int, int],
        box_rows: int,
        bfloat16: bool,
    ) -> bytes:
        return _encoded(pointer, shape, tuple(2 * s for s in strides), box_rows, 2)

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        fresh = {"_cubins": self._cubins, "_loaded": self._loaded}
        with mock.patch.multiple(kernels, driver=lambda: self, compile=self.compile, **fresh):
            yield

    @functools.cached_property
    def _cubins(self) -> Any:
        return kernels._Once()

    @functools.cached_property
    def _loaded(self) -> Any:
        return kernels._Once()


@functools.cache
def _driver(arch: str, shared_limit: int | None, multiprocessors: int, stamp: tuple[int, ...]) -> _Driver:
    return _Driver(arch, shared_limit, multiprocessors)


@dataclass(frozen=True)
class _View:
    pointer: int
    strides: tuple[int, ...]


def execute(
    problem: Problem,
    inputs: Mapping[str, np.ndarray[Any, Any] | None],
    outputs: Mapping[str, np.ndarray[Any, Any] | None],
    family: str = "sm80",
    *,
    arch: str | None = None,
    shared_limit: int | None = None,
    multiprocessors: int = 1,
    seed: int = 0,
    races: bool = True,
) -> list[str]:
    """Carry out everything that flashbob_cupy.kernels launches for a problem; the files of the kernels, in order.

    The planner, the packing of the parameters and the copies are the real ones; only the driver and the compiler are
    replaced. Arrays are named as in problem.INPUTS and problem.OUTPUTS, in the axis order (batch, head, row, width) and
    of any strides; outputs are written in place. The workspace begins as NaN.

    Args:
        arch: What the GPU is: sm_90a for the family sm90, else sm_80.
        shared_limit: The shared memory of a block, if not the usual one of `arch`.
        multiprocessors: How many the GPU has: with one, every problem is a large one.

    Raises:
        EmulatorError: a kernel broke a rule.
    """
    fake = _driver(arch or ("sm_90a" if family == "sm90" else "sm_80"), shared_limit, multiprocessors, _stamp())
    fake.seed, fake.races, fake.launched = seed, races, []
    arrays = {name: x for name, x in {**inputs, **outputs}.items() if x is not None}
    workspaces: list[int] = []

    def workspace(nbytes: int) -> _View:
        workspaces.append(_runtime().emu_allocate(nbytes, 0, b"the workspace"))
        return _View(workspaces[-1], ())

    with _Memory(arrays) as memory, mock.patch.dict(os.environ, {planning.FAMILY_VARIABLE: family}), fake.installed():
        if planning.route(problem, fake.device(0)) != family:
            raise ValueError(f"the family {family} does not serve {problem}")
        views = {
            name: _View(memory.address(x), tuple(s // x.itemsize for s in x.strides)) for name, x in arrays.items()
        }
        try:
            launching.execute(
                problem,
                {name: views.get(name) for name in inputs},
                {name: views.get(name) for name in outputs},
                workspace,
            )
        finally:
            touched = [_runtime().emu_free(address) for address in workspaces]
            if any(touched):
                raise EmulatorError("memory before or after the workspace was overwritten")
    return fake.launched


def _located(message: str, library: Any) -> str:
    """Add the line of the kernel behind the program counter of a signal."""
    match = re.search(r"pc (0x[0-9a-f]+)", message)
    tools = [shutil.which(name) for name in ("nm", "addr2line")]
    if not match or None in tools:
        return message
    start = ctypes.cast(library.emu_entry, c_void_p).value or 0
    symbols = subprocess.run([str(tools[0]), "-D", library._name], capture_output=True, text=True).stdout
    offset = next((int(line.split()[0], 16) for line in symbols.splitlines() if line.endswith(" emu_entry")), None)
    if offset is None:
        return message
    pc = hex(int(match[1], 16) - (start - offset))
    found = subprocess.run([str(tools[1]), "-i", "-e", library._name, pc], capture_output=True, text=True).stdout
    return f"{message}\n  at {', '.join(found.split())}"
