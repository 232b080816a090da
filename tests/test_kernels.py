"""Source, compilation, caches and launches, without a GPU: NVRTC is real, the driver is not."""

from __future__ import annotations

import ctypes
import dataclasses
import math
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import emulator
import launching
import pytest

from flashbob_cupy import driver, kernels
from flashbob_cupy import plan as planning
from flashbob_cupy.errors import CompileError, UnsupportedError
from flashbob_cupy.plan import Specialisation, plan, typical_device
from flashbob_cupy.problem import INPUTS, OUTPUTS, Mask, Problem

CUDA = Path(__file__).resolve().parents[1] / "cuda"
BOB = Problem("bob", 2, 4, 2, 300, 500, 64, 64, "bfloat16", Mask(right=0), 0.125, uq=True, uk=True, uv=True)
FORWARD = dataclasses.replace(BOB, op="forward", uq=False, uk=False, uv=False)

needs_nvrtc = pytest.mark.usefixtures("nvrtc")


@pytest.fixture
def nvrtc() -> None:
    pytest.importorskip("cuda.core", reason="compiling needs flashbob-cupy[cu12] or [cu13]")


def specialisation(arch: str, path: str) -> Specialisation:
    return next(s for s in planning.specialisations(arch) if s.path == path)


# ---- source --------------------------------------------------------------------------------------------------------
def test_every_kernel_is_one_self_contained_text() -> None:
    for path in CUDA.rglob("*.cu"):
        text = kernels.source(path.relative_to(CUDA).as_posix())
        assert "#include" not in text
        assert text.count("struct Attention {") == 1
        assert 'extern "C" __global__' in text
        assert re.search(rf"\b{path.stem}\(const __grid_constant__", text), (
            f"{path.name}: the entry has the file's name"
        )


def test_lines_of_the_flattened_text_are_those_of_the_files() -> None:
    file, number, checked = None, 0, 0
    for line in kernels.source("sm80/bob_rows.cu").splitlines():
        if found := re.match(r'#line (\d+) "(.*)"', line):
            number, file = int(found[1]), (CUDA / found[2]).read_text().splitlines()
            continue
        assert file is not None
        if line:
            assert file[number - 1] == line
            checked += 1
        number += 1
    assert checked > 500


def test_assembly_is_in_two_files_only() -> None:
    with_assembly = {
        p.relative_to(CUDA).as_posix() for p in CUDA.rglob("*.cu*") if re.search(r"\basm\b", p.read_text())
    }
    assert with_assembly == {"ptx.cuh", "sm90/hopper.cuh"}


def test_a_missing_include_is_named_with_file_and_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lost.cu").write_text('// one\n#include "nowhere.cuh"\n')
    monkeypatch.setattr(kernels, "source_dir", lambda: tmp_path)
    with pytest.raises(CompileError, match=r'lost.cu:2: no file "nowhere.cuh"'):
        kernels.source("lost.cu")


# ---- compilation ---------------------------------------------------------------------------------------------------
@needs_nvrtc
@pytest.mark.parametrize("arch", tuple(planning.SHARED_LIMITS))
def test_kernels_compile_without_spills(arch: str) -> None:
    for path in ("sm80/forward.cu", "finish_queries.cu", "statistics.cu", "copy_rows.cu"):
        made = kernels.compile(specialisation(arch, path), arch, cached=False)
        assert made.code.startswith(b"\x7fELF")
        assert f"'{arch}'" in made.log
        assert made.resources is not None
        assert made.resources.registers > 0
        assert (made.resources.spill_bytes, made.resources.stack_bytes, made.resources.warnings) == (0, 0, ())


@needs_nvrtc
def test_a_refused_kernel_is_named_with_log_options_file_and_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sm80").mkdir()
    (tmp_path / "common.cuh").write_text("#pragma once\ntypedef int Fine;\n")
    (tmp_path / "sm80" / "bad.cu").write_text('#include "common.cuh"\n\nFine x = nonsense;\n')
    monkeypatch.setattr(kernels, "source_dir", lambda: tmp_path)
    bad = Specialisation("sm80", "bad", (("QUERIES", 64),), 128, 0)
    with pytest.raises(CompileError) as caught:
        kernels.compile(bad, "sm_80", cached=False)
    message = str(caught.value)
    assert "sm80/bad.cu QUERIES=64 for sm_80 does not compile" in message
    assert 'sm80/bad.cu(3): error: identifier "nonsense" is undefined' in message


