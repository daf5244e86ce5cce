"""Devices and their memory. CUDA and NVML are simulated here: no test needs a GPU."""

import sys

import pytest
import torch

from kpt_backend_nvidia import BACKEND, DeviceManager, device_info, memory_stats
from kpt_backend_nvidia.environment import compute_capabilities, driver
from kpt_core import InputError
from simulated_cuda import GIB, FakeDevice, fake_uuid, simulate, simulate_nvml

A100 = FakeDevice(capability=(8, 0), name="NVIDIA A100-SXM4-40GB", memory=40 * GIB, used=39 * GIB, multiprocessors=108)
H100 = FakeDevice(used=10 * GIB, reserved=6 * GIB, allocated=4 * GIB)
T4 = FakeDevice(capability=(7, 5), name="Tesla T4", memory=16 * GIB)


@pytest.fixture
def without_cuda(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)


def test_a_device_is_described_by_torch_the_chip_table_and_nvml(monkeypatch):
    simulate(monkeypatch, A100, H100)
    info = device_info("cuda:1")
    assert (info.index, info.name, info.uuid) == (1, "NVIDIA H100 80GB HBM3", fake_uuid(1))
    assert (info.chip, info.generation) == ("sm90", "Hopper")
    assert (info.memory, info.multiprocessors, info.shared_memory_per_block) == (80 * GIB, 132, 227 * 1024)
    assert (info.l2_cache, info.registers_per_multiprocessor, info.threads_per_multiprocessor) == (
        50 * 2**20,
        65536,
        2048,
    )
    assert info.peaks is not None
    assert info.peaks.bandwidth == 3350
    assert info.live is not None
    # 100 W + 1 W and 10% per index of the device.
    assert (info.live.power, info.live.busy, info.live.memory_busy) == (101, 0.1, 0.05)
    assert (info.live.clock, info.live.temperature, info.live.memory_used) == (1200, 41, 10 * GIB)
    assert info.live_missing is None


@pytest.mark.parametrize(("device", "hopper", "fp8"), [(A100, False, False), (H100, True, True), (T4, False, False)])
def test_hopper_and_fp8_are_detected(monkeypatch, device, hopper, fp8):
    simulate(monkeypatch, device)
    assert (device_info().is_hopper, device_info().supports_fp8) == (hopper, fp8)
    assert (device_info().unsupported is not None) == (device is T4)


def test_ada_and_blackwell_have_fp8_and_are_not_hopper(monkeypatch):
    simulate(monkeypatch, FakeDevice(capability=(8, 9)), FakeDevice(capability=(10, 0)), FakeDevice(capability=(12, 0)))
    assert [(info.is_hopper, info.supports_fp8) for info in DeviceManager().devices] == [(False, True)] * 3


def test_without_an_index_it_is_the_current_device(monkeypatch):
    state = simulate(monkeypatch, A100, H100)
    state.current = 1
    assert device_info() == device_info("cuda") == device_info(torch.device("cuda")) == device_info(1)
    assert device_info(0).name != device_info().name


@pytest.mark.parametrize(
    ("lacking", "field"),
    [
        ("multi_processor_count", "multiprocessors"),
        ("total_memory", "memory"),
        ("L2_cache_size", "l2_cache"),
        ("shared_memory_per_block_optin", "shared_memory_per_block"),
        ("shared_memory_per_multiprocessor", "shared_memory_per_multiprocessor"),
        ("regs_per_multiprocessor", "registers_per_multiprocessor"),
        ("max_threads_per_multi_processor", "threads_per_multiprocessor"),
    ],
)
def test_a_property_that_this_torch_lacks_is_none_and_the_rest_is_there(monkeypatch, lacking, field):
    simulate(monkeypatch, FakeDevice(lacking=(lacking,)))
    info = device_info()
    assert getattr(info, field) is None
    simulate(monkeypatch, FakeDevice())
    assert getattr(device_info(), field) is not None
    assert info.name == device_info().name


def test_a_property_under_another_name_is_found(monkeypatch):
    simulate(monkeypatch, FakeDevice(lacking=("total_memory",), extra={"total_mem": 7 * GIB}))
    assert device_info().memory == 7 * GIB


def refuse(device=None):
    raise RuntimeError("Insufficient Permissions")


LIVE = {
    "power_draw": "power",
    "temperature": "temperature",
    "utilization": "busy",
    "memory_usage": "memory_busy",
    "clock_rate": "clock",
    "device_memory_used": "memory_used",
}


@pytest.mark.parametrize("asked", LIVE)
def test_what_the_driver_refuses_is_none_and_the_rest_is_there(monkeypatch, asked):
    simulate(monkeypatch, H100)
    monkeypatch.setattr(torch.cuda, asked, refuse)
    live = device_info().live
    assert [field for field in LIVE.values() if getattr(live, field) is None] == [LIVE[asked]]


def test_a_driver_that_tells_nothing_costs_live_facts_alone(monkeypatch):
    simulate(monkeypatch, H100)
    for asked in LIVE:
        monkeypatch.setattr(torch.cuda, asked, refuse)
    info = device_info()
    assert (info.live, info.live_missing) == (None, "RuntimeError: Insufficient Permissions")
    assert info.multiprocessors == 132


