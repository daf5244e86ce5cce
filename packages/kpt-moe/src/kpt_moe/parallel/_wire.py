"""One exchange of rows between the ranks of a group, apart from the waiting for it, in both directions of autograd."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from kpt_core import KptError


class Wire:
    """Sends rows to every rank of a group, and their gradients back.

    Each `exchange` is two autograd functions: one starts the transfer, the other waits for it. Backward starts the
    return of the gradients where forward waited, and waits for it where forward started: what was computed during a
    transfer forward has its gradient computed during one as well.

    Args:
        group: of the ranks.
        sends: rows for each rank, in its order.
        receives: rows from each rank.
    """

    def __init__(self, group: dist.ProcessGroup, sends: list[int], receives: list[int]) -> None:
        self.group = group
        self.sends = sends
        self.receives = receives
        self._pending: list[tuple[dist.Work | None, Tensor, Tensor]] = []

    def exchange(self, *tensors: Tensor) -> Callable[[], tuple[Tensor, ...]]:
        """Start sending `tensors` `[sum(sends), ...]`; the result waits and gives what came, `[sum(receives), ...]`.

        Either all are floating point, and differentiable, or none is. The result must be used if an argument was
        differentiable: gradients come back from all ranks or from none.
        """
        arriving = _Half.apply(self, True, *tensors)  # type: ignore[no-untyped-call]
        return lambda: _Half.apply(self, False, *arriving)  # type: ignore[no-untyped-call]

    def start(self, tensors: tuple[Tensor, ...], sends: list[int], receives: list[int]) -> tuple[Tensor, ...]:
        """Start sending; what is returned is filled when `wait` has returned."""
        arriving = []
        for tensor in tensors:
            sent = tensor.contiguous()
            out = sent.new_empty((sum(receives), *sent.shape[1:]))
            with explained(self.group):
                work = dist.all_to_all_single(out, sent, receives, sends, group=self.group, async_op=True)
            # The sent rows are kept too: an accelerator may still be reading them.
            self._pending.append((work, sent, out))
            arriving.append(out)
        return tuple(arriving)

    def wait(self) -> tuple[Tensor, ...]:
        """What `start` gave, filled."""
        pending, self._pending = self._pending, []
        for work, _, _ in pending:
            if work is not None:
                with explained(self.group):
                    work.wait()
        return tuple(out for _, _, out in pending)


@contextmanager
def explained(group: dist.ProcessGroup) -> Iterator[None]:
    """Turns the failure of a collective of `group` into an error that says what to look at."""
    try:
        yield
    except RuntimeError as error:
        raise KptError(
            f"expert parallelism: rank {dist.get_rank()} (rank {group.rank()} of {group.size()} in group "
            f"{group.group_name!r}, global ranks {dist.get_process_group_ranks(group)}) could not exchange tokens: "
            "another rank ended, or was not here within the group's timeout. Look at the logs of the other ranks for "
            "the first error, then start the job again from its last checkpoint; if a rank was only slow, raise "
            f"init_process_group(timeout=...). torch said: {error}"
        ) from error


class _Half(torch.autograd.Function):
    """Starts a transfer, or waits for it; backward does the other for that of the gradients."""

    @staticmethod
    def forward(ctx: Any, wire: Wire, starts: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.wire, ctx.starts = wire, starts
        if starts:
            return wire.start(tensors, wire.sends, wire.receives)
        wire.wait()
        return tensors

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.starts:
            # What autograd hands over is of the arrived rows; the gradients of the sent ones are on the wire.
            return None, None, *ctx.wire.wait()
        ctx.wire.start(grads, ctx.wire.receives, ctx.wire.sends)
        return None, None, *grads
