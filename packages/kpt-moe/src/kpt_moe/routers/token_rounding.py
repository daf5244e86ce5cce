"""Choices rounded to whole tiles of a matrix product."""

from typing import ClassVar, Literal, Unpack, get_args

import torch
from torch import Tensor

from kpt_moe._checks import require_known, require_size
from kpt_moe.capacity import limit_capacity

from .base import Choices, LinearOptions, LinearRouter

#: Which multiple of the tile an expert's number of tokens becomes; halves are rounded up.
Rounding = Literal["nearest", "up", "down"]
ROUNDINGS: tuple[Rounding, ...] = get_args(Rounding)


class TokenRoundingRouter(LinearRouter):
    """Choose the highest scores, then make every expert's number of tokens a multiple of a tile (arXiv:2512.14080).

    A grouped product computes whole tiles of rows, and pads those of an expert that has too few. This router gives
    each expert a number of tokens without a remainder instead: it refuses the choices that score lowest at the expert,
    or adds the tokens that score highest there among those that did not choose it. Where too few are left, fewer
    are added. Scores are a softmax over all experts, and weights are these scores, not renormalised.

    Rounded routings have the form `[rows, 1]` with `Routing.token`. First come the choices of the tokens, in the order
    of the tokens and best first, the refused ones of expert `e` as `~e`; then rows for the tokens that each expert may
    add, of which the unused ones have id `num_experts`, token 0 and weight 0. The number of rows depends on
    shapes alone.

    Rounded choices depend on the whole batch, so that outside of training the highest scores are chosen.

    Args:
        hidden_size, num_experts: size of a token, and number of experts.
        top_k: experts per token, before rounding.
        tile: rows of a tile.
        rounding: `nearest`, `up` or `down`.
        shared: as in `LinearRouter`, but for what belongs to capacity.

    Raises:
        InputError: as in `Router`; `tile` is not a positive integer.
        UnknownNameError: no such `rounding`.
    """

    mixes: ClassVar[bool] = True
    refused: ClassVar[tuple[str, ...]] = ("capacity_factor", "eval_capacity_factor", "priority")

    def __init__(
        self,
        hidden_size: int,
        *,
        num_experts: int,
        top_k: int,
        tile: int = 128,
        rounding: Rounding = "nearest",
        **shared: Unpack[LinearOptions],
    ) -> None:
        super().__init__(hidden_size, num_experts=num_experts, top_k=top_k, **shared)
        require_size(type(self).__name__, "tile", tile)
        require_known("rounding", rounding, ROUNDINGS)
        self.tile = tile
        self.rounding: Rounding = rounding

    def choose(self, logits: Tensor, scores: Tensor, mask: Tensor | None, token_ids: Tensor | None) -> Choices:
        """The highest scores `[tokens, top_k]`, or rounded `[rows, 1]` as the class says."""
        index = scores.topk(self.top_k, dim=-1).indices
        if not self.training:
            return index, None
        tokens, experts = scores.shape
        chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(1, index, True)
        closed = chosen
        real: int | Tensor = tokens
        weights = scores.gather(1, index)
        if mask is not None:
            padding = ~mask.unsqueeze(1)
            chosen, closed, real = chosen & ~padding, chosen | padding, mask.sum()
            index = torch.where(padding, ~index, index)
        count = chosen.sum(0)
        # At most this many are added to one expert, whatever the choices are.
        margin = {"nearest": self.tile // 2, "up": self.tile - 1, "down": 0}[self.rounding]
        target = (count + margin) // self.tile * self.tile
        index = limit_capacity(index, weights, num_experts=experts, capacity=target, priority="weight")
        added = min(margin, tokens)
        best = scores.masked_fill(closed, float("-inf")).t().topk(added, dim=1).indices
        wanted = (target.clamp(max=real) - count).unsqueeze(1)
        used = torch.arange(added, device=scores.device) < wanted
        expert = torch.arange(experts, device=scores.device).unsqueeze(1)
        own = torch.arange(tokens, device=scores.device).repeat_interleave(self.top_k, output_size=tokens * self.top_k)
        rows = torch.cat((index.reshape(-1), torch.where(used, expert, experts).reshape(-1)))
        return rows.unsqueeze(1), torch.cat((own, torch.where(used, best, 0).reshape(-1)))
