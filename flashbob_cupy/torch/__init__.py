"""Attention for PyTorch that can be differentiated twice, in every way that PyTorch can.

    from flashbob_cupy.torch import attention

    o = attention(q, k, v, causal=True)

`install` puts it behind `torch.nn.functional.scaled_dot_product_attention`, `register_transformers` behind
`attn_implementation="flashbob"` of Hugging Face models.
"""

from flashbob_cupy.torch.functional import attention
from flashbob_cupy.torch.sdpa import install, installed, uninstall
from flashbob_cupy.torch.transformers import register_transformers

__all__ = ["attention", "install", "installed", "register_transformers", "uninstall"]
