"""The (token, choice) pairs of a routing, as the rows of grouped products."""

from typing import NamedTuple, Self

import torch
from torch import Tensor

from .grouped_mm import grouped_mm
from .permutation import expert_of_rows, inside, inverse, sort_by_expert
from .routing import Routing


class SortedPairs(NamedTuple):
    """The pairs of a routing, sorted by expert; those of no expert come last and contribute nothing.

    Attributes:
        routing: whose pairs they are.
        order: `[pairs]` int64, as in `Permutation`.
        offsets: `[num_experts]` int32, likewise.
        expert: `[pairs]` int64, the expert of each sorted pair.
        token: `[pairs]` int64, the token of each sorted pair.
    """

    routing: Routing
    order: Tensor
    offsets: Tensor
    expert: Tensor
    token: Tensor

    @classmethod
    def of(cls, routing: Routing, num_experts: int) -> Self:
        """Sort the pairs of a routing, without reading a value on the host."""
        order, offsets = sort_by_expert(routing.index, num_experts)
        row = order // routing.top_k
        token = row if routing.token is None else routing.token[row]
        return cls(routing, order, offsets, expert_of_rows(offsets, order.shape[0]), token)

    def gather(self, x: Tensor) -> Tensor:
        """The tokens `[tokens, size]` of the pairs, `[pairs, size]`."""
        return x[self.token]

    def linear(self, rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Each pair `[pairs, inputs]` by its expert's matrix `[num_experts, outputs, inputs]`."""
        product = grouped_mm(rows, weight.mT, self.offsets)
        return product if bias is None else product + bias[self.expert]

    def unsort(self, rows: Tensor) -> Tensor:
        """The pairs `[pairs, size]` as the routing has them, `[rows, K, size]`."""
        return rows[inverse(self.order)].view(*self.routing.index.shape, rows.shape[1])

    def combine(self, rows: Tensor, x: Tensor) -> Tensor:
        """The sum of each token's pairs by the routing's weights, `[tokens, size]`, in float32 at least.

        What pairs `[pairs, size]` of no expert hold does not matter, nor what comes back for them. The tokens `x` are
        as in `Routing.by_token`.
        """
        wide = torch.promote_types(rows.dtype, torch.float32)
        here = inside(self.offsets, rows.shape[0]).unsqueeze(1)
        weights = torch.where(here, self.routing.weights.reshape(-1, 1)[self.order].to(wide), 0)
        # Once more after the product: a gradient that is NaN would reach the rows even by a weight of zero.
        return self.routing.by_token(self.unsort(torch.where(here, rows * weights, 0)).sum(1), x)


def sum_in_order(pairs: Tensor, index: Tensor, weights: Tensor, num_experts: int) -> Tensor:
    """The weighted sum of each row's pairs `[rows, K, size]`, one choice after the other, in float32 at least."""
    wide = torch.promote_types(torch.promote_types(pairs.dtype, weights.dtype), torch.float32)
    known = (index >= 0) & (index < num_experts)
    factors = torch.where(known, weights, 0).to(wide).unsqueeze(-1)
    total: Tensor = pairs[:, 0] * factors[:, 0]
    for choice in range(1, index.shape[1]):
        total = total + pairs[:, choice] * factors[:, choice]
    return total
