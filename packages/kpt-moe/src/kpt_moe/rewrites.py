"""What `kpt_optimize.optimize` may do to the experts of a Hugging Face model."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .hf_modules import is_transformers_experts as is_transformers_experts

if TYPE_CHECKING:
    from kpt_optimize import Site  # most processes never optimise


@dataclass(frozen=True)
class KptExperts:
    """Serve an experts module by `moe.experts`; its weights are shared with the original."""

    name: str = "moe.experts"
    lossless: bool = True
    level: str = "conservative"

    def sites(self, model: nn.Module) -> "Iterator[Site]":
        """Every experts module that this would change."""
        from kpt_optimize import Site

        for path, module in model.named_modules():
            # A `forward` of the instance (accelerate's hooks) is bound to it: a twin would run the original.
            if path and is_transformers_experts(module) and "forward" not in vars(module) and self._changes(module):
                yield Site(path, "moe.experts")

    def _changes(self, module: Any) -> bool:
        return bool(module.config._experts_implementation != "kpt")

    def replacement(self, module: nn.Module) -> nn.Module:
        """A twin that shares parameters, children and hooks so far, and whose configuration alone differs."""
        if not is_transformers_experts(module):
            from kpt_optimize import RejectedError

            raise RejectedError(f"another rewrite had put {type(module).__name__} in their place already")
        from . import transformers  # noqa: F401  registers the implementation

        clone: Any = copy.copy(module)
        for name, registry in vars(module).items():
            if isinstance(registry, dict | set):  # parameters, children and hooks: what one gets, the other must not
                vars(clone)[name] = registry.copy()
        clone.config = copy.copy(module.config)
        clone.config._experts_implementation_internal = "kpt"
        return clone  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Bfloat16Experts(KptExperts):
    """Hold an experts module's float32 weights in bfloat16 and multiply in it: half the bytes, twice the rate."""

    name: str = "moe.experts_bfloat16"
    lossless: bool = False
    level: str = "balanced"

    def _changes(self, module: Any) -> bool:
        return module.down_proj.dtype is torch.float32

    def replacement(self, module: nn.Module) -> nn.Module:
        """Such a twin with converted copies of the weights."""
        clone = super().replacement(module)
        for name, parameter in module.named_parameters(recurse=False):
            converted = nn.Parameter(parameter.detach().to(torch.bfloat16), requires_grad=parameter.requires_grad)
            clone.register_parameter(name, converted)
        return clone


REWRITES = (KptExperts(), Bfloat16Experts())
