"""What a user of an AMD GPU meets, area by area. ROCm is simulated: what is decided is shown, not what a GPU does."""

import copy

import pytest
import torch
from torch import nn

from kpt_backend_amd import (
    BACKEND,
    AMDBackend,
    AMDConfig,
    AMDMemoryManager,
    AMDOptimizer,
    DeviceManager,
    OptimizerConfig,
    OutOfMemoryError,
    ROCmCompiler,
    environment,
)
from kpt_core import InputError, KptError, UnknownNameError
from kpt_moe import MoEConfig, MoELayer
from simulated_allocator import MIB, simulate_allocator
from simulated_cuda import GIB, FakeDevice, simulate

QUICK = OptimizerConfig(compile_backend="eager", seconds=0.05)


def device(arch: str, name: str, gib: int) -> FakeDevice:
    return FakeDevice(name=name, memory=gib * GIB, extra={"gcnArchName": f"{arch}:sramecc+:xnack-"})


MI300X, MI210 = device("gfx942", "AMD Instinct MI300X", 192), device("gfx90a", "AMD Instinct MI210", 64)
MI60 = device("gfx906", "AMD Instinct MI60", 32)


def as_rocm(monkeypatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", "6.4.1")


@pytest.fixture
def rocm(monkeypatch):
    """Simulate a torch for ROCm that sees these devices."""

    def see(*devices: FakeDevice):
        state = simulate(monkeypatch, *devices)
        as_rocm(monkeypatch)
        return state

    return see


@pytest.fixture
def memory(monkeypatch):
    """A manager of a simulated device of 1000 MiB, with a margin of 100 MiB."""
    allocator = simulate_allocator(monkeypatch, 1000 * MIB)
    as_rocm(monkeypatch)
    manager = AMDMemoryManager(safety_margin=0.1)
    return manager, allocator


class Sent(nn.Module):
    """A model that remembers where it was sent, and stays."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.linear, self.sent = nn.Linear(rows, columns), []

    def to(self, *args, **kwargs):
        self.sent.append(kwargs)
        return self


# Detection


def test_without_rocm_a_backend_is_made_and_the_model_stays_usable():
    model, x = nn.Linear(7, 5), torch.randn(2, 7)
    before = model(x)
    prepared = AMDBackend(AMDConfig(dtype="bfloat16", pad=True)).prepare_model(model)
    assert prepared.device == torch.device("cpu")
    assert str(prepared).startswith("the model stays where it is: torch")
    assert torch.equal(model(x), before)
    assert DeviceManager().devices == ()
    with pytest.raises(InputError, match="not for ROCm"):
        DeviceManager().on(0).__enter__()


def test_the_current_device_is_the_one_that_is_meant(rocm):
    state = rocm(MI210, MI300X)
    state.current = 1
    assert BACKEND.device() == torch.device("cuda", 1)
    assert "gfx942" in BACKEND.capabilities(torch.device("cuda"))
    assert AMDBackend(AMDConfig(device=0)).device_info().chip == "gfx90a"


@pytest.mark.parametrize(("devices", "seen"), [((MI300X,), "cuda:0 alone"), ((MI210, MI300X), "cuda:0 to cuda:1")])
def test_a_device_that_is_not_there_can_do_nothing_and_is_named(rocm, devices, seen):
    rocm(*devices)
    assert BACKEND.capabilities(torch.device("cuda", 4)) == frozenset()
    with pytest.raises(InputError, match=f"cuda:4 was asked for; torch sees {seen}"):
        AMDBackend(AMDConfig(device=4)).prepare_model(nn.Linear(2, 2))


def test_an_old_chip_beside_a_new_one_is_a_problem_and_is_not_chosen(rocm):
    rocm(MI60, MI300X)
    assert BACKEND.unavailable() is None
    assert [problem.partition(": ")[0] for problem in environment().problems] == ["cuda:0 (AMD Instinct MI60)"]
    assert DeviceManager().roomiest() == torch.device("cuda", 1)


def test_hip_that_does_not_start_is_a_sentence_and_not_an_exception(rocm, monkeypatch):
    rocm(MI300X)

    def fail(index):
        raise RuntimeError("Cannot re-initialize HIP in forked subprocess\nmore")

    monkeypatch.setattr(torch.cuda, "get_device_properties", fail)
    assert BACKEND.unavailable() == "HIP can't be initialised: Cannot re-initialize HIP in forked subprocess"


# Configuration


def test_every_setting_is_obeyed_and_given_back(rocm, monkeypatch):
    state = rocm(MI210, MI300X)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 1.0, raising=False)
    settings = {"device": 1, "dtype": "bfloat16", "channels_last": True, "pad": True, "memory_fraction": 0.25}
    model = Sent(63, 130)
    config = AMDConfig.from_mapping({**settings, "cudnn_benchmark": True})
    prepared = AMDBackend(config).prepare_model(model, for_training=True)
    try:
        assert model.training
        assert model.sent[0] == {"device": torch.device("cuda", 1), "dtype": torch.bfloat16}
        assert state.fractions[1] == 0.25
        assert torch.backends.cudnn.benchmark
        assert prepared.padding.extra_bytes == 2 * (136 * 64 - 130 * 63)
        assert "cast to bfloat16, channels last" in str(prepared)
        assert "torch.autocast" in str(prepared)  # parameters of 16 bits lose small updates
    finally:
        prepared.settings.restore()
    assert not torch.backends.cudnn.benchmark
    assert state.fractions[1] == 1.0


WRONG = {
    "a dtype": (lambda: AMDConfig(dtype="int8"), "dtype"),
    "a fraction": (lambda: AMDConfig(memory_fraction=1.5), "memory_fraction must be above 0 and at most 1"),
    "a switch": (lambda: AMDConfig(pad=1), "pad must be True or False; got 1"),
    "two that contradict": (lambda: AMDConfig(deterministic=True, cudnn_benchmark=True), "contradict each other"),
    "a device of another vendor": (lambda: AMDConfig(device="xpu:0"), "must be of type cuda; got 'xpu:0'"),
    "a margin": (lambda: AMDMemoryManager(safety_margin=1.0), r"1\.0"),
    "a manager's device": (lambda: AMDMemoryManager("xpu"), "xpu"),
    "a shape": (lambda: AMDMemoryManager("cpu").allocate((2, -1)), "-1"),
    "a model of another kind": (lambda: BACKEND.prepare_model(nn.Linear), r"must be a torch\.nn\.Module"),
    "no model": (lambda: AMDOptimizer().optimize_for_inference(None), "model"),
    "an objective": (lambda: OptimizerConfig(objective="beauty"), "beauty"),
    "a level": (lambda: AMDOptimizer("fast"), "fast"),
    "a chip": (lambda: ROCmCompiler("sm90"), "sm90"),
    "waves of a block": (lambda: ROCmCompiler("gfx942", num_warps=3), r"num_warps must be one of \[1, 2, 4, 8, 16\]"),
    "stages": (lambda: ROCmCompiler("gfx942", num_stages=0), "num_stages must be one of"),
    "waves of a SIMD": (lambda: ROCmCompiler("gfx950", waves_per_eu=9), "waves_per_eu must be one of"),
    "packed steps": (lambda: ROCmCompiler("gfx90a", kpack=4), r"kpack must be one of \[1, 2\]; got 4"),
    "a matrix instruction that WMMA lacks": (lambda: ROCmCompiler("gfx1201", matrix_instr_nonkdim=16), "for MFMA"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_refused_with_what_was_expected(what):
    make, says = WRONG[what]
    with pytest.raises((InputError, UnknownNameError), match=says):
        make()


# Levels


def test_recommendations_name_what_the_device_would_gain():
    found = AMDOptimizer("balanced").recommend(nn.Sequential(nn.Linear(63, 130)), torch.randn(4, 63))
    assert {"compute in bfloat16"} <= {each.what for each in found}
    assert not any("tf32" in each.what.lower() for each in found)  # no chip of AMD has it


def test_a_sample_by_names_is_taken_and_the_original_is_left_as_it_was():
    model = nn.Linear(8, 8).eval()
    before = copy.deepcopy(model.state_dict())
    x = torch.randn(4, 8)
    found = AMDOptimizer("aggressive", config=QUICK).optimize_for_inference(model, {"input": x})
    assert torch.allclose(found.model(input=x), model(x), atol=0.1)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


# Memory


def test_memory_is_given_up_to_the_margin_and_not_past_it(memory):
    manager, allocator = memory
    first = manager.allocate((500 * MIB,), torch.uint8)
    assert (manager.memory().total, manager.memory().allocated) == (1000 * MIB, first.nbytes)
    with pytest.raises(OutOfMemoryError) as caught:
        manager.allocate((450 * MIB,), torch.uint8)
    assert isinstance(caught.value, torch.OutOfMemoryError | KptError)
    assert allocator.device.allocated == first.nbytes
    assert manager.statistics().failures == 1


def test_a_pool_keeps_its_memory_until_it_is_cleared(memory):
    manager, allocator = memory
    tensor = manager.allocate((100 * MIB,), torch.uint8, pool=manager.pool("cache"))
    assert manager.pool("cache").statistics().allocated == tensor.nbytes
    with pytest.raises(InputError, match="cache"):
        manager.clear_pool("cache")
    del tensor
    assert allocator.device.reserved == 100 * MIB
    assert manager.clear_pool("cache") == 100 * MIB
    assert allocator.device.reserved == 0


def test_the_cache_is_given_back_and_a_block_gives_its_own(memory):
    manager, allocator = memory
    with manager.allocation((200 * MIB,), torch.uint8):
        assert allocator.device.allocated == 200 * MIB
    assert allocator.device.allocated == 0
    assert allocator.device.reserved == 200 * MIB  # which the cache keeps
    assert manager.clear() == 200 * MIB
    assert allocator.device.reserved == 0


@pytest.mark.parametrize(("times", "calls"), [(1, 2), (9, 2)])
def test_what_runs_out_of_memory_is_tried_once_more_after_freeing(memory, times, calls):
    manager, _ = memory
    seen, freed = [], []

    def step():
        seen.append(1)
        if len(seen) <= times:
            raise torch.OutOfMemoryError("HIP out of memory. Tried to allocate 2.00 GiB")
        return "done"

    manager.add_releaser(lambda: freed.append(1))
    if times == 1:
        assert manager.protect(step)() == "done"
        assert manager.statistics().recoveries == 1
    else:
        with pytest.raises(OutOfMemoryError):
            manager.protect(step)()
    assert (len(seen), bool(freed)) == (calls, True)


def test_a_training_step_is_estimated_without_a_device():
    found = AMDMemoryManager().estimate(nn.Linear(30, 50), torch.ones(2, 30))
    assert found.parameters == 4 * (30 * 50 + 50)
    assert found.gradients == found.parameters


# Integration


def test_a_layer_of_experts_is_prepared_optimised_and_run():
    torch.manual_seed(0)
    layer = MoELayer(MoEConfig(hidden_size=32, num_experts=4, top_k=2, intermediate_size=48)).eval()
    x = torch.randn(2, 5, 32)
    exact = copy.deepcopy(layer).double()(x.double())
    prepared = AMDBackend(AMDConfig(dtype="bfloat16")).prepare_model(layer)
    found = AMDOptimizer("balanced", config=QUICK).optimize_for_inference(prepared.model, x)
    wanted, got = (each[0] if isinstance(each, tuple) else each for each in (exact, found.model(x)))
    torch.testing.assert_close(got.double(), wanted, rtol=0.05, atol=0.05)
    assert found.report.seconds_before > 0
    assert found.model(x[:1, :3]) is not None  # other sizes than the sample's


def test_a_model_that_does_not_fit_comes_back_and_the_error_is_torchs(rocm):
    class Large(nn.Linear):
        def to(self, *args, **kwargs):
            if kwargs:
                raise torch.OutOfMemoryError("HIP out of memory")
            homes.append(args[0])
            return self

    homes: list[torch.device] = []
    rocm(MI300X)
    with pytest.raises(torch.OutOfMemoryError, match="HIP out of memory"):
        AMDBackend(AMDConfig(cudnn_benchmark=True)).prepare_model(Large(4, 4))
    assert homes == [torch.device("cpu")]
    assert not torch.backends.cudnn.benchmark
