"""compressed-tensors of the vLLM project: one scale for a weight, a row or a block; activations quantised or not."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from kpt_core import InputError
from kpt_fp8.checkpoints.scheme import Scheme
from kpt_fp8.linear import NONE

from .base import Format, Takes, expect, names_in

_STRATEGIES = {"tensor": "tensor", "channel": "row", "block": "128x128"}
_NAMES = {granularity: strategy for strategy, granularity in _STRATEGIES.items()}
_FORMATS = ("float-quantized", "naive-quantized")


class CompressedTensors(Format):
    """`quant_method` "compressed-tensors" with 8-bit floats."""

    name = "compressed-tensors"
    method = "compressed-tensors"
    scales = (torch.float32, torch.bfloat16)
    takes: ClassVar[Takes] = {
        "row": (("row", False), ("tensor", True), ("tensor", False), (NONE, False)),
        "tensor": (("tensor", True), ("row", False), ("tensor", False), (NONE, False)),
        "128x128": (("1x128", False), (NONE, False)),
    }

    def read_config(self, config: Mapping[str, Any]) -> Scheme:  # noqa: D102
        groups = config.get("config_groups")
        if not isinstance(groups, Mapping) or not all(isinstance(group, Mapping) for group in groups.values()):
            raise InputError(
                f"{self.name}: quantization_config has config_groups={groups!r}; expected weights and "
                "input_activations by name of the group: write them out"
            )
        schemes = {self._read_group(config, group) for group in groups.values()}
        if len(schemes) != 1:
            found = "; ".join(sorted(map(str, schemes))) or "none"
            raise InputError(
                f"{self.name}: all groups of quantization_config must have one scheme; got {len(schemes)} ({found}): "
                "quantise the model by one scheme"
            )
        return schemes.pop()

    def _read_group(self, config: Mapping[str, Any], group: Mapping[str, Any]) -> Scheme:
        form = group.get("format") or config.get("format")
        expect(self.name, "format", form, _FORMATS)
        weights, inputs = group.get("weights") or {}, group.get("input_activations")
        for name, arguments in (("weights", weights), ("input_activations", inputs)):
            if arguments is not None:
                expect(self.name, f"{name}.type", arguments.get("type"), ("float",))
                expect(self.name, f"{name}.num_bits", arguments.get("num_bits"), (8,))
                expect(self.name, f"{name}.symmetric", arguments.get("symmetric", True), (True,))
        if group.get("output_activations") is not None:
            raise InputError(f"{self.name}: quantization_config has output_activations, which nothing here quantises")
        strategy = weights.get("strategy") or "tensor"
        expect(self.name, "weights.strategy", strategy, tuple(_STRATEGIES))
        if strategy == "block":
            expect(self.name, "weights.block_structure", list(weights.get("block_structure") or ()), ([128, 128],))
        activations, static = self._read_activations(inputs)
        return Scheme(granularity=_STRATEGIES[strategy], activations=activations, static=static)

    def _read_activations(self, inputs: Mapping[str, Any] | None) -> tuple[str, bool]:
        if inputs is None:
            return NONE, False
        strategy = inputs.get("strategy") or "tensor"
        expect(self.name, "input_activations.strategy", strategy, ("token", "tensor", "group"))
        if strategy == "group":
            expect(self.name, "input_activations.group_size", inputs.get("group_size"), (128,))
        static = not inputs.get("dynamic", False)
        if static:
            expect(self.name, "input_activations.strategy (static)", strategy, ("tensor",))
        return {"token": "row", "tensor": "tensor", "group": "1x128"}[strategy], static

    def write_config(self, scheme: Scheme, skipped: Sequence[str]) -> dict[str, Any]:  # noqa: D102
        common = {"num_bits": 8, "type": "float", "symmetric": True}
        weights: dict[str, Any] = {**common, "strategy": _NAMES[scheme.granularity], "dynamic": False}
        if scheme.granularity == "128x128":
            weights["block_structure"] = [128, 128]
        inputs: dict[str, Any] | None = None
        if scheme.activations != NONE:
            strategy = {"row": "token", "tensor": "tensor", "1x128": "group"}[scheme.activations]
            inputs = {**common, "strategy": strategy, "dynamic": not scheme.static}
            if strategy == "group":
                inputs["group_size"] = 128
        return {
            "quant_method": self.method,
            "format": "naive-quantized" if inputs is None else "float-quantized",
            "quantization_status": "compressed",
            "ignore": list(skipped),
            "kv_cache_scheme": None,
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}},
        }

    def skips(self, config: Mapping[str, Any], module: str) -> bool:  # noqa: D102
        targets = [target for group in config["config_groups"].values() for target in group.get("targets") or ()]
        if any(_matches(each, module) for each in names_in(self.name, config, "ignore")):
            return True
        return "Linear" not in targets and not any(_matches(each, module) for each in targets)

    def stored_shape(self, shape: Sequence[int], granularity: str) -> list[int]:  # noqa: D102
        if granularity == "tensor":
            return [1]
        return [shape[0], 1] if granularity == "row" else super().stored_shape(shape, granularity)


def _matches(pattern: str, module: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), module) is not None
    return pattern == module
