"""Make tiny models of transformers' classes, and inputs for them, by the names of settings and arguments alone."""

import inspect
import re
from typing import Any

import torch
import transformers
from torch import Tensor, nn

#: More parameters than so many are no tiny model: the settings were not understood.
MOST_PARAMETERS = 30_000_000
VOCABULARY, TOKENS, BATCH = 128, 14, 2
_SIDE, _PATCH = 32, 8
#: The first pattern that fits a setting's name says what it becomes; None leaves it.
_SETTINGS: tuple[tuple[str, Any], ...] = (
    (r"chunk_size_.*|pretraining_tp|.*channels|num_labels|.*loss.*|.*cost|mask_(time|feature)_.*", None),
    (r".*vocab_size|vocab_size_.*|vocabulary_size", VOCABULARY),
    (r".*token_ids?|.*token_index|.*_token_id_.*", "token"),
    (r"rotary_dim|partial_rotary_.*|type_vocab_size|spatial_merge_size|temporal_patch_size", None),
    (r"qk_rope_head_dim|index_head_dim|index_topk|qk_nope_head_dim|v_head_dim|qk_head_dim", 8),
    (r".*(linear|mamba).*(key|value)_heads|.*n_mamba_heads|mamba_n_heads|mamba_num_heads", 4),
    (r".*(linear|mamba|delta).*(head_dim|d_head|key_head_dim|value_head_dim)", 8),
    (r"d_kv|head_dim|.*_head_dim|attention_head_size|.*head_size", 8),
    (r".*lora_rank|.*_rank", 8),
    (r"(num_key_value_heads|n_kv_heads|.*num_kv_heads|.*key_value_heads|multi_query_group_num)", "kv"),
    (r".*(attention_heads|num_heads|n_heads?|_heads|n_head)", "heads"),
    (r"num_kv_shared_layers|num_nextn_predict_layers|first_k_dense_replace", "fewer"),
    (r".*(_layers|n_layers?|depth|num_blocks)", "layers"),
    (r"n_group|num_expert_group|topk_group|moe_topk_group", 1),
    (r".*(num_experts_per_tok|experts_per_tok|top_?k|moe_topk|num_selected_experts)", "top_k"),
    (r"n_shared_experts|num_shared_experts", 1),
    (r".*(n_routed_experts|num_experts|num_local_experts|expert_num|moe_num_experts|num_routed_experts)", "experts"),
    (r".*(intermediate_size|(ffn|mlp|inner)_dim|d_ff|n_inner|ffn(_hidden)?_size|feed_forward_size)", "wide"),
    (r".*(n_positions|max_.*position.*|block_size|seq_length|max_seq_len|max_sequence_length)", "positions"),
    (r".*sliding_window|.*local_attention|attention_window|attention_chunk_size|window_length", "window"),
    (r"(image|img|input|pretrain_image)_size|input_resolution|crop_size", "side"),
    (r"patch_size", "patch"),
    (r".*(hidden_size(_.*)?|dims?|d_model|n_embe?d|embedding_size|width|d_embed|d_state|attention_size)", "width"),
    (r".*(indexes|indices|layer_ids|_idx|insert_layer_id|.*mlp_only_layers|vision_feature_layer)", "places"),
)  # fmt: skip
#: What settings become that nothing is said of.
_WHERE_NONE = {"pad_token_id": 0, "head_dim": 8, "prediction_length": 4, "num_key_value_heads": 2}
#: What a family needs beside.
_OF_FAMILY: dict[str, dict[str, Any]] = {
    "gemma4_text": {"num_hidden_layers": 4, "num_kv_shared_layers": 2,
                    "layer_types": ["sliding_attention", "full_attention"] * 2},
    "gemma3n_text": {"num_hidden_layers": 5, "num_kv_shared_layers": 2},
}  # fmt: skip


def _becomes(kind: Any, name: str, value: Any, variant: dict[str, Any]) -> Any:
    """Return what a setting of a kind becomes, the value itself to leave it."""
    if isinstance(kind, int):
        return min(value, kind)
    if kind == "token":
        # Far apart, so that text of ids in the middle holds none of them.
        return value if value < 3 else 100 + sum(map(ord, name)) % 27
    if kind == "fewer":
        return min(value, 1)
    if kind == "side":
        return _SIDE if value > _SIDE else value
    if kind == "patch":
        return _PATCH if value > _PATCH else value
    if kind == "places":
        return value
    return min(value, variant[kind]) if value > 0 else value


