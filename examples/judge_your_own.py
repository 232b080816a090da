"""Judge a double backward written by hand with `flashbob check --input`.

Two versions of the same thing are written to files with the tensors they were computed from: one right, one that
forgets that the softmax normaliser moves too, the mistake that is easiest to make. The command passes the first and
fails the second.

    python examples/judge_your_own.py
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

DATA = Path(__file__).resolve().parent.parent / "tests" / "data" / "minilm_attention.npz"


def T(x: np.ndarray) -> np.ndarray:
    return x.swapaxes(-1, -2)


def my_double_backward(x: dict[str, np.ndarray], normaliser_moves: bool) -> dict[str, np.ndarray]:
    """Dense and in float32: gq, gk, gv, gdo."""
    q, k, v, do, uq, uk, uv = (x[name].astype(np.float32) for name in ("q", "k", "v", "do", "uq", "uk", "uv"))
    tau = np.float32(q.shape[-1] ** -0.5)
    s = tau * (q @ T(k))
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    f = tau * (uq @ T(k) + q @ T(uk))
    if normaliser_moves:
        f -= (p * f).sum(-1, keepdims=True)
    dp = do @ T(v)
    x_centred = dp - (p * dp).sum(-1, keepdims=True)
    gdo = (p * f) @ v + p @ uv
    w = p * (f * x_centred + do @ T(uv) - (do * gdo).sum(-1, keepdims=True))
    ds = p * x_centred
    return {
        "gq": tau * (w @ k + ds @ uk),
        "gk": tau * (T(w) @ q + T(ds) @ uq),
        "gv": (p * f).mT @ do,
        "gdo": gdo,
    }


def main() -> None:
    with np.load(DATA) as file:
        tensors = {name: file[name] for name in file.files}
    with tempfile.TemporaryDirectory() as folder:
        for normaliser_moves, expected in ((True, 0), (False, 1)):
            print(f"{'the right version' if normaliser_moves else 'a forgotten term'}:", flush=True)
            path = Path(folder) / "candidate.npz"
            results = my_double_backward(tensors, normaliser_moves)
            np.savez(path, **tensors, **{name: g.astype(np.float16) for name, g in results.items()})
            command = [sys.executable, "-m", "flashbob_cupy", "check", "--device", "cpu", "--input", str(path)]
            code = subprocess.run(command, check=False).returncode
            print(f"exit code {code}\n", flush=True)
            if code != expected:
                raise SystemExit(f"expected exit code {expected}")


if __name__ == "__main__":
    main()
