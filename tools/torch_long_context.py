"""A Hessian-vector product of a Hugging Face language model at a length where eager attention runs out of memory.

    python tools/torch_long_context.py [--tokens 8192] [--layers 8]

The model is a Llama with grouped heads and random weights, the text is the bytes of this repository's pages. At a short
length, the products of both implementations are compared in float32 against eager float64. At the long one each runs in
bfloat16 and its time and peak memory, or its running out of memory, are reported. Prints one JSON document; the exit
code is 1 if the products disagree or this library fails at the long length.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers

from flashbob_cupy.hvp import hvp
from flashbob_cupy.torch import register_transformers

ROOT = Path(__file__).resolve().parent.parent


def tokens(length: int) -> torch.Tensor:
    pages = b"".join(page.read_bytes() for page in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]))
    text = pages * (length // len(pages) + 1)
    return torch.tensor(list(text[:length]), device="cuda")[None]


def model(implementation: str, dtype: torch.dtype, layers: int) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=2048,
        intermediate_size=4096,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=1 << 20,
        use_cache=False,
        attn_implementation=implementation,
    )
    return transformers.LlamaForCausalLM(config).to("cuda", dtype)


def product(net: Any, text: torch.Tensor) -> tuple[float, dict[str, torch.Tensor]]:
    torch.manual_seed(1)
    value, products = hvp(
        lambda net: net(input_ids=text, labels=text).loss,
        net,
        lambda p: torch.randn(p.shape, device="cuda").to(p.dtype),
    )
    return float(value), products


def compare() -> dict[str, float]:
    text, found = tokens(512), {}
    for name, implementation, dtype in (
        ("truth", "eager", torch.float64),
        ("eager", "eager", torch.float32),
        ("flashbob", "flashbob", torch.float32),
    ):
        _, products = product(model(implementation, dtype, layers=2), text)
        found[name] = torch.cat([p.double().flatten() for p in products.values()])
    size = found["truth"].norm()
    return {name: float((found[name] - found["truth"]).norm() / size) for name in ("eager", "flashbob")}


def measure(implementation: str, length: int, layers: int) -> dict[str, Any]:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    net, text = model(implementation, torch.bfloat16, layers), tokens(length)
    try:
        product(net, text)  # compiles kernels
        torch.cuda.synchronize()
        start = time.perf_counter()
        value, products = product(net, text)
        norm = float(sum(p.float().square().sum() for p in products.values()) ** 0.5)
        seconds = time.perf_counter() - start
    except torch.cuda.OutOfMemoryError:
        return {"out_of_memory": True, "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2)}
    peak = torch.cuda.max_memory_allocated() / 2**30
    return {"loss": value, "norm": norm, "seconds": round(seconds, 3), "peak_gib": round(peak, 2)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--layers", type=int, default=8)
    arguments = parser.parse_args()
    register_transformers()
    errors = compare()
    agree = errors["flashbob"] <= 2 * errors["eager"] + torch.finfo(torch.float32).eps
    runs = {name: measure(name, arguments.tokens, arguments.layers) for name in ("flashbob", "eager")}
    served = runs["flashbob"].get("norm", float("nan"))
    json.dump(
        {
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "tokens": arguments.tokens,
            "layers": arguments.layers,
            "relative_errors_at_512_tokens": errors,
            "agree": agree,
            **runs,
        },
        sys.stdout,
        indent=2,
    )
    print()
    return 0 if agree and served == served and served > 0 else 1


if __name__ == "__main__":
    raise SystemExit(main())
