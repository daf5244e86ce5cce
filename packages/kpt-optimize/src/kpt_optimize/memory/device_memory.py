"""`DeviceMemoryManager`: allocation with a safety margin, pools, and help when memory runs out."""

import gc
import os
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor

from kpt_core.errors import InputError, UnknownNameError
from kpt_optimize.accelerator.backend import AcceleratorBackend
from kpt_optimize.accelerator.config import Device, device_of_type
from kpt_optimize.accelerator.devices import MemoryStatistics, memory_statistics

from .estimate import estimate as estimate_step
from .guard import ManagerStatistics, MemoryGuard
from .layout import optimize_layout as lay_out
from .model_memory import optimize_model_memory as make_smaller
from .pools import MemoryPool
from .sizes import format_bytes, segment_bytes, tensor_bytes, tensor_sizes


class _ShortOfMemory(torch.OutOfMemoryError):
    """An allocation that would go into the safety margin; the guard turns it into an explanation."""


class DeviceMemoryManager(MemoryGuard):
    """Memory of one device: allocation that keeps a margin free, pools, statistics, and a guard.

    A vendor's manager names its `backend`; this class by itself manages main memory. It can be made without a device,
    for what needs none: `estimate`, `optimize_layout`, `optimize_model_memory`. Allocation and statistics then raise
    `InputError` with what is missing. With `device="cpu"` all but pools works, on main memory.

        manager = NVIDIAMemoryManager(safety_margin=0.1)
        cache = manager.allocate((4096, 4096), torch.bfloat16)
        step = manager.protect(step)  # frees memory and tries again when it runs out

    Args:
        device: of the backend, or `cpu`; None is the current one when it is first used.
        safety_margin: what allocations leave free: a float below 1 is a fraction of the device, an int is bytes.

    Raises:
        InputError: a device of another type, or a margin out of range.
    """

    backend: ClassVar[AcceleratorBackend | None] = None
    estimate = staticmethod(estimate_step)
    optimize_layout = staticmethod(lay_out)
    optimize_model_memory = staticmethod(make_smaller)

    def __init__(self, device: Device = None, safety_margin: float | int = 0.05) -> None:
        super().__init__()
        on_cpu = device in ("cpu", torch.device("cpu")) or self.backend is None
        kind = "cpu" if on_cpu or self.backend is None else self.backend.device_types[0]
        named = device_of_type("cpu" if on_cpu and device is None else device, kind)
        if not _is_margin(safety_margin):
            raise InputError(
                f"{type(self).__name__}: safety_margin must be a fraction, 0.0 <= margin < 1.0, or bytes as an int; "
                f"got {safety_margin!r}"
            )
        self.safety_margin = safety_margin
        self._named, self._device = named, named if named is not None and named.type == "cpu" else None
        self._pools: dict[str, MemoryPool] = {}
        self._allocations = self._live = self._peak = 0

    @property
    def device(self) -> torch.device:
        """The device, with its index if it is an accelerator; InputError where there is none."""
        if self._device is None:
            assert self.backend is not None
            try:
                self._device = self.backend.device(self._named)
            except InputError as error:
                raise InputError(f"{error}; {type(self).__name__}(device='cpu') manages main memory") from None
        return self._device

    def memory(self) -> MemoryStatistics:
        """Return the device's memory now; on the CPU `allocated` is what tensors of this manager have."""
        if self.device.type != "cpu":
            return memory_statistics(self.device)
        (free, total), live, peak = _main_memory(), self._live, self._peak
        return MemoryStatistics(
            total=total,
            free=free,
            allocated=live,
            allocated_peak=peak,
            reserved=live,
            reserved_peak=peak,
            elsewhere=max(total - free - live, 0),
            split=0,
            retries=self._recoveries + self._failures,
            out_of_memory=self._failures,
        )

    def available(self) -> int:
        """Bytes that could be allocated now without touching the margin: free ones, and the allocator's unused ones."""
        return self.statistics().available

    def allocate(
        self, shape: int | Iterable[int], dtype: torch.dtype = torch.float32, *, pool: str | MemoryPool | None = None
    ) -> Tensor:
        """An uninitialised tensor, if the device has room for it beside the margin.

        If it has not, garbage, the caches given to `add_releaser`, pools without tensors and the allocator's cache are
        freed, and it is tried once more.

        Args:
            shape: sizes.
            dtype: its dtype.
            pool: a pool of this manager, or the name of one that `pool()` has made.

        Returns:
            A tensor of that shape on the manager's device.

        Raises:
            OutOfMemoryError: no room after freeing; also a `torch.OutOfMemoryError`. It tells sizes and next steps.
            InputError: a bad shape or dtype, or a pool of another device.
            UnknownNameError: no such pool.
        """
        sizes = tensor_sizes(shape)
        nbytes, device = tensor_bytes(sizes, dtype), self.device
        source = self._find_pool(pool) if isinstance(pool, str) else pool
        if source is not None and source.device != device:
            raise InputError(f"pool {source.name!r} is on {source.device}, and this manager is on {device}")

        def attempt() -> Tensor:
            self._require(nbytes, source)
            with source.use() if source else nullcontext():
                return torch.empty(sizes, dtype=dtype, device=device)

        tensor = self._run(attempt, nbytes)
        self._allocations += 1
        if device.type == "cpu":
            self._count(nbytes)
            weakref.finalize(tensor.untyped_storage(), self._count, -nbytes).atexit = False
        return tensor

    @contextmanager
    def allocation(
        self, shape: int | Iterable[int], dtype: torch.dtype = torch.float32, *, pool: str | MemoryPool | None = None
    ) -> Iterator[Tensor]:
        """A tensor for the length of a block, whose memory goes back at its end, after an error too.

        At the end the tensor is emptied, so that neither a name nor an error's traceback that still refers to it keeps
        its memory; views of it keep theirs. Arguments and errors are those of `allocate`.
        """
        tensor = self.allocate(shape, dtype, pool=pool)
        try:
            yield tensor
        finally:
            with torch.no_grad():
                tensor.set_()  # type: ignore[call-overload]

    def pool(self, name: str) -> MemoryPool:
        """The pool `name`, made at the first call.

        Raises:
            InputError: the manager is on the CPU, or PyTorch refuses to make a pool.
        """
        if self.device.type == "cpu":
            raise InputError(
                f"pool {name!r}: pools are a feature of accelerators, and this manager is on {self.device}"
            )
        if name not in self._pools:
            self._pools[name] = MemoryPool(name, self.device)
        return self._pools[name]

    def clear_pool(self, name: str) -> int:
        """Give the memory of a pool back to the device; returns the bytes.

        Raises:
            UnknownNameError: no such pool.
            InputError: tensors live in the pool, or it is in use.
        """
        return self._find_pool(name).clear()

    def clear(self) -> int:
        """Free garbage, pools without tensors and the allocator's cache; what is in use stays.

        Returns:
            Bytes given back; 0 without a device.
        """
        if self._device is None and self.backend is not None and self.backend.why_no_device() is not None:
            return 0
        before = self.memory().reserved
        gc.collect()
        for pool in self._pools.values():
            if pool.why_in_use() is None:
                pool.clear()
        if self.device.type != "cpu":
            of = torch.get_device_module(self.device)
            with of.device(self.device):
                of.empty_cache()
        return max(before - self.memory().reserved, 0)

    def statistics(self) -> ManagerStatistics:
        """The device's memory, the margin, counts of what happened, and the pools."""
        memory = self.memory()
        return ManagerStatistics(
            str(self.device),
            memory,
            self._margin(memory.total),
            self._allocations,
            self._recoveries,
            self._failures,
            {name: pool.statistics() for name, pool in self._pools.items()},
        )

    def _margin(self, total: int) -> int:
        return int(self.safety_margin * total) if isinstance(self.safety_margin, float) else self.safety_margin

    def _find_pool(self, name: str) -> MemoryPool:
        if name not in self._pools:
            raise UnknownNameError("pool", name, self._pools, f"pool({name!r}) makes it.")
        return self._pools[name]

    def _require(self, nbytes: int, pool: MemoryPool | None) -> None:
        """Raise unless `nbytes` can be had without touching the margin."""
        on_cpu = self.device.type == "cpu"
        free, total = _main_memory() if on_cpu else torch.get_device_module(self.device).mem_get_info(self.device)
        room = free - self._margin(total)
        if (nbytes if on_cpu else segment_bytes(nbytes)) <= room:
            return
        # A cached block costs the device nothing; the search for one is slow, and made only when memory is short.
        if not on_cpu and _block_fits(pool.segments() if pool else _cached_segments(self.device), nbytes):
            return
        raise _ShortOfMemory(f"{format_bytes(nbytes)} asked for, {format_bytes(max(room, 0))} free beside the margin")

    def _count(self, nbytes: int) -> None:
        self._live += nbytes
        self._peak = max(self._peak, self._live)


def _is_margin(value: object) -> bool:
    if isinstance(value, float):
        return 0 <= value < 1
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _main_memory() -> tuple[int, int]:
    """Bytes of main memory: what new work can have without swapping, and all of it."""
    page = os.sysconf("SC_PAGE_SIZE")
    with open("/proc/meminfo") as lines:
        values = dict(line.split(":", 1) for line in lines)
    return int(values["MemAvailable"].split()[0]) << 10, os.sysconf("SC_PHYS_PAGES") * page


def _block_fits(segments: Iterable[dict[str, Any]], nbytes: int) -> bool:
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


def _cached_segments(device: torch.device) -> list[dict[str, Any]]:
    """The segments that the current stream of `device` allocates from, pools apart."""
    of = torch.get_device_module(device)
    current = of.current_stream(device)
    stream = current.cuda_stream if device.type == "cuda" else current.sycl_queue
    return [
        segment
        for segment in of.memory_snapshot()
        if segment["device"] == device.index
        and segment["stream"] == stream
        and tuple(segment.get("segment_pool_id", (0, 0))) == (0, 0)
    ]