def tiny_settings(config: Any, variant: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a config's class that make it tiny, from the defaults of an instance."""
    told: dict[str, Any] = {}
    accepted = inspect.signature(type(config).__init__).parameters
    for name, value in vars(config).items():
        name = next(
            (
                short
                for short, long in config.attribute_map.items()
                if long == name and short in accepted and name not in accepted
            ),
            name,
        )
        if name.startswith("_") or (name not in accepted and name not in config.sub_configs):
            continue
        if hasattr(value, "model_type"):
            if name in config.sub_configs:
                told[name] = {"model_type": value.model_type} | tiny_settings(value, variant)
            continue
        if value is None and name in _WHERE_NONE:
            told[name] = _WHERE_NONE[name]
            continue
        kind = next((kind for pattern, kind in _SETTINGS if re.fullmatch(pattern, name)), None)
        if kind is None:
            continue
        if isinstance(value, (list, tuple)) and kind == "places" and all(type(each) is int for each in value):
            told[name] = type(value)(sorted({max(min(each, variant["layers"] - 1), -1) for each in value}))
        elif type(value) is int and kind == "places":
            told[name] = max(min(value, variant["layers"] - 1), -variant["layers"])
        elif type(value) is int:
            told[name] = _becomes(kind, name, value, variant)
        elif isinstance(value, (list, tuple)) and len(value) == 2 and kind in ("side", "patch"):
            told[name] = [_becomes(kind, name, each, variant) for each in value]
        elif isinstance(value, (list, tuple)) and kind in ("layers",) and all(type(each) is int for each in value):
            told[name] = type(value)(min(each, 1) for each in value)
    if "depths" in accepted and isinstance(getattr(config, "depths", None), (list, tuple)):
        told["depths"] = type(config.depths)(1 for _ in config.depths)
    return told | _OF_FAMILY.get(config.model_type, {})


_BASE = {
    "heads": 4,
    "kv": 2,
    "width": 32,
    "wide": 48,
    "layers": 2,
    "experts": 4,
    "top_k": 2,
    "positions": 128,
    "window": 6,
}
VARIANTS: tuple[dict[str, Any], ...] = (
    _BASE,
    _BASE | {"kv": 4},
    _BASE | {"layers": 8},  # among which hybrid models have some of attention
    _BASE | {"width": 64, "heads": 4, "kv": 2, "wide": 64},
    _BASE | {"width": 64, "heads": 8, "kv": 8, "wide": 64, "layers": 4},
    _BASE | {"width": 1 << 30, "heads": 1 << 30, "kv": 1 << 30, "wide": 1 << 30},
)


class NotMade(Exception):
    """Raised where no tiny model, or no input for it, could be made."""


def tiny_model(cls: Any, config_class: Any, variant: dict[str, Any], implementation: Any) -> Any:
    """Return a tiny model in evaluation, with weights that make scores differ."""
    default = config_class()
    config = config_class(**tiny_settings(default, variant))
    with torch.device("meta"):
        count = sum(each.numel() for each in cls._from_config(config, attn_implementation="eager").parameters())
    if count > MOST_PARAMETERS:
        raise NotMade(f"{count} parameters")
    config = config_class(**tiny_settings(default, variant))
    torch.manual_seed(0)
    model = cls._from_config(config, **implementation).eval()
    with torch.no_grad():
        for _, each in sorted(model.named_parameters()):
            if each.dim() >= 2 and each.is_floating_point():
                each.copy_(
                    torch.randn(each.shape, generator=torch.Generator().manual_seed(each.numel()))
                    / each.shape[-1] ** 0.5
                )
    return model


def _ints(*shape: int, most: int = 90, seed: int = 1) -> Tensor:
    return torch.randint(3, most, shape, generator=torch.Generator().manual_seed(seed))


def _floats(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2))


def _setting(config: Any, names: tuple[str, ...], otherwise: int) -> Any:
    for part in (
        config,
        *(
            getattr(config, sub, None)
            for sub in ("vision_config", "backbone_config", "audio_config", "text_config", "encoder", "encoder_config")
        ),
    ):
        for name in names:
            if isinstance(value := getattr(part, name, None), (int, list, tuple)):
                return value
    return otherwise


