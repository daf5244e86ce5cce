"""The backend. Without CUDA it says what is missing; with CUDA, which is simulated here, what is asked of it."""

import os
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn

import kpt_core
from kpt_backend_nvidia import CHIPS, NVIDIABackend, NVIDIAConfig, PaddedLinear
from kpt_core import InputError, Kernel
from kpt_core.registry import add_backend, remove_backend
from simulated_cuda import GIB, FakeDevice, simulate

A100 = FakeDevice(capability=(8, 0), name="NVIDIA A100-SXM4-40GB", memory=40 * GIB)
H100 = FakeDevice(used=8 * GIB, reserved=2 * GIB, allocated=1 * GIB)
T4 = FakeDevice(capability=(7, 5), name="Tesla T4")
CUDA = torch.device("cuda")


@pytest.fixture
def without_cuda(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)


class Model(nn.Module):
    """Its tensors stay on the CPU: `to` notes where it was sent, since the device is simulated."""

    def __init__(self, sizes=(64, 64), fails=False):
        super().__init__()
        self.linear = nn.Linear(*sizes)
        self.register_buffer("scale", torch.ones(2))
        self.sent, self.fails = [], fails

    def to(self, *args, **kwargs):
        self.sent.append((*args, kwargs))
        if self.fails and kwargs.get("device"):
            raise torch.OutOfMemoryError("CUDA out of memory")
        dtype = kwargs.get("dtype")
        return super().to(dtype=dtype) if dtype is not None else self

    def forward(self, x):
        return self.linear(x)


def test_a_backend_is_made_without_cuda_and_says_what_is_missing(without_cuda):
    backend = NVIDIABackend()
    assert isinstance(backend, kpt_core.Backend)
    assert (backend.name, backend.device_types, backend.chips) == ("nvidia", ("cuda",), CHIPS)
    assert "is not built for CUDA" in backend.unavailable()
    assert backend.capabilities(CUDA) == backend.capabilities(torch.device("cuda", 0)) == frozenset()


def test_a_backend_is_made_with_cuda_and_is_ready(monkeypatch):
    simulate(monkeypatch, H100)
    assert NVIDIABackend().unavailable() is None


def test_an_answer_is_never_that_of_before(monkeypatch, without_cuda):
    backend = NVIDIABackend()
    assert backend.unavailable() is not None
    simulate(monkeypatch, H100)
    assert backend.unavailable() is None
    assert "wgmma" in backend.capabilities(CUDA)
    simulate(monkeypatch, T4)
    assert "compute capability 7.5" in backend.unavailable()


@pytest.mark.parametrize(
    ("device", "has", "lacks"),
    [
        (H100, {"wgmma", "tma", "fp8_e4m3fn", "sm90"}, {"tcgen05", "sm80"}),
        (A100, {"bf16", "cp_async", "sm80"}, {"fp8_e4m3fn", "tma", "wgmma"}),
        (FakeDevice(capability=(8, 9)), {"fp8_e4m3fn", "fp8_e5m2", "sm89"}, {"tma"}),
        (FakeDevice(capability=(10, 3)), {"tcgen05", "nvfp4", "sm103", "sm100"}, {"wgmma"}),
        (T4, {"sm75"}, {"cuda", "fp16"}),
    ],
    ids=["Hopper", "Ampere", "Ada", "Blackwell", "Turing"],
)
def test_capabilities_are_those_of_the_chip(monkeypatch, device, has, lacks):
    simulate(monkeypatch, device)
    found = NVIDIABackend().capabilities(torch.device("cuda", 0))
    assert has <= found
    assert not lacks & found


def test_cuda_without_an_index_is_the_current_device(monkeypatch):
    state = simulate(monkeypatch, A100, H100)
    backend = NVIDIABackend()
    assert backend.capabilities(CUDA) == backend.capabilities(torch.device("cuda", 0))
    state.current = 1
    assert backend.capabilities(CUDA) == backend.capabilities(torch.device("cuda", 1))
    assert backend.capabilities(torch.device("cuda", 0)) != backend.capabilities(CUDA)


