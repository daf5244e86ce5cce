"""Pools, on a simulated CUDA allocator."""

import pytest
import torch

from kpt_core import InputError
from kpt_optimize.memory import MemoryPool, OutOfMemoryError
from simulated_allocator import MIB


def bytes_of(mebibytes):
    return {"shape": (mebibytes * MIB,), "dtype": torch.uint8}


def test_a_pool_is_made_once(simulated):
    assert simulated.pool("cache") is simulated.pool("cache")
    assert simulated.pool("cache") is not simulated.pool("other")


def test_a_tensor_is_allocated_from_the_pool_and_counted_there_alone(simulated):
    pool = simulated.pool("cache")
    inside = simulated.allocate(**bytes_of(100), pool="cache")
    outside = simulated.allocate(**bytes_of(60))
    statistics = pool.statistics()
    assert (statistics.allocated, statistics.reserved) == (100 * MIB, 100 * MIB)
    assert simulated.statistics().pools == {"cache": statistics}
    assert "pool cache: allocated 100.00 MiB of 100.00 MiB" in str(simulated.statistics())
    assert simulated.memory().allocated == inside.nbytes + outside.nbytes


def test_what_is_allocated_in_a_block_of_use_is_in_the_pool(simulated):
    pool = simulated.pool("cache")
    with pool.use():
        inside = torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
    outside = torch.empty(40 * MIB, dtype=torch.uint8, device="cuda")
    assert pool.statistics().allocated == inside.nbytes
    assert outside.nbytes == 40 * MIB


def test_memory_of_the_pool_is_not_used_outside_of_it(simulated, allocator):
    pool = simulated.pool("cache")
    tensor = simulated.allocate(**bytes_of(100), pool=pool)
    del tensor
    assert (pool.statistics().allocated, pool.statistics().reserved) == (0, 100 * MIB)
    outside = simulated.allocate(**bytes_of(100))
    assert allocator.device.reserved == 200 * MIB
    inside = simulated.allocate(**bytes_of(90), pool=pool)
    assert allocator.device.reserved == 200 * MIB
    assert inside.nbytes + outside.nbytes == 190 * MIB


def test_clearing_gives_the_memory_back_and_the_pool_works_on(simulated, allocator):
    tensor = simulated.allocate(**bytes_of(100), pool=simulated.pool("cache"))
    del tensor
    torch.cuda.empty_cache()
    assert allocator.device.reserved == 100 * MIB  # which a pool keeps from empty_cache
    assert simulated.clear_pool("cache") == 100 * MIB
    assert allocator.device.reserved == 0
    assert simulated.clear_pool("cache") == 0
    assert simulated.pool("cache").statistics().reserved == 0
    tensor = simulated.allocate(**bytes_of(50), pool="cache")
    assert simulated.pool("cache").statistics().allocated == tensor.nbytes


def test_a_pool_whose_tensors_live_is_not_cleared(simulated, allocator):
    tensor = simulated.allocate(**bytes_of(100), pool=simulated.pool("cache"))
    with pytest.raises(InputError, match=r"'cache' holds 100.00 MiB in tensors that are alive"):
        simulated.clear_pool("cache")
    assert simulated.clear() == 0
    assert simulated.pool("cache").statistics().allocated == tensor.nbytes
    del tensor
    assert simulated.clear() == 100 * MIB
    assert allocator.device.reserved == 0


def test_a_pool_in_use_is_not_cleared(simulated):
    with simulated.pool("cache").use(), pytest.raises(InputError, match="'cache' is in use"):
        simulated.clear_pool("cache")


def test_an_idle_pool_makes_room_when_memory_runs_out(simulated):
    tensor = simulated.allocate(**bytes_of(600), pool=simulated.pool("cache"))
    with pytest.raises(OutOfMemoryError):
        simulated.allocate(**bytes_of(500))
    del tensor
    assert simulated.allocate(**bytes_of(500)).nbytes == 500 * MIB
    assert simulated.statistics().recoveries == 1


def test_a_pool_reuses_its_blocks_although_the_device_is_full(simulated):
    pool = simulated.pool("cache")
    first = simulated.allocate(**bytes_of(500), pool=pool)
    kept = simulated.allocate(**bytes_of(400))
    del first
    again = simulated.allocate(**bytes_of(450), pool=pool)
    assert simulated.statistics().recoveries == 0
    assert again.nbytes + kept.nbytes == 850 * MIB


def test_a_pool_s_unused_block_is_no_room_for_tensors_outside(simulated):
    pool = simulated.pool("cache")
    kept, freed = simulated.allocate(**bytes_of(390), pool=pool), simulated.allocate(**bytes_of(500), pool=pool)
    del freed
    with pytest.raises(OutOfMemoryError, match=r"50\.00 MiB asked for"):
        simulated.allocate(**bytes_of(50))
    assert simulated.allocate(**bytes_of(50), pool=pool).nbytes + kept.nbytes == 440 * MIB


def test_a_pool_of_another_device_is_refused(simulated):
    pool = MemoryPool("elsewhere", torch.device("cuda", 0))
    pool.device = torch.device("cuda", 1)
    with pytest.raises(InputError, match="'elsewhere' is on cuda:1"):
        simulated.allocate(3, pool=pool)


def test_a_pool_that_pytorch_refuses_says_why(simulated, monkeypatch):
    def refuse():
        raise NotImplementedError("no expandable segments here")

    monkeypatch.setattr(torch.cuda, "MemPool", refuse)
    with pytest.raises(InputError, match=r"'cache' cannot be made on cuda:0: no expandable segments here"):
        simulated.pool("cache")
