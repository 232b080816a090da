"""What is to be computed: shapes, dtype, mask and options, checked once.

Nothing here knows an array framework. `make_problem` takes anything that has a shape, a dtype name and a device, and
holds every check of an argument and its message.
"""

from __future__ import annotations

from dataclasses import dataclass

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
