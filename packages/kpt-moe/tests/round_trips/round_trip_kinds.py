"""The models that make the round trips: every way in which KPT serves a model of transformers, in tiny."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import kpt_moe.transformers  # noqa: F401  registers the implementation
from conversion_models import PROMPT
from families import FAMILIES
from kpt_moe.conversion import to_kpt_layers, upcycle


def original(family: str) -> PreTrainedModel:
    """The model as transformers has it."""
    return FAMILIES[family].build()


def served(family: str) -> PreTrainedModel:
    """With `experts_implementation="kpt"`."""
    model = original(family)
    model.set_experts_implementation("kpt")
    return model


def converted(family: str) -> Any:
    """By `to_kpt_layers`."""
    return to_kpt_layers(original(family), inplace=True, strict=True)


def dense() -> PreTrainedModel:
    """A dense model with tied embeddings."""
    sizes = {"hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=48, pad_token_id=0, tie_word_embeddings=True, **sizes)
    return LlamaForCausalLM(config).eval()


def upcycled(family: str = "llama") -> Any:
    """A dense model, of which one layer was made sparse, with a shared expert and a correction bias."""
    options: dict[str, Any] = {"layers": [1], "shared": True, "router_options": {"correction_bias": True}}
    model = upcycle(dense(), 4, 2, noise=0.5, **options, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):
                buffer.copy_(torch.linspace(-0.3, 0.3, len(buffer)))
    return model


#: Every kind with its families: one plain, one with a correction bias and shared experts, one with weighed ones.
MODELS: dict[str, tuple[Callable[[str], Any], str]] = {
    "served mixtral": (served, "mixtral"),
    "served qwen3_moe": (served, "qwen3_moe"),
    "served deepseek_v3": (served, "deepseek_v3"),
    "converted mixtral": (converted, "mixtral"),
    "converted qwen3_moe": (converted, "qwen3_moe"),
    "converted qwen2_moe": (converted, "qwen2_moe"),
    "converted deepseek_v3": (converted, "deepseek_v3"),
    "upcycled llama": (upcycled, "llama"),
}


def build(name: str) -> Any:
    """A model of `MODELS`, the same numbers every time."""
    make, family = MODELS[name]
    return make(family)


def other(name: str) -> Any:
    """The same model with other numbers in every tensor that a checkpoint must bring."""
    model = build(name)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.zero_()
    return model


def logits(model: nn.Module) -> Tensor:
    """Of a fixed prompt, outside of training."""
    with torch.no_grad():
        out: Tensor = model.eval()(PROMPT).logits
    return out