def test_a_device_that_is_not_here_can_do_nothing_and_one_of_another_type_is_refused(monkeypatch):
    simulate(monkeypatch, H100)
    assert NVIDIABackend().capabilities(torch.device("cuda", 7)) == frozenset()
    with pytest.raises(InputError, match="of type cuda; got cpu"):
        NVIDIABackend().capabilities(torch.device("cpu"))


def test_kernels_are_listed_without_cuda(monkeypatch, without_cuda):
    assert {kernel.op for kernel in NVIDIABackend().kernels()} >= {"moe.experts", "moe.grouped_mm"}


@kpt_core.op("backend_test.double")
def double(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


class Offering(NVIDIABackend):
    """The backend with a kernel of the op above, under a name of its own."""

    name = "nvidia_test"

    def kernels(self):
        return (Kernel("backend_test.double", f"{__name__}:double.reference", requires={"tma"}),)


@pytest.fixture
def offering():
    add_backend(Offering())
    yield
    remove_backend("nvidia_test")


def explained(device: str) -> str:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return str(kpt_core.explain("backend_test.double", torch.empty(2, device=device)))


def test_the_core_refuses_its_kernels_in_the_backends_words(without_cuda, offering):
    assert "is not built for CUDA" in explained("cuda:0")


def test_a_fake_tensor_on_a_device_that_is_not_here_gets_a_reason(monkeypatch, offering):
    state = simulate(monkeypatch, A100)
    assert state.initialised
    assert "needs tma, which cuda:0 lacks" in explained("cuda:0")
    assert "needs tma, which cuda:3 lacks" in explained("cuda:3")


def test_prepare_model_without_cuda_leaves_a_usable_model_and_one_sentence(without_cuda):
    model = nn.Sequential(nn.Linear(7, 5))
    x = torch.randn(2, 7)
    want = model(x)
    config = NVIDIAConfig(pad=True, dtype="bfloat16", allow_tf32=True, device="cuda:1")
    precision = torch.get_float32_matmul_precision()
    prepared = NVIDIABackend(config).prepare_model(model)
    assert prepared.model is model
    assert prepared.device == torch.device("cpu")
    assert "is not built for CUDA" in prepared.unavailable
    assert str(prepared).splitlines()[0].startswith("the model stays where it is: torch")
    assert not model.training
    assert torch.equal(model(x), want)
    assert type(model[0]) is nn.Linear
    assert torch.get_float32_matmul_precision() == precision
    assert [advice.name for advice in prepared.advice] == ["0.weight"]


@pytest.mark.parametrize("for_training", [True, False])
def test_the_mode_is_the_one_asked_for(monkeypatch, for_training):
    simulate(monkeypatch, H100)
    model = Model()
    model.train(not for_training)
    prepared = NVIDIABackend().prepare_model(model, for_training=for_training)
    assert model.training is for_training
    assert f"{'training' if for_training else 'evaluation'} mode" in str(prepared)


@pytest.mark.parametrize(("device", "index"), [(None, 1), ("cuda", 1), ("cuda:0", 0), (0, 0)])
def test_a_model_goes_to_the_configured_device_by_index(monkeypatch, device, index):
    simulate(monkeypatch, A100, H100).current = 1
    model = Model()
    prepared = NVIDIABackend(NVIDIAConfig(device=device)).prepare_model(model)
    assert model.sent == [({"device": torch.device("cuda", index), "dtype": None},)]
    assert f"it is on cuda:{index}" in prepared.changes
    assert prepared.unavailable is None


def test_a_custom_configuration_is_obeyed(monkeypatch):
    simulate(monkeypatch, H100)
    config = NVIDIAConfig(dtype="bfloat16", pad=True, channels_last=True, cudnn_benchmark=True, memory_fraction=0.25)
    model = Model((63, 130))
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 1.0, raising=False)
    prepared = NVIDIABackend(config).prepare_model(model)
    try:
        assert isinstance(model.linear, PaddedLinear)
        assert model.linear.padded_weight.shape == (136, 64)
        assert model.linear.padded_weight.dtype is torch.bfloat16
        assert prepared.padding.extra_bytes == 2 * (136 * 64 - 130 * 63)
        assert model.sent[1] == ({"memory_format": torch.channels_last},)
        assert torch.backends.cudnn.benchmark
        assert prepared.advice == ()
        assert "it is on cuda:0, cast to bfloat16, channels last" in prepared.changes
        assert "1 linear layers are padded" in str(prepared)
        assert model(torch.ones(1, 63, dtype=torch.bfloat16)).shape == (1, 130)
    finally:
        prepared.settings.restore()
    assert not torch.backends.cudnn.benchmark


