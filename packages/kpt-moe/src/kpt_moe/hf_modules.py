"""The experts modules of Hugging Face models, told and read without importing transformers."""

from typing import Any

from torch import nn

#: What transformers' `use_experts_implementation` sets on every module that it decorates.
_MARKS = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "config")


def is_transformers_experts(module: nn.Module) -> bool:
    """Return whether a module's experts implementation can be chosen."""
    return all(hasattr(module, mark) for mark in _MARKS) and hasattr(module.config, "_experts_implementation")


def has_post_norm(module: nn.Module) -> bool:
    """Return whether a norm follows each expert; transformers before 5.23 may have no word of it."""
    return getattr(module, "has_post_expert_norm", False)


def parameter_names(module: Any) -> dict[str, str]:
    """Return what the parameters of an experts module are called, by their names in `moe.experts`."""
    up = "gate_up_proj" if module.has_gate else "up_proj"
    names = {"gate_up_proj": up, "down_proj": "down_proj"}
    return names | ({"gate_up_proj_bias": f"{up}_bias", "down_proj_bias": "down_proj_bias"} if module.has_bias else {})
