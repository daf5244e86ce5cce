"""The manager. `simulated` is on a simulated CUDA device of 1000 MiB, `on_cpu` on real main memory."""

import gc

import pytest
import torch

from kpt_backend_nvidia import NVIDIAMemoryManager, OutOfMemoryError
from kpt_core import InputError, UnknownNameError
from simulated_allocator import MIB

NO_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is there")


def bytes_of(mebibytes):
    return {"shape": (mebibytes * MIB,), "dtype": torch.uint8}


@NO_CUDA
def test_without_cuda_it_is_made_and_says_what_is_missing():
    manager = NVIDIAMemoryManager()
    for call in (lambda: manager.allocate(3), manager.statistics, manager.available, lambda: manager.pool("p")):
        with pytest.raises(InputError, match=r"CUDA.*\(device='cpu'\) manages main memory"):
            call()
    assert manager.clear() == 0
    assert manager.estimate(torch.nn.Linear(3, 5), torch.ones(2, 3)).parameters == (15 + 5) * 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"device": "xpu"}, "xpu"),
        ({"device": "nonsense"}, "nonsense"),
        ({"safety_margin": 1.0}, "1.0"),
        ({"safety_margin": -1}, "-1"),
        ({"safety_margin": -0.5}, "-0.5"),
        ({"safety_margin": float("nan")}, "nan"),
        ({"safety_margin": True}, "True"),
        ({"safety_margin": "5%"}, "5%"),
    ],
)
def test_bad_devices_and_margins_are_refused(arguments, message):
    with pytest.raises(InputError, match=message):
        NVIDIAMemoryManager(**arguments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(3, 5), (0, 7), (), 11, [2, 1, 3]])
def test_a_tensor_of_that_shape_and_dtype_is_allocated_and_counted(on_cpu, shape, dtype):
    tensor = on_cpu.allocate(shape, dtype)
    expected = (shape,) if isinstance(shape, int) else tuple(shape)
    assert (tuple(tensor.shape), tensor.dtype, tensor.device.type) == (expected, dtype, "cpu")
    tensor.zero_()
    statistics = on_cpu.statistics()
    assert statistics.allocations == 1
    assert statistics.memory.allocated == tensor.numel() * tensor.element_size()


def test_memory_is_counted_as_long_as_a_view_lives_and_the_peak_stays(on_cpu):
    tensor = on_cpu.allocate((100, 100), torch.float64)
    view = tensor[3]
    del tensor
    assert on_cpu.memory().allocated == 80_000
    del view
    assert on_cpu.memory().allocated == 0
    assert on_cpu.memory().allocated_peak == 80_000


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        ((3, -1), torch.float32, "-1"),
        ((3, 2.5), torch.float32, "2.5"),
        ("ab", torch.float32, "'ab'"),
        (None, torch.float32, "None"),
        ((3,), "float32", "dtype 'float32'"),
    ],
)
def test_bad_shapes_and_dtypes_are_refused(on_cpu, shape, dtype, message):
    with pytest.raises(InputError, match=message):
        on_cpu.allocate(shape, dtype)
    assert on_cpu.statistics().allocations == 0


def test_what_can_never_fit_is_refused_with_sizes_and_next_steps(on_cpu):
    with pytest.raises(OutOfMemoryError, match=r"1048576\.00 GiB asked for, and again") as caught:
        on_cpu.allocate(2**48)
    assert isinstance(caught.value, torch.OutOfMemoryError)
    assert caught.value.requested == 2**50
    for part in ("free", "safety margin", "cached", "elsewhere", "Next: split the tensor"):
        assert part in str(caught.value)
    assert on_cpu.statistics().failures == 1


def test_a_margin_in_bytes_is_left_free():
    manager = NVIDIAMemoryManager("cpu", safety_margin=2**60)
    assert manager.statistics().margin == 2**60
    assert manager.available() == 0
    with pytest.raises(OutOfMemoryError, match=f"safety margin of {2**30:d}.00 GiB"):
        manager.allocate(1)


def test_a_block_s_memory_goes_back_at_its_end(on_cpu):
    with on_cpu.allocation((1000,), torch.float32) as tensor:
        assert tensor.fill_(2).sum() == 2000
        assert on_cpu.memory().allocated == 4000
    assert on_cpu.memory().allocated == 0  # although the name still refers to the tensor
    assert tensor.shape == (0,)


def test_a_block_s_memory_goes_back_after_an_error_that_is_kept(on_cpu):
    def function():
        with on_cpu.allocation((1000,)) as tensor:
            tensor[2000] = 1

    with pytest.raises(IndexError, match="2000") as kept:
        function()
    assert on_cpu.memory().allocated == 0
    assert kept.value.__traceback__ is not None


def test_a_view_that_leaves_the_block_stays_readable(on_cpu):
    with on_cpu.allocation((1000,)) as tensor:
        view = tensor.fill_(3)[:10]
    assert view.tolist() == [3] * 10


def test_clear_frees_garbage_and_tells_how_much(on_cpu):
    class Cycle:
        pass

    gc.collect()
    cycle = Cycle()
    cycle.itself, cycle.tensor = cycle, on_cpu.allocate(500, torch.float64)
    kept = on_cpu.allocate(10, torch.float64)
    gc.disable()
    try:
        del cycle
        assert on_cpu.memory().allocated == 4080
        assert on_cpu.clear() == 4000
    finally:
        gc.enable()
    assert on_cpu.memory().allocated == kept.nbytes
    assert on_cpu.clear() == 0


