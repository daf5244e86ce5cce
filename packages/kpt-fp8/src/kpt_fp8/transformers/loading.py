"""Loading a checkpoint: `load`."""

import os
from typing import Any

import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from kpt_core import InputError
from kpt_fp8.checkpoints.contents import Contents, describe
from kpt_fp8.checkpoints.folder import CheckpointFolder
from kpt_fp8.checkpoints.formats import module_of

from .quantizer import METHOD

_OWNER = "kpt_fp8.transformers.load"


def load(
    path: str | os.PathLike[str], *, model_class: Any = None, quantize_activations: bool = True, **arguments: Any
) -> Any:
    """Load an FP8 checkpoint of a Hugging Face model; weights stay 8-bit on every device.

    Linear layers become `NativeFP8Linear`, experts stay stacked in 8 bits. They are frozen.

    Args:
        path: a folder with config.json and weights in safetensors, in one of the formats of `convert_checkpoint`.
        model_class: what has `from_pretrained`; None: the class that the checkpoint names.
        quantize_activations: quantise activations as the checkpoint says; False leaves them as they are, which is more
            exact and, where no device multiplies 8-bit numbers, faster.
        arguments: of `from_pretrained`: device_map, dtype, attn_implementation, experts_implementation and so on.

    Raises:
        InputError: the checkpoint is damaged, not quantised, or in a format that is not known.
    """
    if "quantization_config" in arguments:
        raise InputError(f"{_OWNER}: quantization_config comes from the checkpoint; got another: leave it out")
    contents = describe(CheckpointFolder(path))
    contents.require_good()
    if contents.format is None:
        raise InputError(
            f"{_OWNER}: {path} is not quantised: load it with transformers and convert_model_to_fp8, or write a "
            "quantised one with convert_checkpoint"
        )
    config = arguments.pop("config", None) or AutoConfig.from_pretrained(
        path, trust_remote_code=arguments.get("trust_remote_code")
    )
    config.quantization_config = {
        "quant_method": METHOD,
        "checkpoint": contents.folder.quantization,
        "activations": quantize_activations,
        "quantized": _quantized(contents),
    }
    chosen = model_class or _class_of(config)
    return chosen.from_pretrained(path, config=config, **arguments)


def _class_of(config: Any) -> Any:
    for name in config.architectures or ():
        found = getattr(transformers, name, None)
        if found is not None:
            return found
    return AutoModelForCausalLM


def _quantized(contents: Contents) -> dict[str, bool]:
    found = {module_of(name): False for name in contents.plain if name.endswith(".weight")}
    return found | {module_of(name): True for name in contents.weights}
