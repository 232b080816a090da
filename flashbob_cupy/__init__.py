"""Exact attention, its gradient and its double backward, for arrays of any framework.

`forward`, `backward`, `bob` and `jvp` take and return arrays of torch, JAX, CuPy, NumPy or any other library with
DLPack, on a GPU or on the CPU, and never store a matrix of queries times keys.
"""

from flashbob_cupy.errors import CompileError, UnsupportedError
from flashbob_cupy.ops import BackwardResult, BobResult, ForwardResult, JvpResult, backward, bob, forward, jvp

__version__ = "0.1.0"

__all__ = [
    "BackwardResult",
    "BobResult",
    "CompileError",
    "ForwardResult",
    "JvpResult",
    "UnsupportedError",
    "__version__",
    "backward",
    "bob",
    "forward",
    "jvp",
]
