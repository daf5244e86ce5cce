"""Tiny random models of many families of transformers, with inputs that run all of their parts."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor, nn

_SIZES = {
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,  # blocks of keys and values have a ragged edge
    "head_dim": 32,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_RAGGED = {"intermediate_size": 200}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_chunk_size": 8}
_LATENT = {
    "num_key_value_heads": 4,
    "head_dim": 16,
    "kv_lora_rank": 128,
    "q_lora_rank": 128,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
}
_ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 128,
    "first_k_dense_replace": 1,
}
_COUNTED = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
_LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
_TOWER = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "head_dim": 32,
    "image_size": 28,
    "patch_size": 14,
}
_QWEN_TOWER = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "depth": 2,
    "num_heads": 4,
    "patch_size": 14,
    "out_hidden_size": 128,
    "fullatt_block_indexes": [1],
    "deepstack_visual_indexes": [0],
    "window_size": 56,
}
_MROPE = {"rope_parameters": {"mrope_section": [4, 6, 6], "rope_type": "default", "rope_theta": 10000.0}}
_IMAGE = 63
#: How many places an image takes in a text: one for each patch, or for 4 that are merged.
_PLACES = {"image in text": 4, "merged image in text": 2, "patches in text": 1}
_OUTPUTS = ("logits", "last_hidden_state", "text_embeds", "image_embeds")


@dataclass(frozen=True)
class Family:
    """Names a class of transformers and what its configuration needs beside the usual sizes.

    `inputs` says which are given; `text` and `vision` are the parts of a configuration that has such; sizes that
    128 does not divide ask for the granularity "tensor"; `experts` tells that there are some, which must be 8-bit.
    """

    model: str
    options: Mapping[str, Any] = field(default_factory=dict)
    inputs: str = "ids"
    text: Mapping[str, Any] | None = None
    vision: Mapping[str, Any] | None = None
    granularity: str = "128x128"
    experts: bool = False

    def made(self) -> nn.Module:
        """Return the model with the same random numbers each time, in biases and norms too."""
        torch.manual_seed(0)
        kind = getattr(transformers, self.model)
        if self.text is None:
            config = kind.config_class(**{**_SIZES, **self.options})
        else:
            parts = {"text_config": {**_SIZES, **self.text}, "vision_config": dict(self.vision or {})}
            config = kind.config_class(**parts, **self.options)
        model: nn.Module = kind(config).eval()
        for tensor in model.state_dict().values():
            if tensor.is_floating_point() and tensor.dim() > 1:
                tensor.normal_(std=0.1)
            elif tensor.is_floating_point():
                tensor.add_(torch.randn_like(tensor), alpha=0.1)
        return model

    def outputs(self, model: nn.Module) -> Tensor:
        """Return what a model computes of the family's inputs, as one row of numbers."""
        with torch.no_grad():
            found = model(**_inputs(self.inputs))
        return torch.cat([found[name].flatten() for name in _OUTPUTS if found.get(name) is not None])


