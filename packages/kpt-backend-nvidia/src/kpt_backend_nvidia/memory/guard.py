"""The out-of-memory guard: free what can be freed, try once more, else explain."""

import functools
import gc
import inspect
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

import torch

from kpt_backend_nvidia.devices import MemoryStatistics
from kpt_core import InputError

from .out_of_memory import OutOfMemoryError, explain, is_out_of_memory
from .sizes import format_bytes

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
Releaser = Callable[[], object]


class MemoryGuard:
    """Frees memory when a call runs out of it.

    Args:
        read: gives the device, its memory now, and the bytes that are kept free.
        empty: empties the allocator's caches; called last, after garbage and the users' caches are gone.
    """

    def __init__(
        self, read: Callable[[], tuple[torch.device, MemoryStatistics, int]], empty: Callable[[], object]
    ) -> None:
        self._read, self._empty = read, empty
        self._releasers: list[Callable[[], Releaser | None]] = []
        self.recoveries = 0
        self.failures = 0

    def add_releaser(self, release: Releaser) -> Callable[[], None]:
        """Call `release` when memory runs out; returns a function that ends this.

        A bound method is held weakly and goes with its object; any other callable is held until it is removed.
        """
        if not callable(release):
            raise InputError(f"add_releaser: a callable without arguments is needed; got {type(release).__name__}")
        reference: Callable[[], Releaser | None]
        reference = weakref.WeakMethod(release) if inspect.ismethod(release) else lambda: release
        self._releasers.append(reference)

        def remove() -> None:
            if reference in self._releasers:
                self._releasers.remove(reference)

        return remove

    def free(self) -> tuple[int, list[str]]:
        """Free garbage, the users' caches and the allocator's.

        Returns:
            Bytes brought back to the device or to the allocator, and a sentence for each releaser that failed.
        """
        (_, before, _), problems = self._read(), []
        for reference in list(self._releasers):
            release = reference()
            if release is None:
                self._releasers.remove(reference)
                continue
            try:
                release()
            except Exception as error:
                name = getattr(release, "__qualname__", repr(release))
                problems.append(f"The releaser {name} failed: {type(error).__name__}: {error}")
        gc.collect()
        self._empty()
        _, after, _ = self._read()
        return max(after.free - before.free, before.allocated - after.allocated, 0), problems

    def run(self, function: Callable[[], Result], requested: int | None = None) -> Result:
        """Call `function`; if memory runs out, free some and call it once more.

        Raises:
            OutOfMemoryError: the second call ran out of memory too.
        """
        try:
            return function()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        # Out here the error is gone, and with it the frames of the call, whose tensors would survive the freeing.
        freed, problems = self.free()
        try:
            result = function()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            tried = f"{format_bytes(freed)} came back by freeing, and the second try failed too."
            raise self._failure(error, requested, [tried, *problems]) from error
        self.recoveries += 1
        return result

    def protect(self, function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
        """`function`, called once more after freeing when it runs out of memory.

        What the function did before memory ran out is done twice: protect one whose beginning may be repeated.

        Raises:
            InputError: a generator or coroutine function, which runs when the guard is left already.
        """
        if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
            raise InputError(f"protect: {function.__qualname__} is a generator or coroutine, whose body runs later")

        @functools.wraps(function)
        def protected(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
            return self.run(lambda: function(*args, **kwargs))

        return protected

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Free memory and explain when the body runs out of it; a body cannot be run again, see `protect`.

        Raises:
            OutOfMemoryError: the body ran out of memory.
        """
        try:
            yield
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            # The frames that the error holds keep tensors of finished calls alive.
            traceback.clear_frames(error.__traceback__)
            freed, problems = self.free()
            tried = f"{format_bytes(freed)} came back by freeing; the block is not run again, as protect() would do."
            raise self._failure(error, None, [tried, *problems]) from error

    def _failure(self, error: Exception, requested: int | None, remarks: list[str]) -> OutOfMemoryError:
        traceback.clear_frames(error.__traceback__)
        self.failures += 1
        device, memory, margin = self._read()
        return OutOfMemoryError(explain(device, memory, margin, requested, remarks), requested, memory)
