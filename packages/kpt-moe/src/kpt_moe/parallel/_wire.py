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

        Floating-point tensors are differentiable. Of those, the result must be used if the argument was differentiable:
        gradients come back from all ranks or from none.
        """
        arriving = _Start.apply(self, *tensors)  # type: ignore[no-untyped-call]
        return lambda: _Wait.apply(self, *arriving)  # type: ignore[no-untyped-call]

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
    """Turns the failure of a collective of `group` into an error that says what to look at.

    Raises:
        KptError: a collective failed.
    """
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


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, wire: Wire, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.wire = wire
        arriving = wire.start(tensors, wire.sends, wire.receives)
        ctx.mark_non_differentiable(*(t for t in arriving if not t.is_floating_point()))
        ctx.floating = [t.is_floating_point() for t in tensors]
        return arriving

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # What autograd hands over is of the arrived rows; the gradients of the sent ones are on the wire.
        arrived = iter(ctx.wire.wait())
        return None, *(next(arrived) if floating else None for floating in ctx.floating)


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, wire: Wire, *arriving: Tensor) -> tuple[Tensor, ...]:
        ctx.wire = wire
        wire.wait()
        ctx.mark_non_differentiable(*(t for t in arriving if not t.is_floating_point()))
        ctx.floating = [t.is_floating_point() for t in arriving]
        return arriving

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        wire = ctx.wire
        floating = tuple(grad for grad, wanted in zip(grads, ctx.floating, strict=True) if wanted)
        wire.start(floating, wire.receives, wire.sends)
        return None, *(grad if wanted else None for grad, wanted in zip(grads, ctx.floating, strict=True))
