"""Capacity: how many tokens an expert takes at most, and which choices are refused for want of it."""

import math
from typing import Literal

import torch
from torch import Tensor

from kpt_core import InputError, UnknownNameError

from .permutation import inverse, sort_by_expert

#: Who comes first: earlier tokens, all first choices before any second one (GShard, arXiv:2006.16668); or the tokens
#: with the greatest weights (batch prioritised routing, V-MoE, arXiv:2106.05974).
Priority = Literal["position", "weight"]
PRIORITIES: tuple[Priority, ...] = ("position", "weight")


def expert_capacity(tokens: int, top_k: int, num_experts: int, factor: float) -> int:
    """Tokens that each expert takes at most: `ceil(tokens * top_k / num_experts * factor)`.

    Source: Switch Transformer (arXiv:2101.03961), equation 3, with `top_k` choices per token.

    Raises:
        InputError: a factor that is not a positive number.
    """
    if not factor > 0 or math.isinf(factor):
        raise InputError(f"capacity: the factor must be a positive number; got {factor}")
    return math.ceil(tokens * top_k * factor / num_experts)


def limit_capacity(
    index: Tensor, weights: Tensor, num_experts: int, capacity: int | Tensor, priority: Priority = "position"
) -> Tensor:
    """Refuse the choices that exceed what their expert takes.

    Nothing is read on the host, and the result's shape depends on shapes alone.

    Args:
        index: `[tokens, K]`; negative ids and those at or above `num_experts` take no place.
        weights: `[tokens, K]`; read for the priority `weight`.
        num_experts: number of experts.
        capacity: places of each expert, or 0-d or `[num_experts]` on the device of `index`.
        priority: who comes first.

    Returns:
        `[tokens, K]`, refused choices of expert `e` as `~e`.

    Raises:
        UnknownNameError: no such priority.
    """
    if priority not in PRIORITIES:
        raise UnknownNameError("priority", priority, PRIORITIES)
    tokens, top_k = index.shape
    # Rows in the order in which they are served: all first choices, then all second ones; or by weight.
    served = torch.arange(index.numel(), device=index.device).view(top_k, tokens).t().reshape(-1)
    if priority == "weight":
        served = inverse(weights.detach().reshape(-1).argsort(descending=True, stable=True))
    by_turn = index.reshape(-1)[inverse(served)]
    order, offsets = sort_by_expert(by_turn.unsqueeze(1), num_experts)
    ends = offsets.long()
    starts = torch.cat((ends.new_zeros(1), ends[:-1]))
    expert = by_turn[order]
    here = (expert >= 0) & (expert < num_experts)
    place = torch.arange(order.numel(), device=index.device) - starts[expert.clamp(0, num_experts - 1)]
    room = capacity if isinstance(capacity, int) else capacity.expand(num_experts)[expert.clamp(0, num_experts - 1)]
    kept = torch.where(here & (place >= room), ~expert, expert)
    return kept[inverse(order)][served].view(tokens, top_k)
