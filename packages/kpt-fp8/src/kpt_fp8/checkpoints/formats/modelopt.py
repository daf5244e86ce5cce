"""NVIDIA's ModelOpt: its algorithms FP8, FP8_PER_CHANNEL_PER_TOKEN and FP8_PB_WO."""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, ClassVar

from kpt_fp8.checkpoints.scheme import Scheme
from kpt_fp8.linear import NONE

from .base import Format, Takes, expect, names_in

_ALGORITHMS = {
    "FP8": ("tensor", "tensor", True),
    "FP8_PER_CHANNEL_PER_TOKEN": ("row", "row", False),
    "FP8_PB_WO": ("128x128", NONE, False),
}


class ModelOpt(Format):
    """`quant_method` "modelopt" of vLLM and TensorRT-LLM."""

    name = "modelopt"
    method = "modelopt"
    takes: ClassVar[Takes] = {
        granularity: ((activations, static),) for granularity, activations, static in _ALGORITHMS.values()
    }

    def read_config(self, config: Mapping[str, Any]) -> Scheme:  # noqa: D102
        # Two ways to write it: that of config.json, and that of hf_quant_config.json.
        own = config.get("quantization", config)
        algorithm = str(own.get("quant_algo")).upper()
        expect(self.name, "quant_algo", algorithm, tuple(_ALGORITHMS))
        granularity, activations, static = _ALGORITHMS[algorithm]
        return Scheme(granularity=granularity, activations=activations, static=static)

    def write_config(self, scheme: Scheme, skipped: Sequence[str]) -> dict[str, Any]:  # noqa: D102
        algorithm = next(name for name, (granularity, *_) in _ALGORITHMS.items() if granularity == scheme.granularity)
        config: dict[str, Any] = {"quant_method": self.method, "quant_algo": algorithm, "ignore": list(skipped)}
        if algorithm == "FP8":
            common = {"dynamic": False, "num_bits": 8, "type": "float"}
            config["config_groups"] = {
                "group_0": {"targets": ["Linear"], "weights": common, "input_activations": common}
            }
        return config

    def skips(self, config: Mapping[str, Any], module: str) -> bool:  # noqa: D102
        own = config.get("quantization", config)
        listed = names_in(self.name, own, "ignore", "exclude_modules")
        return any(fnmatchcase(module, each) or module.startswith(f"{each}.") for each in listed)

    def stored_shape(self, shape: Sequence[int], granularity: str) -> list[int]:  # noqa: D102
        plain = super().stored_shape(shape, granularity)
        return [plain[0], 1, plain[1], 1] if granularity == "128x128" else plain
