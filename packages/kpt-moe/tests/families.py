"""Mixture-of-Experts models of transformers, each built tiny from its own configuration."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

VOCABULARY = 48

#: What the configurations have in common; a family's own values come on top.
_TINY: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LOCAL_EXPERTS: dict[str, Any] = {"num_local_experts": 6}
_ROUTED_EXPERTS: dict[str, Any] = {"n_routed_experts": 8, "moe_intermediate_size": 24, "n_shared_experts": 1}
_NUM_EXPERTS: dict[str, Any] = {"num_experts": 6, "moe_intermediate_size": 24}
_LATENT_ATTENTION: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
}


@dataclass(frozen=True, kw_only=True)
class Family:
    """One architecture.

    Attributes:
        model: name of the model class in transformers.
        config: name of its configuration, of its text configuration if it has several.
        values: what differs from the common tiny sizes.
        served_by: the op that must serve its experts.
        experts: how many experts modules the model has.
        outer: name of the configuration that holds the text configuration, where the model has one.
        around: what else that configuration takes.
    """

    model: str
    config: str
    values: Mapping[str, Any]
    served_by: str = "moe.experts"
    experts: int = 2
    outer: str | None = None
    around: Mapping[str, Any] = field(default_factory=dict)

    def build(self) -> PreTrainedModel:
        """A float32 model whose parameters are large enough for its experts to matter."""
        config = getattr(transformers, self.config)(**{**_TINY, **self.values})
        if self.outer is not None:
            config = getattr(transformers, self.outer)(text_config=config, **self.around)
        torch.manual_seed(0)
        model: PreTrainedModel = getattr(transformers, self.model)._from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                deviation = 0.1 if parameter.dim() < 2 else 1.5 * parameter.shape[-1] ** -0.5
                parameter.add_(torch.randn_like(parameter), alpha=deviation)
        return model.train(False)


def experts_of(model: torch.nn.Module) -> list[Any]:
    """The modules whose class transformers' `use_experts_implementation` decorates."""
    return [module for module in model.modules() if hasattr(module, "has_post_expert_norm")]


