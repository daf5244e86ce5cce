"""Loading a checkpoint: `load`."""

import copy
import os
import warnings
from collections.abc import Mapping
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from kpt_core import InputError, KptWarning
from kpt_fp8.checkpoints.contents import describe
from kpt_fp8.checkpoints.folder import CheckpointFolder
from kpt_fp8.checkpoints.widening import OF_CACHES

from .layers import multiplied
from .quantizer import METHOD

_OWNER = "kpt_fp8.transformers.load"
#: Arguments of `from_pretrained` itself, which configurations have under the same names.
_OF_LOADING = ("dtype", "torch_dtype", "attn_implementation", "experts_implementation", "trust_remote_code")


def load(
    path: str | os.PathLike[str], *, model_class: Any = None, quantize_activations: bool | None = None, **arguments: Any
) -> Any:
    """Load an FP8 checkpoint of a Hugging Face model; weights stay 8-bit on every device.

    Linear layers become `NativeFP8Linear`, experts stay stacked in 8 bits. They are frozen. Experts are run by kpt-moe
    where it is installed; by `fp8.linear`, one after the other, where activations are to be quantised always or
    `experts_implementation="eager"` is given.

    Args:
        path: a folder with config.json and weights in safetensors, in one of the formats of `convert_checkpoint`.
        model_class: what has `from_pretrained`; None: the class that the checkpoint names.
        quantize_activations: quantise activations as the checkpoint says, those of experts too; False leaves them as
            they are, which is more exact and, where no device multiplies 8-bit numbers, faster. None: those of linear
            layers where the device that `device_map` names multiplies 8-bit numbers, which no CPU does; there kernels
            of experts may round those of many tokens, see `activations` of kpt-moe's `experts`.
        arguments: of `from_pretrained`: device_map, dtype, attn_implementation, experts_implementation, config,
            subfolder, what the configuration has (`use_cache=False`), and so on.
            `"kpt"` needs no import of kpt_attention.transformers or kpt_moe.transformers.

    Raises:
        InputError: `"kpt"` is given for what no installed package serves; or the checkpoint is damaged, holds what
            `check_checkpoint` finds, is not quantised, is in a format that is not known, or lacks weights or scales
            that the model has.
    """
    if "quantization_config" in arguments:
        raise InputError(f"{_OWNER}: quantization_config comes from the checkpoint; got another: leave it out")
    path = Path(path, arguments.pop("subfolder", None) or "")
    contents = describe(CheckpointFolder(path))
    contents.require_good()
    if contents.format is None:
        raise InputError(
            f"{_OWNER}: {path} is not quantised: load it with transformers and convert_model_to_fp8, or write a "
            "quantised one with convert_checkpoint"
        )
    caches = [name for name in contents.plain if name.rpartition(".")[2] in OF_CACHES]
    if caches:
        message = f"{_OWNER}: scales of attention's caches are ignored, as {caches[0]}: caches hold the model's dtype"
        warnings.warn(message, KptWarning, stacklevel=2)
    config = _config(path, model_class, arguments)
    _register(arguments)
    activations = quantize_activations
    if activations is None:
        activations = bool(multiplied(_device_of(arguments.get("device_map"))))
    config.quantization_config = {
        "quant_method": METHOD,
        "checkpoint": contents.folder.quantization,
        "activations": activations,
        "experts": "eager" if quantize_activations or find_spec("kpt_moe") is None else "kpt",
        "quantized": dict.fromkeys(contents.plain, False) | dict.fromkeys(contents.weights, True),
        "key_mapping": arguments.get("key_mapping"),
        "scale_dtype": contents.scheme.scale_dtype if contents.scheme else torch.float32,
    }
    chosen = model_class or _class_of(config)
    wanted = arguments.pop("output_loading_info", False)
    model, info = chosen.from_pretrained(path, config=config, output_loading_info=True, **arguments)
    _require_complete(path, info)
    return (model, info) if wanted else model


def _config(path: Path, model_class: Any, arguments: dict[str, Any]) -> Any:
    """Return the configuration, and take it, and what it is to have otherwise, out of the arguments."""
    given = arguments.pop("config", None)
    if given is not None and not isinstance(given, str | os.PathLike):
        return copy.deepcopy(given)  # the caller's own stays as it is
    # A class for a part of a model reads that part's configuration.
    kind = getattr(model_class, "config_class", None) or AutoConfig
    read = partial(kind.from_pretrained, given or path, trust_remote_code=arguments.get("trust_remote_code"))
    config = read()
    # `from_pretrained` would do this itself, if it were not given a configuration.
    other = [name for name in arguments if name not in _OF_LOADING and hasattr(config, name)]
    return read(**{name: arguments.pop(name) for name in other}) if other else config


def _register(arguments: Mapping[str, Any]) -> None:
    """Have packages that are installed and asked for, or serve experts, register what transformers calls "kpt"."""
    for argument, package in (("attn_implementation", "kpt_attention"), ("experts_implementation", "kpt_moe")):
        if find_spec(package) is not None:
            if arguments.get(argument) == "kpt" or package == "kpt_moe":
                import_module(f"{package}.transformers")
        elif arguments.get(argument) == "kpt":
            raise InputError(f'{_OWNER}: {argument}="kpt" is of {package}: pip install {package.replace("_", "-")}')


def _device_of(device_map: Any) -> torch.device:
    """Return the device that most of a model goes to, as far as that is known before it is loaded."""
    places = list(device_map.values()) if isinstance(device_map, Mapping) else [device_map]
    place = next((each for each in places if each not in ("cpu", "disk", None)), "cpu")
    if isinstance(place, int) or place in ("auto", "balanced", "balanced_low_0", "sequential"):
        return torch.accelerator.current_accelerator() or torch.device("cpu")
    return torch.device(place)


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
