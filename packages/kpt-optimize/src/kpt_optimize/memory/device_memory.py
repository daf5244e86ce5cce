"""`DeviceMemoryManager`: allocation with a safety margin, pools, statistics, and help when memory runs out."""

import functools
import gc
import inspect
import os
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import ClassVar, ParamSpec, TypeVar

import torch
from torch import Tensor

from kpt_core.errors import InputError, KptError, UnknownNameError
from kpt_optimize.devices.backend import AcceleratorBackend
from kpt_optimize.devices.config import DeviceLike, device_of_type
from kpt_optimize.devices.facts import MemoryStatistics, memory_statistics

from .estimate import estimate as estimate_step
from .models import optimize_layout as lay_out
from .models import optimize_model_memory as make_smaller
from .pools import MemoryPool, PoolStatistics
from .sizes import format_bytes, model_bytes, segment_bytes

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

#: What the messages of allocation failures contain that PyTorch raises as a plain RuntimeError.
_FAILURES = (
    "DefaultCPUAllocator: can't allocate memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)


@dataclass(frozen=True, slots=True)
class ManagerStatistics:
    """What `DeviceMemoryManager.statistics` returns; sizes in bytes.

    Attributes:
        device: as in `cuda:0`.
        memory: of the device; on the CPU `allocated` and `reserved` are what the manager's own tensors have.
        margin: what the manager keeps free.
        allocations: tensors that it has allocated.
        recoveries: calls that ran out of memory and succeeded after freeing some.
        failures: calls that ran out of memory for good.
        pools: each pool under its name.
    """

    device: str
    memory: MemoryStatistics
    margin: int
    allocations: int
    recoveries: int
    failures: int
    pools: dict[str, PoolStatistics]

    @property
    def available(self) -> int:
        """What the manager would still allocate: free and cached memory without the margin."""
        return max(self.memory.available - self.margin, 0)

    def __str__(self) -> str:
        memory = self.memory
        lines = [
            f"{self.device}: {format_bytes(memory.total)}, free {format_bytes(memory.free)}",
            f"  allocated {format_bytes(memory.allocated)} (peak {format_bytes(memory.allocated_peak)}), "
            f"cached {format_bytes(memory.reserved - memory.allocated)}, elsewhere {format_bytes(memory.elsewhere)}",
            f"  available {format_bytes(self.available)} beside a safety margin of {format_bytes(self.margin)}",
            f"  {self.allocations} allocations, {self.recoveries} recoveries, {self.failures} failures",
            *(f"  pool {name}: allocated {pool}" for name, pool in self.pools.items()),
        ]
        return "\n".join(lines)


class OutOfMemoryError(KptError, torch.OutOfMemoryError):
    """Memory ran out although everything that could be freed was freed; caught by `torch.OutOfMemoryError` too.

    Attributes:
        requested: bytes asked for; None where PyTorch alone knows.
        statistics: of the manager when the call was given up.
    """

    def __init__(self, message: str, requested: int | None, statistics: ManagerStatistics) -> None:
        super().__init__(message)
        self.requested = requested
        self.statistics = statistics


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether `error` is an allocation failure of PyTorch, cuBLAS or cuDNN for which nothing was freed yet."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return not isinstance(error, OutOfMemoryError)
    return isinstance(error, RuntimeError) and any(failure in str(error) for failure in _FAILURES)


class DeviceMemoryManager:
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

    def __init__(self, device: DeviceLike = None, safety_margin: float | int = 0.05) -> None:
        on_cpu = self.backend is None or device in ("cpu", torch.device("cpu"))
        kind = "cpu" if self.backend is None or on_cpu else self.backend.device_types[0]
        self._named = device_of_type(device, kind)
        self._device = torch.device("cpu") if on_cpu else None
        is_fraction = isinstance(safety_margin, float) and 0 <= safety_margin < 1
        if not is_fraction and (type(safety_margin) is not int or safety_margin < 0):
            raise InputError(
                f"{type(self).__name__}: safety_margin must be a fraction, 0.0 <= margin < 1.0, or bytes as an int; "
                f"got {safety_margin!r}"
            )
        self.safety_margin = safety_margin
        self._pools: dict[str, MemoryPool] = {}
        self._releasers: list[Callable[[], object]] = []
        self._allocations = self._recoveries = self._failures = self._live = self._peak = 0

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
        held = {"allocated": live, "allocated_peak": peak, "reserved": live, "reserved_peak": peak, "split": 0}
        failed = {"retries": self._recoveries + self._failures, "out_of_memory": self._failures}
        return MemoryStatistics(total=total, free=free, elsewhere=max(total - free - live, 0), **held, **failed)

    def statistics(self) -> ManagerStatistics:
        """Return the device's memory, the margin, counts of what happened, and the pools."""
        memory = self.memory()
        pools = {name: pool.statistics() for name, pool in self._pools.items()}
        counts = self._allocations, self._recoveries, self._failures
        return ManagerStatistics(str(self.device), memory, self._margin(memory.total), *counts, pools)

    def available(self) -> int:
        """Return the bytes that could be allocated now without touching the margin, the allocator's cache included."""
        return self.statistics().available

    def allocate(
        self, shape: int | Iterable[int], dtype: torch.dtype = torch.float32, *, pool: str | MemoryPool | None = None
    ) -> Tensor:
        """Allocate an uninitialised tensor, if the device has room for it beside the margin.

        If it has not, garbage, the caches given to `add_releaser`, pools without tensors and the allocator's cache are
        freed, and it is tried once more.

        Args:
            shape: sizes.
            dtype: its dtype.
            pool: a pool of this manager, or the name of one that `pool()` has made.

        Raises:
            OutOfMemoryError: no room after freeing; also a `torch.OutOfMemoryError`. It tells sizes and next steps.
            InputError: a bad shape or dtype, or a pool of another device.
        """
        try:
            sizes = (shape,) if isinstance(shape, int) else tuple(shape)
            nbytes = torch.empty(sizes, dtype=dtype, device="meta").nbytes
        except (TypeError, RuntimeError) as error:
            raise InputError(f"no tensor has shape {shape!r} and dtype {dtype!r}: {error}") from None
        device = self.device
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
        """Allocate a tensor for the length of a block; its memory goes back at its end, after an error too.

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
        """Return the pool `name`, made at the first call; the CPU has none."""
        if self.device.type == "cpu":
            raise InputError(f"pool {name!r}: pools are a feature of accelerators, and this manager is on the CPU")
        if name not in self._pools:
            self._pools[name] = MemoryPool(name, self.device)
        return self._pools[name]

    def clear_pool(self, name: str) -> int:
        """Give the memory of a pool back to the device, and return its bytes: see `MemoryPool.clear`."""
        return self._find_pool(name).clear()

    def clear(self) -> int:
        """Free garbage, pools without tensors and the allocator's cache, and return the bytes; what is in use stays."""
        if self._device is None and self.backend is not None and self.backend.why_no_device() is not None:
            return 0
        before = self.memory().reserved
        gc.collect()
        for pool in self._pools.values():
            with suppress(InputError):  # it is in use
                pool.clear()
        if self.device.type != "cpu":
            of = torch.get_device_module(self.device)
            with of.device(self.device):
                of.empty_cache()
        return max(before - self.memory().reserved, 0)

    def add_releaser(self, release: Callable[[], object]) -> None:
        """Have a cache of yours emptied when memory runs out."""
        self._releasers.append(release)

    def protect(self, function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
        """Wrap a function so that it is called once more, after freeing, when it runs out of memory.

        What the function did before memory ran out is done twice: protect one whose beginning may be repeated. The
        second failure is an `OutOfMemoryError` that explains.

        Raises:
            InputError: a generator or coroutine function, which runs when the guard is left already.
        """
        if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
            raise InputError(f"protect: {function.__qualname__} is a generator or coroutine, whose body runs later")

        @functools.wraps(function)
        def protected(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
            return self._run(lambda: function(*args, **kwargs), None)

        return protected

    def _run(self, function: Callable[[], Result], requested: int | None) -> Result:
        try:
            return function()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        # Out here the error is gone, and with it the frames of the call, whose tensors would survive the freeing.
        before = self.memory()
        for release in self._releasers:
            release()
        self.clear()
        after = self.memory()
        try:
            result = function()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            traceback.clear_frames(error.__traceback__)
            freed = max(after.free - before.free, before.allocated - after.allocated, 0)
            raise self._explained(requested, freed) from error
        self._recoveries += 1
        return result

    def _explained(self, requested: int | None, freed: int) -> OutOfMemoryError:
        """Say why memory ran out, what holds it, and what to do."""
        self._failures += 1
        found = self.statistics()
        memory, most = found.memory, found.memory.total - found.margin
        next_steps = ["take a smaller batch, or optimize_model_memory(model, checkpoint=True) for training"]
        if requested is not None and requested > most:
            next_steps = [f"split the tensor: it can never fit in {format_bytes(most)}"]
        elif requested is not None and memory.free > requested:
            next_steps.append("make the safety margin smaller")
        settings = os.environ.get("PYTORCH_ALLOC_CONF", "") + os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
        if memory.reserved - memory.allocated > memory.reserved // 10 and "expandable_segments:True" not in settings:
            next_steps.append("start with PYTORCH_ALLOC_CONF=expandable_segments:True: the cache is in pieces")
        asked = "memory ran out" if requested is None else f"{format_bytes(requested)} asked for"
        told = f"{asked}, and again after {format_bytes(freed)} came back by freeing. {found}"
        return OutOfMemoryError(f"{told}\nNext: {'; '.join(next_steps)}.", requested, found)

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
        if (nbytes if on_cpu else segment_bytes(nbytes)) > room and (on_cpu or not self._cached(nbytes, pool)):
            asked = f"{format_bytes(nbytes)} asked for, {format_bytes(max(room, 0))} free beside the margin"
            raise torch.OutOfMemoryError(asked)  # the guard turns it into an explanation

    def _cached(self, nbytes: int, pool: MemoryPool | None) -> bool:
        """Return whether an unused block of the pool, or of the allocator's cache, holds `nbytes`: a slow search.

        Requests up to 1 MiB and greater ones are served from segments of their own kind.
        """
        device, of = self.device, torch.get_device_module(self.device)
        current = of.current_stream(device)
        home = device.index, current.cuda_stream if device.type == "cuda" else current.sycl_queue, (0, 0)
        return any(
            block["state"] == "inactive" and block["size"] >= nbytes
            for segment in (of.memory_snapshot() if pool is None else pool.segments())
            if segment["segment_type"] == ("small" if nbytes <= 1 << 20 else "large")
            and (pool or (segment["device"], segment["stream"], tuple(segment.get("segment_pool_id", (0, 0)))) == home)
            for block in segment["blocks"]
        )

    def _count(self, nbytes: int) -> None:
        """Account for a tensor in main memory, of which torch keeps no statistics."""
        self._live += nbytes
        self._peak = max(self._peak, self._live)


def room_for(model: torch.nn.Module) -> int:
    """Return the bytes that a model may take of its device: what it has and what is free, less the margin."""
    device = next((each.device for each in model.parameters()), torch.device("cpu"))
    if device.type == "meta":
        raise InputError("the model lies on 'meta', which has no memory: say how much there is, as in memory=24 << 30")
    if device.type == "cpu":
        free = DeviceMemoryManager().available()
    else:
        memory = memory_statistics(device)
        free = int(memory.free + memory.reserved - memory.allocated - 0.05 * memory.total)
    return free + model_bytes(model)


def _main_memory() -> tuple[int, int]:
    """Return bytes of main memory: what new work can have without swapping, and all of it."""
    with open("/proc/meminfo") as lines:
        values = dict(line.split(":", 1) for line in lines)
    return int(values["MemAvailable"].split()[0]) << 10, int(values["MemTotal"].split()[0]) << 10
