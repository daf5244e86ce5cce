"""Hugging Face's `fp8` ("finegrained"), which DeepSeek-V3 began: blocks of 128 by 128, or one scale for a weight.

Its scale is named `weight_scale_inv` and multiplies nevertheless.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from kpt_core import InputError
from kpt_fp8.checkpoints.scheme import Scheme

from .base import Format, Takes, expect

_DTYPES = {"e4m3": torch.float8_e4m3fn, "float8_e4m3fn": torch.float8_e4m3fn, "e4m3fnuz": torch.float8_e4m3fnuz}


class HfFp8(Format):
    """`quant_method` "fp8" of transformers and vLLM."""

    name = "fp8"
    method = "fp8"
    scales = (torch.float32, torch.bfloat16, torch.float8_e8m0fnu)
    takes: ClassVar[Takes] = {
        "128x128": (("1x128", False), ("tensor", True)),
        "tensor": (("row", False), ("tensor", True)),
    }

    def read_config(self, config: Mapping[str, Any]) -> Scheme:  # noqa: D102
        block = config.get("weight_block_size", [128, 128])
        block = block if block is None else list(block)
        expect(self.name, "weight_block_size", block, (None, [128, 128]))
        form = str(config.get("fmt", "e4m3")).lower()
        if "e5m2" in form:
            raise InputError(
                f"fp8: quantization_config has fmt={form!r}, weights and activations of e5m2, which no device "
                "multiplies with each other; expected 'e4m3': quantise the model to e4m3"
            )
        expect(self.name, "fmt", form, tuple(_DTYPES))
        activations = str(config.get("activation_scheme", "dynamic")).lower()
        expect(self.name, "activation_scheme", activations, ("dynamic", "static"))
        expect(self.name, "expert_dtype", config.get("expert_dtype", "fp8"), ("fp8",))
        granularity = "tensor" if block is None else "128x128"
        static = activations == "static"
        powers = config.get("scale_fmt") == "ue8m0"
        return Scheme(
            granularity=granularity,
            activations="tensor" if static else self.takes[granularity][0][0],
            static=static,
            dtype=_DTYPES[form],
            scale_dtype=torch.float8_e8m0fnu if powers else torch.float32,
        )

    def write_config(self, scheme: Scheme, skipped: Sequence[str]) -> dict[str, Any]:  # noqa: D102
        config: dict[str, Any] = {
            "quant_method": self.method,
            "activation_scheme": "static" if scheme.static else "dynamic",
            "fmt": "e4m3fnuz" if scheme.dtype is torch.float8_e4m3fnuz else "e4m3",
            "weight_block_size": None if scheme.granularity == "tensor" else [128, 128],
            # The same under two names: what older readers know, and what newer ones do.
            "modules_to_not_convert": list(skipped),
            "ignored_layers": list(skipped),
        }
        if scheme.scale_dtype is torch.float8_e8m0fnu:
            config["scale_fmt"] = "ue8m0"
        return config

    def scale_name(self, weight: str) -> str:  # noqa: D102
        return f"{weight}_scale_inv"

    def input_scale_name(self, weight: str) -> str:  # noqa: D102
        return f"{weight.rpartition('.')[0]}.activation_scale"

    def refusal(self, scheme: Scheme) -> str:  # noqa: D102
        if scheme.scale_dtype is torch.float8_e8m0fnu and scheme.granularity == "tensor":
            return "it has scales of float8_e8m0fnu for blocks alone; got one scale for a weight"
        return super().refusal(scheme)


class AutoFp8(HfFp8):
    """`quant_method` "fp8" as AutoFP8 wrote it for vLLM: one scale for a weight, by the names of other formats."""

    name = "AutoFP8"
    method = "autofp8"  # as `CheckpointFolder.quantization` names it
    scale_name = Format.scale_name
    input_scale_name = Format.input_scale_name

    def read_config(self, config: Mapping[str, Any]) -> Scheme:  # noqa: D102
        return super().read_config({**config, "weight_block_size": None})
