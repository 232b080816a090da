"""Attention written out in PyTorch operators: what autograd makes of it is what the adapter is held to."""

from __future__ import annotations

import math
from typing import Any

import torch


def dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: tuple[int | None, int | None] | None = None,
    layout: str = "bhnd",
    return_lse: bool = False,
) -> Any:
    """The function that `flashbob_cupy.torch.attention` is, for queries that all see a key."""
    if layout == "bnhd":
        q, k, v = (x.transpose(-3, -2) for x in (q, k, v))
    group = q.shape[-3] // k.shape[-3]
    k, v = (x.repeat_interleave(group, -3) for x in (k, v))
    M, N = q.shape[-2], k.shape[-2]
    s = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    left, right = window or (None, None)
    if causal:
        right = 0 if right is None else min(right, 0)
    offset = torch.arange(N) - torch.arange(M)[:, None] - (N - M)
    visible = torch.ones(M, N, dtype=torch.bool)
    if left is not None:
        visible &= offset >= -left
    if right is not None:
        visible &= offset <= right
    s = s.masked_fill(~visible.to(s.device), -math.inf)
    o = s.softmax(-1) @ v
    if layout == "bnhd":
        o = o.transpose(-3, -2)
    return (o, s.logsumexp(-1)) if return_lse else o


def qkv(
    B: int = 2,
    Hq: int = 4,
    Hkv: int = 2,
    M: int = 5,
    N: int = 7,
    D: int = 4,
    Dv: int = 3,
    *,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    leading: tuple[int, ...] = (),
) -> list[torch.Tensor]:
    """Normal q, k and v."""
    random = torch.Generator().manual_seed(seed)
    shapes = ((B, Hq, M, D), (B, Hkv, N, D), (B, Hkv, N, Dv))
    return [torch.randn(*leading, *shape, generator=random, dtype=torch.float64).to(dtype) for shape in shapes]


def like(tensors: list[torch.Tensor], seed: int = 1) -> list[torch.Tensor]:
    """Normal tensors of the same shapes and dtypes."""
    random = torch.Generator().manual_seed(seed)
    return [torch.randn(x.shape, generator=random, dtype=torch.float64).to(x.dtype) for x in tensors]


def leaves(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [x.detach().clone().requires_grad_() for x in tensors]
