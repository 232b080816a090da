"""A gradient penalty through attention, with plain arrays.

The penalty R(q, k, v) = (|dq|² + |dk|² + |dv|²) / 2, where dq, dk, dv is the gradient of ⟨do, attention(q, k, v)⟩, is
what WGAN-GP, Lipschitz regularisation and sharpness penalties add to a loss. Its gradient needs the double backward:
`bob` along (dq, dk, dv). The tensors are those of a layer of a real sentence encoder.

    python examples/gradient_penalty.py
"""

from pathlib import Path

import numpy as np

import flashbob_cupy as fb

DATA = Path(__file__).resolve().parent.parent / "tests" / "data" / "minilm_attention.npz"


def penalty(q: np.ndarray, k: np.ndarray, v: np.ndarray, do: np.ndarray) -> float:
    """R, from the forward and the first backward alone."""
    o, lse = fb.forward(q, k, v)
    return sum(float(np.vdot(g, g)) for g in fb.backward(q, k, v, do, o, lse)) / 2


def penalty_gradient(q: np.ndarray, k: np.ndarray, v: np.ndarray, do: np.ndarray) -> fb.BobResult:
    """The gradient of R with respect to q, k, v and do."""
    o, lse = fb.forward(q, k, v)
    dq, dk, dv = fb.backward(q, k, v, do, o, lse)
    return fb.bob(q, k, v, do, dq, dk, dv, o, lse)


def main() -> None:
    with np.load(DATA) as file:
        q, k, v, do = (file[name].astype(np.float64) for name in ("q", "k", "v", "do"))

    gq, gk, gv, _ = penalty_gradient(q, k, v, do)

    # A step down the gradient must lower the penalty at the rate the gradient promises.
    step = 1e-4
    before = penalty(q, k, v, do)
    promised = -step * sum(float(np.vdot(g, g)) for g in (gq, gk, gv))
    found = (
        penalty(q - step * gq, k - step * gk, v - step * gv, do)
        - penalty(q + step * gq, k + step * gk, v + step * gv, do)
    ) / 2
    print(f"penalty                       {before:.6f}")
    print(f"change promised by gradient   {promised:.6e}")
    print(f"change found by central steps {found:.6e}")
    if not np.isclose(promised, found, rtol=1e-5):
        raise SystemExit("the gradient does not describe the penalty")


if __name__ == "__main__":
    main()