def test_without_padding_awkward_sizes_are_reported(monkeypatch):
    simulate(monkeypatch, H100)
    model = Model((63, 130))
    prepared = NVIDIABackend(NVIDIAConfig(dtype="float16")).prepare_model(model)
    assert type(model.linear) is nn.Linear
    assert prepared.padding is None
    assert "linear.weight (linear) is 130x63; 136x64" in str(prepared)


def test_training_with_few_bits_is_warned_of_in_the_report(monkeypatch):
    simulate(monkeypatch, H100)
    backend = NVIDIABackend(NVIDIAConfig(dtype="bfloat16"))
    assert "torch.autocast" in str(backend.prepare_model(Model(), for_training=True))
    assert "torch.autocast" not in str(backend.prepare_model(Model()))


def test_a_model_that_does_not_fit_is_brought_back_and_the_error_is_torchs(monkeypatch):
    simulate(monkeypatch, H100)
    model = Model(fails=True)
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        NVIDIABackend(NVIDIAConfig(cudnn_benchmark=True)).prepare_model(model)
    assert model.sent[-1] == (torch.device("cpu"), {})
    assert not torch.backends.cudnn.benchmark


def test_a_model_on_several_devices_is_not_moved(monkeypatch):
    simulate(monkeypatch, H100)
    model = Model()
    monkeypatch.setattr(
        "kpt_optimize.devices.backend._homes", lambda model: {torch.device("cuda", 0), torch.device("cuda", 1)}
    )
    prepared = NVIDIABackend().prepare_model(model)
    assert model.sent == []
    assert prepared.device is None
    assert "lies on cuda:0, cuda:1 and is not moved" in str(prepared)


def test_a_model_without_data_is_refused_with_the_next_step(monkeypatch):
    simulate(monkeypatch, H100)
    with pytest.raises(InputError, match="to_empty"):
        NVIDIABackend().prepare_model(nn.Linear(8, 8, device="meta"))


@pytest.mark.parametrize("wrong", [None, "model", nn.Linear, torch.zeros(2)], ids=["None", "str", "class", "tensor"])
def test_what_is_no_model_is_refused(wrong):
    with pytest.raises(InputError, match=r"model must be a torch\.nn\.Module; got"):
        NVIDIABackend().prepare_model(wrong)


def test_a_configured_device_that_is_not_there_is_named(monkeypatch):
    simulate(monkeypatch, H100)
    with pytest.raises(InputError, match="cuda:4 was asked for; torch sees cuda:0 alone"):
        NVIDIABackend(NVIDIAConfig(device=4)).prepare_model(Model())


def test_a_configuration_of_another_type_is_refused():
    with pytest.raises(InputError, match="from_mapping"):
        NVIDIABackend({"pad": True})


def test_device_information_and_memory_are_those_of_the_configured_device(monkeypatch):
    simulate(monkeypatch, A100, H100)
    backend = NVIDIABackend(NVIDIAConfig(device=1))
    assert backend.device_info().name == "NVIDIA H100 80GB HBM3"
    assert backend.device_info(0).name == "NVIDIA A100-SXM4-40GB"
    assert backend.memory_stats().elsewhere == 6 * GIB
    assert backend.memory_stats("cuda:0").total == 40 * GIB


def test_importing_and_making_one_needs_neither_triton_nor_nvml_nor_cuda():
    program = """
        import sys
        sys.modules["triton"] = sys.modules["pynvml"] = None  # importing them raises
        from kpt_backend_nvidia.backend import NVIDIABackend
        import torch
        backend = NVIDIABackend()
        print(type(backend.unavailable()).__name__, torch.cuda.is_initialized())
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, env=environment, check=True
    )
    assert done.stdout.split()[1] == "False"
