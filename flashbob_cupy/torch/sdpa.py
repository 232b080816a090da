"""`torch.nn.functional.scaled_dot_product_attention` served by this package where its arguments allow."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from flashbob_cupy.errors import UnsupportedError
from flashbob_cupy.torch.functional import attention

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_PLAIN = (torch.Tensor, torch.nn.Parameter)

_original: Callable[..., torch.Tensor] | None = None
_strict = False


def install(*, strict: bool = False) -> None:
    """Serve `torch.nn.functional.scaled_dot_product_attention` from here, process-wide, until `uninstall`.

    Calls that this package has no equal for (with `attn_mask`, with `dropout_p` above 0, with shapes that broadcast,
    with tensor subclasses or dtypes it does not know) go to PyTorch's own function, unchanged. `is_causal` keeps
    PyTorch's meaning: aligned at the top left when the lengths differ.

    Code that imported the function by name before keeps the one it imported.

    Args:
        strict: raise UnsupportedError for such calls instead.
    """
    global _original, _strict
    _strict = strict
    if _original is None:
        _original = F.scaled_dot_product_attention
        F.scaled_dot_product_attention = scaled_dot_product_attention


def uninstall() -> None:
    """Undo `install`; without effect when nothing is installed.

    Raises:
        RuntimeError: something else replaced the function since.
    """
    global _original
    if _original is None:
        return
    if F.scaled_dot_product_attention is not scaled_dot_product_attention:
        raise RuntimeError(
            "scaled_dot_product_attention was replaced by something else after install(); undo that replacement first"
        )
    F.scaled_dot_product_attention, _original = _original, None


@contextlib.contextmanager
def installed(*, strict: bool = False) -> Iterator[None]:
    """`install` for the length of a `with` block; leaves what was installed before."""
    before, before_strict = _original is not None, _strict
    install(strict=strict)
    try:
        yield
    finally:
        if before:
            install(strict=before_strict)
        else:
            uninstall()


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """PyTorch's function of this name; see `install`."""
    obstacle = _obstacle(query, key, value, attn_mask, dropout_p, enable_gqa)
    if obstacle is not None:
        if _strict:
            raise UnsupportedError(
                f"flashbob cannot serve this scaled_dot_product_attention: {obstacle}. Without install(strict=True) "
                "PyTorch's own implementation serves it"
            )
        original = F.scaled_dot_product_attention if _original is None else _original
        return original(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    M, N = query.shape[-2], key.shape[-2]
    window = None
    if is_causal and M < N:  # no query sees the keys past the M-th
        key, value = key[..., :M, :], value[..., :M, :]
    elif is_causal and M > N:  # j <= i, where the diagonal at the bottom right is j <= i + N - M
        window, is_causal = (None, M - N), False
    result: torch.Tensor = attention(query, key, value, causal=is_causal, scale=scale, window=window)
    return result


def _obstacle(query: Any, key: Any, value: Any, attn_mask: Any, dropout_p: float, enable_gqa: bool) -> str | None:
    """Why this call is not ours, or None."""
    if attn_mask is not None:
        return "attn_mask is given"
    if dropout_p > 0:
        return f"dropout_p is {dropout_p}"
    for name, x in (("query", query), ("key", key), ("value", value)):
        if type(x) not in _PLAIN or x.layout is not torch.strided:
            return f"{name} is not a plain dense tensor"
        if x.device.type not in ("cpu", "cuda") or x.device != query.device:
            return f"{name} is on {x.device}"
        if x.dtype not in _DTYPES or (x.dtype != query.dtype and not torch.is_autocast_enabled(x.device.type)):
            return f"{name} is {x.dtype}"
        if x.dim() < 3 or x.shape[:-3] != query.shape[:-3] or x.shape[-1] == 0:
            return f"{name} has shape {tuple(x.shape)}"
    if key.shape[-3:-1] != value.shape[-3:-1] or query.shape[-1] != key.shape[-1]:
        return f"query, key and value have shapes {tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}"
    Hq, Hkv = query.shape[-3], key.shape[-3]
    if Hq != Hkv and not (enable_gqa and Hkv and Hq % Hkv == 0):
        return f"query has {Hq} heads and key {Hkv}, with enable_gqa={enable_gqa}"
    return None
