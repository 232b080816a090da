"""Attention for JAX that can be differentiated twice, in every way that JAX can.

    from flashbob_cupy.jax import attention

    o = attention(q, k, v, causal=True)

It works under jit, grad, jvp, vmap, hessian and their compositions, on a CPU and on NVIDIA GPUs.
"""

from flashbob_cupy.jax.attention import attention

__all__ = ["attention"]
