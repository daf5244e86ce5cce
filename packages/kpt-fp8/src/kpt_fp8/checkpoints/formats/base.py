"""What a format of files is: `Format`."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from kpt_core import InputError
from kpt_fp8.checkpoints.scheme import Scheme
from kpt_fp8.scales import scale_shape

#: By granularity of weights, granularities of activations, each with whether their scale is static.
Takes = Mapping[str, tuple[tuple[str, bool], ...]]


class Format:
    """How a library writes quantised weights: names and shapes of tensors, and what its configuration says.

    A weight is known by the name that it has in the model, `layer.weight`. Subclasses say how things are named; where
    they say nothing, a weight has its own name and its scale ends in `_scale`. `takes` tells by granularity of weights
    what activations may be, the usual first; `bound` is the largest magnitude that they are taken to have.
    """

    name: ClassVar[str]
    method: ClassVar[str]
    takes: ClassVar[Takes]
    bound: ClassVar[float | None] = None
    scales: ClassVar[tuple[torch.dtype, ...]] = (torch.float32,)

    def read_config(self, config: Mapping[str, Any]) -> Scheme:
        """What `quantization_config` says."""
        raise NotImplementedError

    def write_config(self, scheme: Scheme, skipped: Sequence[str]) -> dict[str, Any]:
        """Return the `quantization_config` of a scheme; `skipped` are modules whose weights are not quantised."""
        raise NotImplementedError

    def skips(self, config: Mapping[str, Any], module: str) -> bool:
        """Tell whether the configuration leaves a module as it is, by names as transformers reads them."""
        listed = names_in(self.name, config, "modules_to_not_convert", "ignored_layers")
        end = r"(?:(?<=\.)|(?=\.|$))"
        return any(module.endswith(each) or re.match(f"(?:{each}){end}", module) for each in listed)

    def weight_name(self, stored: str) -> str:
        """The weight's name, from the name under which the file has its codes."""
        return stored

    def codes_name(self, weight: str) -> str:
        """The name of the codes."""
        return weight

    def scale_name(self, weight: str) -> str:
        """The name of the scale."""
        return f"{weight}_scale"

    def input_scale_name(self, weight: str) -> str:
        """The name of the static scale of activations."""
        return f"{weight.rpartition('.')[0]}.input_scale"

    def stored_shape(self, shape: Sequence[int], granularity: str) -> list[int]:
        """The shape that a scale has in the file."""
        return scale_shape(shape, granularity)

    def refusal(self, scheme: Scheme) -> str:
        """Say why the format can't hold such weights, as the rest of a sentence; empty where it can."""
        if scheme.scale_dtype not in self.scales:
            return f"its scales are {' or '.join(map(str, self.scales))}; got {scheme.scale_dtype}"
        if scheme.granularity in self.takes:
            return ""
        return f"it has scales per {' or '.join(self.takes)}; got scales per {scheme.granularity}"

    def metadata(
        self, scheme: Scheme, names: Sequence[str], weights: Mapping[str, Sequence[int]], dtype: str
    ) -> dict[str, str]:
        """Return the header of every file, from `names` and shapes of quantised `weights` as the model has them."""
        return {"format": "pt"}


def expect(format: str, key: str, value: object, known: Sequence[object]) -> None:
    """Raise `InputError` unless a value of the configuration is one of those known."""
    if value not in known:
        listed = " or ".join(repr(each) for each in known)
        raise InputError(f"{format}: quantization_config has {key}={value!r}; expected {listed}")


def names_in(format: str, config: Mapping[str, Any], *keys: str) -> list[str]:
    """Names of modules under the first of the keys that has some; raises `InputError` where it is no list of names."""
    key = next((key for key in keys if config.get(key)), keys[0])
    found = config.get(key) or []
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise InputError(f"{format}: quantization_config has {key}={found!r}; expected a list of names of modules")
    return found


def module_of(weight: str) -> str:
    """The module of a weight: `layer` of `layer.weight`."""
    return weight.removesuffix(".weight")
