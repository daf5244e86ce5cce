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
    """Memory that only the tensors allocated under it share, on torch's `MemPool`: it does not fragment the rest.

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
            self._renew()
        except (RuntimeError, NotImplementedError) as error:
            raise InputError(f"pool {name!r} cannot be made on {device}: {error}") from error

    def use(self) -> AbstractContextManager[None]:
        """Allocate from the pool what this thread allocates in the block.

        Other threads are not affected; autograd runs a backward pass in such ones.
        """
        block: AbstractContextManager[None] = self._of.use_mem_pool(self._pool, self.device)
        return block

    def segments(self) -> list[dict[str, Any]]:
        """Return what `MemPool.snapshot` tells of the pool's memory on its device."""
        return [segment for segment in self._pool.snapshot() if segment["device"] == self.device.index]

    def statistics(self) -> PoolStatistics:
        """Return what the pool holds now; blocks that other streams still read count as allocated."""
        segments = self.segments()
        return PoolStatistics(
            sum(max(segment["allocated_size"], segment["active_size"]) for segment in segments),
            sum(segment["total_size"] for segment in segments),
        )

    def clear(self) -> int:
        """Give the pool's memory back to the device, and return its bytes; the pool can be used again afterwards.

        Raises:
            InputError: tensors live in the pool, or it is in use: by a block of `use()`, or by a graph.
        """
        if self._pool.use_count() > 1:
            raise InputError(f"pool {self.name!r} is in use: leave the block of use(), or delete the graph, first")
        found = self.statistics()
        if found.allocated:
            held = format_bytes(found.allocated)
            raise InputError(f"pool {self.name!r} holds {held} in tensors that are alive: delete them first")
        self._renew()
        return found.reserved

    def _renew(self) -> None:
        # PyTorch keeps the cache of a pool as long as its object lives, and empties it when that goes.
        with self._of.device(self.device):  # a MemPool belongs to the device that is current
            self._pool = self._of.MemPool()
