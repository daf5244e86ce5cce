"""Tokens to the ranks that hold their experts, and the results back: the all-to-all of expert parallelism."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from kpt_core import InputError

from ._wire import Wire, explained

#: What computes the local experts: rows `[rows, hidden_size]`, local ids `[rows, K]` and weights `[rows, K]` to the
#: weighted sum of each row `[rows, hidden_size]`. Ids that are negative, or at or above the number of local experts,
#: contribute nothing.
Experts = Callable[[Tensor, Tensor, Tensor], Tensor]


def experts_per_rank(num_experts: int, ranks: int) -> list[int]:
    """Return how many experts each rank holds: as DTensor's `Shard(0)` splits them, the last having fewer if need be.

    Raises:
        InputError: a rank would have none.
    """
    held = -(-num_experts // ranks)
    counts = [min(held, num_experts - held * rank) for rank in range(ranks)]
    if counts[-1] <= 0:
        raise InputError(
            f"expert parallelism: {num_experts} experts in groups of {held} leave nothing for some of {ranks} ranks; "
            "use a number of ranks that divides the number of experts"
        )
    return counts


def dispatch(
    x: Tensor,
    index: Tensor,
    weights: Tensor,
    experts: Experts,
    *,
    num_experts: int,
    groups: Sequence[dist.ProcessGroup],
    chunks: int = 1,
) -> Tensor:
    """Let each row be computed where its experts are, and sum what comes back.

    A row travels once to every rank that holds any of its experts, with its ids and weights; that rank sends one row
    back, the weighted sum over the experts it holds, in x's dtype. Rows of a token are summed in the order of the
    ranks, in float32 (float64 for float64). The group's ranks agree on the number of rows in one small exchange, whose
    result is read on the host, once per call: the one synchronisation with an accelerator (`1 + chunks` with two
    groups).

    Every rank of the group must call this equally often, with equal dtypes, sizes (but for the number of rows, which
    may be zero) and `chunks`, and either all or none with inputs that require gradients; whoever has no rows takes part
    in forward and in backward all the same. Gradients of `x` and `weights` come back from the ranks that used them.

    With two groups the exchange has two levels: first between nodes, to the rank of the same place in each node that
    holds any of the row's experts (once per node, however many ranks of it are meant), from there within the node.
    Expert ids then run through the second group first.

    Source: GShard (arXiv:2006.16668) for the all-to-all; the two levels as in Tutel (arXiv:2206.03382); chunks so that
    computing hides sending as in Tutel and FasterMoE (PPoPP 2022).

    Args:
        x: `[rows, hidden_size]`.
        index: `[rows, K]` int64, ids among all experts of the groups; one that is negative or at or above
            `num_experts` goes nowhere.
        weights: `[rows, K]` floating point.
        experts: computes the experts of this rank.
        num_experts: of all ranks; rank `r` holds those of the r-th part, as `experts_per_rank` says.
        groups: the ranks, outermost level first; none calls `experts` right away.
        chunks: parts into which rows are split, so that one is on its way while another is being computed.

    Returns:
        `[rows, hidden_size]` of x's dtype.

    Raises:
        InputError: `chunks` is below 1, or a rank would hold no expert.
        KptError: a rank ended, or didn't come within the group's timeout.
    """
    if not groups:
        return experts(x, index, weights)
    if chunks < 1:
        raise InputError(f"expert parallelism: chunks must be 1 or more; got {chunks}")
    group, *inner = groups
    here = experts_per_rank(num_experts, group.size())[group.rank()]

    def received(x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return dispatch(x, index, weights, experts, num_experts=here, groups=inner)

    parts = _plan(x, index, weights, num_experts, group, chunks)
    answers = []
    arriving = parts[0].send()
    for i, part in enumerate(parts):
        ids, rows, row_weights = arriving()
        if i + 1 < len(parts):
            arriving = parts[i + 1].send()
        answers.append(part.answer(received(rows, ids, row_weights).to(x.dtype)))
    # All are awaited last, so that backward begins by starting all their returns.
    sums = [part.sum(answer) for part, answer in zip(parts, answers, strict=True)]
    return sums[0] if len(sums) == 1 else torch.cat(sums)


@dataclass(frozen=True, slots=True)
class _Part:
    """A run of rows and where they go."""

    x: Tensor  # [rows, hidden_size]
    weights: Tensor  # [rows, K]
    ids: Tensor  # [sent, K], the ids of the sent rows on the rank that each goes to
    row: Tensor  # [sent], which row each one is; ascending for each rank
    sends: list[int]  # how many go to each rank
    receives: list[int]  # how many come from each rank
    group: dist.ProcessGroup

    def send(self) -> Callable[[], tuple[Tensor, ...]]:
        """Start sending rows, ids and weights."""
        ids = Wire(self.group, self.sends, self.receives).exchange(self.ids)
        x, weights = (_Spread.apply(t, self.row, self.sends) for t in (self.x, self.weights))  # type: ignore[no-untyped-call]
        rows = Wire(self.group, self.sends, self.receives).exchange(x, weights)
        return lambda: (*ids(), *rows())

    def answer(self, rows: Tensor) -> Callable[[], tuple[Tensor, ...]]:
        """Start sending results `[received, hidden_size]` back."""
        return Wire(self.group, self.receives, self.sends).exchange(rows)

    def sum(self, answer: Callable[[], tuple[Tensor, ...]]) -> Tensor:
        """`[rows, hidden_size]`: each row's results, summed."""
        return _Gather.apply(*answer(), self.row, self.sends, self.x.shape[0])  # type: ignore[no-any-return,no-untyped-call]


