"""The experts modules of Hugging Face models, told and read without importing transformers."""

from typing import Any

from torch import Tensor, nn

#: What transformers' `use_experts_implementation` sets on every module that it decorates.
_MARKS = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "config")

#: What they call index and weights, which they take after the hidden states.
_TOLD = (("top_k_index", "router_indices"), ("top_k_weights", "routing_weights"))


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


def told_routing(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return index and weights of a call of an experts module."""
    return [*args[1:], *(kwargs[name] for names in _TOLD for name in names if name in kwargs)]


def replace_routing(
    args: tuple[Any, ...], kwargs: dict[str, Any], routing: tuple[Tensor, Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call of an experts module with another index and other weights."""
    named = {name: value for names, value in zip(_TOLD, routing, strict=True) for name in names if name in kwargs}
    return (*args[:1], *routing[: max(len(args) - 1, 0)]), {**kwargs, **named}
