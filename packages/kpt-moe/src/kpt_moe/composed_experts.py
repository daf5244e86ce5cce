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

    The tensors, `transposed` and the result are those of `moe.experts`. `activation` maps `[rows, width]` to
    `[rows, intermediate_size]`, and `post_norm` `[rows, hidden_size]` to itself, before the routing weights. It saves
    every intermediate that autograd asks for; `moe.experts` saves the pre-activation alone.
    """
    up, down = (gate_up_proj.mT, down_proj.mT) if transposed else (gate_up_proj, down_proj)
    pairs = SortedPairs.of(Routing(top_k_index, top_k_weights, logits=top_k_weights), up.shape[0])
    y = pairs.linear(activation(pairs.linear(pairs.gather(x), up, gate_up_proj_bias)), down, down_proj_bias)
    if post_norm is not None:
        y = post_norm(y)
    return pairs.combine(y, x).to(x.dtype)
