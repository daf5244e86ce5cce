"""PyTorch's CUDA allocator simulated: a device of a given size, whose tensors are on `meta`.

It follows the rules that the memory manager relies on: memory is taken from the device in whole segments, small ones
serve small tensors alone, a tensor that dies leaves its segment in the cache, `empty_cache` gives back what no tensor
uses but leaves the caches of living pools, and a `MemPool` gives its cache back when it goes.
"""

import itertools
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kpt_optimize.memory import format_bytes, segment_bytes
from simulated_cuda import FakeDevice, simulate

MIB = 2**20


@dataclass(eq=False)
class Segment:
    size: int
    pool: tuple[int, int]
    used: int = 0

    def snapshot(self) -> dict[str, Any]:
        blocks = [{"size": self.used, "state": "active_allocated"}] if self.used else []
        if self.size > self.used:
            blocks.append({"size": self.size - self.used, "state": "inactive"})
        return {
            "device": 0,
            "stream": 0,
            "segment_pool_id": self.pool,
            "segment_type": "small" if self.size == 2 * MIB else "large",
            "total_size": self.size,
            "allocated_size": self.used,
            "active_size": self.used,
            "blocks": blocks,
        }


@dataclass(eq=False)
class SimulatedAllocator:
    device: FakeDevice
    segments: list[Segment] = field(default_factory=list)
    living_pools: set[tuple[int, int]] = field(default_factory=set)
    pool: tuple[int, int] = (0, 0)
    elsewhere: int = 0

    def update(self) -> None:
        self.device.reserved = sum(segment.size for segment in self.segments)
        self.device.allocated = sum(segment.used for segment in self.segments)
        self.device.used = self.device.reserved + self.elsewhere

    def take(self, nbytes: int) -> Segment:
        small = nbytes <= MIB
        fitting = [
            s
            for s in self.segments
            if not s.used and s.pool == self.pool and s.size >= nbytes and (s.size == 2 * MIB) is small
        ]
        if fitting:
            segment = min(fitting, key=lambda s: s.size)
        else:
            size = segment_bytes(nbytes)
            if size > self.device.memory - self.device.used:
                self.empty_cache()
            if size > self.device.memory - self.device.used:
                raise torch.OutOfMemoryError(f"CUDA out of memory (simulated): {format_bytes(nbytes)}")
            segment = Segment(size, self.pool)
            self.segments.append(segment)
        segment.used = nbytes
        self.update()
        return segment

    def give(self, segment: Segment) -> None:
        segment.used = 0
        self.update()

    def empty_cache(self) -> None:
        self.segments = [s for s in self.segments if s.used or s.pool in self.living_pools]
        self.update()

    def snapshot(self) -> list[dict[str, Any]]:
        return [segment.snapshot() for segment in self.segments]


def simulate_allocator(monkeypatch: pytest.MonkeyPatch, memory: int) -> SimulatedAllocator:
    """Put a device with `memory` bytes and its allocator in place until the test ends."""
    device = FakeDevice(memory=memory)
    allocator = SimulatedAllocator(device)
    numbers = itertools.count(1)
    simulate(monkeypatch, device)
    real_empty = torch.empty

    class MemPool:
        def __init__(self) -> None:
            self.id = (0, next(numbers))
            self.users = 1
            allocator.living_pools.add(self.id)

        def use_count(self) -> int:
            return self.users

        def snapshot(self) -> list[dict[str, Any]]:
            return [segment for segment in allocator.snapshot() if segment["segment_pool_id"] == self.id]

        def __del__(self) -> None:
            allocator.living_pools.discard(self.id)
            allocator.empty_cache()

    @contextmanager
    def use_mem_pool(pool: MemPool, device: Any = None) -> Iterator[None]:
        before, allocator.pool = allocator.pool, pool.id
        pool.users += 1
        try:
            yield
        finally:
            allocator.pool = before
            pool.users -= 1

    def empty(*sizes: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        if device is None or torch.device(device).type != "cuda":
            return real_empty(*sizes, device=device, **kwargs)
        tensor = real_empty(*sizes, device="meta", **kwargs)
        segment = allocator.take(tensor.nbytes)
        weakref.finalize(tensor.untyped_storage(), allocator.give, segment).atexit = False
        return tensor

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch.cuda, "MemPool", MemPool)
    monkeypatch.setattr(torch.cuda, "use_mem_pool", use_mem_pool)
    monkeypatch.setattr(torch.cuda, "empty_cache", allocator.empty_cache)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", allocator.snapshot)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: SimpleNamespace(cuda_stream=0))
    return allocator
