"""The formats on disk, by name."""

from collections.abc import Mapping
from typing import Any

from kpt_core import InputError, UnknownNameError

from .base import Format, module_of
from .compressed_tensors import CompressedTensors
from .fbgemm import Fbgemm
from .hf_fp8 import AutoFp8, HfFp8
from .modelopt import ModelOpt
from .torchao import TorchAo

FORMATS: dict[str, Format] = {
    each.name: each for each in (HfFp8(), CompressedTensors(), Fbgemm(), ModelOpt(), TorchAo())
}
#: Formats that are read, and written as another.
_READ = (AutoFp8(),)

__all__ = ["FORMATS", "Format", "format_named", "format_of", "module_of"]


def format_named(name: str) -> Format:
    """The format of a name."""
    if name not in FORMATS:
        raise UnknownNameError("checkpoint format", name, tuple(FORMATS))
    return FORMATS[name]


def format_of(config: Mapping[str, Any]) -> Format:
    """The format that a `quantization_config` names."""
    method = config.get("quant_method") or (config.get("producer") or {}).get("name")
    for each in (*FORMATS.values(), *_READ):
        if each.method == method:
            return each
    known = ", ".join(repr(each.method) for each in FORMATS.values())
    advice = "convert the checkpoint with the library that wrote it, or start from unquantised weights"
    if method == "mxfp4":
        advice = "widen it with kpt convert IN OUT --to bfloat16 first"
    raise InputError(f"quantization_config has quant_method={method!r}; KPT reads {known}: {advice}")
