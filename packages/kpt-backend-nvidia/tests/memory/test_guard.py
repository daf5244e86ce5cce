"""The out-of-memory guard, on the CPU. Errors that CUDA would raise are raised by the functions under guard."""

import gc
import weakref

import pytest
import torch

from kpt_backend_nvidia.memory import NVIDIAMemoryManager, OutOfMemoryError, is_out_of_memory, largest_tensors
from kpt_backend_nvidia.memory.out_of_memory import explain
from kpt_core import InputError, KptError


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
    with pytest.raises(OutOfMemoryError, match=r"memory ran out.*\n.*second try failed too") as caught:
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

    for call in (on_cpu.protect(function), lambda: guarded(on_cpu, function)):
        with pytest.raises(type(error)) as caught:
            call()
        assert caught.value is error
    assert cache.items == [1, 2]


def guarded(manager, function):
    with manager.guard():
        return function()


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


def test_a_block_that_runs_out_frees_and_explains(on_cpu):
    cache = Cache()
    on_cpu.add_releaser(cache.drop)
    kept, at_release = [], []
    on_cpu.add_releaser(lambda: at_release.append(on_cpu.memory().allocated))

    def function():
        tensor = on_cpu.allocate(1000)
        kept.append(weakref.ref(tensor.untyped_storage()))
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(OutOfMemoryError, match=r"the block is not run again, as protect\(\) would do"):
        guarded(on_cpu, function)
    assert cache.items == []
    assert at_release == [0]  # what the error's frames held is gone before the freeing
    assert kept[0]() is None


def test_a_block_that_does_not_run_out_is_left_alone(on_cpu):
    assert guarded(on_cpu, lambda: 3) == 3
    assert on_cpu.statistics().failures == 0


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


def test_a_method_s_releaser_goes_with_its_object(on_cpu):
    cache = Cache()
    released = weakref.ref(cache)
    on_cpu.add_releaser(cache.drop)
    del cache
    gc.collect()
    assert released() is None
    assert on_cpu.protect(out_of_memory_for(1)[0])() == "done"


def test_a_function_releaser_stays_until_it_is_removed(on_cpu):
    calls = []
    remove = on_cpu.add_releaser(lambda: calls.append(1))
    gc.collect()
    on_cpu.protect(out_of_memory_for(1)[0])()
    assert calls == [1]
    remove()
    remove()
    on_cpu.protect(out_of_memory_for(1)[0])()
    assert calls == [1]


def test_a_releaser_that_fails_does_not_hide_the_rest_and_is_named(on_cpu):
    def broken():
        raise KeyError("lost")

    cache = Cache()
    on_cpu.add_releaser(broken)
    on_cpu.add_releaser(cache.drop)
    with pytest.raises(OutOfMemoryError, match=r"releaser .*broken failed: KeyError: 'lost'"):
        on_cpu.protect(out_of_memory_for(2)[0])()
    assert cache.items == []


def test_a_releaser_must_be_callable(on_cpu):
    with pytest.raises(InputError, match="int"):
        on_cpu.add_releaser(3)


async def coroutine():
    pass


def generator():
    yield


@pytest.mark.parametrize("function", [coroutine, generator])
def test_what_runs_later_is_not_protected(on_cpu, function):
    with pytest.raises(InputError, match=function.__name__):
        on_cpu.protect(function)


def test_the_largest_tensors_are_found_by_storage():
    tensor = torch.zeros(3_000_000)
    view = tensor[:10]
    parameter = torch.nn.Parameter(torch.zeros(4_000_000, dtype=torch.float16))
    found = {text: nbytes for nbytes, text in largest_tensors(torch.device("cpu"), 50)}
    assert found["tensor [3000000] float32, 2 views"] == 12_000_000
    assert any(text.startswith("parameter [4000000] float16") for text in found)
    assert [nbytes for nbytes, _ in largest_tensors(torch.device("cpu"), 2)] == sorted(found.values())[:-3:-1]
    assert (view.numel(), parameter.numel()) == (10, 4_000_000)


def reading(**values):
    manager = NVIDIAMemoryManager("cpu")
    fields = {name: getattr(manager.memory(), name) for name in type(manager.memory()).__slots__}
    return type(manager.memory())(**{**fields, **values})


@pytest.mark.parametrize(
    ("settings", "allocated", "advised"),
    [("", 300, True), ("", 990, False), ("expandable_segments:True", 300, False)],
)
def test_expandable_segments_are_advised_where_the_cache_does_not_fit(monkeypatch, settings, allocated, advised):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", settings)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    memory = reading(total=2000, free=1000, allocated=allocated, reserved=1000, elsewhere=0)
    text = explain(torch.device("cuda:0"), memory, 100, 600)
    assert ("PYTORCH_ALLOC_CONF=expandable_segments:True" in text) is advised


@pytest.mark.parametrize(("elsewhere", "named"), [(500, True), (50, False)])
def test_memory_of_others_is_named_where_it_counts(elsewhere, named):
    memory = reading(total=2000, free=100, allocated=1400, reserved=1400, elsewhere=elsewhere)
    assert ("nvidia-smi" in explain(torch.device("cuda:0"), memory, 100, 600)) is named
