"""torchao's `Float8Tensor` in safetensors: codes and scale of `layer.weight` are `layer._weight_qdata` and `_scale`."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from kpt_core import InputError
from kpt_fp8.checkpoints.scheme import Scheme
from kpt_fp8.linear import NONE

from .base import Format, Takes, expect

_GRANULARITIES = {"tensor": "PerTensor", "row": "PerRow"}
_WEIGHT_ONLY, _DYNAMIC = "Float8WeightOnlyConfig", "Float8DynamicActivationFloat8WeightConfig"


class TorchAo(Format):
    """`quant_method` "torchao" of transformers; what is read is what torchao 0.18 writes."""

    name = "torchao"
    method = "torchao"
    takes: ClassVar[Takes] = {"row": (("row", False), (NONE, False)), "tensor": (("tensor", False), (NONE, False))}

    def read_config(self, config: Mapping[str, Any]) -> Scheme:  # noqa: D102
        kind = (config.get("quant_type") or {}).get("default") or {}
        expect(self.name, "quant_type", kind.get("_type"), (_WEIGHT_ONLY, _DYNAMIC))
        about = kind.get("_data") or {}
        granularity = about.get("granularity") or {"_type": "PerTensor" if kind["_type"] == _DYNAMIC else "PerRow"}
        # Of activations and of weights.
        listed = granularity if isinstance(granularity, list) else [granularity, granularity]
        names = [each.get("_type") if isinstance(each, Mapping) else each for each in listed]
        for each in names:
            expect(self.name, "quant_type.granularity", each, tuple(_GRANULARITIES.values()))
        activations, weights = (next(k for k, v in _GRANULARITIES.items() if v == each) for each in names)
        dtype = (about.get("weight_dtype") or {}).get("_data", "float8_e4m3fn")
        expect(self.name, "quant_type.weight_dtype", dtype, ("float8_e4m3fn",))
        dynamic = kind["_type"] == _DYNAMIC
        return Scheme(granularity=weights, activations=activations if dynamic else NONE)

    def write_config(self, scheme: Scheme, skipped: Sequence[str]) -> dict[str, Any]:  # noqa: D102
        granularity = {"_type": _GRANULARITIES[scheme.granularity], "_version": 1, "_data": {}}
        if scheme.granularity == "row":
            granularity["_data"] = {"dim": -1}
        codes = {"_type": "torch.dtype", "_data": "float8_e4m3fn"}
        if scheme.activations == NONE:
            about: dict[str, Any] = {"weight_dtype": codes, "set_inductor_config": True, "granularity": granularity}
            kind = {"_type": _WEIGHT_ONLY, "_version": 2, "_data": about}
        else:
            about = {"activation_dtype": codes, "weight_dtype": codes, "granularity": [granularity, granularity]}
            kind = {"_type": _DYNAMIC, "_version": 2, "_data": about}
        return {
            "quant_method": self.method,
            "quant_type": {"default": kind},
            "modules_to_not_convert": list(skipped),
            "include_input_output_embeddings": False,
            "untie_embedding_weights": False,
        }

    def weight_name(self, stored: str) -> str:  # noqa: D102
        found = re.fullmatch(r"(.*\.)_(\w+)_qdata", stored)
        return found[1] + found[2] if found else stored

    def codes_name(self, weight: str) -> str:  # noqa: D102
        return _part(weight, "qdata")

    def scale_name(self, weight: str) -> str:  # noqa: D102
        return _part(weight, "scale")

    def stored_shape(self, shape: Sequence[int], granularity: str) -> list[int]:  # noqa: D102
        return [1, 1] if granularity == "tensor" else [shape[0], 1]

    def refusal(self, scheme: Scheme) -> str:  # noqa: D102
        if scheme.dtype is not torch.float8_e4m3fn:
            return f"it has codes of float8_e4m3fn; got {scheme.dtype}"
        return super().refusal(scheme)

    def metadata(  # noqa: D102
        self, scheme: Scheme, names: Sequence[str], weights: Mapping[str, Sequence[int]], dtype: str
    ) -> dict[str, str]:
        plain = json.dumps({"_type": "Tensor"})
        written = {name: _about(scheme, weights[name], dtype) if name in weights else plain for name in names}
        return {"format": "pt", **written, "tensor_names": json.dumps(list(names))}


def _part(weight: str, part: str) -> str:
    module, _, own = weight.rpartition(".")
    if not module:
        raise InputError(f"torchao: a weight stands in a module; got {weight!r}: leave it as it is")
    return f"{module}._{own}_{part}"


def _about(scheme: Scheme, shape: Sequence[int], dtype: str) -> str:
    kwargs: dict[str, Any] | None = None
    preference = {"_type": "KernelPreference", "_data": "AUTO"}
    if scheme.activations != NONE:
        kwargs = {
            "_type": "QuantizeTensorToFloat8Kwargs",
            "_data": {
                "float8_dtype": {"_type": "torch.dtype", "_data": "float8_e4m3fn"},
                "granularity": {
                    "_type": _GRANULARITIES[scheme.activations],
                    "_data": {"dim": -1} if scheme.activations == "row" else {},
                },
                "mm_config": {
                    "_type": "Float8MMConfig",
                    "_data": {"emulate": False, "use_fast_accum": True, "pad_inner_dim": False},
                },
                "hp_value_lb": None,
                "hp_value_ub": None,
                "kernel_preference": preference,
            },
        }
    about = {
        "block_size": list(shape) if scheme.granularity == "tensor" else [1, shape[1]],
        "mm_config": None if kwargs is None else kwargs["_data"]["mm_config"],
        "act_quant_kwargs": kwargs,
        "kernel_preference": preference,
        "dtype": {"_type": "torch.dtype", "_data": dtype},
    }
    return json.dumps({"_type": "Float8Tensor", "_data": about, "_tensor_data_names": ["qdata", "scale"]})