def test_simulated_cuda_allocates_up_to_the_margin_and_no_further(simulated, allocator):
    assert str(simulated.device) == "cuda:0"
    assert simulated.statistics().margin == 100 * MIB
    first = simulated.allocate(**bytes_of(500))
    assert simulated.available() == 400 * MIB
    second = simulated.allocate(**bytes_of(400))
    assert allocator.device.used == 900 * MIB
    with pytest.raises(OutOfMemoryError, match=r"(?s)20.00 MiB asked for.*free 100.00 MiB\n.*margin of 100.00 MiB"):
        simulated.allocate(**bytes_of(20))
    assert "make the safety margin smaller" in refusal(simulated, 20)
    assert allocator.device.used == 900 * MIB
    assert (first.nbytes, second.nbytes) == (500 * MIB, 400 * MIB)


def refusal(manager, mebibytes):
    with pytest.raises(OutOfMemoryError) as caught:
        manager.allocate(**bytes_of(mebibytes))
    return str(caught.value)


def test_simulated_cuda_needs_room_for_a_whole_segment(simulated):
    kept = simulated.allocate(**bytes_of(890))
    with pytest.raises(OutOfMemoryError, match=r"5.00 MiB asked for"):  # of a segment of 20 MiB
        simulated.allocate(**bytes_of(5))
    small = simulated.allocate(**bytes_of(1))  # of a segment of 2 MiB
    assert kept.nbytes + small.nbytes == 891 * MIB


def test_simulated_cuda_reuses_a_cached_block_although_the_device_is_full(simulated, allocator, monkeypatch):
    kept, freed = simulated.allocate(**bytes_of(500)), simulated.allocate(**bytes_of(400))
    del freed
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: pytest.fail("the cache was emptied without need"))
    again = simulated.allocate(**bytes_of(300))
    assert allocator.device.reserved == 900 * MIB
    assert simulated.statistics().recoveries == 0
    assert kept.nbytes + again.nbytes == 800 * MIB


def test_simulated_cuda_knows_that_small_blocks_are_apart(simulated):
    kept, freed = simulated.allocate(**bytes_of(500)), simulated.allocate(**bytes_of(400))
    del freed
    small = simulated.allocate(**bytes_of(1))
    assert simulated.statistics().recoveries == 1  # the large block cannot serve it and had to go
    assert kept.nbytes + small.nbytes == 501 * MIB


def test_simulated_cuda_empties_a_cache_whose_blocks_are_too_small_and_tries_again(simulated, allocator):
    pieces = [simulated.allocate(**bytes_of(300)) for _ in range(3)]
    del pieces[:2]
    assert simulated.available() == 600 * MIB
    tensor = simulated.allocate(**bytes_of(500))
    assert simulated.statistics().recoveries == 1
    assert allocator.device.reserved == 800 * MIB
    assert tensor.nbytes == 500 * MIB


def test_simulated_cuda_calls_the_releasers_before_giving_up(simulated):
    cache = [simulated.allocate(**bytes_of(800))]
    simulated.add_releaser(cache.clear)
    tensor = simulated.allocate(**bytes_of(700))
    assert cache == []
    assert tensor.nbytes == 700 * MIB
    assert simulated.statistics().recoveries == 1


def test_simulated_cuda_gives_the_cache_back_when_cleared(simulated, allocator):
    kept, freed = simulated.allocate(**bytes_of(100)), simulated.allocate(**bytes_of(200))
    del freed
    assert allocator.device.reserved == 300 * MIB
    assert simulated.clear() == 200 * MIB
    assert allocator.device.reserved == kept.nbytes


def test_simulated_cuda_tells_its_statistics(simulated, allocator):
    allocator.elsewhere = 50 * MIB
    kept, freed = simulated.allocate(**bytes_of(100)), simulated.allocate(**bytes_of(200))
    del freed
    statistics = simulated.statistics()
    memory = statistics.memory
    assert (statistics.device, statistics.margin, statistics.allocations) == ("cuda:0", 100 * MIB, 2)
    assert (memory.total, memory.free) == (1000 * MIB, 650 * MIB)
    assert (memory.allocated, memory.reserved, memory.elsewhere) == (kept.nbytes, 300 * MIB, 50 * MIB)
    assert statistics.available == 750 * MIB
    assert "free 650.00 MiB" in str(statistics)


def test_simulated_cuda_refuses_a_device_that_is_not_there(allocator):
    with pytest.raises(InputError, match="cuda:3"):
        NVIDIAMemoryManager("cuda:3").allocate(3)


def test_an_unknown_pool_is_refused(simulated):
    simulated.pool("activations")
    with pytest.raises(UnknownNameError, match="'activations'"):
        simulated.allocate(3, pool="activation")
    with pytest.raises(UnknownNameError, match="'activations'"):
        simulated.clear_pool("activation")


def test_the_cpu_has_no_pools(on_cpu):
    with pytest.raises(InputError, match="pools are a feature of accelerators"):
        on_cpu.pool("activations")
