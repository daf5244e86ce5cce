"""`NVIDIAMemoryManager`: allocation with a safety margin, pools, and help when memory runs out."""

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from kpt_backend_nvidia.configuration import cuda_device
from kpt_backend_nvidia.devices import MemoryStatistics, device_index, memory_stats
from kpt_core import InputError, UnknownNameError

from .estimate import MemoryEstimate, OptimizerFactory, estimate
from .guard import MemoryGuard, Releaser
from .layout import LayoutReport, optimize_layout
from .model_memory import ModelMemoryReport, optimize_model_memory
from .pools import MemoryPool
from .sizes import format_bytes, segment_bytes, tensor_bytes, tensor_sizes
from .statistics import ManagerStatistics, block_fits, cached_segments, system_memory

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class _ShortOfMemory(torch.OutOfMemoryError):
    """An allocation that would go into the safety margin; the guard turns it into an explanation."""


class NVIDIAMemoryManager:
    """Memory of one device: allocation that keeps a margin free, pools, statistics, and a guard.

    It can be made without CUDA, for what needs no device: `estimate`, `optimize_layout`, `optimize_model_memory`.
    Allocation and statistics then raise `InputError` with what is missing. With `device="cpu"` all but pools works, on
    main memory.

        manager = NVIDIAMemoryManager(safety_margin=0.1)
        cache = manager.allocate((4096, 4096), torch.bfloat16)
        step = manager.protect(step)  # frees memory and tries again when it runs out

    Args:
        device: a CUDA device or `cpu`; None is the current CUDA device when it is first used.
        safety_margin: what allocations leave free: a float below 1 is a fraction of the device, an int is bytes.

    Raises:
        InputError: a device of another type, or a margin out of range.
    """

    def __init__(self, device: torch.device | str | int | None = None, safety_margin: float | int = 0.05) -> None:
        named = torch.device("cpu") if device in ("cpu", torch.device("cpu")) else cuda_device(device)
        if not _is_margin(safety_margin):
            raise InputError(
                "NVIDIAMemoryManager: safety_margin must be a fraction, 0.0 <= margin < 1.0, or bytes as an int; "
                f"got {safety_margin!r}"
            )
        self.safety_margin = safety_margin
        self._named, self._device = named, named if named is not None and named.type == "cpu" else None
        self._pools: dict[str, MemoryPool] = {}
        self._allocations = 0
        self._live = self._peak = 0
        self._guard = MemoryGuard(self._read, self._empty_caches)

    @property
    def device(self) -> torch.device:
        """The device, with its index if it is a CUDA one; InputError where there is none."""
        if self._device is None:
            try:
                self._device = torch.device("cuda", device_index(self._named))
            except InputError as error:
                raise InputError(f"{error}; NVIDIAMemoryManager(device='cpu') manages main memory") from None
        return self._device

    def memory(self) -> MemoryStatistics:
        """The device's memory now; on the CPU `allocated` is what tensors of this manager have."""
        if self.device.type == "cuda":
            return memory_stats(self.device)
        (free, total), live, peak = system_memory(), self._live, self._peak
        return MemoryStatistics(
            total=total,
            free=free,
            allocated=live,
            allocated_peak=peak,
            reserved=live,
            reserved_peak=peak,
            elsewhere=max(total - free - live, 0),
            split=0,
            retries=self._guard.recoveries + self._guard.failures,
            out_of_memory=self._guard.failures,
        )

    def margin(self) -> int:
        """Bytes that allocations leave free."""
        return self._margin_of(self._free_and_total()[1])

    def _margin_of(self, total: int) -> int:
        return int(self.safety_margin * total) if isinstance(self.safety_margin, float) else self.safety_margin

    def _free_and_total(self) -> tuple[int, int]:
        return torch.cuda.mem_get_info(self.device) if self.device.type == "cuda" else system_memory()

    def _read(self) -> tuple[torch.device, MemoryStatistics, int]:
        memory = self.memory()
        return self.device, memory, self._margin_of(memory.total)

    def available(self) -> int:
        """Bytes that could be allocated now without touching the margin: free ones, and the allocator's unused ones."""
        memory = self.memory()
        return max(memory.available - self._margin_of(memory.total), 0)

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
        source = self._find_pool(pool)

        def attempt() -> Tensor:
            self._require(nbytes, source)
            with source.use() if source else nullcontext():
                return torch.empty(sizes, dtype=dtype, device=device)

        tensor = self._guard.run(attempt, nbytes)
        self._allocations += 1
        if device.type == "cpu":
            self._live += nbytes
            self._peak = max(self._peak, self._live)
            weakref.finalize(tensor.untyped_storage(), self._forget, nbytes).atexit = False
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
        device = self.device
        if device.type != "cuda":
            raise InputError(
                f"pool {name!r}: pools are a feature of the CUDA allocator, and this manager is on {device}"
            )
        if name not in self._pools:
            self._pools[name] = MemoryPool(name, device)
        return self._pools[name]

    def clear_pool(self, name: str) -> int:
        """Give the memory of a pool back to the device; returns the bytes.

        Raises:
            UnknownNameError: no such pool.
            InputError: tensors live in the pool, or it is in use.
        """
        if name not in self._pools:
            raise UnknownNameError("pool", name, self._pools)
        return self._pools[name].clear()

    def clear(self) -> int:
        """Free garbage, pools without tensors and the allocator's cache; what is in use stays.

        Returns:
            Bytes given back; 0 without CUDA.
        """
        if self._device is None and not torch.cuda.is_available():
            return 0
        before = self.memory().reserved
        gc.collect()
        self._empty_caches()
        return max(before - self.memory().reserved, 0)

    def statistics(self) -> ManagerStatistics:
        """The device's memory, the margin, counts of what happened, and the pools."""
        device, memory, margin = self._read()
        return ManagerStatistics(
            str(device),
            memory,
            margin,
            max(memory.available - margin, 0),
            self._allocations,
            self._guard.recoveries,
            self._guard.failures,
            {name: pool.statistics() for name, pool in self._pools.items()},
        )

    def guard(self) -> AbstractContextManager[None]:
        """A block that frees memory and explains when it runs out of it; see `MemoryGuard.watch`."""
        return self._guard.watch()

    def protect(self, function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
        """A function that frees memory and runs once more when it runs out of it; see `MemoryGuard.protect`."""
        return self._guard.protect(function)

    def add_releaser(self, release: Releaser) -> Callable[[], None]:
        """Have a cache of yours emptied when memory runs out; see `MemoryGuard.add_releaser`."""
        return self._guard.add_releaser(release)

    def estimate(
        self,
        model: nn.Module,
        example_inputs: Any,
        *,
        training: bool = True,
        optimizer: str | OptimizerFactory | None = "adamw",
    ) -> MemoryEstimate:
        """The memory of a step, without running it; see `kpt_backend_nvidia.memory.estimate`."""
        return estimate(model, example_inputs, training=training, optimizer=optimizer)

    def optimize_layout(self, model: nn.Module) -> LayoutReport:
        """Parameters laid out as tensor cores read them; see `kpt_backend_nvidia.memory.optimize_layout`."""
        return optimize_layout(model)

    def optimize_model_memory(
        self,
        model: nn.Module,
        example_inputs: Any = None,
        *,
        checkpoint: bool | Iterable[type[nn.Module]] = False,
        dtype: torch.dtype | None = None,
    ) -> ModelMemoryReport:
        """A model made smaller in place; see `kpt_backend_nvidia.memory.optimize_model_memory`."""
        return optimize_model_memory(model, example_inputs, checkpoint=checkpoint, dtype=dtype)

    def _find_pool(self, pool: str | MemoryPool | None) -> MemoryPool | None:
        if isinstance(pool, str):
            if pool not in self._pools:
                raise UnknownNameError("pool", pool, self._pools, f"pool({pool!r}) makes it.")
            return self._pools[pool]
        if pool is not None and pool.device != self.device:
            raise InputError(f"pool {pool.name!r} is on {pool.device}, and this manager is on {self.device}")
        return pool

    def _require(self, nbytes: int, pool: MemoryPool | None) -> None:
        """Raise unless `nbytes` can be had without touching the margin."""
        free, total = self._free_and_total()
        room = free - self._margin_of(total)
        cuda = self.device.type == "cuda"
        if (segment_bytes(nbytes) if cuda else nbytes) <= room:
            return
        # A cached block costs the device nothing; the search for one is slow, and made only when memory is short.
        if cuda and block_fits(pool.segments() if pool else cached_segments(self.device), nbytes):
            return
        raise _ShortOfMemory(f"{format_bytes(nbytes)} asked for, {format_bytes(max(room, 0))} free beside the margin")

    def _empty_caches(self) -> None:
        for pool in self._pools.values():
            if pool.unused():
                pool.clear()
        if self.device.type == "cuda":
            with torch.cuda.device(self.device):
                torch.cuda.empty_cache()

    def _forget(self, nbytes: int) -> None:
        self._live -= nbytes


def _is_margin(value: object) -> bool:
    if isinstance(value, float):
        return 0 <= value < 1
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
