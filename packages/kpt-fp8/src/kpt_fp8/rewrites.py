"""What `kpt_optimize.optimize` may do to linear layers and experts of a model: hold their weights in 8 bits."""

import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn

from kpt_core import InputError

from .experts import NativeFP8Experts, is_stacked, refusal
from .linear import NONE
from .native_linear import NativeFP8Linear
from .selection import select

if TYPE_CHECKING:
    from kpt_optimize import Site  # most processes never optimise

#: Layers with fewer inputs or outputs stay as they are.
MIN_FEATURES = 64

#: By level, the error allowed: rounding a weight to e4m3 costs an output 2.6 to 3.1 % of its largest number, more than
#: the 2 % of level `balanced`. Tried on small Llamas.
MAX_ERRORS = {"balanced": 5e-2, "aggressive": 1e-1}


@dataclass(frozen=True)
class FP8Linear:
    """Make an `nn.Linear` a `NativeFP8Linear`, with what shares a scale of weight and activations.

    `optimize` keeps it where the layer's output is within the error budget and the layer is measured faster, or smaller
    where that is the objective.
    """

    name: str
    granularity: str
    activations: str = NONE
    level: str = "balanced"
    lossless: bool = False
    max_errors: ClassVar[Mapping[str, float]] = MappingProxyType(MAX_ERRORS)

    def sites(self, model: nn.Module) -> "Iterator[Site]":
        """Every layer that could be converted."""
        from kpt_optimize import Site

        places: dict[nn.Module, list[str]] = {}
        for path, module in model.named_modules(remove_duplicate=False):
            places.setdefault(module, []).append(path)
        for module, paths in places.items():
            if paths[0] and convertible(module) and not any(weight_is_read(model, path) for path in paths):
                yield Site(paths[0], "fp8.linear")

    def replacement(self, module: nn.Module) -> nn.Module:
        """Return the converted layer; raise `RejectedError` where it was converted and this rewrite adds nothing."""
        if isinstance(module, NativeFP8Linear):
            return self._from_converted(module)
        if not isinstance(module, nn.Linear):
            raise InputError(f"{self.name}: module must be an nn.Linear; got {type(module).__name__}")
        return NativeFP8Linear.from_linear(module, granularity=self.granularity, activations=self.activations)

    def _from_converted(self, layer: NativeFP8Linear) -> nn.Module:
        """A twin with the same codes that quantises activations too."""
        from kpt_optimize import RejectedError

        if self.activations == NONE or layer.activations != NONE or layer.granularity != self.granularity:
            raise RejectedError(f"the layer is 8-bit already, with scales for each {layer.granularity}")
        return NativeFP8Linear.from_fp8(layer.weight, layer.bias, activations=self.activations).train(layer.training)


@dataclass(frozen=True)
class FP8Experts:
    """Make experts as transformers fuses them `NativeFP8Experts`: kept where `FP8Linear` would be."""

    name: str
    granularity: str
    level: str = "balanced"
    lossless: bool = False
    max_errors: ClassVar[Mapping[str, float]] = MappingProxyType(MAX_ERRORS)

    def sites(self, model: nn.Module) -> "Iterator[Site]":
        """Every module of experts that could be converted."""
        from kpt_optimize import Site

        for path, module in model.named_modules():
            if path and is_stacked(module) and not refusal(module, self.granularity, torch.float8_e4m3fn):
                yield Site(path, "moe.experts")

    def replacement(self, module: nn.Module) -> nn.Module:
        """Return the converted experts; raise `InputError` where the op can't stand for them."""
        return NativeFP8Experts.from_experts(module, granularity=self.granularity)[0]


def convertible(module: nn.Module) -> bool:
    """Tell whether a module is a layer that `convert_model_to_fp8` would convert, by itself."""
    if type(module) is not nn.Linear or module.weight.is_meta:
        return False
    try:
        return bool(select("rewrites", nn.ModuleList([module]), None, (), MIN_FEATURES).chosen)
    except InputError:  # its dtype is none to convert from, or it has hooks that would be lost
        return False


def weight_is_read(model: nn.Module, path: str) -> bool:
    """Tell whether the layer's parent reads its weight instead of only calling it, as its source tells.

    Such a parent would take codes for numbers: `nn.TransformerEncoderLayer`, and T5's feed-forward layers, which
    convert their input to the weight's dtype.
    """
    parent, _, name = path.rpartition(".")
    try:
        source = inspect.getsource(type(model.get_submodule(parent)).forward)
    except (OSError, TypeError):  # made on the spot, or no Python
        return False
    return re.search(rf"\bself\.{re.escape(name)}\.(weight|bias)\b", source) is not None


#: By granularity of the weight: what a plan names. Blocks are for layers whose rows are not accurate enough, which few
#: are; with them at a lower level each layer would be tried twice.
WEIGHTS = {
    "row": FP8Linear("fp8.linear", "row"),
    "128x128": FP8Linear("fp8.linear_128x128", "128x128", level="aggressive"),
}
#: The same of experts.
EXPERTS = {
    "row": FP8Experts("fp8.experts", "row"),
    "128x128": FP8Experts("fp8.experts_128x128", "128x128", level="aggressive"),
}
REWRITES = (
    *WEIGHTS.values(),
    FP8Linear("fp8.linear_activations", "row", "row", level="aggressive"),
    *EXPERTS.values(),
)
