"""The manager on a real CUDA device, where there is one."""

import pytest
import torch

from kpt_backend_nvidia import NVIDIAMemoryManager, OutOfMemoryError
from kpt_core import InputError
from simulated_allocator import MIB

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture
def manager():
    torch.cuda.empty_cache()
    return NVIDIAMemoryManager(safety_margin=0.05)


def bytes_of(mebibytes):
    return {"shape": (mebibytes * MIB,), "dtype": torch.uint8}


def test_a_tensor_is_allocated_on_the_current_device(manager):
    tensor = manager.allocate((3, 5), torch.bfloat16)
    assert tensor.device == manager.device == torch.device("cuda", torch.cuda.current_device())
    assert manager.statistics().memory.allocated >= tensor.nbytes


def test_what_does_not_fit_is_refused_and_the_device_works_on(manager):
    total = manager.memory().total
    with pytest.raises(OutOfMemoryError, match="safety margin"):
        manager.allocate(total, torch.uint8)
    assert manager.allocate(10).zero_().sum() == 0


def test_a_real_out_of_memory_error_is_explained_after_a_second_try(manager):
    calls = []

    def function():
        calls.append(1)
        return torch.empty(2 * manager.memory().total, dtype=torch.uint8, device=manager.device)

    with pytest.raises(OutOfMemoryError) as caught:
        manager.protect(function)()
    assert len(calls) == 2
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)


def test_a_cache_is_given_up_for_the_second_try(manager):
    free = manager.memory().free
    cache = [torch.empty(free // 2, dtype=torch.uint8, device=manager.device)]
    manager.add_releaser(cache.clear)
    tensor = manager.allocate(free * 3 // 4, torch.uint8)
    assert cache == []
    assert manager.statistics().recoveries == 1
    assert tensor.is_cuda


def test_a_pool_holds_its_tensors_and_gives_its_memory_back(manager):
    pool = manager.pool("cache")
    tensor = manager.allocate(**bytes_of(64), pool="cache")
    outside = manager.allocate(**bytes_of(32))
    assert pool.statistics().allocated == tensor.nbytes
    with pytest.raises(InputError, match="alive"):
        manager.clear_pool("cache")
    with pool.use(), pytest.raises(InputError, match="in use"):
        manager.clear_pool("cache")
    del tensor
    reserved = torch.cuda.memory_reserved()
    assert manager.clear_pool("cache") == 64 * MIB
    assert torch.cuda.memory_reserved() == reserved - 64 * MIB
    assert manager.allocate(**bytes_of(16), pool="cache").nbytes + outside.nbytes == 48 * MIB


def test_clear_gives_the_cache_back(manager):
    tensor = manager.allocate(**bytes_of(64))
    del tensor
    assert manager.clear() >= 64 * MIB