def _inputs(kind: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids, image = torch.arange(1, 12)[None] * 3, torch.randn(1, 3, 28, 28, generator=generator)
    if kind == "ids":
        return {"input_ids": ids}
    if kind == "two texts":
        return {"input_ids": ids, "decoder_input_ids": ids[:, :7]}
    if kind == "speech":
        return {"input_features": torch.randn(1, 8, 32, generator=generator), "decoder_input_ids": ids}
    if kind == "image":
        return {"pixel_values": image}
    if kind == "image and text":
        return {"input_ids": ids, "pixel_values": image}
    placed = torch.cat([ids[:, :2], torch.full((1, _PLACES[kind]), _IMAGE), ids[:, 2:]], 1)
    if kind == "image in text":
        return {"input_ids": placed, "pixel_values": image}
    if kind == "merged image in text":
        wide = torch.cat([image, -image], 3)
        return {"input_ids": placed, "pixel_values": wide, "image_sizes": torch.tensor([[28, 56]])}
    patches = torch.randn(4, 3 * 2 * 14 * 14, generator=generator)
    told = {"image_grid_thw": torch.tensor([[1, 2, 2]]), "mm_token_type_ids": (placed == _IMAGE).int()}
    return {"input_ids": placed, "pixel_values": patches, **told}


FAMILIES = {
    "Llama": Family("LlamaForCausalLM"),
    "Mistral": Family("MistralForCausalLM", {"hidden_size": 64, "head_dim": 16}, granularity="tensor"),
    "Qwen2": Family("Qwen2ForCausalLM", _RAGGED, granularity="tensor"),
    "Qwen3": Family("Qwen3ForCausalLM"),
    "Gemma2": Family("Gemma2ForCausalLM"),
    "Gemma3": Family("Gemma3ForCausalLM"),
    "Phi3": Family("Phi3ForCausalLM"),
    "OLMo2": Family("Olmo2ForCausalLM"),
    "Granite": Family("GraniteForCausalLM"),
    "Cohere2": Family("Cohere2ForCausalLM"),
    "GLM4": Family("Glm4ForCausalLM"),
    "SmolLM3": Family("SmolLM3ForCausalLM"),
    "StableLM": Family("StableLmForCausalLM"),
    "Starcoder2": Family("Starcoder2ForCausalLM"),
    "Falcon-H1": Family("FalconH1ForCausalLM", {**_MAMBA, "mamba_d_ssm": 256}),
    "Bamba": Family("BambaForCausalLM", {**_MAMBA, "attn_layer_indices": [1]}),
    "Mamba": Family("MambaForCausalLM", {"state_size": 16, "time_step_rank": 128}),
    "Mamba2": Family("Mamba2ForCausalLM", {"num_heads": 8, "n_groups": 1, "state_size": 16, "chunk_size": 8}),
    "BERT": Family("BertForMaskedLM", _RAGGED, granularity="tensor"),
    "RoBERTa": Family("RobertaForMaskedLM"),
    "ModernBERT": Family("ModernBertForMaskedLM"),
    "T5": Family(
        "T5ForConditionalGeneration", {"d_model": 128, "d_kv": 32, "d_ff": 200, "num_layers": 2, "num_heads": 4},
        "two texts", granularity="tensor",
    ),
    "BART": Family(
        "BartForConditionalGeneration",
        {
            "d_model": 128, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 256, "decoder_ffn_dim": 256,
            "encoder_attention_heads": 4, "decoder_attention_heads": 4,
        },
        "two texts",
    ),
    "Whisper": Family(
        "WhisperForConditionalGeneration",
        {
            "d_model": 128, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 256, "decoder_ffn_dim": 256,
            "encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_mel_bins": 8, "max_source_positions": 16,
            "max_target_positions": 64, "decoder_start_token_id": 1,
        },
        "speech",
    ),
    "ViT": Family("ViTModel", _TOWER, "image"),
    "CLIP": Family("CLIPModel", {"projection_dim": 64}, "image and text", {}, _TOWER),
    "LLaVA": Family(
        "LlavaForConditionalGeneration", {"image_token_id": _IMAGE}, "image in text", {"model_type": "llama"},
        {"model_type": "clip_vision_model", **_TOWER},
    ),
    "Mistral3": Family(
        "Mistral3ForConditionalGeneration", {"image_token_id": _IMAGE}, "merged image in text",
        {"model_type": "mistral"}, {"model_type": "pixtral", **_TOWER, "image_size": 56},
    ),
    "Qwen2.5-VL": Family(
        "Qwen2_5_VLForConditionalGeneration", {"image_token_id": _IMAGE}, "patches in text", _MROPE, _QWEN_TOWER
    ),
    "Qwen3-VL": Family(
        "Qwen3VLForConditionalGeneration", {"image_token_id": _IMAGE}, "patches in text", _MROPE, _QWEN_TOWER
    ),
    "Mixtral": Family("MixtralForCausalLM", _LOCAL, experts=True),
    "Qwen2-MoE": Family("Qwen2MoeForCausalLM", {**_COUNTED, "shared_expert_intermediate_size": 128}, experts=True),
    "Qwen3-MoE": Family("Qwen3MoeForCausalLM", _COUNTED, experts=True),
    "Qwen3-Next": Family(
        "Qwen3NextForCausalLM",
        {
            **_COUNTED, "shared_expert_intermediate_size": 128, "layer_types": ["linear_attention", "full_attention"],
            "linear_key_head_dim": 16, "linear_value_head_dim": 32, "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
        },
        experts=True,
    ),
    "OLMoE": Family(
        "OlmoeForCausalLM", {"num_experts": 4, "num_experts_per_tok": 2, **_RAGGED}, granularity="tensor", experts=True
    ),
    "DeepSeek-V2": Family("DeepseekV2ForCausalLM", {**_LATENT, **_ROUTED}, experts=True),
    "DeepSeek-V3": Family("DeepseekV3ForCausalLM", {**_LATENT, **_ROUTED}, experts=True),
    "GLM4-MoE": Family("Glm4MoeForCausalLM", _ROUTED, experts=True),
    "Ernie4.5-MoE": Family(
        "Ernie4_5_MoeForCausalLM", {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 128}, experts=True
    ),
    "Jamba": Family(
        "JambaForCausalLM",
        {
            "num_experts": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 128,
            "use_mamba_kernels": False,
        },
        experts=True,
    ),
    "PhiMoE": Family("PhimoeForCausalLM", {**_LOCAL, **_RAGGED}, granularity="tensor", experts=True),
    "GraniteMoe": Family("GraniteMoeForCausalLM", _LOCAL, experts=True),
    "GraniteMoeHybrid": Family(
        "GraniteMoeHybridForCausalLM",
        {**_MAMBA, **_LOCAL, "shared_intermediate_size": 128, "layer_types": ["mamba", "attention"]},
        experts=True,
    ),
    "gpt-oss": Family("GptOssForCausalLM", _LOCAL, experts=True),
    "Llama4": Family("Llama4ForCausalLM", {**_LOCAL, "intermediate_size_mlp": 256, "moe_layers": [1]}, experts=True),
    "Qwen3.5-MoE": Family(
        "Qwen3_5MoeForCausalLM",
        {
            **_COUNTED, "shared_expert_intermediate_size": 128, "layer_types": ["linear_attention", "full_attention"],
            "linear_key_head_dim": 32, "linear_value_head_dim": 32, "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
        },
        experts=True,
    ),
    "Qwen3-VL-MoE": Family(
        "Qwen3VLMoeForConditionalGeneration", {"image_token_id": _IMAGE}, "patches in text", {**_MROPE, **_COUNTED},
        _QWEN_TOWER, experts=True,
    ),
    "Nemotron-H": Family(
        "NemotronHForCausalLM",
        {
            **_ROUTED, "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
            "num_hidden_layers": 4, "mamba_num_heads": 8, "mamba_head_dim": 32, "ssm_state_size": 16, "n_groups": 1,
            "chunk_size": 8, "moe_shared_expert_intermediate_size": 128, "use_mamba_kernels": False,
        },
        experts=True,
    ),
    "Hunyuan-V1-MoE": Family("HunYuanMoEV1ForCausalLM", {"num_experts": 4, "moe_topk": 2}, experts=True),
    "MiniMax": Family("MiniMaxForCausalLM", {**_LOCAL, "block_size": 8}, experts=True),
    "MiniMax-M2": Family("MiniMaxM2ForCausalLM", _LOCAL, experts=True),
    "Kimi-Linear": Family(
        "KimiLinearForCausalLM",
        {**_LATENT, **_ROUTED, **_COUNTED, "layer_types": ["full_attention", "full_attention"]}, experts=True,
    ),
    "LongCat-Flash": Family(
        "LongcatFlashForCausalLM",
        {
            **_LATENT, "num_layers": 1, "n_routed_experts": 4, "zero_expert_num": 2, "moe_topk": 2,
            "expert_ffn_hidden_size": 128, "ffn_hidden_size": 256,
        },
        experts=True,
    ),
    "Gemma4-MoE": Family(
        "Gemma4ForCausalLM",
        {
            "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 128,
            "layer_types": ["sliding_attention", "full_attention"], "global_head_dim": 32, "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 64,
        },
        experts=True,
    ),
    "LFM2-MoE": Family(
        "Lfm2MoeForCausalLM", {**_COUNTED, "num_dense_layers": 1, "layer_types": ["conv", "full_attention"]},
        experts=True,
    ),
    "Aria": Family(
        "AriaTextForCausalLM", {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1}, experts=True
    ),
    "DBRX": Family(
        "DbrxForCausalLM",
        {
            "d_model": 128, "n_heads": 4, "n_layers": 2, "max_seq_len": 64,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
            "ffn_config": {"hidden_size": 128, "ffn_hidden_size": 256, "moe_num_experts": 4, "moe_top_k": 2},
        },
        experts=True,
    ),
    "JetMoe": Family("JetMoeForCausalLM", {**_LOCAL, "num_key_value_heads": 2, "kv_channels": 32}, experts=True),
}  # fmt: skip
