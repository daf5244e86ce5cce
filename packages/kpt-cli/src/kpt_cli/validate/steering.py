"""Steer a run by a recording: change what flows between its modules."""

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from .routing import differing_rows, find_routing
from .trace import Call, Layer

Side = Literal["inputs", "outputs"]
#: From a call's key and the tensors that its module is about to take, or gave, to those that take their place.
Steer = Callable[[str, Side, list[Tensor]], list[Tensor]]


def following(calls: Sequence[Call]) -> Steer:
    """Give tokens whose routing flipped the recorder's experts and weights, so that all after it can be compared.

    A routing is corrected among arguments too, where the router is no module of its own. Tokens whose routing by the
    recorder differs from float64 follow though their choice is the same here: the recorder's weights are others.
    """
    recorded = {call.key: call for call in calls}

    def steer(key: str, side: Side, leaves: list[Tensor]) -> list[Tensor]:
        call, routing = recorded.get(key), find_routing(leaves)
        if call is None or routing is None or not _same_shapes(leaves, getattr(call, side)):
            return leaves
        theirs: Sequence[Tensor] = getattr(call, side)
        rows = differing_rows(leaves[routing.index].cpu(), theirs[routing.index])
        if isinstance(call, Layer) and side == "outputs":
            rows = rows | differing_rows(theirs[routing.index], call.reference[routing.index])
        if rows.any():
            for position in (routing.index, *routing.weights):
                leaf = leaves[position]
                leaves[position] = torch.where(rows[:, None].to(leaf.device), _as(theirs[position], leaf), leaf)
        return leaves

    return steer


def forcing(calls: Sequence[Call]) -> Steer:
    """Feed every module what the recorder's was fed, and hand on what that gave: no error goes any further."""
    recorded = {call.key: call for call in calls}

    def steer(key: str, side: Side, leaves: list[Tensor]) -> list[Tensor]:
        call = recorded.get(key)
        if call is None or not _same_shapes(leaves, getattr(call, side)):
            return leaves
        return [
            # A mask may be boolean for one implementation and additive for another.
            _as(value, leaf) if value.is_floating_point() == leaf.is_floating_point() else leaf
            for value, leaf in zip(getattr(call, side), leaves, strict=True)
        ]

    return steer


def _same_shapes(leaves: Sequence[Tensor], recorded: Sequence[Tensor]) -> bool:
    return [leaf.shape for leaf in leaves] == [value.shape for value in recorded]


def _as(value: Tensor, like: Tensor) -> Tensor:
    """A copy, since a module may write into what it is given."""
    return value.to(like.device, like.dtype, copy=True)
