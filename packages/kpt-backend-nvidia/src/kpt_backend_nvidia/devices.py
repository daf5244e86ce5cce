"""The CUDA devices that torch sees: what they are, what memory they have left, and how to choose one."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from kpt_core import Capability, InputError

from .chips import Peaks, capabilities_of, chip_name, generation, peaks_of, unsupported
from .configuration import cuda_device
from .environment import why_no_device, why_unavailable
from .nvml import LiveState, NvmlError, live_state

Device = int | str | torch.device | None
"""A CUDA device: an index, `"cuda"`, `"cuda:1"`, a `torch.device`; None for the current one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceInfo:
    """What a device is; what this version of torch or the driver does not tell is None.

    Attributes:
        index: as torch counts.
        name: the product.
        uuid: as torch gives it.
        pci_address: domain, bus and device, as in `00000000:3b:00.0`.
        compute_capability: major and minor.
        chip: for instance `sm90`.
        generation: for instance `Hopper`.
        capabilities: what it can do, in KPT's words.
        unsupported: why KPT's kernels don't run on it, None if they do.
        memory: bytes.
        multiprocessors: their number.
        l2_cache: bytes.
        shared_memory_per_block: bytes that one block may have after opting in.
        shared_memory_per_multiprocessor: bytes.
        registers_per_multiprocessor: of 32 bits.
        threads_per_multiprocessor: at most.
        peaks: of the product, from its data sheet.
        live: clocks, power, use: at the time of the question.
        live_missing: why `live` is None.
    """

    index: int
    name: str
    uuid: str | None
    pci_address: str | None
    compute_capability: tuple[int, int]
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
        """Whether its generation is Hopper, whose kernels use `wgmma`."""
        return self.compute_capability[0] == 9

    @property
    def supports_fp8(self) -> bool:
        """Whether its tensor cores multiply FP8."""
        return "fp8_e4m3fn" in self.capabilities


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
        elsewhere: the rest: other processes, and CUDA contexts, libraries and graphs of this one.
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


def device_index(device: Device = None) -> int:
    """The index of a device; one without an index is the current one.

    Raises:
        InputError: CUDA is not there, or it has no such device.
    """
    named = cuda_device(device)
    reason = why_no_device()
    if reason is not None:
        raise InputError(f"{named or 'a CUDA device'} was asked for: {reason}")
    index = torch.cuda.current_device() if named is None or named.index is None else named.index
    count = torch.cuda.device_count()
    if index >= count:
        seen = "cuda:0 alone" if count == 1 else f"cuda:0 to cuda:{count - 1}"
        raise InputError(f"cuda:{index} was asked for; torch sees {seen}")
    return int(index)


def device_info(device: Device = None, *, live: bool = True) -> DeviceInfo:
    """Everything that torch and NVML tell of a device, an unsupported one too.

    Args:
        device: which.
        live: whether NVML is asked, which takes much longer than the rest.

    Raises:
        InputError: CUDA is not there, or it has no such device.
    """
    index = device_index(device)
    properties = torch.cuda.get_device_properties(index)
    capability = (int(properties.major), int(properties.minor))
    uuid, address = _uuid(properties), _pci_address(properties)
    state, missing = None, None if live else "it was not asked for"
    if live:
        try:
            state = live_state(uuid, address)
        except NvmlError as error:
            missing = str(error)
    return DeviceInfo(
        index=index,
        name=properties.name,
        uuid=uuid,
        pci_address=address,
        compute_capability=capability,
        chip=chip_name(capability),
        generation=generation(capability),
        capabilities=capabilities_of(capability),
        unsupported=unsupported(capability),
        memory=_number(properties, "total_memory", "total_mem"),
        multiprocessors=_number(properties, "multi_processor_count", "multiprocessor_count"),
        l2_cache=_number(properties, "L2_cache_size", "l2_cache_size"),
        shared_memory_per_block=_number(properties, "shared_memory_per_block_optin"),
        shared_memory_per_multiprocessor=_number(properties, "shared_memory_per_multiprocessor"),
        registers_per_multiprocessor=_number(properties, "regs_per_multiprocessor"),
        threads_per_multiprocessor=_number(properties, "max_threads_per_multi_processor"),
        peaks=peaks_of(properties.name),
        live=state,
        live_missing=missing,
    )


def memory_stats(device: Device = None) -> MemoryStatistics:
    """The memory of a device and of this process on it.

    Raises:
        InputError: CUDA is not there, or it has no such device.
    """
    index = device_index(device)
    free, total = torch.cuda.mem_get_info(index)
    stats = torch.cuda.memory_stats(index)  # empty until something was allocated, and poorer with other allocators
    reserved = torch.cuda.memory_reserved(index)
    return MemoryStatistics(
        total=total,
        free=free,
        allocated=torch.cuda.memory_allocated(index),
        allocated_peak=torch.cuda.max_memory_allocated(index),
        reserved=reserved,
        reserved_peak=torch.cuda.max_memory_reserved(index),
        elsewhere=max(0, total - free - reserved),
        split=stats.get("inactive_split_bytes.all.current", 0),
        retries=stats.get("num_alloc_retries", 0),
        out_of_memory=stats.get("num_ooms", 0),
    )


class DeviceManager:
    """The devices that torch sees, whether or not there are any.

    Example:
        >>> manager = DeviceManager()
        >>> manager.unavailable  # None, or the sentence that says what is missing
        >>> with manager.on(manager.roomiest()):
        ...     x = torch.empty(1024, device="cuda")
    """

    @property
    def unavailable(self) -> str | None:
        """Why KPT's kernels run on no device here, None if they do."""
        return why_unavailable()

    @property
    def devices(self) -> tuple[DeviceInfo, ...]:
        """Every device that torch sees, unsupported ones too; empty without CUDA."""
        if why_no_device() is not None:
            return ()
        return tuple(device_info(index) for index in range(torch.cuda.device_count()))

    def roomiest(self) -> torch.device | None:
        """The supported device with the most free memory; None if there is none (`unavailable` says why)."""
        free = {info.index: _free_memory(info) for info in self.devices if info.unsupported is None}
        return torch.device("cuda", max(free, key=lambda index: free[index])) if free else None

    @contextmanager
    def on(self, device: Device) -> Iterator[torch.device]:
        """Have a device be the current one inside the block.

        Raises:
            InputError: CUDA is not there, or it has no such device.
        """
        index = device_index(device)
        with torch.cuda.device(index):
            yield torch.device("cuda", index)


def _free_memory(info: DeviceInfo) -> int:
    """Bytes; NVML is asked first, since torch makes a context of hundreds of megabytes on each device that it asks."""
    if info.live is not None and info.live.memory_free is not None and not info.live.mig:
        return info.live.memory_free
    return int(torch.cuda.mem_get_info(info.index)[0])


def _number(properties: Any, *names: str) -> int | None:
    """The first of a property's names that this version of torch has."""
    found = next((value for name in names if (value := getattr(properties, name, None)) is not None), None)
    return None if found is None else int(found)


def _uuid(properties: Any) -> str | None:
    uuid = getattr(properties, "uuid", None)
    return None if uuid is None else str(uuid)


def _pci_address(properties: Any) -> str | None:
    domain, bus, device = (_number(properties, f"pci_{part}_id") for part in ("domain", "bus", "device"))
    return None if domain is None or bus is None or device is None else f"{domain:08x}:{bus:02x}:{device:02x}.0"
