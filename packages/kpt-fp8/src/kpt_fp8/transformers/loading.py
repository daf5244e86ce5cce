"""Loading a checkpoint: `load`."""

import os
from collections.abc import Mapping
from typing import Any

import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from kpt_core import InputError
from kpt_fp8.checkpoints.contents import describe
from kpt_fp8.checkpoints.folder import CheckpointFolder

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
        InputError: the checkpoint is damaged, holds what `check_checkpoint` finds, is not quantised, is in a format
            that is not known, or lacks weights or scales that the model has.
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
        "quantized": dict.fromkeys(contents.plain, False) | dict.fromkeys(contents.weights, True),
        "key_mapping": arguments.get("key_mapping"),
    }
    chosen = model_class or _class_of(config)
    wanted = arguments.pop("output_loading_info", False)
    model, info = chosen.from_pretrained(path, config=config, output_loading_info=True, **arguments)
    _require_complete(path, info)
    return (model, info) if wanted else model


def _class_of(config: Any) -> Any:
    for name in config.architectures or ():
        found = getattr(transformers, name, None)
        if found is not None:
            return found
    return AutoModelForCausalLM


def _require_complete(path: object, info: Mapping[str, Any]) -> None:
    """Raise `InputError` with the names of what the files did not fill: it would be random, or left uninitialised."""
    wrong = sorted({*info["missing_keys"], *(name for name, *_ in info["mismatched_keys"])})
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise InputError(
            f"{_OWNER}: {path} does not fill {', '.join(wrong[:3])}{more} of the model: pass the model_class that it "
            "was saved from, or convert it again"
        )
