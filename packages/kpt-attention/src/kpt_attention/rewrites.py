"""What `kpt_optimize.optimize` may do to the attention of a Hugging Face model: serve it by `attention.dense`."""

import copy
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from kpt_core import InputError

if TYPE_CHECKING:
    from kpt_optimize import Site  # most processes never optimise


@dataclass(frozen=True)
class KptAttention:
    """Serve an attention module that runs PyTorch's SDPA by `attention.dense`; its weights are those of the original.

    The model keeps its implementation, and so the masks that it makes, whose format is the same for both.
    """

    name: str = "attention.dense"
    lossless: bool = True
    level: str = "conservative"

    def sites(self, model: nn.Module) -> "Iterator[Site]":
        """Every attention module whose implementation can be chosen, and is `sdpa`."""
        from kpt_optimize import Site

        for path, module in model.named_modules():
            # A `forward` of the instance (accelerate's hooks) is bound to it: a twin would run the original.
            if path and _is_attention(module) and "forward" not in vars(module):
                yield Site(path, "attention.dense")

    def replacement(self, module: nn.Module) -> nn.Module:
        """Return a twin that shares parameters, children and hooks so far, and whose configuration alone differs."""
        if not _is_attention(module):
            raise InputError(f"{type(module).__name__} is no attention module of transformers that runs 'sdpa'")
        from . import transformers  # registers the implementation

        clone: Any = copy.copy(module)
        for name, registry in vars(module).items():
            if isinstance(registry, dict | set):  # parameters, children and hooks: what one gets, the other must not
                vars(clone)[name] = registry.copy()
        clone.config = copy.copy(module.config)
        clone.config._attn_implementation_internal = transformers.NAME
        return clone  # type: ignore[no-any-return]


def _is_attention(module: Any) -> bool:
    """Return whether a module asks transformers' table for the attention function that its configuration names."""
    if getattr(getattr(module, "config", None), "_attn_implementation", None) != "sdpa":
        return False
    names = getattr(inspect.unwrap(type(module).forward), "__code__", _is_attention.__code__).co_names
    return "ALL_ATTENTION_FUNCTIONS" in names


REWRITES = (KptAttention(),)
