"""Sophia-H on a small character model: a second-order optimiser through attention, in PyTorch.

Every tenth step the diagonal of the Hessian is estimated by one Hessian-vector product with random signs (Hutchinson),
which differentiates attention twice. The text is the closing paragraph of Darwin's On the Origin of Species.

    python examples/torch_sophia.py
"""

import torch
from torch import nn

from flashbob_cupy.hvp import hvp
from flashbob_cupy.torch import attention

TEXT = (
    "It is interesting to contemplate an entangled bank, clothed with many plants of many kinds, with birds singing on "
    "the bushes, with various insects flitting about, and with worms crawling through the damp earth, and to reflect "
    "that these elaborately constructed forms, so different from each other, and dependent on each other in so complex "
    "a manner, have all been produced by laws acting around us. These laws, taken in the largest sense, being Growth "
    "with Reproduction; Inheritance which is almost implied by reproduction; Variability from the indirect and direct "
    "action of the external conditions of life, and from use and disuse; a Ratio of Increase so high as to lead to a "
    "Struggle for Life, and as a consequence to Natural Selection, entailing Divergence of Character and the "
    "Extinction of less-improved forms."
)
WIDTH, HEADS, KEY_HEADS, LENGTH = 64, 4, 2, 128


class Model(nn.Module):
    """One block with grouped heads."""

    def __init__(self, letters: int) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(letters, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.q, self.kv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH * KEY_HEADS // HEADS)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, letters))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.letters(tokens) + self.places.weight
        q = self.q(x).unflatten(-1, (HEADS, -1))
        k, v = (t.unflatten(-1, (KEY_HEADS, -1)) for t in self.kv(x).chunk(2, -1))
        x = x + self.out(attention(q, k, v, causal=True, layout="bnhd").flatten(2))
        return self.head(x + self.mlp(x))


def main() -> None:
    torch.manual_seed(0)
    alphabet = sorted(set(TEXT))
    text = torch.tensor([alphabet.index(letter) for letter in TEXT])
    model = Model(len(alphabet))
    parameters = dict(model.named_parameters())
    momentum = {name: torch.zeros_like(p) for name, p in parameters.items()}
    diagonal = {name: torch.zeros_like(p) for name, p in parameters.items()}

    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        starts = torch.randint(len(text) - LENGTH, (4, 1))
        window = text[starts + torch.arange(LENGTH + 1)]
        return window[:, :-1], window[:, 1:]

    losses = []
    for step in range(41):
        tokens, following = batch()

        def loss(model: nn.Module, tokens: torch.Tensor = tokens, following: torch.Tensor = following) -> torch.Tensor:
            return nn.functional.cross_entropy(model(tokens).flatten(0, 1), following.flatten())

        value = loss(model)
        losses.append(value.item())
        gradients = torch.autograd.grad(value, list(parameters.values()))
        if step % 10 == 0:
            signs = {name: torch.randn_like(p).sign() for name, p in parameters.items()}
            _, product = hvp(loss, model, signs)
            for name, u in signs.items():
                diagonal[name].lerp_(u * product[name], 0.1 if step else 1.0)
            trace = sum(d.sum().item() for d in diagonal.values())
            print(f"step {step:2}: loss {losses[-1]:.3f}, trace of the Hessian about {trace:.1f}")
        with torch.no_grad():
            for (name, p), g in zip(parameters.items(), gradients, strict=True):
                momentum[name].lerp_(g, 0.1)
                p -= 3e-3 * (momentum[name] / (0.05 * diagonal[name]).clamp_min(1e-12)).clamp(-1, 1)
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    if not losses[-1] < losses[0] - 0.5:
        raise SystemExit("the optimiser did not make progress")


if __name__ == "__main__":
    main()
