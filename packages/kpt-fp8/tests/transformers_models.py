"""Small random models of transformers, on disk, and what they compute."""

import copy

import torch
import transformers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from kpt_fp8.checkpoints.contents import describe
from kpt_fp8.checkpoints.folder import CheckpointFolder

_SIZES = {
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
_KINDS = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "mixtral": (MixtralForCausalLM, MixtralConfig, {"num_local_experts": 4}),
    "qwen3_moe": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig,
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "head_dim": 32},
    ),
}
KINDS = tuple(_KINDS)
_VISION = {"hidden_size": 128, "intermediate_size": 256, "patch_size": 14}
_TOWER = {**_VISION, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 28}
_QWEN = {**_VISION, "depth": 2, "num_heads": 4, "out_hidden_size": 128, "deepstack_visual_indexes": [0]}
_MROPE = {"head_dim": 32, "rope_scaling": {"mrope_section": [4, 6, 6], "rope_type": "default"}}
#: Models around a text model, whose names in files are not those of their modules.
WRAPPERS = {
    "Llava": ({}, {"model_type": "clip_vision_model", **_TOWER}),
    "Mistral3": ({"head_dim": 32}, {"model_type": "pixtral", "head_dim": 32, **_TOWER}),
    "Gemma3": ({"head_dim": 32}, _TOWER),
    "Qwen3VL": (_MROPE, _QWEN),
}
IDS = torch.arange(10)[None] * 3


def model(kind, **options):
    """In float32; its numbers are not small, so that quantisation is seen."""
    made, config, more = _KINDS[kind]
    torch.manual_seed(0)
    return made(config(**(_SIZES | {"initializer_range": 0.1} | more | options))).eval()


def wrapper(kind):
    text, vision = WRAPPERS[kind]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")
    text = {"initializer_range": 0.1, "model_type": "llama", **_SIZES, **text}
    own = config.sub_configs["text_config"]
    if own is not transformers.AutoConfig:
        text["model_type"] = own.model_type
    return getattr(transformers, f"{kind}ForConditionalGeneration")(
        config(text_config=text, vision_config=vision, image_token_id=63)
    ).eval()


def logits(model):
    with torch.no_grad():
        return model(IDS).logits.float()


def with_numbers(original, numbers):
    """The model with other numbers, by the names of its file."""
    made = copy.deepcopy(original)
    state = made.state_dict()
    for name, tensor in numbers.items():
        if name in state:
            state[name].copy_(tensor)
            continue
        # Experts are one by one in the file, and stacked in the model; the gate comes before the up projection.
        place, number, projection, _ = name.replace("block_sparse_moe", "mlp").rsplit(".", 3)
        number, half = int(number), tensor.shape[0]
        if projection in ("w2", "down_proj"):
            state[f"{place}.down_proj"][number] = tensor
        else:
            start = half if projection in ("w3", "up_proj") else 0
            state[f"{place}.gate_up_proj"][number, start : start + half] = tensor
    return made


def sqnr(exact, other):
    return float(10 * torch.log10(exact.square().sum() / (exact - other).square().sum()))


def saved(tmp_path_factory):
    """Models by kind, and beside each its folder."""
    made = {}
    for kind in KINDS:
        folder = tmp_path_factory.mktemp("models") / kind
        made[kind] = model(kind)
        made[kind].save_pretrained(folder)
        made[f"{kind} on disk"] = folder
    return made


def numbers(folder):
    """What the quantised weights of a folder stand for."""
    contents = describe(CheckpointFolder(folder))
    with contents.folder.reading() as reader:
        return {n: each.read(reader, contents.scheme).dequantize().clone() for n, each in contents.weights.items()}
