"""Small checkpoints on disk, written by safetensors alone."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from kpt_fp8.checkpoints import convert_checkpoint

LAYERS = {"model.0.q_proj": (256, 128), "model.0.o_proj": (128, 256), "model.1.q_proj": (256, 128)}
#: How the seven variants that transformers reads on a CPU are made, and three that it does not.
VARIANTS = {
    "fp8-block": {"to": "fp8"},
    "fp8-tensor-static": {"to": "fp8", "granularity": "tensor", "activations": "tensor"},
    "ct-channel": {"to": "compressed-tensors"},
    "ct-channel-bf16": {"to": "compressed-tensors", "scale_dtype": torch.bfloat16},
    "ct-tensor-static": {"to": "compressed-tensors", "granularity": "tensor", "activations": "tensor"},
    "ct-block": {"to": "compressed-tensors", "granularity": "128x128"},
    "ct-weight-only": {"to": "compressed-tensors", "activations": "none"},
    "fbgemm": {"to": "fbgemm_fp8"},
    "modelopt": {"to": "modelopt", "granularity": "row"},
    "torchao": {"to": "torchao"},
}


def write(folder: Path, tensors, config=None, files=None):
    """A checkpoint of tensors; `files` gives tensors' files, for one in several."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "dtype": "bfloat16", **(config or {})}))
    (folder / "tokenizer.json").write_text("{}")
    if files is None:
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return folder
    for file in set(files.values()):
        save_file({name: tensors[name] for name in tensors if files[name] == file}, folder / file, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return folder


def plain_tensors(dtype=torch.bfloat16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    tensors = {f"{name}.weight": torch.randn(shape, generator=generator) / 16 for name, shape in LAYERS.items()}
    tensors["model.embed_tokens.weight"] = torch.randn(32, 128, generator=generator)
    tensors["lm_head.weight"] = torch.randn(32, 128, generator=generator)
    tensors["model.0.q_proj.bias"] = torch.randn(256, generator=generator)
    tensors["model.norm.weight"] = torch.ones(128)
    return {name: tensor.to(dtype) for name, tensor in tensors.items()}


def quantized(path: Path, source: Path, variant: str, **options):
    """One of `VARIANTS` of a checkpoint, and the report."""
    chosen = VARIANTS[variant] | options
    if chosen.get("activations") == "tensor":
        chosen["input_scales"] = {name: 0.01 * (place + 1) for place, name in enumerate(modules(source))}
    return convert_checkpoint(source, path, **chosen)


def modules(source: Path):
    return [name.removesuffix(".weight") for name in tensors_of(source) if name.endswith(".weight")]


def tensors_of(folder: Path):
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        found.update(load_file(file))
    return found


def config_of(folder: Path):
    return json.loads((folder / "config.json").read_text())


def change(folder: Path, tensors=None, remove=(), **quantization):
    """Change tensors and what the configuration says of them, as a careless writer would."""
    held = tensors_of(folder)
    held.update(tensors or {})
    save_file({name: each for name, each in held.items() if name not in remove}, folder / "model.safetensors")
    config = config_of(folder)
    config["quantization_config"].update(quantization)
    (folder / "config.json").write_text(json.dumps(config))
    return folder
