"""Experts whose activation or output norm is a module of its own: composed of grouped products, saved by autograd."""

from collections.abc import Callable

from torch import Tensor

from .grouped_mm import grouped_mm
from .permutation import expert_of_rows, inverse, sort_by_expert


def composed_experts(
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    gate_up_proj_bias: Tensor | None = None,
    down_proj_bias: Tensor | None = None,
    *,
    activation: Callable[[Tensor], Tensor],
    post_norm: Callable[[Tensor], Tensor] | None = None,
    transposed: bool = False,
) -> Tensor:
    """What `moe.experts` does, with any row-wise function as the activation and after the down projection.

    It saves every intermediate that autograd asks for; `moe.experts` saves the pre-activation alone.

    Args:
        x: `[tokens, hidden_size]`.
        top_k_index: `[tokens, top_k]`; pairs with a negative id or one at or above the number of experts
            contribute nothing.
        top_k_weights: `[tokens, top_k]`.
        gate_up_proj: `[num_experts, width, hidden_size]`, its last two exchanged if `transposed`.
        down_proj: `[num_experts, hidden_size, intermediate_size]`, likewise.
        gate_up_proj_bias: `[num_experts, width]`.
        down_proj_bias: `[num_experts, hidden_size]`.
        activation: maps `[rows, width]` to `[rows, intermediate_size]`.
        post_norm: maps `[rows, hidden_size]` to itself, before the routing weights.
        transposed: the matrices are stored as input by output.

    Returns:
        `[tokens, hidden_size]` of x's dtype.
    """
    num_experts, top_k = gate_up_proj.shape[0], top_k_index.shape[1]
    up, down = (gate_up_proj, down_proj) if transposed else (gate_up_proj.mT, down_proj.mT)
    order, offsets = sort_by_expert(top_k_index, num_experts)
    expert = expert_of_rows(offsets, order.shape[0])
    away = ((top_k_index < 0) | (top_k_index >= num_experts)).reshape(-1)[order].unsqueeze(1)
    rows = x[order // top_k].masked_fill(away, 0)
    h = grouped_mm(rows, up, offsets)
    if gate_up_proj_bias is not None:
        h = h + gate_up_proj_bias[expert]
    y = grouped_mm(activation(h), down, offsets)
    if down_proj_bias is not None:
        y = y + down_proj_bias[expert]
    if post_norm is not None:
        y = post_norm(y)
    weights = top_k_weights.reshape(-1)[order].unsqueeze(1).masked_fill(away, 0)
    weighted = (y * weights).masked_fill(away, 0)
    return weighted[inverse(order)].view(x.shape[0], top_k, x.shape[1]).sum(1).to(x.dtype)
