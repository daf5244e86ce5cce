"""Software: what is missing is said in a sentence. CUDA and NVML are simulated where a test is given `monkeypatch`."""

import builtins
import importlib.metadata
import importlib.util
import sys

import pytest
import torch

from kpt_backend_nvidia.environment import environment, why_no_device, why_unavailable
from simulated_cuda import FakeDevice, simulate, simulate_nvml

H100 = FakeDevice()
T4 = FakeDevice(capability=(7, 5), name="Tesla T4")


def test_a_working_machine_has_no_problem(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91100)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    simulate(monkeypatch, H100)
    found = environment()
    assert why_unavailable() is None
    assert found.problems == ()
    assert (found.cuda, found.hip, found.cudnn) == ("13.0", None, 91100)
    assert (found.driver.version, found.driver.cuda) == ("580.65.06", (13, 0))
    assert found.devices == ("NVIDIA H100 80GB HBM3",)
    assert "sm_90" in found.arch_list
    assert found.triton == importlib.metadata.version("triton")
    assert found.torch == torch.__version__
    assert any("expandable_segments" in sentence for sentence in found.advice)


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_advice_that_was_followed_is_not_given(monkeypatch, name):
    simulate(monkeypatch, H100)
    monkeypatch.setenv(name, "expandable_segments:True")
    assert environment().advice == ()


def test_a_torch_without_cuda_is_named_with_the_remedy(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    sentence = why_unavailable()
    assert f"torch {torch.__version__} is not built for CUDA" in sentence
    assert "https://pytorch.org" in sentence
    found = environment()
    assert found.problems == (sentence,)
    assert (found.devices, found.advice) == ((), ())


def test_a_torch_for_rocm_is_named_though_it_calls_its_devices_cuda(monkeypatch):
    simulate(monkeypatch, H100)
    monkeypatch.setattr(torch.version, "hip", "6.4.1")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "built for ROCm 6.4.1, not for CUDA" in why_unavailable()


def test_no_driver_is_named_with_the_remedy(monkeypatch):
    simulate(monkeypatch)
    simulate_nvml(monkeypatch, broken="NVML Shared Library Not Found")
    sentence = why_unavailable()
    assert "no NVIDIA driver answers (NVML did not start: NVML Shared Library Not Found)" in sentence
    assert "--gpus all" in sentence


@pytest.mark.parametrize(("driver_cuda", "cuda", "old"), [(12040, "13.0", True), (12040, "12.9", False)])
def test_a_driver_is_too_old_for_a_newer_major_version_alone(monkeypatch, driver_cuda, cuda, old):
    simulate(monkeypatch, cuda=cuda, driver="550.54", driver_cuda=driver_cuda)
    sentence = why_unavailable()
    assert ("update the driver" in sentence) == old
    if old:
        assert "driver 550.54 is for CUDA 12.4 and older" in sentence
        assert "built for CUDA 13.0" in sentence


@pytest.mark.parametrize("visible", ["", "-1"])
def test_hidden_devices_are_told_from_missing_ones(monkeypatch, visible):
    simulate(monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert f"CUDA_VISIBLE_DEVICES={visible!r} leaves no device" in why_unavailable()
    assert environment().visible_devices == visible


def test_what_torch_complained_of_is_passed_on_and_warns_nobody(monkeypatch):
    complaint = "CUDA initialization: CUDA unknown error - this may be due to an incorrectly set up environment\nmore"
    simulate(monkeypatch, initialised=False, warning=complaint)
    assert "(CUDA initialization: CUDA unknown error" in why_unavailable()
    assert "nvidia-smi" in why_unavailable()


def test_devices_that_are_all_too_old_are_named(monkeypatch):
    simulate(monkeypatch, T4, T4, FakeDevice(capability=(7, 0), name="Tesla V100"))
    sentence = why_unavailable()
    assert sentence.count("Tesla T4: compute capability 7.5") == 1
    assert "Tesla V100: compute capability 7.0" in sentence
    assert why_no_device() is None
    assert environment().problems == (sentence,)


def test_one_device_that_is_too_old_does_not_stop_the_others(monkeypatch):
    simulate(monkeypatch, T4, H100, arch_list=("sm_75", "sm_90"))
    assert why_unavailable() is None
    (problem,) = environment().problems
    assert problem.startswith("cuda:0 (Tesla T4): compute capability 7.5")


def test_cuda_is_not_initialised_where_nvml_tells_enough(monkeypatch):
    state = simulate(monkeypatch, H100, FakeDevice(capability=(8, 0)), initialised=False)
    assert why_unavailable() is None
    assert not state.initialised


@pytest.mark.parametrize("nvml", ["mixed", "broken"])
def test_cuda_is_asked_where_nvml_does_not_tell_enough(monkeypatch, nvml):
    state = simulate(monkeypatch, T4, initialised=False)
    if nvml == "mixed":  # the H100 is hidden
        simulate_nvml(monkeypatch, T4, H100)
    else:
        simulate_nvml(monkeypatch, broken="Unknown Error")
    assert "Tesla T4" in why_unavailable()
    assert state.initialised


def test_cuda_that_can_not_be_initialised_is_a_sentence_and_not_an_exception(monkeypatch):
    def refuse(device=None):
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess. To use CUDA with\nmore")

    simulate(monkeypatch, H100)
    for name in ("get_device_name", "get_device_capability"):
        monkeypatch.setattr(torch.cuda, name, refuse)
    assert why_unavailable() == (
        "CUDA can't be initialised: Cannot re-initialize CUDA in forked subprocess. To use CUDA with"
    )
    found = environment()
    assert found.devices == ()
    assert found.problems[0] == why_unavailable()


def test_a_missing_triton_is_named_and_not_imported_to_find_out(monkeypatch):
    simulate(monkeypatch, H100)
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    asked = []
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: asked.append(name))
    original = builtins.__import__

    def refuse(name, *args):
        assert not name.startswith("triton"), "triton was imported"
        return original(name, *args)

    monkeypatch.setattr(builtins, "__import__", refuse)
    assert why_unavailable() == "triton is not installed; pip install 'triton>=3.6'"
    assert asked == ["triton"]


def test_a_triton_that_is_too_old_is_a_problem(monkeypatch):
    simulate(monkeypatch, H100)
    original = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "3.5.1" if name == "triton" else original(name))
    (problem,) = environment().problems
    assert "triton 3.5.1 is too old" in problem


