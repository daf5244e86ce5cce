"""Torch's switches: set as asked, given back as they were. CUDA is simulated where a test is given `monkeypatch`."""

import os

import pytest
import torch

from kpt_optimize.devices import DeviceConfig, apply_settings
from simulated_cuda import FakeDevice, simulate

MATMUL, CUDNN = torch.backends.cuda.matmul, torch.backends.cudnn


def switches():
    """Everything that settings may touch, by both of torch's interfaces."""
    newer = [
        owner.fp32_precision
        for owner in (MATMUL, CUDNN.conv, CUDNN.rnn, torch.backends.mkldnn.matmul)
        if hasattr(owner, "fp32_precision")
    ]
    return (
        newer,
        MATMUL.allow_tf32,
        CUDNN.allow_tf32,
        torch.get_float32_matmul_precision(),
        CUDNN.benchmark,
        CUDNN.deterministic,
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
    )


@pytest.fixture(autouse=True)
def unchanged():
    """No test may leave a switch changed."""
    before = switches()
    yield
    assert switches() == before


@pytest.mark.parametrize("allowed", [True, False])
def test_tf32_is_set_for_products_and_convolutions_and_both_interfaces_can_be_read(allowed):
    with apply_settings(DeviceConfig(allow_tf32=allowed)) as applied:
        assert MATMUL.allow_tf32 is allowed
        assert CUDNN.allow_tf32 is allowed
        assert (MATMUL.fp32_precision == "tf32") is allowed
        assert (CUDNN.conv.fp32_precision == "tf32") is allowed
        assert (torch.get_float32_matmul_precision() == "highest") is not allowed
        assert len(applied.changes) == 1


@pytest.mark.parametrize("mine", ["tf32", "ieee"])
def test_what_was_set_by_torchs_newer_interface_alone_comes_back(mine):
    before = MATMUL.fp32_precision
    try:
        MATMUL.fp32_precision = mine
        with apply_settings(DeviceConfig(allow_tf32=mine == "ieee")):
            assert MATMUL.fp32_precision != mine
        assert MATMUL.fp32_precision == mine
    finally:
        MATMUL.fp32_precision = before


def test_settings_inside_each_other_come_back_one_by_one():
    with apply_settings(DeviceConfig(allow_tf32=True)):
        with apply_settings(DeviceConfig(allow_tf32=False)):
            assert not MATMUL.allow_tf32
        assert MATMUL.allow_tf32


@pytest.mark.parametrize("wanted", [True, False])
def test_cudnns_trials_are_set(wanted):
    with apply_settings(DeviceConfig(cudnn_benchmark=wanted)):
        assert CUDNN.benchmark is wanted


def test_deterministic_algorithms_are_required_and_cublas_is_told(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    with apply_settings(DeviceConfig(deterministic=True)):
        assert torch.are_deterministic_algorithms_enabled()
        assert CUDNN.deterministic
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        with pytest.raises(RuntimeError, match="deterministic"):
            torch.nn.functional.max_unpool1d(torch.ones(1, 1, 2), torch.tensor([[[0, 2]]]), 2)


def test_a_workspace_that_the_user_chose_is_kept(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    with apply_settings(DeviceConfig(deterministic=True)):
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    monkeypatch.undo()


def test_deterministic_that_only_warned_does_so_again_afterwards():
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with apply_settings(DeviceConfig(deterministic=False)):
            assert not torch.are_deterministic_algorithms_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("device", "index"), [(None, 1), ("cuda", 1), ("cuda:0", 0)])
def test_the_memory_fraction_is_set_on_the_device_and_taken_back(monkeypatch, device, index):
    state = simulate(monkeypatch, FakeDevice(), FakeDevice())
    state.current = 1
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 0.9, raising=False)
    with apply_settings(DeviceConfig(memory_fraction=0.5, device=device)) as applied:
        assert state.fractions == {index: 0.5}
        assert "50%" in applied.changes[0]
    assert state.fractions == {index: 0.9}


def test_a_whole_memory_fraction_is_given_as_torch_wants_it(monkeypatch):
    state = simulate(monkeypatch, FakeDevice())
    monkeypatch.delattr(torch.cuda, "get_per_process_memory_fraction", raising=False)  # older versions lack it
    with apply_settings(DeviceConfig(memory_fraction=1)):
        assert isinstance(state.fractions[0], float)
    assert state.fractions == {0: 1.0}


def test_without_a_device_a_memory_fraction_is_not_claimed():
    assert apply_settings(DeviceConfig(memory_fraction=0.5)).changes == ()


def test_a_default_configuration_changes_nothing():
    before = switches()
    with apply_settings(DeviceConfig()) as applied:
        assert switches() == before
    assert applied.changes == ()


def test_what_was_changed_comes_back_if_a_later_switch_can_not_be_set(monkeypatch):
    simulate(monkeypatch, FakeDevice())

    def refuse(fraction, device):
        raise RuntimeError("refused")

    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", refuse)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 1.0, raising=False)
    before = switches()
    with pytest.raises(RuntimeError, match="refused"):
        apply_settings(DeviceConfig(allow_tf32=True, cudnn_benchmark=True, memory_fraction=0.5))
    assert switches() == before


def test_restoring_by_hand_works_once():
    applied = apply_settings(DeviceConfig(cudnn_benchmark=True))
    applied.restore()
    assert not CUDNN.benchmark
    CUDNN.benchmark = True
    try:
        applied.restore()
        assert CUDNN.benchmark
    finally:
        CUDNN.benchmark = False