@needs_nvrtc
def test_a_failed_static_assertion_says_what_was_assumed() -> None:
    good = specialisation("sm_80", "sm80/forward.cu")
    wrong = dataclasses.replace(good, macros=tuple((k, 24 if k == "HEAD_DIM" else v) for k, v in good.macros))
    with pytest.raises(CompileError, match=r"sm80/tiles.cuh\(\d+\): error: static assertion failed.*multiple of 16"):
        kernels.compile(wrong, "sm_80", cached=False)


@needs_nvrtc
def test_a_tile_that_would_wait_for_itself_does_not_compile() -> None:
    # UK Qᵀ of the next tile is computed before this one is released: with one stage the GPU would hang.
    problem = dataclasses.replace(BOB, D=128, Dv=128)
    every = frozenset(INPUTS["bob"] + OUTPUTS["bob"])
    launches = plan(problem, typical_device("sm_90a"), "sm90", every).launches
    good = next(one.specialisation for one in launches if one.specialisation.kernel == "bob_columns")
    wrong = dataclasses.replace(good, macros=tuple((k, 1 if k == "STAGES" else v) for k, v in good.macros))
    with pytest.raises(CompileError, match="the next tile is needed before this one is released"):
        kernels.compile(wrong, "sm_90a", cached=False)


@needs_nvrtc
def test_an_architecture_nvrtc_does_not_know_is_a_compile_error() -> None:
    with pytest.raises(CompileError, match=r"copy_rows.cu .* for sm_13 does not compile"):
        kernels.compile(specialisation("sm_80", "copy_rows.cu"), "sm_13", cached=False)


def test_resources_are_read_from_the_log() -> None:
    log = """ptxas info    : Compiling entry function 'x' for 'sm_90a'
ptxas         .     72 bytes stack frame, 64 bytes spill stores, 80 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 72 bytes cumulative stack size
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized"""
    found = kernels.read_resources(log)
    assert (found.registers, found.spill_bytes, found.stack_bytes) == (255, 144, 72)
    assert len(found.warnings) == 1
    assert "C7510" in found.warnings[0]