@pytest.mark.parametrize(
    ("capability", "arch_list", "served"),
    [
        ((9, 0), ("sm_80", "sm_90"), True),
        ((9, 0), ("sm_80", "sm_86"), False),
        ((9, 0), ("sm_90a",), True),
        ((8, 9), ("sm_80",), True),
        ((8, 0), ("sm_86",), False),
        ((10, 3), ("sm_100",), True),
        ((12, 0), ("sm_90", "sm_100"), False),
        ((12, 0), ("sm_90", "compute_90"), True),
        ((9, 0), ("compute_100",), False),
        ((12, 1), ("sm_120",), True),
    ],
)
def test_a_device_for_which_torch_has_no_kernels_is_a_problem(monkeypatch, capability, arch_list, served):
    simulate(monkeypatch, FakeDevice(capability=capability), arch_list=arch_list)
    problems = environment().problems
    assert (problems == ()) == served
    if not served:
        assert f"sm{capability[0]}{capability[1]}, but torch" in problems[0]


def test_a_cudnn_that_does_not_fit_is_a_problem_and_not_an_exception(monkeypatch):
    def version():
        raise RuntimeError("cuDNN version incompatibility: PyTorch was compiled against (9, 1)\nmore")

    simulate(monkeypatch, H100)
    monkeypatch.setattr(torch.backends.cudnn, "version", version)
    found = environment()
    assert found.cudnn is None
    assert found.problems == (
        "cuDNN can't be used: cuDNN version incompatibility: PyTorch was compiled against (9, 1)",
    )
