"""When memory runs out: free what can be freed, try once more, else explain."""

import functools
import inspect
import os
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

import torch

from kpt_core.errors import InputError, KptError
from kpt_optimize.accelerator.devices import MemoryStatistics

from .pools import PoolStatistics
from .sizes import format_bytes

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
    pools: dict[str, PoolStatistics] = field(default_factory=dict)

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
            f"  available {format_bytes(self.available)} beside a margin of {format_bytes(self.margin)}",
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
    """Whether `error` is an allocation failure of PyTorch, cuBLAS or cuDNN for which nothing was freed yet."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return not isinstance(error, OutOfMemoryError)
    return isinstance(error, RuntimeError) and any(failure in str(error) for failure in _FAILURES)


class MemoryGuard(ABC):
    """What a memory manager does when memory runs out."""

    def __init__(self) -> None:
        self._releasers: list[Callable[[], object]] = []
        self._recoveries = self._failures = 0

    @abstractmethod
    def statistics(self) -> ManagerStatistics:
        """The device's memory, the margin, counts of what happened, and the pools."""

    @abstractmethod
    def clear(self) -> int:
        """Free garbage, pools without tensors and the allocator's cache; returns the bytes."""

    def add_releaser(self, release: Callable[[], object]) -> None:
        """Have a cache of yours emptied when memory runs out."""
        self._releasers.append(release)

    def protect(self, function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
        """`function`, called once more after freeing when it runs out of memory.

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
        freed = self._free()
        try:
            result = function()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            traceback.clear_frames(error.__traceback__)
            raise self._explained(requested, freed) from error
        self._recoveries += 1
        return result

    def _free(self) -> int:
        """Empty the users' caches, then the allocator's; returns the bytes that came back to one of the two."""
        before = self.statistics().memory
        for release in self._releasers:
            release()
        self.clear()
        after = self.statistics().memory
        return max(after.free - before.free, before.allocated - after.allocated, 0)

    def _explained(self, requested: int | None, freed: int) -> OutOfMemoryError:
        """Why memory ran out, what holds it, and what to do."""
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
        return OutOfMemoryError(
            f"{found.device}: {'memory ran out' if requested is None else f'{format_bytes(requested)} asked for'}; "
            f"of {format_bytes(memory.total)} are free {format_bytes(memory.free)}, of which "
            f"{format_bytes(found.margin)} are the safety margin; tensors hold {format_bytes(memory.allocated)}, "
            f"the allocator reserves {format_bytes(memory.reserved)}, {format_bytes(memory.elsewhere)} are held "
            f"elsewhere. {format_bytes(freed)} came back by freeing, and the second try failed too. "
            f"Next: {'; '.join(next_steps)}.",
            requested,
            found,
        )