FAMILIES: dict[str, Family] = {
    "mixtral": Family(model="MixtralForCausalLM", config="MixtralConfig", values=_LOCAL_EXPERTS),
    "qwen2_moe": Family(
        model="Qwen2MoeForCausalLM",
        config="Qwen2MoeConfig",
        values={**_NUM_EXPERTS, "shared_expert_intermediate_size": 16},
    ),
    "qwen3_moe": Family(model="Qwen3MoeForCausalLM", config="Qwen3MoeConfig", values={**_NUM_EXPERTS, "head_dim": 8}),
    "olmoe": Family(model="OlmoeForCausalLM", config="OlmoeConfig", values={"num_experts": 6}),
    "deepseek_v3": Family(
        model="DeepseekV3ForCausalLM",
        config="DeepseekV3Config",
        values={**_ROUTED_EXPERTS, **_LATENT_ATTENTION, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1},
        experts=1,
    ),
    "gpt_oss": Family(
        model="GptOssForCausalLM",
        config="GptOssConfig",
        values={**_LOCAL_EXPERTS, "head_dim": 8, "swiglu_limit": 1.5},
    ),
    "granitemoe": Family(model="GraniteMoeForCausalLM", config="GraniteMoeConfig", values=_LOCAL_EXPERTS),
    "ernie4_5_moe": Family(
        model="Ernie4_5_MoeForCausalLM",
        config="Ernie4_5_MoeConfig",
        values={"moe_num_experts": 6, "moe_k": 3, "moe_intermediate_size": 24, "moe_num_shared_experts": 1},
        experts=1,
    ),
    "glm4_moe": Family(
        model="Glm4MoeForCausalLM", config="Glm4MoeConfig", values={**_ROUTED_EXPERTS, "head_dim": 8}, experts=1
    ),
    "nemotron_h": Family(
        model="NemotronHForCausalLM",
        config="NemotronHConfig",
        values={
            **_ROUTED_EXPERTS,
            "layers_block_type": ["mamba", "moe", "attention", "moe"],
            "moe_shared_expert_intermediate_size": 16,
            "head_dim": 8,
            "ssm_state_size": 4,
            "mamba_num_heads": 4,
            "mamba_head_dim": 8,
            "n_groups": 2,
            "chunk_size": 8,
        },
    ),
    "muse_spark": Family(
        model="MuseSparkForConditionalGeneration",
        config="MuseSparkTextConfig",
        values={**_LOCAL_EXPERTS, "moe_intermediate_size": 24, "moe_hidden_size": 16, "head_dim": 8},
        served_by="moe.grouped_mm",
        outer="MuseSparkConfig",
        around={
            "vision_config": {
                "num_hidden_layers": 1,
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_attention_heads": 2,
                "patch_size": 4,
            },
            "audio_config": {
                "patch_sizes": (2, 2),
                "hidden_sizes": (8, 8),
                "depths": (1, 1),
                "num_hidden_layers": 2,
                "out_hidden_size": 32,
            },
            "out_hidden_size": 32,
            "projector_hidden_size": 16,
        },
    ),
    "deepseek_v4": Family(
        model="DeepseekV4ForCausalLM",
        config="DeepseekV4Config",
        values={
            **_ROUTED_EXPERTS,
            "mlp_layer_types": ["moe", "moe"],
            "num_key_value_heads": 1,
            "head_dim": 16,
            "q_lora_rank": 8,
            "o_groups": 2,
            "o_lora_rank": 8,
            "index_n_heads": 2,
            "index_head_dim": 8,
            "index_topk": 4,
            "swiglu_limit": 1.5,
        },
    ),
    "minimax_m3_vl": Family(
        model="MiniMaxM3VLForCausalLM",
        config="MiniMaxM3VLTextConfig",
        values={
            **_LOCAL_EXPERTS,
            "head_dim": 8,
            "rotary_dim": 4,
            "dense_intermediate_size": 24,
            "shared_intermediate_size": 16,
            "index_n_heads": 2,
            "index_head_dim": 8,
            "swiglu_limit": 1.5,
        },
    ),
    "inkling2": Family(
        model="Inkling2ForCausalLM",
        config="Inkling2TextConfig",
        values={
            **_ROUTED_EXPERTS,
            "unpadded_vocab_size": VOCABULARY,
            "head_dim": 8,
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 2,
            "swa_head_dim": 8,
            "d_rel": 4,
            "rel_extent": 16,
        },
        served_by="moe.grouped_mm",
    ),
    "aria": Family(
        model="AriaTextForCausalLM",
        config="AriaTextConfig",
        values={"moe_num_experts": 6, "moe_topk": 3, "moe_num_shared_experts": 1},
    ),
    "phimoe": Family(
        model="PhimoeForCausalLM", config="PhimoeConfig", values={**_LOCAL_EXPERTS, "num_experts_per_tok": 2}
    ),
    "qwen3_next": Family(
        model="Qwen3NextForCausalLM",
        config="Qwen3NextConfig",
        values={
            **_NUM_EXPERTS,
            "shared_expert_intermediate_size": 16,
            "head_dim": 8,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
    "jamba": Family(
        model="JambaForCausalLM",
        config="JambaConfig",
        values={
            "num_experts": 6,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "mamba_d_state": 4,
            "mamba_dt_rank": 4,
        },
        experts=1,
    ),
    "lfm2_moe": Family(
        model="Lfm2MoeForCausalLM",
        config="Lfm2MoeConfig",
        values={**_NUM_EXPERTS, "num_dense_layers": 0, "layer_types": ["conv", "full_attention"]},
    ),
    "gemma4": Family(
        model="Gemma4ForCausalLM",
        config="Gemma4TextConfig",
        values={
            **_NUM_EXPERTS,
            "top_k_experts": 3,
            "enable_moe_block": True,
            "head_dim": 8,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": VOCABULARY,
        },
    ),
}
