"""Tensor parallelism inside experts: every rank holds a part of each expert's inner width."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from kpt_core import InputError
from kpt_moe.activations import Activation
from kpt_moe.expert_networks import ExpertNetwork, FeedForwardExpert

from ._wire import explained
from .dispatch import Experts


def placements(network: ExpertNetwork, ranks: int) -> dict[str, Placement]:
    """How each parameter lies on a mesh of `ranks` ranks that split the inner width.

    `gate_up_proj` and its bias are split column-wise, gate and up each for itself, so that a rank has matching parts of
    both; `down_proj` row-wise; the bias of `down_proj` is everywhere.

    Source: Megatron-LM (arXiv:1909.08053), section 3.
    """
    if not isinstance(network, FeedForwardExpert):
        raise InputError(f"tensor parallelism is for FeedForwardExpert; got {type(network).__name__}")
    if network.intermediate_size % ranks:
        raise InputError(
            f"tensor parallelism: intermediate_size={network.intermediate_size} does not divide by {ranks}"
        )
    gated = Activation(network.activation).gated
    columns = _StridedShard(1, split_factor=2) if gated else Shard(1)
    return {"gate_up_proj": columns, "gate_up_proj_bias": columns, "down_proj": Shard(2), "down_proj_bias": Replicate()}


def partial_bias(bias: Tensor, group: dist.ProcessGroup) -> Tensor:
    """A bias that is everywhere, as a summand that only the first rank adds; its gradient is the same everywhere."""
    return _SumGradients.apply(bias, group) * float(group.rank() == 0)  # type: ignore[no-any-return,no-untyped-call]


def sum_of_parts(
    experts: Experts, group: dist.ProcessGroup | None, x: Tensor, index: Tensor, weights: Tensor
) -> Tensor:
    """The sum of what all ranks' `experts` give, of tensors that all ranks have alike; gradients are summed too."""
    if group is None:
        return experts(x, index, weights)
    x, weights = (_SumGradients.apply(t, group) for t in (x, weights))  # type: ignore[no-untyped-call]
    return _Sum.apply(experts(x, index, weights), group)  # type: ignore[no-any-return,no-untyped-call]


def _all_reduce(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = tensor.clone(memory_format=torch.contiguous_format)
    with explained(group):
        dist.all_reduce(total, group=group)
    return total


class _SumGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _all_reduce(grad, ctx.group), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None
