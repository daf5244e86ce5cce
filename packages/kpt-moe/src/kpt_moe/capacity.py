"""Capacity: how many tokens an expert takes at most, and which choices are refused for want of it."""

from fractions import Fraction
from typing import Literal, overload

import torch
from torch import Tensor
from torch.nn import functional as F

from ._checks import require_known, require_number
from .permutation import sort_by_expert

#: Who comes first: earlier tokens, all first choices before any second one (GShard, arXiv:2006.16668); or the choices
#: with the greatest weights (Megatron-LM's policy `probs`; for one choice per token, the batch prioritised routing of
#: V-MoE, arXiv:2106.05974). Of equal weights, as all are that are normalised over one choice, the earlier comes first.
Priority = Literal["position", "weight"]
PRIORITIES: tuple[Priority, ...] = ("position", "weight")


@overload
def expert_capacity(tokens: int, *, top_k: int, num_experts: int, factor: float) -> int: ...
@overload
def expert_capacity(tokens: int | Tensor, *, top_k: int, num_experts: int, factor: float) -> int | Tensor: ...
def expert_capacity(tokens: int | Tensor, *, top_k: int, num_experts: int, factor: float) -> int | Tensor:
    """Tokens that each expert takes at most: `ceil(tokens * top_k / num_experts * factor)`.

    Computed in integers, with the factor as a fraction of a denominator up to a million: a number of tokens and a 0-d
    int64 tensor of it give the same capacity, and 1.1 times 100 tokens is 110, not a rounding error more.

    Source: Switch Transformer (arXiv:2101.03961), equation 3, with `top_k` choices per token.

    Raises:
        InputError: a factor that is not a positive number.
    """
    require_number("expert_capacity", "factor", factor, "a positive number")
    exact = Fraction(factor).limit_denominator(1_000_000)
    # A factor that is less than the fractions can tell is the least of them, not zero.
    numerator, denominator = (exact.numerator, exact.denominator) if exact.numerator else (1, 1_000_000)
    return -(-tokens * (top_k * numerator) // (num_experts * denominator))


def limit_capacity(
    index: Tensor, weights: Tensor, *, num_experts: int, capacity: int | Tensor, priority: Priority = "position"
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
    require_known("priority", priority, PRIORITIES)
    tokens, top_k = index.shape
    # Choices in the order in which they are served: all first ones, then all second ones; or by weight.
    turns = None
    if priority == "weight":
        turns = weights.detach().reshape(-1).argsort(descending=True, stable=True)
    choices = index.t().reshape(-1) if turns is None else index.reshape(-1)[turns]
    order, offsets = sort_by_expert(choices, num_experts)
    expert = choices[order]
    known = expert.clamp(0, num_experts - 1)
    # The first sorted place of each expert.
    place = torch.arange(order.numel(), device=index.device) - F.pad(offsets[:-1], (1, 0))[known]
    room = capacity if isinstance(capacity, int) else capacity.expand(num_experts)[known]
    kept = torch.where((known == expert) & (place >= room), ~expert, expert)
    if turns is None:
        return torch.empty_like(kept).scatter_(0, order, kept).view(top_k, tokens).t().contiguous()
    return torch.empty_like(kept).scatter_(0, turns[order], kept).view(tokens, top_k)
