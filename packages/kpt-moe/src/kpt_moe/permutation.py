"""Putting the rows of (token, choice) pairs into the order of their experts, and back."""

from typing import NamedTuple

import torch
from torch import Tensor


class Permutation(NamedTuple):
    """The rows of a routing, sorted by expert.

    Attributes:
        order: `[T * K]` int64; sorted row `j` is pair `order[j]`, of token `order[j] // K`. Stable, but that negative
            ids count as `E`.
        offsets: `[E]` int32; expert `e` owns the sorted rows from `offsets[e - 1]` to `offsets[e]`. Rows at and past
            `offsets[-1]` belong to no expert here.
    """

    order: Tensor
    offsets: Tensor


def sort_by_expert(top_k_index: Tensor, num_experts: int) -> Permutation:
    """Sort the pairs of `top_k_index` `[T, K]` by expert, without reading a value on the host.

    Ids that are negative or at and above `num_experts` (experts of another rank, dropped pairs) sort to the end.
    """
    flat = top_k_index.reshape(-1)
    ids, order = torch.sort(torch.where(flat < 0, num_experts, flat), stable=True)
    experts = torch.arange(num_experts, device=ids.device, dtype=ids.dtype)
    return Permutation(order, torch.searchsorted(ids, experts, right=True, out_int32=True))


def inside(offsets: Tensor, rows: int) -> Tensor:
    """`[rows]` bool: whether an expert here owns each sorted row."""
    return torch.arange(rows, device=offsets.device) < offsets[-1:]


def inverse(order: Tensor) -> Tensor:
    """`[T * K]`: where each pair lies among the sorted rows."""
    positions = torch.empty_like(order)
    return positions.scatter_(0, order, torch.arange(order.numel(), device=order.device))


def expert_of_rows(offsets: Tensor, rows: int) -> Tensor:
    """`[rows]` int64: the expert of each sorted row; rows of no expert are given to the last one."""
    positions = torch.arange(rows, device=offsets.device, dtype=offsets.dtype)
    return torch.searchsorted(offsets, positions, right=True).clamp_(max=offsets.numel() - 1)
