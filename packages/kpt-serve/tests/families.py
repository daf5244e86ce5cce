"""Tiny models of transformers' families, with KPT's experts and attention."""

from typing import Any

from torch import nn

_COMMON = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2}
#: By transformers' name of the family, what its configuration has beside the sizes that all have.
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen3": {"head_dim": 16},
    "Qwen3Moe": {"head_dim": 16, "moe_intermediate_size": 32, **_MOE},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Gemma2": {"head_dim": 16, "sliding_window": 8},
    "Gemma3": {"head_dim": 16, "sliding_window": 8},
    "Olmoe": _MOE,
    "GptOss": {"head_dim": 16, "sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    "DeepseekV3": {
        "num_key_value_heads": 4,
        "moe_intermediate_size": 32,
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
    },
}


def make(family: str) -> nn.Module:
    """Return a tiny model with random weights whose attention KPT runs, and whose experts if it has any."""
    import transformers

    import kpt_attention.transformers  # noqa: F401  registers
    import kpt_moe.transformers  # noqa: F401
    from kpt_moe.rewrites import is_transformers_experts

    names = {"Gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM")}
    config, model = names.get(family, (f"{family}Config", f"{family}ForCausalLM"))
    made = getattr(transformers, model)(getattr(transformers, config)(**{**_COMMON, **FAMILIES[family]})).eval()
    if any(map(is_transformers_experts, made.modules())):
        made.set_experts_implementation("kpt")
    made.set_attn_implementation("kpt")
    return made
