"""`moe.experts` of a few tokens natively: the weights are read once, in one parallel region, and nothing is sorted."""

import torch
from torch import Tensor

from . import amx, experts_ops
from .experts import refusal_of_weights, scale_of_stored
from .operators import call
from .tensors import refusal_of_transforms

#: From more tokens on the products of `experts` are faster.
MAX_TOKENS = 64
#: So many rows that share an expert, on average, are better multiplied as a matrix.
MAX_ROWS_OF_EXPERT = 8
#: The same where tiles multiply weights of 8 bits.
MAX_ROWS_OF_EXPERT_BY_TILES = 5


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
    tokens, top_k = top_k_index.shape
    if tokens > MAX_TOKENS:
        return f"{tokens} tokens; this kernel is for {MAX_TOKENS} at most"
    # Tiles gain from 8 bits alone, and where a column's numbers are neighbours.
    by_tiles = amx.TILES and x.dtype is torch.bfloat16 and gate_up_proj.itemsize == 1
    along = gate_up_proj.stride(-2 if transposed else -1) == 1
    most = MAX_ROWS_OF_EXPERT_BY_TILES if by_tiles and along else MAX_ROWS_OF_EXPERT
    if tokens * top_k > most * gate_up_proj.shape[0]:
        return f"{tokens * top_k} rows for {gate_up_proj.shape[0]} experts; needs {most} each at most"
    return refusal_of_transforms() or refusal_of_weights(top_k_weights)


def experts_decode(
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
    """`moe.experts`, summed in float32, without gradients."""
    up, down = (gate_up_proj, down_proj) if transposed else (gate_up_proj.mT, down_proj.mT)
    scales = scale_of_stored(gate_up_scale, transposed), scale_of_stored(down_scale, transposed)
    tensors = (x, top_k_index, top_k_weights, up, down, gate_up_proj_bias, down_proj_bias, *scales)
    settings = (activation, interleaved, alpha, beta, limit, True)
    return call(torch.ops.kpt_backend_cpu.experts.default, experts_ops.forward, *tensors, *settings)  # type: ignore[no-any-return]
