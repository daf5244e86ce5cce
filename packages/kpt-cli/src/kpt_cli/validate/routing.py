"""Routing seen from outside: which experts were chosen, whose choice flipped, and whether rounding explains it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RoutingLeaves:
    """Where a routing stands among the tensors that a module takes or gives.

    Attributes:
        index: position of the chosen experts, an integer `[tokens, top_k]`.
        weights: positions of floating tensors of the same shape.
        logits: position of the scores that the choice was made by, `[tokens, num_experts]`; None if they are not there.
    """

    index: int
    weights: tuple[int, ...]
    logits: int | None


def find_routing(leaves: Sequence[Tensor]) -> RoutingLeaves | None:
    """A choice of experts with its weights among tensors, or None."""
    for position, leaf in enumerate(leaves):
        if leaf.dim() != 2 or leaf.dtype not in (torch.int64, torch.int32):
            continue
        floating = [i for i, other in enumerate(leaves) if other.is_floating_point() and other.dim() == 2]
        weights = tuple(i for i in floating if leaves[i].shape == leaf.shape)
        if weights:
            wider = [i for i in floating if leaves[i].shape[0] == leaf.shape[0] and leaves[i].shape[1] > leaf.shape[1]]
            return RoutingLeaves(position, weights, wider[0] if len(wider) == 1 else None)
    return None


def differing_rows(index: Tensor, other: Tensor) -> Tensor:
    """Which tokens go to other experts, whatever their order: bool `[tokens]`."""
    return (index.sort(-1).values != other.sort(-1).values).any(-1)


def by_expert(leaves: Sequence[Tensor], routing: RoutingLeaves) -> list[Tensor]:
    """The tensors with each token's experts in ascending order: equal scores may come in any."""
    order = leaves[routing.index].long().argsort(-1)
    moved = {routing.index, *routing.weights}
    return [leaf.gather(-1, order) if i in moved else leaf for i, leaf in enumerate(leaves)]


@dataclass(frozen=True, slots=True)
class Flip:
    """A token that goes to other experts than it did for the recorder.

    Attributes:
        token: its row.
        gap: how far the reference's scores of the exchanged experts lie apart; None where scores are not seen, or
            where something else than their order decides.
        limit: how much of a gap rounding explains.
    """

    token: int
    gap: float | None
    limit: float

    @property
    def explained(self) -> bool:
        """Whether rounding may have caused it, as far as can be told."""
        return self.gap is None or self.gap <= self.limit


def find_flips(
    index: Tensor, recorded: Tensor, reference: Tensor, logits: Tensor | None, limit: float
) -> tuple[Flip, ...]:
    """Compare the choice of a run with the recorder's.

    Args:
        index: `[tokens, top_k]`, this run's choice.
        recorded: the recorder's.
        reference: float64's own.
        logits: float64's scores `[tokens, num_experts]`, if seen.
        limit: what rounding explains of a gap between two scores.
    """
    top_k = index.shape[1]
    # Biases and groups may decide beside the scores: then their order tells nothing.
    decided = logits is not None and not differing_rows(logits.topk(top_k, dim=-1).indices, reference).any()
    flips = []
    for token in differing_rows(index, recorded).nonzero().flatten().tolist():
        gap = None
        if decided and logits is not None:
            lost = sorted(set(recorded[token].tolist()) - set(index[token].tolist()))
            gained = sorted(set(index[token].tolist()) - set(recorded[token].tolist()))
            if gained and not logits[token].isnan().any():
                gap = (logits[token, lost].max() - logits[token, gained].min()).item() if lost else None
        flips.append(Flip(token, gap, limit))
    return tuple(flips)
