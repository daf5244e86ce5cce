"""`moe.experts`: all of a layer's experts in a few Triton kernels, with nothing but the pre-activation saved."""

from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from kpt_core import tuned_config
from kpt_triton.moe import experts as library
from kpt_triton.moe.activation import GATED
from kpt_triton.moe.sorting import MAX_EXPERTS
from kpt_triton.moe.tiles import candidate_tiles, chip_of

from .float8 import refusal_of_float8

_TARGET = "kpt_backend_nvidia.moe.experts:experts"


def unsupported(
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    gate_up_proj_bias: Tensor | None = None,
    down_proj_bias: Tensor | None = None,
    *,
    activation: str = "swiglu",
    transposed: bool = False,
    interleaved: bool = False,
    alpha: float = 1.0,
    beta: float = 0.0,
    limit: float | None = None,
    gate_up_scale: Tensor | None = None,
    down_scale: Tensor | None = None,
) -> str | None:
    """Why a call is not for this kernel, or None."""
    if top_k_weights.dtype is torch.float64:
        return "routing weights in float64; needs float32, bfloat16 or float16"
    if gate_up_proj.shape[0] > MAX_EXPERTS:
        return f"{gate_up_proj.shape[0]} experts; this kernel sorts by {MAX_EXPERTS} at most"
    return refusal_of_float8(x, gate_up_proj, down_proj)


def experts(
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    gate_up_proj_bias: Tensor | None = None,
    down_proj_bias: Tensor | None = None,
    *,
    activation: str = "swiglu",
    transposed: bool = False,
    interleaved: bool = False,
    alpha: float = 1.0,
    beta: float = 0.0,
    limit: float | None = None,
    gate_up_scale: Tensor | None = None,
    down_scale: Tensor | None = None,
) -> Tensor:
    """`kpt_triton.moe.experts.experts`, with the tiles that were measured for the device, if any."""
    tensors = (x, top_k_index, top_k_weights, gate_up_proj, down_proj, gate_up_proj_bias, down_proj_bias)
    options: dict[str, Any] = {
        "activation": activation,
        "transposed": transposed,
        "interleaved": interleaved,
        "alpha": alpha,
        "beta": beta,
        "limit": limit,
        "gate_up_scale": gate_up_scale,
        "down_scale": down_scale,
    }
    found = tuned_config("moe.experts", _TARGET, *tensors, **options)
    tiles = None if found is None else library.ExpertsTiles(**found)
    return library.experts(*tensors, **options, tiles=tiles)


def configs(
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    gate_up_proj_bias: Tensor | None = None,
    down_proj_bias: Tensor | None = None,
    *,
    activation: str = "swiglu",
    transposed: bool = False,
    interleaved: bool = False,
    alpha: float = 1.0,
    beta: float = 0.0,
    limit: float | None = None,
    gate_up_scale: Tensor | None = None,
    down_scale: Tensor | None = None,
) -> list[dict[str, str]]:
    """What is worth measuring for a call: each product's candidates, the others left at their defaults.

    Nothing is where a few tokens are computed pair by pair, without tiles.
    """
    chip = chip_of(x.device)
    products = {"up": "pair" if activation in GATED else "crowded", "down": "plain"}
    if torch.is_grad_enabled() and any(t.requires_grad for t in (x, gate_up_proj, down_proj, top_k_weights)):
        products |= {"slope": "slope", "wgrad": "wgrad"}
    elif library.is_few(x.shape[0], top_k_index.shape[1], gate_up_proj.shape[0]):
        return []
    return [
        asdict(library.ExpertsTiles(**{name: str(tile)}))
        for name, product in products.items()
        for tile in candidate_tiles(product, chip)
    ]
