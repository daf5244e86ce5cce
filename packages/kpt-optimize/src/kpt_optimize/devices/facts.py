"""What an accelerator is and does at the moment: facts that torch tells, whatever the vendor."""

from dataclasses import dataclass
from typing import Any

import torch

from kpt_core.contract import Capability


@dataclass(frozen=True, slots=True)
class Peaks:
    """What a product can do at most, from its data sheet; without structured sparsity.

    Attributes:
        chip: for instance `sm90`.
        memory: nominal, GiB; a driver keeps some of it for itself.
        bf16_tflops: bfloat16 products with float32 accumulation, TFLOP/s; those of float16 are as fast.
        bandwidth: of the device's memory, GB/s (10**9 bytes).
        source: the document.
        fp8_tflops: products of 8-bit floating-point numbers, TFLOP/s; None if the chip has none.
    """

    chip: str
    memory: int
    bf16_tflops: float
    bandwidth: float
    source: str
    fp8_tflops: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveState:
    """A device at this moment; a fact that the driver does not give is None.

    Attributes:
        power: drawn, watts.
        temperature: of the chip, degrees Celsius.
        busy: share of the last sample period in which a kernel ran, 0 to 1.
        memory_busy: likewise, in which memory was read or written.
        clock: of the multiprocessors, MHz.
        memory_used: bytes that all processes take.
    """

    power: float | None
    temperature: int | None
    busy: float | None
    memory_busy: float | None
    clock: int | None
    memory_used: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceInfo:
    """What a device is; what this version of torch or the driver does not tell is None. Sizes are in bytes.

    Attributes:
        chip: for instance `sm90` or `gfx942`.
        generation: for instance `Hopper`.
        unsupported: why KPT's kernels don't run on it, None if they do.
        multiprocessors: their number (compute units, Xe cores).
        shared_memory_per_block: what one block may have after opting in.
        registers_per_multiprocessor: of 32 bits.
        peaks: of the product, from its data sheet.
        live: clocks, power, use: at the time of the question.
        live_missing: why `live` is None.
    """

    index: int
    name: str
    uuid: str | None
    chip: str
    generation: str
    capabilities: frozenset[Capability]
    unsupported: str | None
    memory: int | None
    multiprocessors: int | None
    l2_cache: int | None
    shared_memory_per_block: int | None
    shared_memory_per_multiprocessor: int | None
    registers_per_multiprocessor: int | None
    threads_per_multiprocessor: int | None
    peaks: Peaks | None
    live: LiveState | None
    live_missing: str | None

    @property
    def is_hopper(self) -> bool:
        """Whether its generation is NVIDIA's Hopper, whose kernels use `wgmma`."""
        return self.generation == "Hopper"

    @property
    def supports_fp8(self) -> bool:
        """Whether its matrix units multiply FP8."""
        return not self.capabilities.isdisjoint(("fp8_e4m3fn", "fp8_e4m3fnuz"))


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryStatistics:
    """A device's memory, in bytes.

    Attributes:
        total: of the device.
        free: that nobody has taken from the driver.
        allocated: that tensors of this process have.
        allocated_peak: the most that they had since the process began or the peak was reset.
        reserved: that torch's allocator of this process holds, `allocated` and its cache.
        reserved_peak: likewise.
        elsewhere: the rest: other processes, and contexts, libraries and graphs of this one.
        split: cached in the rests of divided blocks, which can't be given back to the driver.
        retries: how often the allocator gave its cache back to find memory.
        out_of_memory: how often it found none.
    """

    total: int
    free: int
    allocated: int
    allocated_peak: int
    reserved: int
    reserved_peak: int
    elsewhere: int
    split: int
    retries: int
    out_of_memory: int

    @property
    def available(self) -> int:
        """What this process can still take: free memory and the allocator's cache."""
        return self.free + self.reserved - self.allocated

    @property
    def fragmentation(self) -> float:
        """Share of the reserved memory that lies in rests of divided blocks, 0 to 1."""
        return self.split / self.reserved if self.reserved else 0.0


def memory_statistics(device: torch.device) -> MemoryStatistics:
    """Return the memory of a device that is there, and of this process on it."""
    of = torch.get_device_module(device)
    free, total = of.mem_get_info(device.index)
    stats = of.memory_stats(device.index)  # empty until something was allocated, and poorer with other allocators
    reserved = of.memory_reserved(device.index)
    return MemoryStatistics(
        total=total,
        free=free,
        allocated=of.memory_allocated(device.index),
        allocated_peak=of.max_memory_allocated(device.index),
        reserved=reserved,
        reserved_peak=of.max_memory_reserved(device.index),
        elsewhere=max(0, total - free - reserved),
        split=stats.get("inactive_split_bytes.all.current", 0),
        retries=stats.get("num_alloc_retries", 0),
        out_of_memory=stats.get("num_ooms", 0),
    )


def live_state(device: torch.device) -> LiveState | str:
    """Ask the driver's management library, by way of torch; return why nothing is known where it does not answer.

    NVIDIA's is NVML (package nvidia-ml-py), AMD's is AMD SMI (package amdsmi), Intel's is Level Zero Sysman.
    """
    if device.type == "cpu":
        return "a CPU has no management library to ask"
    of = torch.get_device_module(device)
    refusals: list[str] = []

    def ask(name: str, unit: float = 1) -> Any:
        try:
            return getattr(of, name)(device.index) * unit
        except Exception as error:  # each library has errors of its own, and each fact may be refused by itself
            refusals.append(f"{type(error).__name__}: {error}")
            return None

    # NVML's figure, which torch hands on, is in milliwatts; AMD SMI's and Level Zero's are in watts.
    milliwatts = device.type == "cuda" and torch.version.hip is None
    found = LiveState(
        power=ask("power_draw", 1e-3 if milliwatts else 1),
        temperature=ask("temperature"),
        busy=ask("utilization", 1e-2),
        memory_busy=ask("memory_usage", 1e-2),
        clock=ask("clock_rate"),
        memory_used=ask("device_memory_used"),
    )
    return refusals[0] if len(refusals) == 6 else found