def inputs_for(model: nn.Module, config: Any) -> list[dict[str, Any]]:
    """Return what may be inputs of a model, the likeliest first."""
    known = inspect.signature(model.forward).parameters
    side = _setting(config, ("image_size", "img_size", "input_size"), _SIDE)
    sides = tuple(side)[-2:] if isinstance(side, (list, tuple)) else (side, side)
    channels = _setting(config, ("num_channels", "in_channels", "in_chans", "num_input_channels"), 3)
    channels = channels if isinstance(channels, int) else 3
    mels = _setting(config, ("num_mel_bins", "feature_size", "n_mels", "num_features", "input_dim"), 16)
    frames = 2 * _setting(config, ("max_source_positions",), 16)
    text: dict[str, Any] = {"input_ids": _ints(BATCH, TOKENS)}
    decoder = {"decoder_input_ids": _ints(BATCH, 7, seed=3)} if "decoder_input_ids" in known else {}
    options: list[dict[str, Any]] = []
    if type(model).__name__.endswith("MultipleChoice"):
        return [{"input_ids": _ints(BATCH, 2, TOKENS)}]
    if "input_ids" in known:
        options += [text | decoder, text | {"pixel_values": _floats(BATCH, channels, *sides)} | decoder]
        if "bbox" in known:
            options.insert(0, text | {"bbox": _ints(BATCH, TOKENS, 1).expand(-1, -1, 4).contiguous()} | decoder)
        if getattr(model, "main_input_name", "") != "input_ids":
            options.reverse()
        if isinstance(config.eos_token_id if hasattr(config, "eos_token_id") else None, int):  # which heads look for
            ended = torch.cat((text["input_ids"][:, 1:], torch.full((BATCH, 1), config.eos_token_id)), 1)
            options.append({"input_ids": ended} | decoder)
            options.append({"input_ids": ended})
    if "pixel_values" in known:
        options += [
            {"pixel_values": _floats(BATCH, channels, *sides)} | decoder,
            {"pixel_values": _floats(BATCH, channels, 64, 64)} | decoder,
        ]
        options += [
            {"pixel_values": _floats(BATCH, frames, channels, *sides)}
            for frames in (_setting(config, ("num_frames",), 4), 2)
        ]
    for name in ("pixel_values_videos",):
        if name in known:
            options += [{name: _floats(1, _setting(config, ("num_frames", "frames_per_clip"), 4), channels, *sides)}]
    for name in ("input_features",):
        if name in known:
            options += [{name: _floats(BATCH, mels, length)} | decoder for length in (frames, 64)]
            options += [{name: _floats(BATCH, 64, mels)} | decoder]
    if "input_values" in known:
        options += [
            {"input_values": _floats(BATCH, *shape)} | decoder for shape in ((4000,), (1, 4000), (64, mels), (mels, 64))
        ]
    if "inputs_embeds" in known and not options:
        options += [{"inputs_embeds": _floats(BATCH, TOKENS, _setting(config, ("hidden_size", "d_model"), 32))}]
    if "past_values" in known:
        length = _setting(config, ("context_length",), 16) + max(getattr(config, "lags_sequence", [0]) or [0])
        size = getattr(config, "num_input_channels", 1)
        values = (
            _floats(BATCH, length, size) if size > 1 or "past_time_features" not in known else _floats(BATCH, length)
        )
        more = {
            "past_time_features": _floats(BATCH, length, max(getattr(config, "num_time_features", 0), 1)),
            "past_observed_mask": torch.ones_like(values),
            "future_time_features": _floats(BATCH, getattr(config, "prediction_length", 1) or 1, 1),
            "future_values": _floats(BATCH, getattr(config, "prediction_length", 1) or 1),
        }
        options += [{"past_values": values} | {name: value for name, value in more.items() if name in known}]
    return options


def classes() -> dict[str, str]:
    """Return every class of transformers' auto mappings by its name, with the class of its config."""
    from transformers.models.auto import configuration_auto, modeling_auto

    configs: dict[str, str] = vars(configuration_auto)["CONFIG_MAPPING_NAMES"]
    found: dict[str, str] = {}
    for mapping in sorted(
        name for name in dir(modeling_auto) if name.endswith("_MAPPING_NAMES") and name != "CONFIG_MAPPING_NAMES"
    ):
        for family, names in getattr(modeling_auto, mapping).items():
            config = configs.get(family)
            for name in (names,) if isinstance(names, str) else names:
                if config and name not in found and hasattr(transformers, name) and hasattr(transformers, config):
                    found[name] = config
    return dict(sorted(found.items()))
