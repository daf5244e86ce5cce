"""The out-of-memory guard, on the CPU. Errors that CUDA would raise are raised by the functions under guard."""

import weakref

import pytest
import torch

from kpt_core import InputError, KptError
from kpt_optimize.memory import OutOfMemoryError, is_out_of_memory


class Cache:
    def __init__(self):
        self.items = [1, 2]

    def drop(self):
        self.items.clear()


def out_of_memory_for(times):
    """A function that runs out of memory so many times, and how often it was called."""
    calls = []

    def function(*args, **kwargs):
        calls.append((args, kwargs))
        if len(calls) <= times:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return "done"

    return function, calls


def test_a_function_that_runs_out_once_is_called_again_after_freeing(on_cpu):
    function, calls = out_of_memory_for(1)
    cache = Cache()
    on_cpu.add_releaser(cache.drop)
    assert on_cpu.protect(function)(3, key=4) == "done"
    assert calls == [((3,), {"key": 4})] * 2
    assert cache.items == []
    assert on_cpu.statistics().recoveries == 1


def test_a_function_that_runs_out_twice_is_not_called_a_third_time(on_cpu):
    function, calls = out_of_memory_for(9)
    with pytest.raises(OutOfMemoryError, match=r"memory ran out, and again after [\d.]+ \w+ came back") as caught:
        on_cpu.protect(function)()
    assert len(calls) == 2
    assert isinstance(caught.value, torch.OutOfMemoryError)
    assert isinstance(caught.value, KptError)
    assert "Tried to allocate 2.00 GiB" in str(caught.value.__cause__)
    assert on_cpu.statistics().failures == 1


def test_guards_in_guards_try_again_once(on_cpu):
    function, calls = out_of_memory_for(9)
    with pytest.raises(OutOfMemoryError):
        on_cpu.protect(on_cpu.protect(function))()
    assert len(calls) == 2


@pytest.mark.parametrize("error", [ValueError("no"), RuntimeError("shape mismatch"), KeyboardInterrupt()])
def test_other_errors_pass_and_nothing_is_freed(on_cpu, error):
    cache = Cache()
    on_cpu.add_releaser(cache.drop)

    def function():
        raise error

    with pytest.raises(type(error)) as caught:
        on_cpu.protect(function)()
    assert caught.value is error
    assert cache.items == [1, 2]


def test_another_error_at_the_second_call_passes(on_cpu):
    errors = [torch.OutOfMemoryError("first"), ValueError("second")]

    def function():
        raise errors.pop(0)

    with pytest.raises(ValueError, match="second"):
        on_cpu.protect(function)()


def test_tensors_of_the_failed_call_are_gone_before_the_second(on_cpu):
    class Work:
        pass

    seen, alive = [], []

    def inner():
        work = Work()
        work.itself = work  # only the garbage collector finds it
        seen.append(weakref.ref(work))
        raise torch.OutOfMemoryError("inner")

    def function():
        local = Work()
        seen.append(weakref.ref(local))
        if len(seen) == 1:
            inner()
        alive.extend(reference() for reference in seen[:-1])

    on_cpu.protect(function)()
    assert alive == [None, None]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (MemoryError(), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (ValueError("CUDA error: out of memory"), False),
    ],
)
def test_allocation_failures_are_recognised(error, expected):
    assert is_out_of_memory(error) is expected


def test_a_real_failure_of_the_cpu_s_allocator_is_recognised():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**50)
    assert is_out_of_memory(caught.value)


def test_a_releaser_s_own_failure_passes(on_cpu):
    def broken():
        raise KeyError("lost")

    on_cpu.add_releaser(broken)
    with pytest.raises(KeyError, match="lost"):
        on_cpu.protect(out_of_memory_for(2)[0])()


async def coroutine():
    pass


def generator():
    yield


@pytest.mark.parametrize("function", [coroutine, generator])
def test_what_runs_later_is_not_protected(on_cpu, function):
    with pytest.raises(InputError, match=function.__name__):
        on_cpu.protect(function)


@pytest.mark.parametrize(
    ("settings", "live", "advised"),
    [("", 300, True), ("", 400, False), ("expandable_segments:True", 300, False)],
)
def test_expandable_segments_are_advised_where_the_cache_is_in_pieces(simulated, monkeypatch, settings, live, advised):
    """400 MiB are reserved by a pool, whose cache stays while a tensor lives in it."""
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", settings)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    pool = simulated.pool("cache")
    tensors = [simulated.allocate(100 << 20, torch.uint8, pool=pool) for _ in range(4)]
    del tensors[live // 100 :]
    with pytest.raises(OutOfMemoryError) as caught:
        simulated.protect(out_of_memory_for(2)[0])()
    assert ("PYTORCH_ALLOC_CONF=expandable_segments:True" in str(caught.value)) is advised
