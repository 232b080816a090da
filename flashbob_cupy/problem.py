"""What is to be computed: shapes, dtype, mask and options, checked once.

Nothing here knows an array framework. `make_problem` takes anything that has a shape, a dtype name and a device, and
holds every check of an argument and its message.
"""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

DTYPES = ("float16", "bfloat16", "float32", "float64")
LAYOUTS = ("bhnd", "bnhd")

#: The array arguments of every operation, in positional order; `dlse` is a keyword.
INPUTS: dict[str, tuple[str, ...]] = {
    "forward": ("q", "k", "v"),
    "backward": ("q", "k", "v", "do", "o", "lse", "dlse"),
    "bob": ("q", "k", "v", "do", "uq", "uk", "uv", "o", "lse", "dlse"),
    "jvp": ("q", "k", "v", "uq", "uk", "uv", "o", "lse"),
}
#: The results of every operation, in order.
OUTPUTS: dict[str, tuple[str, ...]] = {
    "forward": ("o", "lse"),
    "backward": ("dq", "dk", "dv"),
    "bob": ("gq", "gk", "gv", "gdo", "gdlse"),
    "jvp": ("to", "tlse"),
}
#: Arguments that may be None.
OPTIONAL = frozenset({"uq", "uk", "uv", "dlse"})

_QUERY, _KEY, _VALUE, _OUT, _ROW = (
    ("B", "Hq", "M", "D"),
    ("B", "Hkv", "N", "D"),
    ("B", "Hkv", "N", "Dv"),
    ("B", "Hq", "M", "Dv"),
    ("B", "Hq", "M"),
)
#: The axes of every argument and result, in the order batch, head, row, width.
AXES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("q", "uq", "dq", "gq"), _QUERY),
    **dict.fromkeys(("k", "uk", "dk", "gk"), _KEY),
    **dict.fromkeys(("v", "uv", "dv", "gv"), _VALUE),
    **dict.fromkeys(("o", "do", "to", "gdo"), _OUT),
    **dict.fromkeys(("lse", "dlse", "tlse", "gdlse"), _ROW),
}


@dataclass(frozen=True, slots=True)
class Mask:
    """Which keys a query sees: a band around the diagonal that is aligned at the bottom right.

    Query i of M sees key j of N if and only if ``i + N - M - left <= j <= i + N - M + right``; both ends are
    inclusive and None is unbounded. Causal is ``right=0``.
    """

    left: int | None = None
    right: int | None = None

    def within(self, M: int, N: int) -> Mask:
        """The same mask for M queries and N keys, with the bounds that never bite replaced by None."""
        left = None if self.left is not None and self.left >= N - 1 else self.left
        right = None if self.right is not None and self.right >= M - 1 else self.right
        return Mask(left, right)

    def transposed(self) -> Mask:
        """Which queries a key is seen by: the mask with the roles of queries and keys exchanged."""
        return Mask(self.right, self.left)

    def visible(self, M: int, N: int) -> int:
        """How many pairs of a query and a key it sees there are."""

        def ramp(x: int) -> int:
            """The sum of clip(t, 0, N) over all t < x."""
            within = max(0, min(x, N))
            return within * (within - 1) // 2 + max(0, x - N) * N

        shift = N - M
        end = M * N if self.right is None else ramp(N + self.right + 1) - ramp(shift + self.right + 1)
        begin = 0 if self.left is None else ramp(N - self.left) - ramp(shift - self.left)
        return end - begin

    def most_visible(self, M: int, N: int) -> int:
        """The most keys that any query sees."""
        shift = N - M

        def seen(i: int) -> int:
            end = N if self.right is None else min(N, max(0, i + shift + self.right + 1))
            begin = 0 if self.left is None else min(N, max(0, i + shift - self.left))
            return end - begin

        # The number rises until the last key is seen or the first no longer is.
        turns = (0, M - 1, M - 1 - (self.right or 0), (self.left or 0) - shift)
        return max(seen(min(M - 1, max(0, i))) for i in turns) if M else 0