def _plan(
    x: Tensor, index: Tensor, weights: Tensor, num_experts: int, group: dist.ProcessGroup, chunks: int
) -> list[_Part]:
    ranks, rows = group.size(), x.shape[0]
    held = -(-num_experts // ranks)
    owner = torch.where((index >= 0) & (index < num_experts), index // held, ranks)
    wanted = torch.zeros(rows, ranks + 1, dtype=torch.bool, device=x.device).scatter(1, owner, True)[:, :ranks]
    bounds = [(rows * i // chunks, rows * (i + 1) // chunks) for i in range(chunks)]

    sends = torch.stack([wanted[start:end].sum(0) for start, end in bounds], dim=1)
    receives = torch.empty_like(sends)
    with explained(group):
        dist.all_to_all_single(receives, sends, group=group)
    on_host = torch.stack((sends, receives), dim=1).permute(2, 1, 0).tolist()

    parts = []
    for (start, end), (to, of) in zip(bounds, on_host, strict=True):
        # Sorting finds the marked places without waiting for their number, which is known by now.
        marks = wanted[start:end].T.reshape(-1).to(torch.uint8)
        places = torch.sort(marks, descending=True, stable=True).indices[: sum(to)]
        row, rank = places % max(end - start, 1), places // max(end - start, 1)
        there = owner[start:end][row] == rank.unsqueeze(1)
        ids = torch.where(there, index[start:end][row] - held * rank.unsqueeze(1), held)
        parts.append(_Part(x[start:end], weights[start:end], ids, row, to, of, group))
    return parts


def _sum_by_row(sent: Tensor, row: Tensor, sizes: list[int], rows: int) -> Tensor:
    """Sum in the order of the ranks; a rank has a row once at most, so that each `index_add_` has one order too."""
    total = torch.zeros(rows, *sent.shape[1:], dtype=torch.promote_types(sent.dtype, torch.float32), device=sent.device)
    for part, where in zip(sent.split(sizes), row.split(sizes), strict=True):
        total.index_add_(0, where, part.to(total.dtype))
    return total.to(sent.dtype)


class _Spread(torch.autograd.Function):
    """A copy of its row for every rank that a row goes to."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, row: Tensor, sizes: list[int]) -> Tensor:
        ctx.save_for_backward(row)
        ctx.sizes, ctx.rows = sizes, x.shape[0]
        return x.index_select(0, row)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (row,) = ctx.saved_tensors
        return _sum_by_row(grad, row, ctx.sizes, ctx.rows), None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sent: Tensor, row: Tensor, sizes: list[int], rows: int) -> Tensor:
        ctx.save_for_backward(row)
        return _sum_by_row(sent, row, sizes, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (row,) = ctx.saved_tensors
        return grad.index_select(0, row), None, None, None
