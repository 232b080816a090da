"""The sharpest curvature of an attention layer, by power iteration with Hessian-vector products.

f(q, k, v) = ⟨do, attention(q, k, v)⟩ is how a loss sees the layer to first order. Its Hessian is never formed: `bob`
multiplies it with a vector, and two such products certify the symmetry that makes power iteration work. The tensors
are those of a layer of a real sentence encoder.

    python examples/curvature.py
"""

import math
from pathlib import Path

import numpy as np

import flashbob_cupy as fb

DATA = Path(__file__).resolve().parent.parent / "tests" / "data" / "minilm_attention.npz"
Triple = tuple[np.ndarray, np.ndarray, np.ndarray]


def dot(a: Triple, b: Triple) -> float:
    return sum(float(np.vdot(x, y)) for x, y in zip(a, b, strict=True))


def main() -> None:
    with np.load(DATA) as file:
        q, k, v, do = (file[name].astype(np.float32) for name in ("q", "k", "v", "do"))
    o, lse = fb.forward(q, k, v)

    def hessian(u: Triple) -> Triple:
        gq, gk, gv, _ = fb.bob(q, k, v, do, *u, o, lse)
        return gq, gk, gv

    rng = np.random.default_rng(0)
    u, w = (tuple(rng.standard_normal(x.shape, dtype=np.float32) for x in (q, k, v)) for _ in range(2))
    left, right = dot(w, hessian(u)), dot(u, hessian(w))
    print(f"symmetry: <w, H u> = {left:.5f}, <u, H w> = {right:.5f}")
    if not np.isclose(left, right, rtol=1e-3):
        raise SystemExit("the Hessian-vector product is not symmetric")

    # Squared, H has no two leading eigenvalues of opposite sign, between which the iteration would swing.
    for iteration in range(1, 31):
        image = hessian(hessian(u))
        size = math.sqrt(dot(image, image))
        curvature = math.sqrt(size / math.sqrt(dot(u, u)))
        u = tuple(x / size for x in image)
        if iteration % 10 == 0:
            print(f"iteration {iteration}: largest |curvature| {curvature:.5f}")


if __name__ == "__main__":
    main()
