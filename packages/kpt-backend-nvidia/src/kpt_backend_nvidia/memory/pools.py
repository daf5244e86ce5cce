"""Named pools: memory of one purpose kept apart from the rest, on `torch.cuda.MemPool`."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from kpt_core import InputError

from .sizes import format_bytes
from .statistics import PoolStatistics


class MemoryPool:
    """Memory that only the tensors allocated under it share, so that they do not fragment the rest.

    Source: `torch.cuda.MemPool` and `torch.cuda.use_mem_pool`, a private pool of PyTorch's caching allocator.

    Args:
        name: what messages call it.
        device: a CUDA device with its index.

    Raises:
        InputError: PyTorch refuses to make a pool, as some versions do with expandable segments.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        self.name, self.device = name, device
        self._pool: torch.cuda.MemPool | None = self._create()

    def _create(self) -> torch.cuda.MemPool:
        try:
            with torch.cuda.device(self.device):  # a MemPool belongs to the device that is current
                return torch.cuda.MemPool()
        except (RuntimeError, NotImplementedError) as error:
            raise InputError(f"pool {self.name!r} cannot be made on {self.device}: {error}") from error

    @contextmanager
    def use(self) -> Iterator[None]:
        """Allocate what this thread allocates in the block from the pool.

        Other threads are not affected; autograd runs a backward pass in such ones.
        """
        if self._pool is None:
            self._pool = self._create()
        with torch.cuda.use_mem_pool(self._pool, self.device):
            yield

    def statistics(self) -> PoolStatistics:
        """What the pool holds now."""
        segments = self.segments()
        free = (b["size"] for segment in segments for b in segment["blocks"] if b["state"] == "inactive")
        return PoolStatistics(
            sum(segment["allocated_size"] for segment in segments),
            sum(segment["total_size"] for segment in segments),
            len(segments),
            max(free, default=0),
        )

    def segments(self) -> list[dict[str, Any]]:
        """Pieces of device memory that the pool has, as in `torch.cuda.MemPool.snapshot`."""
        if self._pool is None:
            return []
        return [segment for segment in self._pool.snapshot() if segment["device"] == self.device.index]

    def unused(self) -> bool:
        """Whether no tensor lives in the pool and nothing allocates from it now."""
        return self._pool is None or (self._pool.use_count() == 1 and not self._held())

    def clear(self) -> int:
        """Give the pool's memory back to the device; the pool can be used again afterwards.

        Returns:
            Bytes given back.

        Raises:
            InputError: tensors live in the pool, or it is in use: by a block of `use()`, or by a CUDA graph.
        """
        if self._pool is None:
            return 0
        if self._pool.use_count() > 1:
            raise InputError(f"pool {self.name!r} is in use: leave the block of use(), or delete the CUDA graph, first")
        if held := self._held():
            raise InputError(
                f"pool {self.name!r} holds {format_bytes(held)} in tensors that are alive: delete them first"
            )
        freed = self.statistics().reserved
        # PyTorch keeps the cache of a pool as long as its object lives, and empties it when that goes.
        self._pool = None
        return freed

    def _held(self) -> int:
        # Blocks that other streams still read count as active, not as allocated.
        return sum(max(segment["allocated_size"], segment["active_size"]) for segment in self.segments())
