"""The specification: exact attention and its derivatives, written out densely in float64.

Every line can be checked against the equations of the double backward; nothing here is fast. Arrays are in the order
batch, head, row, width: q, uq (B, Hq, M, D); k, uk (B, Hkv, N, D); v, uv (B, Hkv, N, Dv); do (B, Hq, M, Dv);
dlse (B, Hq, M). Any real dtype comes in and float64 goes out. `uq`, `uk`, `uv` and `dlse` may be None, which is zero.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .problem import Mask

Float = NDArray[np.float64]
_BAND = Mask()


def visible(mask: Mask, M: int, N: int) -> NDArray[np.bool_]:
    """Which keys each query sees, (M, N): a band around the diagonal that is aligned at the bottom right."""
    offset = np.arange(N)[None, :] - (np.arange(M)[:, None] + N - M)
    seen = np.ones((M, N), dtype=bool)
    if mask.left is not None:
        seen &= offset >= -mask.left
    if mask.right is not None:
        seen &= offset <= mask.right
    return seen


class _Grid(NamedTuple):
    """Which keys each query sees, and how query heads share key heads."""

    seen: NDArray[np.bool_]
    Hq: int
    Hkv: int
    tau: float

    @property
    def alive(self) -> NDArray[np.bool_]:
        """Queries that see a key, (M, 1)."""
        alive: NDArray[np.bool_] = np.any(self.seen, axis=1, keepdims=True)
        return alive

    def rows(self, x: Any, like: Any) -> Float:
        """A query-side operand; None is zero, and so are rows that see no key, whatever stands there."""
        x = np.zeros(like.shape) if x is None else np.asarray(x).astype(np.float64)
        return np.where(self.alive, x, 0.0)

    def keys(self, x: Any, like: Any) -> Float:
        """A key-side operand repeated over its group; None is zero, and so are rows that no query sees."""
        x = np.zeros(like.shape) if x is None else np.asarray(x).astype(np.float64)
        return np.repeat(np.where(np.any(self.seen, axis=0)[:, None], x, 0.0), self.Hq // max(self.Hkv, 1), axis=1)

    def per_key_head(self, x: Float) -> Float:
        """The sum over the query heads of each group."""
        B, _, N, D = x.shape
        summed: Float = np.sum(x.reshape(B, self.Hkv, self.Hq // max(self.Hkv, 1), N, D), axis=2)
        return summed

    def softmax(self, Q: Float, K: Float) -> tuple[Float, Float]:
        """P and L. Hidden entries are selected away before every exponential."""
        S = np.where(self.seen, self.tau * (Q @ _T(K)), -np.inf)
        top = np.where(self.alive, np.max(S, axis=-1, keepdims=True, initial=-np.inf), 0.0)
        with np.errstate(divide="ignore"):
            L = top + np.log(np.sum(np.exp(S - top), axis=-1, keepdims=True))
        return np.exp(S - np.where(self.alive, L, 0.0)), L

    def tangent(self, Q: Float, K: Float, UQ: Float, UK: Float) -> Float:
        """F, the tangent of S."""
        return np.where(self.seen, self.tau * (UQ @ _T(K) + Q @ _T(UK)), 0.0)


def _grid(q: Any, k: Any, mask: Mask, scale: float | None) -> _Grid:
    (_, Hq, M, D), (_, Hkv, N, _) = q.shape, k.shape
    return _Grid(visible(mask, M, N), Hq, Hkv, 1.0 / math.sqrt(D) if scale is None else scale)


def _T(x: Float) -> Float:
    return x.swapaxes(-1, -2)


def forward(q: Any, k: Any, v: Any, *, mask: Mask = _BAND, scale: float | None = None) -> tuple[Float, Float]:
    """o (B, Hq, M, Dv) and the natural-log lse (B, Hq, M), -inf on rows with no key."""
    grid = _grid(q, k, mask, scale)
    Q, K, V = grid.rows(q, q), grid.keys(k, k), grid.keys(v, v)
    P, L = grid.softmax(Q, K)
    return P @ V, L[..., 0]


def backward(
    q: Any, k: Any, v: Any, do: Any, *, dlse: Any = None, mask: Mask = _BAND, scale: float | None = None
) -> tuple[Float, Float, Float]:
    """dq, dk, dv: the gradients of ⟨do, o⟩ + ⟨dlse, lse⟩ in q, k and v."""
    grid = _grid(q, k, mask, scale)
    Q, K, V, dO = grid.rows(q, q), grid.keys(k, k), grid.keys(v, v), grid.rows(do, do)
    dL = grid.rows(None if dlse is None else np.asarray(dlse)[..., None], do[..., :1])
    P, _ = grid.softmax(Q, K)
    O = P @ V

    dP = dO @ _T(V)
    D = np.sum(dO * O, axis=-1, keepdims=True) - dL
    dS = P * (dP - D)
    dQ = grid.tau * (dS @ K)
    dK = grid.tau * (_T(dS) @ Q)
    dV = _T(P) @ dO
    return dQ, grid.per_key_head(dK), grid.per_key_head(dV)


def bob(
    q: Any,
    k: Any,
    v: Any,
    do: Any,
    uq: Any,
    uk: Any,
    uv: Any,
    *,
    dlse: Any = None,
    mask: Mask = _BAND,
    scale: float | None = None,
) -> tuple[Float, Float, Float, Float, Float]:
    """gq, gk, gv, gdo, gdlse: the gradients of Φ = ⟨dq, uq⟩ + ⟨dk, uk⟩ + ⟨dv, uv⟩ in q, k, v, do and dlse."""
    grid = _grid(q, k, mask, scale)
    Q, K, V, dO = grid.rows(q, q), grid.keys(k, k), grid.keys(v, v), grid.rows(do, do)
    UQ, UK, UV = grid.rows(uq, q), grid.keys(uk, k), grid.keys(uv, v)
    dL = grid.rows(None if dlse is None else np.asarray(dlse)[..., None], do[..., :1])
    P, _ = grid.softmax(Q, K)
    O = P @ V

    dP = dO @ _T(V)
    D = np.sum(dO * O, axis=-1, keepdims=True) - dL
    X = dP - D
    dS = P * X

    F = grid.tangent(Q, K, UQ, UK)
    alpha = np.sum(P * F, axis=-1, keepdims=True)
    Fhat = F - alpha
    G = dO @ _T(UV)
    gdO = (P * Fhat) @ V + P @ UV
    epsilon = np.sum(dO * gdO, axis=-1, keepdims=True)
    W = P * (Fhat * X + G - epsilon)
    gQ = grid.tau * (W @ K + dS @ UK)
    gK = grid.tau * (_T(W) @ Q + _T(dS) @ UQ)
    gV = _T(P * Fhat) @ dO
    return gQ, grid.per_key_head(gK), grid.per_key_head(gV), gdO, alpha[..., 0]


def jvp(
    q: Any, k: Any, v: Any, uq: Any, uk: Any, uv: Any, *, mask: Mask = _BAND, scale: float | None = None
) -> tuple[Float, Float]:
    """to, tlse: the derivatives of o and lse along (uq, uk, uv)."""
    grid = _grid(q, k, mask, scale)
    Q, K, V = grid.rows(q, q), grid.keys(k, k), grid.keys(v, v)
    UQ, UK, UV = grid.rows(uq, q), grid.keys(uk, k), grid.keys(uv, v)
    P, _ = grid.softmax(Q, K)

    F = grid.tangent(Q, K, UQ, UK)
    alpha = np.sum(P * F, axis=-1, keepdims=True)
    return (P * (F - alpha)) @ V + P @ UV, alpha[..., 0]