@dataclass(frozen=True, slots=True)
class Problem:
    """One operation on one set of shapes. Hashable: it is the key of every cache."""

    op: str
    B: int
    Hq: int
    Hkv: int
    M: int
    N: int
    D: int
    Dv: int
    dtype: str
    mask: Mask
    scale: float
    deterministic: bool = False
    uq: bool = False
    uk: bool = False
    uv: bool = False
    dlse: bool = False

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.Hq // self.Hkv if self.Hkv else 1

    @property
    def lse_dtype(self) -> str:
        return "float64" if self.dtype == "float64" else "float32"

    @property
    def first_query(self) -> int:
        """Queries before this one see no key; every later one sees at least one."""
        if self.N == 0:
            return self.M
        if self.mask.right is None:
            return 0
        return min(self.M, max(0, self.M - self.N - self.mask.right))

    @property
    def first_key(self) -> int:
        """Keys before this one are seen by no query; every later one is seen by at least one."""
        if self.M == 0:
            return self.N
        if self.mask.left is None:
            return 0
        return min(self.N, max(0, self.N - self.M - self.mask.left))

    @property
    def vanishes(self) -> bool:
        """Every result is exactly zero (lse -inf) or empty, so nothing has to be computed."""
        empty = 0 in (self.B, self.Hq, self.M, self.N)
        return empty or (self.op in ("bob", "jvp") and not (self.uq or self.uk or self.uv))

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of an argument or a result, in the order batch, head, row, width."""
        return tuple(getattr(self, axis) for axis in AXES[name])

    def dtype_of(self, name: str) -> str:
        return self.lse_dtype if len(AXES[name]) == 3 else self.dtype


class Described(Protocol):
    """What the checks look at; the shape is in the caller's layout."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...
    @property
    def device(self) -> tuple[str, int]: ...


def axes_of(name: str, layout: str) -> tuple[str, ...]:
    """The axes of an argument or a result in the caller's layout."""
    axes = AXES[name]
    if layout == "bnhd" and len(axes) == 4:
        return axes[0], axes[2], axes[1], axes[3]
    return axes


def make_problem(
    op: str,
    arrays: Mapping[str, Described | None],
    *,
    causal: bool,
    scale: float | None,
    window: tuple[int | None, int | None] | None,
    layout: str,
    deterministic: bool,
) -> Problem:
    """Check every argument of `op` and describe what it asks for.

    Raises:
        TypeError: a required array is None, or a dtype or the type of an option is wrong.
        ValueError: a shape, a device or the value of an option is wrong.
    """
    check_layout(layout)
    mask = _mask(causal, window)
    _check_bool("deterministic", deterministic)
    given = {name: x for name, x in arrays.items() if x is not None}
    for name in INPUTS[op]:
        if name not in given and name not in OPTIONAL:
            raise TypeError(f"{name} is required by {op}; got None")
    _check_dtypes(given)
    _check_devices(given)
    sizes = _check_shapes(op, given, layout)
    checked_scale = _scale(scale, sizes["D"], given["q"].dtype)
    return Problem(
        op=op,
        **sizes,
        dtype=given["q"].dtype,
        mask=mask.within(sizes["M"], sizes["N"]),
        scale=checked_scale,
        deterministic=deterministic,
        uq="uq" in given,
        uk="uk" in given,
        uv="uv" in given,
        dlse="dlse" in given,
    )


def check_layout(layout: object) -> None:
    if not isinstance(layout, str):
        raise TypeError(f"layout must be a string, {_choices(LAYOUTS)}; got {type(layout).__name__}")
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be {_choices(LAYOUTS)}; got {layout!r}")


def check_output(problem: Problem, name: str, given: Described, layout: str, device: tuple[str, int]) -> None:
    """Check one preallocated result.

    Raises:
        TypeError: the dtype is not that of the result.
        ValueError: the shape or the device is not that of the result.
    """
    label = f"out ({name})"
    dtype = problem.dtype_of(name)
    if given.dtype != dtype:
        raise TypeError(f"{label} must be {dtype}; got {given.dtype}")
    if given.device != device:
        raise ValueError(f"{label} must be on {_device(device)} like q; got {_device(given.device)}")
    axes = axes_of(name, layout)
    shape = tuple(getattr(problem, axis) for axis in axes)
    if given.shape != shape and not (len(shape) == 3 and given.shape == (*shape, 1)):
        raise ValueError(f"{label} must have shape {_tuple(axes)} = {shape}; got {given.shape}")


def _check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False; got {value!r} ({type(value).__name__})")


def _mask(causal: object, window: object) -> Mask:
    _check_bool("causal", causal)
    left: int | None = None
    right: int | None = None
    if window is not None:
        if not isinstance(window, tuple | list):
            raise TypeError(f"window must be None or a pair (left, right); got {window!r} ({type(window).__name__})")
        if len(window) != 2:
            raise ValueError(f"window must have 2 entries (left, right); got {len(window)}: {window!r}")
        left, right = (_bound(side, value) for side, value in zip(("left", "right"), window, strict=True))
    if causal:
        right = 0 if right is None else min(right, 0)
    return Mask(left, right)


