"""Named pools: keep memory of one purpose apart from the rest, on torch's `MemPool`."""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from kpt_core.errors import InputError

from .sizes import format_bytes


@dataclass(frozen=True, slots=True)
class PoolStatistics:
    """A pool's memory now, in bytes.

    Attributes:
        allocated: what its tensors hold.
        reserved: what it took from the device.
    """

    allocated: int
    reserved: int

    def __str__(self) -> str:
        return f"{format_bytes(self.allocated)} of {format_bytes(self.reserved)}"


class MemoryPool:
    """Memory that only the tensors allocated under it share, so that they do not fragment the rest.

    Args:
        name: what messages call it.
        device: an accelerator with its index.

    Raises:
        InputError: PyTorch refuses to make a pool, as some versions do with expandable segments.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        self.name, self.device = name, device
        self._of = torch.get_device_module(device)
        try:
            with self._of.device(device):  # a MemPool belongs to the device that is current
                self._pool = self._of.MemPool()
        except (RuntimeError, NotImplementedError) as error:
            raise InputError(f"pool {name!r} cannot be made on {device}: {error}") from error

    def use(self) -> AbstractContextManager[None]:
        """Allocate what this thread allocates in the block from the pool.

        Other threads are not affected; autograd runs a backward pass in such ones.
        """
        block: AbstractContextManager[None] = self._of.use_mem_pool(self._pool, self.device)
        return block

    def segments(self) -> list[dict[str, Any]]:
        """Pieces of device memory that the pool has, as `MemPool.snapshot` gives them."""
        return [segment for segment in self._pool.snapshot() if segment["device"] == self.device.index]

    def statistics(self) -> PoolStatistics:
        """What the pool holds now; blocks that other streams still read count as allocated."""
        segments = self.segments()
        return PoolStatistics(
            sum(max(segment["allocated_size"], segment["active_size"]) for segment in segments),
            sum(segment["total_size"] for segment in segments),
        )

    def why_in_use(self) -> str | None:
        """Why its memory can't be given back, and what to do; None if it can."""
        if self._pool.use_count() > 1:
            return f"pool {self.name!r} is in use: leave the block of use(), or delete the graph, first"
        held = self.statistics().allocated
        if held:
            return f"pool {self.name!r} holds {format_bytes(held)} in tensors that are alive: delete them first"
        return None

    def clear(self) -> int:
        """Give the pool's memory back to the device; the pool can be used again afterwards.

        Returns:
            Bytes given back.

        Raises:
            InputError: tensors live in the pool, or it is in use: by a block of `use()`, or by a graph.
        """
        if (why := self.why_in_use()) is not None:
            raise InputError(why)
        freed = self.statistics().reserved
        # PyTorch keeps the cache of a pool as long as its object lives, and empties it when that goes.
        with self._of.device(self.device):
            self._pool = self._of.MemPool()
        return freed