def test_the_driver_is_left_alone_where_live_facts_are_not_wanted(monkeypatch):
    simulate(monkeypatch, H100)
    monkeypatch.setattr(torch.cuda, "power_draw", lambda device=None: pytest.fail("asked"))
    info = device_info(live=False)
    assert (info.live, info.live_missing) == (None, "it was not asked for")
    assert info.chip == "sm90"


@pytest.mark.parametrize("missing", ["NVML did not start: Insufficient Permissions", "pip install nvidia-ml-py"])
def test_nvml_that_does_not_answer_is_told_with_the_reason(monkeypatch, missing):
    simulate(monkeypatch, H100)
    if "pip" in missing:
        monkeypatch.setitem(sys.modules, "pynvml", None)
    else:
        simulate_nvml(monkeypatch, H100, broken="Insufficient Permissions")
    assert missing in driver().missing
    assert compute_capabilities() is None


def test_memory_statistics_account_for_every_byte(monkeypatch):
    stats = {"inactive_split_bytes.all.current": 1 * GIB, "num_ooms": 2, "num_alloc_retries": 3}
    peaks = {"allocated_bytes.all.peak": 5 * GIB, "reserved_bytes.all.peak": 7 * GIB}
    simulate(monkeypatch, FakeDevice(used=10 * GIB, reserved=6 * GIB, allocated=4 * GIB, stats=stats | peaks))
    found = memory_stats()
    assert (found.total, found.free, found.reserved, found.allocated) == (80 * GIB, 70 * GIB, 6 * GIB, 4 * GIB)
    assert found.elsewhere == 4 * GIB
    assert found.free + found.reserved + found.elsewhere == found.total
    assert found.available == 72 * GIB
    assert found.fragmentation == pytest.approx(1 / 6)
    assert (found.allocated_peak, found.reserved_peak) == (5 * GIB, 7 * GIB)
    assert (found.out_of_memory, found.retries) == (2, 3)


def test_memory_statistics_of_an_untouched_device_are_zeros(monkeypatch):
    simulate(monkeypatch, FakeDevice())
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device=None: {})
    found = memory_stats()
    assert (found.split, found.retries, found.out_of_memory, found.fragmentation) == (0, 0, 0, 0)


def test_memory_of_the_device_that_was_asked_for(monkeypatch):
    simulate(monkeypatch, A100, H100)
    assert memory_stats("cuda:0").total == 40 * GIB
    assert memory_stats(1).total == 80 * GIB


def test_without_cuda_a_question_about_a_device_is_refused_with_the_reason(without_cuda):
    for ask in (device_info, memory_stats, BACKEND.device):
        with pytest.raises(InputError, match="not built for CUDA; install"):
            ask()


@pytest.mark.parametrize(("devices", "seen"), [((H100,), "cuda:0 alone"), ((H100, A100), "cuda:0 to cuda:1")])
def test_a_device_that_is_not_there_is_named(monkeypatch, devices, seen):
    simulate(monkeypatch, *devices)
    with pytest.raises(InputError, match=f"cuda:5 was asked for; torch sees {seen}"):
        device_info(5)
    with pytest.raises(InputError, match="got 'cpu'"):
        device_info("cpu")


def test_the_manager_without_cuda_has_no_devices_and_a_sentence(without_cuda):
    manager = DeviceManager()
    assert manager.devices == ()
    assert manager.roomiest() is None
    assert "not built for CUDA" in manager.unavailable
    with pytest.raises(InputError, match="not built for CUDA"), manager.on("cuda:0"):
        pass


def test_the_manager_with_cuda_lists_devices_and_chooses_the_one_with_most_free_memory(monkeypatch):
    simulate(monkeypatch, A100, FakeDevice(used=60 * GIB), FakeDevice(used=50 * GIB), T4)
    manager = DeviceManager()
    assert manager.unavailable is None
    assert [info.chip for info in manager.devices] == ["sm80", "sm90", "sm90", "sm75"]
    assert manager.roomiest() == torch.device("cuda", 2)


def test_a_device_that_is_not_supported_is_never_chosen(monkeypatch):
    simulate(monkeypatch, T4, A100)
    assert DeviceManager().roomiest() == torch.device("cuda", 1)  # 1 GiB free, and the T4 has 16
    simulate(monkeypatch, T4)
    assert DeviceManager().roomiest() is None
    assert len(DeviceManager().devices) == 1


def test_choosing_makes_no_context_on_devices_that_nvml_knows(monkeypatch):
    simulate(monkeypatch, A100, H100)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: pytest.fail("a context was made"))
    assert DeviceManager().roomiest() == torch.device("cuda", 1)


@pytest.mark.parametrize("divided", [False, True])
def test_choosing_asks_cuda_where_the_driver_does_not_tell_of_the_device_alone(monkeypatch, divided):
    name = "NVIDIA H100 80GB HBM3 MIG 1g.10gb" if divided else "NVIDIA H100 80GB HBM3"
    simulate(monkeypatch, FakeDevice(name=name), FakeDevice(name=name))
    if not divided:
        monkeypatch.setattr(torch.cuda, "device_memory_used", refuse)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: ((1, 2)[device], 2))
    assert DeviceManager().roomiest() == torch.device("cuda", 1)


def test_a_device_is_the_current_one_inside_the_block_alone(monkeypatch):
    state = simulate(monkeypatch, A100, H100)
    with DeviceManager().on("cuda:1") as device:
        assert (state.current, device) == (1, torch.device("cuda", 1))
    assert state.current == 0