def _bound(side: str, value: Any) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"window {side} must be an integer or None; got {value!r} ({type(value).__name__})")
    bound = operator.index(value)
    if bound < 0:
        raise ValueError(f"window {side} must be 0 or more, or None for unbounded; got {bound}")
    return bound


def _scale(scale: object, D: int, dtype: str) -> float:
    if scale is None:
        return 1.0 / math.sqrt(D)
    if isinstance(scale, bool) or not isinstance(scale, numbers.Real):
        raise TypeError(f"scale must be None (1/sqrt(D)) or a real number; got {scale!r} ({type(scale).__name__})")
    value = float(scale)
    # Scores are computed in float32 unless the inputs are float64.
    largest = 1.7976931348623157e308 if dtype == "float64" else 3.4028234663852886e38
    if not abs(value) <= largest:
        raise ValueError(f"scale must be finite, at most {largest:.3g} in magnitude for {dtype} inputs; got {value}")
    return value


def _check_dtypes(given: Mapping[str, Described]) -> None:
    dtype = given["q"].dtype
    if dtype not in DTYPES:
        raise TypeError(f"q must be {_choices(DTYPES)}; got {dtype}")
    row_dtype = "float64" if dtype == "float64" else "float32"
    for name, x in given.items():
        if len(AXES[name]) == 3:
            if x.dtype != row_dtype:
                raise TypeError(f"{name} must be {row_dtype} when q is {dtype}; got {x.dtype}")
        elif x.dtype != dtype:
            raise TypeError(f"{name} must be {dtype} like q; got {x.dtype}")


def _check_devices(given: Mapping[str, Described]) -> None:
    device = given["q"].device
    if device[0] not in ("cpu", "cuda"):
        raise ValueError(f"q must be on a CPU or a CUDA device; got {_device(device)}")
    for name, x in given.items():
        if x.device != device:
            raise ValueError(f"{name} must be on {_device(device)} like q; got {_device(x.device)}")


def _check_shapes(op: str, given: Mapping[str, Described], layout: str) -> dict[str, int]:
    sizes: dict[str, int] = {}
    # q, k and v come first, so they give the symbols their numbers and the others are held to them.
    for name in sorted(given, key=INPUTS[op].index):
        axes, shape = axes_of(name, layout), given[name].shape
        if len(axes) == 3 and len(shape) == 4 and shape[3] == 1:
            shape = shape[:3]
        if len(shape) != len(axes):
            or_column = f" or {_tuple((*axes, '1'))}" if len(axes) == 3 else ""
            raise ValueError(
                f"{name} must have the {len(axes)} axes {_tuple(axes)}{or_column}; got {len(shape)} axes: shape {shape}"
                + (". Fold extra leading axes into B, or map over them" if len(shape) > len(axes) else "")
            )
        wanted = tuple(sizes.get(axis) for axis in axes)
        if any(size is not None and size != came for size, came in zip(wanted, shape, strict=True)):
            raise ValueError(f"{name} must have shape {_expected(axes, sizes)}; got {shape}{_other_layout(layout)}")
        sizes.update(zip(axes, shape, strict=True))
    for axis, name in (("D", "q"), ("Dv", "v")):
        if sizes[axis] == 0:
            raise ValueError(f"{name} must have a last axis {axis} of 1 or more; got {given[name].shape}")
    Hq, Hkv = sizes["Hq"], sizes["Hkv"]
    if Hq != 0 and (Hkv == 0 or Hq % Hkv):
        raise ValueError(
            f"the heads of q must be a multiple of the heads of k and v: got Hq = {Hq} and Hkv = {Hkv}"
            + _other_layout(layout)
        )
    return sizes


def _expected(axes: tuple[str, ...], sizes: Mapping[str, int]) -> str:
    if all(axis in sizes for axis in axes):
        return f"{_tuple(axes)} = {tuple(sizes[axis] for axis in axes)}"
    return f"{_tuple(axes)} with " + ", ".join(f"{axis} = {sizes[axis]}" for axis in axes if axis in sizes)


def _other_layout(layout: str) -> str:
    other = {"bhnd": "rows before heads", "bnhd": "heads before rows"}[layout]
    return f" (layout is {layout!r}; for {other} pass layout={LAYOUTS[1 - LAYOUTS.index(layout)]!r})"


def _tuple(axes: tuple[str, ...]) -> str:
    return f"({', '.join(axes)})"


def _choices(values: tuple[str, ...]) -> str:
    return f"{', '.join(values[:-1])} or {values[-1]}"


def _device(device: tuple[str, int]) -> str:
    return f"cuda:{device[1]}" if device[0] == "cuda" else device[0]
