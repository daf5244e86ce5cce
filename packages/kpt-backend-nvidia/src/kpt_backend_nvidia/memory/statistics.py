"""What a manager tells of its memory, and where the numbers come from."""

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from kpt_backend_nvidia.devices import MemoryStatistics

from .sizes import format_bytes


@dataclass(frozen=True, slots=True)
class PoolStatistics:
    """A pool's memory now, in bytes.

    Attributes:
        allocated: what its tensors hold.
        reserved: what it took from the device.
        segments: number of pieces that it took.
        largest_free_block: the greatest tensor that fits without taking more.
    """

    allocated: int
    reserved: int
    segments: int
    largest_free_block: int


@dataclass(frozen=True, slots=True)
class ManagerStatistics:
    """What `NVIDIAMemoryManager.statistics` returns; sizes in bytes.

    Attributes:
        device: as in `cuda:0`.
        memory: of the device; on the CPU `allocated` and `reserved` are what the manager's own tensors have.
        margin: what the manager keeps free.
        available: what it would still allocate: free and cached memory without the margin.
        allocations: tensors that it has allocated.
        recoveries: calls that ran out of memory and succeeded after freeing some.
        failures: calls that ran out of memory for good.
        pools: each pool under its name.
    """

    device: str
    memory: MemoryStatistics
    margin: int
    available: int
    allocations: int
    recoveries: int
    failures: int
    pools: dict[str, PoolStatistics] = field(default_factory=dict)

    def __str__(self) -> str:
        memory = self.memory
        lines = [
            f"{self.device}: {format_bytes(memory.total)}, free {format_bytes(memory.free)}",
            f"  allocated {format_bytes(memory.allocated)} (peak {format_bytes(memory.allocated_peak)}), "
            f"cached {format_bytes(memory.reserved - memory.allocated)}, elsewhere {format_bytes(memory.elsewhere)}",
            f"  available {format_bytes(self.available)} beside a margin of {format_bytes(self.margin)}",
            f"  {self.allocations} allocations, {self.recoveries} recoveries, {self.failures} failures",
        ]
        lines += [
            f"  pool {name}: allocated {format_bytes(pool.allocated)} of {format_bytes(pool.reserved)}"
            for name, pool in self.pools.items()
        ]
        return "\n".join(lines)


def system_memory() -> tuple[int, int]:
    """Bytes of main memory: what new work can have without swapping, and all of it."""
    page = os.sysconf("SC_PAGE_SIZE")
    total = os.sysconf("SC_PHYS_PAGES") * page
    try:
        with open("/proc/meminfo") as lines:
            values = dict(line.split(":", 1) for line in lines)
        return int(values["MemAvailable"].split()[0]) << 10, total
    except (OSError, KeyError):  # not Linux
        return os.sysconf("SC_AVPHYS_PAGES") * page, total


def block_fits(segments: Iterable[dict[str, Any]], nbytes: int) -> bool:
    """Whether an unused block of the allocator's `segments`, entries of a snapshot, can hold `nbytes`.

    Requests up to 1 MiB and greater ones are served from segments of their own kind.
    """
    kind = "small" if nbytes <= 1 << 20 else "large"
    return any(
        block["state"] == "inactive" and block["size"] >= nbytes
        for segment in segments
        if segment["segment_type"] == kind
        for block in segment["blocks"]
    )


def cached_segments(device: torch.device) -> list[dict[str, Any]]:
    """The segments that the current stream of `device` allocates from, pools apart."""
    stream = torch.cuda.current_stream(device).cuda_stream
    return [
        segment
        for segment in torch.cuda.memory_snapshot()
        if segment["device"] == device.index
        and segment["stream"] == stream
        and tuple(segment.get("segment_pool_id", (0, 0))) == (0, 0)
    ]
