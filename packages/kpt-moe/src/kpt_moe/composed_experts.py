"""Experts whose activation or output norm is a module of its own: composed of grouped products, saved by autograd."""

from collections.abc import Callable

from torch import Tensor

from ._pairs import SortedPairs
from .routing import Routing


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
    up, down = (gate_up_proj.mT, down_proj.mT) if transposed else (gate_up_proj, down_proj)
    pairs = SortedPairs.of(Routing(top_k_index, top_k_weights, logits=top_k_weights), up.shape[0])
    y = pairs.linear(activation(pairs.linear(pairs.gather(x), up, gate_up_proj_bias)), down, down_proj_bias)
    if post_norm is not None:
        y = post_norm(y)
    return pairs.combine(y, x.shape[0]).to(x.dtype)