# ---- caches --------------------------------------------------------------------------------------------------------
def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(kernels.sys, "platform", "linux")
    monkeypatch.setenv(kernels.CACHE_VARIABLE, str(tmp_path / "mine"))
    assert kernels.cache_dir() == tmp_path / "mine"
    monkeypatch.delenv(kernels.CACHE_VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert kernels.cache_dir() == tmp_path / "xdg" / "flashbob_cupy"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert kernels.cache_dir() == Path.home() / ".cache" / "flashbob_cupy"


@needs_nvrtc
def test_the_second_compilation_comes_from_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(kernels.CACHE_VARIABLE, str(tmp_path))
    one, other = [s for s in planning.specialisations("sm_80") if s.path == "copy_rows.cu"]
    first = kernels.compile(one, "sm_80")
    assert first.resources is not None
    again = kernels.compile(one, "sm_80")
    assert (again.code, again.log, again.resources) == (first.code, "", None)
    for changed in (kernels.compile(other, "sm_80"), kernels.compile(one, "sm_86")):
        assert changed.resources is not None  # not taken from the first one's place
        assert changed.code != first.code


@needs_nvrtc
def test_a_cache_folder_that_cannot_be_made_is_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(kernels.CACHE_VARIABLE, str(tmp_path / "file" / "folder"))
    with pytest.warns(RuntimeWarning, match="compiled kernels are not kept: .*Set FLASHBOB_CACHE_DIR"):
        made = kernels.compile(specialisation("sm_80", "copy_rows.cu"), "sm_80")
    assert made.code.startswith(b"\x7fELF")


# ---- the driver ----------------------------------------------------------------------------------------------------
class Library:
    """A driver library of one Hopper GPU: records calls, and fails those whose name is in `codes`."""

    def __init__(self, version: int = 13000, missing: str = "") -> None:
        self.calls: list[str] = []
        self.launches: list[tuple[int, int]] = []  # kernel, stream
        self.codes: dict[str, int] = {}
        self.context = self.primary = 77
        values: dict[str, Callable[..., Any]] = {
            "cuDriverGetVersion": lambda out: self._set(out, version),
            "cuDeviceGetCount": lambda out: self._set(out, 1),
            "cuDeviceGet": lambda out, index: self._set(out, index),
            "cuDeviceGetAttribute": lambda out, key, _: self._set(out, {75: 9, 76: 0, 16: 132, 97: 232448}[key]),
            "cuDevicePrimaryCtxRetain": lambda out, _: self._set(out, self.primary),
            "cuCtxGetCurrent": lambda out: self._set(out, self.context),
            "cuLibraryLoadData": lambda out, *_: self._set(out, 5),
            "cuLibraryGetKernel": lambda out, *_: self._set(out, 6),
            "cuGetErrorName": lambda code, out: self._set(out, b"CUDA_ERROR_SOMETHING"),
            "cuGetErrorString": lambda code, out: self._set(out, b"something happened"),
            "cuLaunchKernelEx": self._launch,
        }
        for name in driver._SIGNATURES:
            if name != missing:
                setattr(self, name, self._function(name, values.get(name, lambda *_: None)))

    @staticmethod
    def _set(out: Any, value: Any) -> None:
        out._obj.value = value

    def _launch(self, config: int, kernel: int, *_: Any) -> None:
        self.launches.append((kernel, driver.LaunchConfig.from_address(config).stream or 0))

    def _function(self, name: str, value: Callable[..., Any]) -> Callable[..., int]:
        def function(*arguments: Any) -> int:
            self.calls.append(name)
            value(*arguments)
            return self.codes.get(name, 0)

        return function


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    """The fake driver, in place of the real one, with empty caches and a compiler that takes no time."""
    fake = Library()
    made = driver.Driver(fake)
    monkeypatch.delenv(planning.FAMILY_VARIABLE, raising=False)
    monkeypatch.setattr(kernels, "driver", lambda: made)
    monkeypatch.setattr(kernels, "compile", lambda *_: kernels.Compiled(b"code", "", None))
    monkeypatch.setattr(kernels, "_cubins", kernels._Once())
    monkeypatch.setattr(kernels, "_loaded", kernels._Once())
    _prepared.clear()
    return fake


@dataclasses.dataclass
class View:
    pointer: int
    strides: tuple[int, ...]


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    return tuple(strides)


def views(p: Problem, names: tuple[str, ...], first: int = 1 << 40) -> dict[str, View | None]:
    absent = {"dlse", "gdlse"} - ({"dlse", "gdlse"} if p.dlse else set())
    return {
        name: None if name in absent else View(first + (i << 20), contiguous(p.shape(name)))
        for i, name in enumerate(names)
    }


_prepared: dict[Any, kernels.Prepared] = {}


def run(
    p: Problem,
    stream: int = 0,
    workspace: Callable[[int], View] = lambda _: View(1 << 50, (1,)),
    inputs: Mapping[str, View | None] | None = None,
    outputs: Mapping[str, View | None] | None = None,
) -> None:
    inputs, outputs = inputs or views(p, INPUTS[p.op]), outputs or views(p, OUTPUTS[p.op], 1 << 41)
    launching.execute(p, inputs, outputs, workspace, stream, _prepared)


def test_what_is_known_of_a_device(library: Library) -> None:
    assert kernels.device_info(0) == planning.Device("sm_90a", (9, 0), 232448, 132)
    with pytest.raises(driver.DriverError, match="there is no CUDA device 1: the driver sees 1"):
        kernels.device_info(1)


def test_old_drivers_are_refused_with_their_version() -> None:
    with pytest.raises(driver.DriverError, match=r"supports CUDA 11.8; 12.0 or later is needed"):
        driver.Driver(Library(version=11080))
    with pytest.raises(driver.DriverError, match=r"has no cuLibraryLoadData: version 12.0 or later is needed"):
        driver.Driver(Library(missing="cuLibraryLoadData"))


def test_code_the_gpu_cannot_run_is_explained(library: Library) -> None:
    library.codes["cuLibraryLoadData"] = 209
    with pytest.raises(driver.DriverError) as caught:
        run(FORWARD)
    for part in (
        "forward",
        "CUDA_ERROR_SOMETHING: something happened",
        "sm_90a",
        "9.0",
        "CUDA 13.0",
        "update the driver",
    ):
        assert part in str(caught.value)


def test_a_failed_launch_names_the_kernel_and_the_error(library: Library) -> None:
    library.codes["cuLaunchKernelEx"] = 700
    with pytest.raises(driver.DriverError, match=r"sm90/forward.cu .* on device 0: CUDA_ERROR_SOMETHING: something"):
        run(FORWARD)


def test_launches_go_to_the_stream_and_the_context_is_restored(library: Library) -> None:
    run(BOB, stream=123)
    assert [stream for _, stream in library.launches] == [123, 123, 123]
    assert "cuCtxPushCurrent_v2" not in library.calls
    library.context = 99  # another device's, or none
    library.codes["cuLaunchKernelEx"] = 1
    with pytest.raises(driver.DriverError):
        run(BOB, stream=5)
    assert library.calls.count("cuCtxPushCurrent_v2") == library.calls.count("cuCtxPopCurrent_v2") == 1


def test_a_thread_without_a_context_encodes_maps_and_launches_in_the_devices_own(library: Library) -> None:
    library.context = 0
    run(BOB)
    inside = library.calls[library.calls.index("cuCtxPushCurrent_v2") : library.calls.index("cuCtxPopCurrent_v2")]
    for name in ("cuTensorMapEncodeTiled", "cuLaunchKernelEx"):
        assert inside.count(name) == library.calls.count(name) > 0, name


def test_a_repeated_call_only_launches(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that it can be captured in a CUDA graph, and costs a few microseconds."""
    sizes: list[int] = []

    def workspace(nbytes: int) -> View:
        sizes.append(nbytes)
        return View(1 << 50, (1,))

    run(BOB, workspace=workspace)
    del library.calls[:], sizes[:]
    monkeypatch.setattr(planning, "plan", None)
    run(BOB, workspace=workspace)
    assert library.calls == ["cuCtxGetCurrent", *["cuLaunchKernelEx"] * 3]
    assert len(sizes) == 1
    assert sizes[0] > 0


def test_only_what_changed_is_written_and_nothing_stale_is_launched(library: Library) -> None:
    """Calls on two sets of arrays in turn: every launch sees the addresses of its own."""
    seen: list[tuple[int, int, int]] = []

    def launch(config: int, kernel: int, parameters: int, _: Any) -> int:
        attention = ctypes.c_uint64.from_address(parameters).value
        seen.append(tuple((ctypes.c_uint64 * 64).from_address(attention)[i] for i in words))
        return 0

    words = (0, kernels._VIEWS.index("out_o") * 4, kernels._STATISTICS_WORD)
    kernels.driver().launch = launch
    lies = {
        name: contiguous(BOB.shape(name)) for name in INPUTS["bob"] + OUTPUTS["bob"] if name not in ("dlse", "gdlse")
    }
    prepared = kernels.prepare(BOB, lies, 0)
    one = [(1 << 40) + (i << 20) for i in range(len(lies))]
    other = [(1 << 41) + (i << 20) for i in range(len(lies))]
    recipe = prepared.recipe(one)
    assert prepared.recipe(other) is recipe
    o = list(lies).index("gdo")
    for pointers, base in ((one, 1 << 50), (one, 1 << 50), (other, 1 << 50), (one, 1 << 51), (list(one), 1 << 51)):
        del seen[:]
        recipe.run(pointers, base, 0)
        assert set(seen) == {(pointers[0], pointers[o], base)}
    with pytest.raises(ValueError, match="multiple of 16"):
        recipe.run(other, 8, 0)
    del seen[:]
    recipe.run(one, 1 << 51, 0)
    assert set(seen) == {(one[0], one[o], 1 << 51)}


def test_arrays_of_another_alignment_are_copied(library: Library) -> None:
    lies = {name: contiguous(FORWARD.shape(name)) for name in INPUTS["forward"] + OUTPUTS["forward"]}
    prepared = kernels.prepare(FORWARD, lies, 0)
    aligned = [(1 << 40) + (i << 20) for i in range(len(lies))]
    shifted = [pointer + 2 * (i == 1) for i, pointer in enumerate(aligned)]
    assert prepared.recipe(aligned).workspace == 0
    recipe = prepared.recipe(shifted)
    assert recipe.workspace == 2 * math.prod(FORWARD.shape("k"))
    assert prepared.recipe([pointer + (1 << 30) for pointer in shifted]) is recipe
    recipe.run(shifted, 1 << 50, 0)
    assert len(library.launches) == 2


def test_the_workspace_is_held_until_everything_is_launched(library: Library) -> None:
    held: list[Any] = []

    class Owner(View):
        pass

    def workspace(nbytes: int) -> View:
        made = Owner(1 << 50, (1,))
        held.append(weakref.ref(made))
        return made

    def launch(*_: Any) -> int:
        assert held[-1]() is not None
        return 0

    kernels.driver().launch = launch
    run(BOB, workspace=workspace)
    assert held[-1]() is None


def test_threads_share_one_compilation(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Specialisation] = []

    def slow(s: Specialisation, arch: str) -> kernels.Compiled:
        compiled.append(s)
        time.sleep(0.02)
        return kernels.Compiled(b"code", "", None)

    monkeypatch.setattr(kernels, "compile", slow)
    threads = [threading.Thread(target=run, args=(BOB,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(compiled) == len(set(compiled)) == 3
    assert len(library.launches) == 8 * 3


def test_a_failed_compilation_is_tried_again(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    good = kernels.compile

    def bad(*_: object) -> kernels.Compiled:
        raise CompileError("no")

    monkeypatch.setattr(kernels, "compile", bad)
    with pytest.raises(CompileError):
        run(FORWARD)
    monkeypatch.setattr(kernels, "compile", good)
    run(FORWARD)
    assert len(library.launches) == 1


def test_problems_of_the_blocked_engine_are_refused(library: Library) -> None:
    with pytest.raises(UnsupportedError, match="no kernel computes forward of this problem on device 0; blocks do"):
        run(dataclasses.replace(FORWARD, dtype="float32"))


def test_addresses_no_kernel_can_use_are_refused(library: Library) -> None:
    with pytest.raises(ValueError, match="workspace: expected an address that is a multiple of 16"):
        run(BOB, workspace=lambda _: View((1 << 50) + 8, (1,)))
    outputs = views(FORWARD, OUTPUTS["forward"], 1 << 41)
    outputs["lse"] = View((1 << 40) + 2, contiguous(FORWARD.shape("lse")))
    with pytest.raises(ValueError, match="lse: float32 numbers must start at a multiple of 4 bytes"):
        run(FORWARD, outputs=outputs)
    assert library.launches == []


# ---- parameters ----------------------------------------------------------------------------------------------------
def test_the_packed_struct_is_that_of_the_kernels() -> None:
    """Every field of `struct Attention`, read back at the place the kernels read it."""
    p = dataclasses.replace(BOB, mask=Mask(left=7, right=-3), scale=0.3)
    made = plan(p, typical_device("sm_80"), "sm80", frozenset(INPUTS["bob"] + OUTPUTS["bob"]))
    strides = {field: (1000 + i, 2000 + i, 3000 + i) for i, field in enumerate(kernels._VIEWS)}
    content = kernels._pack_attention(p, made, strides)
    layout = emulator.attention_type()
    assert len(content) == ctypes.sizeof(layout)
    read = layout.from_buffer_copy(content)
    for field, expected in strides.items():
        view = getattr(read, field)
        assert (view.data, view.batch, view.head, view.row) == (None, *expected)
    views_in_order = [name for name, kind in layout._fields_ if kind is emulator.View]
    assert tuple(views_in_order) == kernels._VIEWS
    expected = {
        "statistics": None, "accumulator": None, "batches": 2, "query_heads": 4, "key_heads": 2, "group": 2,
        "queries": 300, "keys": 500, "dim": 64, "value_dim": 64, "padded_queries": made.padded_queries,
        "first_query": 0, "first_key": 193, "shift": 200, "left": 7, "right": -3,
    }  # fmt: skip
    assert {name: getattr(read, name) for name in expected} == expected
    assert read.scale == pytest.approx(0.3, rel=1e-7)
    named = {name for name, _ in layout._fields_}
    assert named == set(expected) | set(kernels._VIEWS) | {"scale"}
    assert layout.statistics.offset == 8 * kernels._STATISTICS_WORD


def test_far_bounds_of_the_mask_fit_their_integers() -> None:
    p = dataclasses.replace(BOB, mask=Mask(left=-(10**12), right=10**12))
    made = plan(p, typical_device("sm_80"), "sm80", frozenset())
    read = emulator.attention_type().from_buffer_copy(kernels._pack_attention(p, made, {}))
    assert (read.left, read.right) == (-800, 0)
    assert read.first_key == 500  # and so no query sees a key, as ever


def test_launch_configurations_are_those_of_the_driver() -> None:
    fields = {name: getattr(driver.LaunchConfig, name).offset for name, _ in driver.LaunchConfig._fields_}
    assert fields == {
        "blocks": 0, "threads": 12, "shared_bytes": 24, "stream": 32, "attributes": 40, "attribute_count": 48,
    }  # fmt: skip
    assert ctypes.sizeof(driver.LaunchConfig) == 56


def test_tensor_maps_begin_at_the_first_row_that_is_read(library: Library) -> None:
    maps: list[tuple[Any, ...]] = []

    def encode(*arguments: Any) -> None:
        _, dtype, rank, pointer, sizes, steps, box, _, *options = arguments
        maps.append((dtype, rank, pointer, tuple(sizes), tuple(steps), tuple(box), tuple(options)))

    kernels.driver()._functions["cuTensorMapEncodeTiled"] = lambda *a: encode(*a) or 0
    p = dataclasses.replace(BOB, mask=Mask(left=9, right=0))  # first_key = 500 - 300 - 9
    run(p)
    made = plan(p, typical_device("sm_90a"), "sm90", frozenset(INPUTS["bob"] + OUTPUTS["bob"]))
    rows = dict(made.launches[0].specialisation.macros)
    k = next(m for m in maps if m[2] == (1 << 40) + (1 << 20) + 2 * 191 * 64)
    assert k == (
        9,
        4,
        k[2],
        (64, 500 - 191, 2, 2),
        (128, 500 * 128, 2 * 500 * 128),
        (64, rows["KEYS"], 1, 1),
        (0, 3, 3, 0),
    )
    q = next(m for m in maps if m[2] == 1 << 40)
    assert q[3] == (64, 300, 4, 2)
    count = len(maps)
    run(p)
    assert len(maps) == count  # the same pointers again
    run(p, inputs=views(p, INPUTS["bob"], 1 << 42))
    assert len(maps) == 2 * count


def test_copies_are_packed_as_copy_rows_reads_them() -> None:
    text = kernels.source("copy_rows.cu")
    body = re.search(r"struct Copy \{(.*?)\};", text, re.S)
    assert body is not None
    names = re.sub(r"//.*", "", body[1]).replace("\n", " ").split(";")
    assert [" ".join(name.split()) for name in names if name.strip()] == [
        "View from, to", "i64 column", "int heads, rows, columns, width",
    ]  # fmt: skip
    assert kernels._COPY.format == "=QqqqQqqqq4i"
