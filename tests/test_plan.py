"""Planning: pure arithmetic, so every device and every head dimension is tried here."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from flashbob_cupy import check, reference
from flashbob_cupy import plan as planning
from flashbob_cupy.errors import UnsupportedError
from flashbob_cupy.plan import Device, Plan, arch_for, plan, readable, route, specialisations, typical_device
from flashbob_cupy.problem import INPUTS, OUTPUTS, Mask, Problem

CUDA = Path(__file__).resolve().parents[1] / "cuda"
ARCHES = tuple(planning.SHARED_LIMITS)
OPS = tuple(INPUTS)
BASE = Problem("bob", 2, 4, 2, 300, 500, 64, 64, "bfloat16", Mask(right=0), 0.125, uq=True, uk=True, uv=True)
PLAIN = {"uq": False, "uk": False, "uv": False}


def problem(op: str, **changes: object) -> Problem:
    changes = ({} if op in ("bob", "jvp") else PLAIN) | changes
    return dataclasses.replace(BASE, op=op, **changes)


def everything(p: Problem) -> frozenset[str]:
    return frozenset(INPUTS[p.op] + OUTPUTS[p.op])


def families(p: Problem, device: Device) -> list[str]:
    return [family for family in ("sm80", "sm90") if planning._family_serves(family, p, device)]


@pytest.fixture(autouse=True)
def _unforced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(planning.FAMILY_VARIABLE, raising=False)


@pytest.mark.parametrize(
    ("capability", "arch"),
    [
        ((7, 5), ""),
        ((8, 0), "sm_80"),
        ((8, 6), "sm_86"),
        ((8, 7), "sm_87"),
        ((8, 9), "sm_89"),
        ((9, 0), "sm_90a"),
        ((10, 0), "sm_100a"),
        ((10, 3), "sm_100"),
        ((11, 0), "sm_110"),
        ((12, 0), "sm_120a"),
        ((12, 1), "sm_120"),
        ((13, 0), "sm_130"),
    ],
)
def test_architecture_names(capability: tuple[int, int], arch: str) -> None:
    assert arch_for(capability) == arch


def test_a_typical_device_is_what_it_is_named_after() -> None:
    for arch in ARCHES:
        device = typical_device(arch)
        assert device.arch == arch
        assert arch_for(device.capability) == arch
    with pytest.raises(ValueError, match=r"arch: expected one of sm_80, .*; got 'sm_70'"):
        typical_device("sm_70")


def test_route() -> None:
    ampere, hopper = typical_device("sm_80"), typical_device("sm_90a")
    turing = Device("", (7, 5), 64 << 10, 40)
    assert route(BASE, ampere) == "sm80"
    assert route(BASE, hopper) == "sm90"
    assert route(BASE, turing) == "blocked"
    for changes in ({"dtype": "float32"}, {"dtype": "float64"}, {"D": 129}, {"Dv": 256}):
        assert route(dataclasses.replace(BASE, **changes), hopper) == "blocked"
    # No query sees a key, so a tensor map would have no row.
    assert route(dataclasses.replace(BASE, mask=Mask(right=-600)), hopper) == "sm80"


def test_a_forced_family_is_taken_where_it_can_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    ampere, hopper = typical_device("sm_80"), typical_device("sm_90a")
    monkeypatch.setenv(planning.FAMILY_VARIABLE, "sm80")
    assert route(BASE, hopper) == "sm80"
    assert route(dataclasses.replace(BASE, dtype="float32"), hopper) == "blocked"
    monkeypatch.setenv(planning.FAMILY_VARIABLE, "sm90")
    assert route(BASE, ampere) == "sm80"
    monkeypatch.setenv(planning.FAMILY_VARIABLE, "blocked")
    assert route(BASE, hopper) == "blocked"
    monkeypatch.setenv(planning.FAMILY_VARIABLE, "sm70")
    with pytest.raises(ValueError, match="FLASHBOB_FAMILY: expected one of sm90, sm80, blocked; got 'sm70'"):
        route(BASE, hopper)


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("op", OPS)
def test_every_head_dimension_fits_every_device(arch: str, op: str) -> None:
    device = typical_device(arch)
    for D in (1, 16, 40, 64, 80, 96, 128):
        for Dv in (1, 64, 128):
            for deterministic in (False, True):
                p = problem(op, D=D, Dv=Dv, deterministic=deterministic)
                for family in families(p, device):
                    made = plan(p, device, family, everything(p))
                    for launch in made.launches:
                        s = launch.specialisation
                        assert s.shared_bytes <= device.shared_limit
                        assert s.threads % 32 == 0
                        assert 32 <= s.threads <= 1024


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("mask", [Mask(), Mask(right=0), Mask(left=64, right=0)], ids=str)
def test_small_problems_have_small_tiles(op: str, deterministic: bool, mask: Mask) -> None:
    hopper = dataclasses.replace(typical_device("sm_90a"), multiprocessors=132)
    for D, heads, length in itertools.product((64, 128), (1, 4, 5, 8, 16, 64), (60, 256, 1000, 1024, 4096, 8192)):
        p = problem(op, B=1, Hq=heads, Hkv=heads, M=length, N=length, D=D, Dv=D, deterministic=deterministic, mask=mask)
        one = dataclasses.replace(hopper, multiprocessors=1)
        large, chosen = (plan(p, device, "sm90", everything(p)).launches for device in (one, hopper))
        for a, b in zip(large, chosen, strict=True):
            if a.specialisation.family != "sm90" or not b.maps:
                continue
            blocks = -(-length // 64) * heads
            # Under a causal mask the work of all together is half of what the longest CTA has, times their number.
            at_once = blocks if mask.within(length, length) != Mask(right=0) else blocks * (length + 1) / (2 * length)
            if at_once <= 132:
                assert b.blocks == blocks
            elif at_once > 140:  # a window's first queries see fewer keys
                assert b == a


@pytest.mark.parametrize(
    ("op", "D", "rows"),
    [
        ("jvp", 64, {1: 64, 64: 64, 65: 128, 128: 128, 129: 192, 192: 192, 256: 128, 384: 192, 640: 128, 4096: 192}),
        ("forward", 64, {1: 64, 128: 128, 192: 192, 256: 128, 1024: 192}),
        ("forward", 128, {1: 64, 128: 128, 192: 192, 256: 128, 1024: 192}),
        ("jvp", 128, {1: 64, 64: 64, 65: 128, 4096: 128}),
        ("backward", 64, {1: 64, 64: 64, 65: 128, 192: 128, 4096: 128}),
    ],
)
def test_many_heads_take_the_tile_that_has_least_to_do(op: str, D: int, rows: dict[int, int]) -> None:
    hopper = dataclasses.replace(typical_device("sm_90a"), multiprocessors=132)
    for length, planned in rows.items():
        p = problem(op, B=8, Hq=64, Hkv=64, M=length, N=length, D=D, Dv=D, mask=Mask())
        made = plan(p, hopper, "sm90", everything(p))
        one = next(launch for launch in made.launches if launch.maps)
        sizes = dict(one.specialisation.macros)
        assert sizes["KEYS" if op == "backward" else "QUERIES"] == planned, length
        assert one.blocks == 512 * -(-length // planned)


@pytest.mark.parametrize(
    ("M", "N", "mask", "pairs"),
    [
        (16384, 16384, Mask(right=0), True),
        (4096, 4096, Mask(right=0), True),
        (1024, 1024, Mask(right=0), False),  # the later rows of a pair see many more keys than the others
        (16384, 16384, Mask(left=1024, right=0), False),
        (16384, 16384, Mask(left=8192, right=0), True),
        (1024, 1024, Mask(), True),
        (256, 4096, Mask(right=0), True),
        (128, 4096, Mask(right=0), False),  # one tile
        (300, 4096, Mask(), False),  # three tiles
    ],
    ids=str,
)
def test_ctas_share_what_streams_past_where_rows_see_many_keys(M: int, N: int, mask: Mask, pairs: bool) -> None:
    hopper = dataclasses.replace(typical_device("sm_90a"), multiprocessors=132)
    for op, kernel in (("jvp", "bob_rows"), ("bob", "bob_queries"), ("backward", "backward_rows")):
        for D in (64, 96, 128):
            shape = {"B": 8, "Hq": 32, "Hkv": 8, "M": M, "N": N, "D": D, "Dv": D}
            p = problem(op, **shape, mask=mask, deterministic=op != "jvp")
            launch = next(
                one for one in plan(p, hopper, "sm90", everything(p)).launches if one.specialisation.kernel == kernel
            )
            sizes = dict(launch.specialisation.macros)
            assert sizes["CLUSTER"] == (2 if pairs and D > 64 else 1)
            rows = {one.field: one.rows for one in launch.maps}
            if sizes["CLUSTER"] == 1:
                assert (rows["q"], rows["k"]) == (sizes["QUERIES"], sizes["KEYS"])
                continue
            # A warpgroup's queries, and each CTA's part of a tile of keys.
            assert (rows["q"], rows["k"]) == (64, sizes["KEYS"] // 2)
            assert launch.blocks == 8 * 32 * 2 * -(-M // (2 * sizes["QUERIES"]))


@given(
    M=st.integers(0, 9),
    N=st.integers(0, 9),
    left=st.none() | st.integers(-6, 12),
    right=st.none() | st.integers(-6, 12),
)
def test_a_mask_counts_what_is_visible(M: int, N: int, left: int | None, right: int | None) -> None:
    assume(left is None or right is None or -left <= right)
    mask = Mask(left, right)
    seen = reference.visible(mask, M, N)
    assert mask.visible(M, N) == seen.sum()
    assert mask.most_visible(M, N) == seen.sum(axis=1).max(initial=0)
    assert (reference.visible(mask.transposed(), N, M) == seen.T).all()


def test_the_grid_of_check_reaches_every_tile() -> None:
    device = dataclasses.replace(typical_device("sm_90a"), multiprocessors=132)
    large = dataclasses.replace(device, multiprocessors=1)  # check.Engine.large
    found = set()
    for case, op, on in itertools.product(check.grid(), OPS, (device, large)):
        shape = {axis: getattr(case, axis) for axis in ("B", "Hq", "Hkv", "M", "N", "D", "Dv", "dtype")}
        p = problem(op, **shape, deterministic=case.deterministic, mask=Mask(right=0))
        if route(p, on) == "sm90":
            for one in plan(p, on, "sm90", everything(p)).specialisations():
                sizes = dict(one.macros)
                names = ("HEAD_DIM", "QUERIES", "KEYS", "CLUSTER")
                found.add((one.kernel, *(sizes.get(name, 1) for name in names)))
    for kernel, entry in planning.TABLES["sm90"].items():
        for D in (64, 128):
            tables = (entry.tiles, entry.few, entry.other or {}, entry.paired or {})
            for tile in itertools.chain.from_iterable(table.get(D, ())[:1] for table in tables):
                assert (kernel, D, tile.QUERIES, tile.KEYS, tile.CLUSTER) in found, kernel


def test_a_device_too_small_for_every_tile_is_refused_with_the_numbers() -> None:
    tiny = Device("sm_86", (8, 6), 48 << 10, 10)
    with pytest.raises(UnsupportedError, match=r"needs \d+ bytes of shared memory per block; this device offers 49152"):
        plan(problem("bob", D=128, Dv=128), tiny, "sm80", everything(BASE))


def macros(made: Plan, kernel: str) -> dict[str, int]:
    return next(
        dict(launch.specialisation.macros) for launch in made.launches if launch.specialisation.kernel == kernel
    )


@pytest.mark.parametrize("arch", ARCHES)
def test_row_tiles_fill_the_statistics_that_column_tiles_read(arch: str) -> None:
    """A portable bob_rows writes the statistics of its own tiles and no further."""
    device = typical_device(arch)
    for D in (16, 64, 128):
        made = plan(problem("bob", D=D, Dv=D), device, "sm80", everything(BASE))
        assert macros(made, "bob_rows")["QUERIES"] % macros(made, "bob_columns")["QUERIES"] == 0


def launched(op: str, deterministic: bool) -> list[str]:
    p = problem(op, deterministic=deterministic)
    return [x.specialisation.kernel for x in plan(p, typical_device("sm_80"), "sm80", everything(p)).launches]


def test_kernels_of_each_operation() -> None:
    assert launched("forward", False) == launched("forward", True) == ["forward"]
    assert launched("jvp", False) == launched("jvp", True) == ["bob_rows"]
    assert launched("backward", False) == ["statistics", "backward_columns", "finish_queries"]
    assert launched("backward", True) == ["statistics", "backward_columns", "backward_rows"]
    assert launched("bob", False) == ["bob_rows", "bob_columns", "finish_queries"]
    assert launched("bob", True) == ["bob_rows", "bob_columns", "bob_queries"]


def test_grids_cover_rows_and_columns() -> None:
    made = plan(BASE, typical_device("sm_80"), "sm80", everything(BASE))
    rows, columns = made.launches[:2]
    assert rows.blocks == -(-300 // macros(made, "bob_rows")["QUERIES"]) * 4 * 2
    assert columns.blocks == -(-500 // macros(made, "bob_columns")["KEYS"]) * 2 * 2


def test_many_heads_make_one_long_grid_and_too_many_are_refused() -> None:
    p = problem("forward", B=70000, Hq=1, Hkv=1, M=16, N=16, D=16, Dv=16)
    device = typical_device("sm_80")
    assert plan(p, device, "sm80", everything(p)).launches[0].blocks == 70000
    crowd = dataclasses.replace(p, B=1 << 20, Hq=1 << 12, Hkv=1 << 12)
    with pytest.raises(UnsupportedError, match="forward would take 4294967296 thread blocks"):
        plan(crowd, device, "sm80", everything(p))


def test_macros_say_what_the_problem_is() -> None:
    device = typical_device("sm_80")

    def of(**changes: object) -> dict[str, int]:
        p = dataclasses.replace(BASE, **changes)
        return macros(plan(p, device, "sm80", everything(p)), "bob_columns")

    assert (of()["MASK_LEFT"], of()["MASK_RIGHT"], of()["BFLOAT16"], of()["FUSED"]) == (0, 1, 1, 1)
    assert of(dtype="float16")["BFLOAT16"] == 0
    assert of(deterministic=True)["FUSED"] == 0
    assert (of(uq=False)["HAS_UQ"], of(uq=False)["HAS_UK"], of(uq=False)["HAS_UV"]) == (0, 1, 1)
    assert (of(D=40, Dv=7)["HEAD_DIM"], of(D=40, Dv=7)["VALUE_DIM"]) == (48, 16)
    # Bounds that never bite cost nothing: a single query sees every key although it is causal.
    assert of(M=1)["MASK_RIGHT"] == 0
    assert of(mask=Mask(left=499, right=299)) == of(mask=Mask())
    assert of(mask=Mask(left=498))["MASK_LEFT"] == 1


@given(
    op=st.sampled_from(OPS),
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 700), st.integers(1, 700)),
    widths=st.tuples(st.integers(1, 128), st.integers(1, 128)),
    arch=st.sampled_from(ARCHES),
    deterministic=st.booleans(),
    data=st.data(),
)
def test_the_workspace_holds_everything_apart(
    op: str,
    sizes: tuple[int, int, int, int],
    widths: tuple[int, int],
    arch: str,
    deterministic: bool,
    data: st.DataObject,
) -> None:
    B, H, M, N = sizes
    p = problem(op, B=B, Hq=2 * H, Hkv=H, M=M, N=N, D=widths[0], Dv=widths[1], deterministic=deterministic)
    device = typical_device(arch)
    direct = data.draw(st.frozensets(st.sampled_from(INPUTS[op] + OUTPUTS[op])))
    for family in families(p, device):
        made = plan(p, device, family, direct)
        regions = []
        for launch in made.launches:
            tile = dict(launch.specialisation.macros)
            if "QUERIES" in tile:
                assert made.padded_queries >= -(-M // tile["QUERIES"]) * tile["QUERIES"]
        rows = p.B * p.Hq * made.padded_queries
        if made.statistics is not None:
            regions.append((made.statistics, 16 * rows))
        if made.accumulator is not None:
            regions.append((made.accumulator, 4 * rows * made.dim))
        for copy in made.copies_in + made.copies_out:
            shape = p.shape(copy.name)
            assert copy.name not in direct
            assert copy.width % 8 == 0
            assert copy.width >= shape[3]
            assert copy.strides(shape)[0] == shape[1] * shape[2] * copy.width
            regions.append((copy.offset, 2 * shape[0] * copy.strides(shape)[0]))
        end = 0
        for start, size in sorted(regions):
            assert start >= end
            assert start % 256 == 0
            end = start + size
        assert made.workspace >= end


def test_only_what_cannot_be_used_in_place_is_copied() -> None:
    device = typical_device("sm_80")
    made = plan(BASE, device, "sm80", everything(BASE) - {"v", "gq"})
    assert [copy.name for copy in made.copies_in] == ["v"]
    assert [copy.name for copy in made.copies_out] == ["gq"]
    assert plan(BASE, device, "sm80", everything(BASE)).copies_in == ()
    absent = dataclasses.replace(BASE, uk=False)
    assert "uk" not in [copy.name for copy in plan(absent, device, "sm80", frozenset()).copies_in]


@pytest.mark.parametrize(
    ("shape", "strides", "pointer", "portable", "hopper"),
    [
        ((2, 3, 4, 64), (768, 256, 64, 1), 4096, True, True),
        ((2, 3, 4, 64), (768, 64, 192, 1), 4096, True, True),  # heads after rows
        ((2, 3, 4, 64), (768, 256, 64, 1), 4098, False, False),  # off by one element
        ((2, 3, 4, 64), (768, 256, 1, 4), 4096, False, False),  # transposed
        ((2, 3, 4, 64), (780, 260, 65, 1), 4096, False, False),  # rows 65 apart
        ((2, 3, 4, 36), (864, 288, 72, 1), 4096, False, False),  # 36 columns
        ((2, 3, 4, 64), (0, 0, 0, 1), 4096, True, False),  # broadcast
        ((2, 3, 4, 64), (0, 0, 0, 0), 4096, False, False),
        ((2, 3, 4, 64), (768, 256, -64, 1), 4096, True, False),  # reversed
        ((1, 1, 4, 64), (7, 0, 64, 1), 4096, True, True),  # strides of axes of size 1 mean nothing
        ((1, 1, 4, 64), (7, 0, 1 << 31, 1), 4096, False, False),
    ],
)
def test_readable(shape: tuple[int, ...], strides: tuple[int, ...], pointer: int, portable: bool, hopper: bool) -> None:
    assert readable("sm80", shape, strides, pointer) is portable
    assert readable("sm90", shape, strides, pointer) is hopper


def test_every_kernel_file_is_compiled_ahead_of_time() -> None:
    on_hopper = {s.path for s in specialisations("sm_90a")}
    assert on_hopper == {path.relative_to(CUDA).as_posix() for path in CUDA.rglob("*.cu")}
    elsewhere = {s.path for s in specialisations("sm_120a")}
    assert elsewhere == {path for path in on_hopper if not path.startswith("sm90/")}


@pytest.mark.parametrize("arch", ARCHES)
def test_specialisations_differ_in_what_matters(arch: str) -> None:
    found = specialisations(arch)
    assert len(found) == len(set(found)) == len({(s.path, s.macros) for s in found})
    for name, values in {
        "BFLOAT16": {0, 1}, "MASK_LEFT": {0, 1}, "MASK_RIGHT": {0, 1}, "FUSED": {0, 1}, "HAS_UQ": {0, 1},
        "HAS_UK": {0, 1}, "HAS_UV": {0, 1}, "HEAD_DIM": {16, 48, 64, 128},
        "VALUE_DIM": {16, 32, 48, 64, 128},
    }.items():  # fmt: skip
        assert {dict(s.macros)[name] for s in found if name in dict(s.macros)} == values
    with pytest.raises(ValueError, match="arch: expected one of"):
        specialisations("sm_75")
