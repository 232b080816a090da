"""Attention for Hugging Face transformers: `attn_implementation="flashbob"`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from flashbob_cupy.errors import UnsupportedError
from flashbob_cupy.torch.functional import attention

#: Keywords with which models ask for another attention than ours.
_REFUSED = (
    "softcap",
    "position_bias",
    "s_aux",
    "sinks",
    "head_mask",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "indices",
    "block_indices",
    "block_table",
    "output_attentions",
)


#: The names that have been registered.
_names: set[str] = set()


def register_transformers(name: str = "flashbob") -> None:
    """Make `attn_implementation=name` available to transformers models.

    Causal, bidirectional, sliding-window and cross attention, grouped heads and dynamic caches are served. Everything
    else (padding, packed sequences, masks of the user's own, dropout, soft-capped scores, sinks, position biases)
    raises UnsupportedError when the model runs. A padding mask of ones only is no padding; to see that waits for the
    device once per forward pass, so pass no mask where there is no padding.

    Raises:
        ImportError: transformers is not installed, or is older than 5.13.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface, modeling_utils
    except ImportError as error:
        raise ImportError("register_transformers needs transformers 5.13 or later: pip install transformers") from error
    AttentionInterface.register(name, _attention)
    AttentionMaskInterface.register(name, _mask)
    _names.add(name)
    _keep_flash_attention_out(modeling_utils)


def _keep_flash_attention_out(modeling_utils: Any) -> None:
    """transformers takes a name with "flash" in it for a build of FlashAttention, and looks for its functions."""
    load = getattr(modeling_utils, "lazy_import_flash_attention", None)
    if load is None or hasattr(load, "passes_over"):
        return

    def load_unless_ours(implementation: str | None, *arguments: Any, **keywords: Any) -> Any:
        return None if implementation in _names else load(implementation, *arguments, **keywords)

    load_unless_ours.passes_over = _names  # type: ignore[attr-defined]
    modeling_utils.lazy_import_flash_attention = load_unless_ours


def _refuse(what: str) -> UnsupportedError:
    return UnsupportedError(
        f"flashbob cannot honour {what}. Use attn_implementation='sdpa' or 'eager' for this model, or call it without: "
        "sequences of one length need no padding, and dropout is off in eval() or with attention_dropout=0"
    )


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    deterministic: bool | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """One layer: query (B, Hq, M, D), key and value (B, Hkv, N, D) to (B, M, Hq, D)."""
    if attention_mask is not None:
        raise _refuse("an attention mask of the caller's own")
    if dropout:
        raise _refuse(f"attention dropout (here {dropout})")
    for name in _REFUSED:
        value_given = others.get(name)
        if value_given is not None and value_given is not False:
            raise _refuse(f"{name}")
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    window = None if sliding_window is None else (sliding_window - 1, sliding_window - 1)
    o = attention(query, key, value, causal=causal, scale=scaling, window=window, deterministic=bool(deterministic))
    return o.transpose(1, 2).contiguous(), None


def _mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **_: Any,
) -> None:
    """The mask that `_attention` is given: None, after making sure that it will apply the same one by itself.

    transformers says what it wants by a function of indices; `_attention` only hears `is_causal` and `sliding_window`.
    """
    from transformers import masking_utils

    if attention_mask is not None:
        seen = attention_mask[:, kv_offset : kv_offset + kv_length]
        if seen.shape[1] != kv_length or not bool(seen.all()):
            raise _refuse("padding (an attention_mask with zeros)")
    if not (allow_is_causal_skip or allow_is_bidirectional_skip):
        raise _refuse("packed sequences, a custom mask or a static cache")
    bidirectional = mask_function is masking_utils.bidirectional_mask_function
    if bidirectional and local_size is None:
        return
    if q_offset + q_length != kv_offset + kv_length and allow_is_causal_skip:
        raise _refuse(
            f"a cache with room for {kv_offset + kv_length - q_offset - q_length} keys to come (a static cache)"
        )
    if mask_function is masking_utils.causal_mask_function and local_size is None:
        return
    if (
        mask_function is None
        or local_size is None
        or not _is_window(
            mask_function, local_size, allow_is_causal_skip, q_length, kv_length, int(q_offset), int(kv_offset)
        )
    ):
        raise _refuse("a mask that is neither causal nor a sliding window")


def _is_window(
    mask_function: Callable[..., Any], size: int, causal: bool, M: int, N: int, q_offset: int, kv_offset: int
) -> bool:
    """Whether a mask function hides exactly what lies outside a sliding window, told from both of its edges."""
    q = torch.arange(M) + q_offset
    zero = torch.zeros_like(q)
    edges = {1 - size: True, -size: False, 1: False} if causal else {}
    if not causal:
        edges = {-size: True, size: True, -size - 1: False, size + 1: False}
    edges[0] = True
    for distance, visible in edges.items():
        kv = q + distance
        inside = (kv >= kv_offset) & (kv < kv_offset + N)
        found = torch.as_tensor(mask_function(zero, zero, q, kv)).expand(M)
        if bool((found != visible)[inside].any()):
            return False
    return True
