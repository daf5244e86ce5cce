"""The backend for AMD GPUs: without ROCm it says what is missing; with ROCm, simulated here, what is asked of it."""

import json
import re
import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path

import pytest
import torch
from torch import nn

import kpt_backend_amd
import kpt_core
from kpt_backend_amd import (
    BACKEND,
    CHIPS,
    AMDBackend,
    AMDConfig,
    AMDMemoryManager,
    AMDOptimizer,
    DeviceManager,
    OptimizationWarning,
    OptimizerConfig,
    capabilities_of,
    device_info,
    environment,
    memory_stats,
    peaks_of,
)
from kpt_backend_amd import environment as environment_function
from kpt_backend_amd.chips import generation, unsupported
from kpt_backend_amd.environment import why_no_device, why_unavailable
from kpt_core import InputError, UnknownNameError
from kpt_core.contract import load
from simulated_cuda import GIB, FakeDevice, simulate

CUDA = torch.device("cuda")
PROGRAM = """
import json, sys, warnings
warnings.simplefilter("error")
import torch
before = set(sys.modules)
import kpt_backend_amd
kernels, unavailable = kpt_backend_amd.BACKEND.kernels(), kpt_backend_amd.BACKEND.unavailable()
print(json.dumps({"new": sorted({name.partition(".")[0] for name in set(sys.modules) - before}),
                  "initialised": torch.cuda.is_initialized(), "kernels": len(kernels)}))
"""


def device(arch: str, name: str = "AMD Instinct MI300X", **more) -> FakeDevice:
    return FakeDevice(name=name, extra={"gcnArchName": f"{arch}:sramecc+:xnack-"}, multiprocessors=304, **more)


MI300X, MI250X = device("gfx942", memory=192 * GIB), device("gfx90a", "AMD Instinct MI250X", memory=64 * GIB)
VEGA = device("gfx906", "AMD Instinct MI60")


@pytest.fixture
def rocm(monkeypatch):
    """Simulate a torch for ROCm that sees these devices."""

    def see(*devices: FakeDevice):
        state = simulate(monkeypatch, *devices)
        monkeypatch.setattr(torch.version, "cuda", None)
        monkeypatch.setattr(torch.version, "hip", "6.4.1")
        return state

    return see


@pytest.mark.parametrize(
    ("chip", "name", "has", "lacks"),
    [
        ("gfx90a", "CDNA2", {"mfma", "wave64", "bf16"}, {"fp8_e4m3fn", "fp8_e4m3fnuz"}),
        ("gfx942", "CDNA3", {"mfma", "fp8_e4m3fnuz", "fp8_e5m2fnuz"}, {"fp8_e4m3fn"}),
        ("gfx950", "CDNA4", {"mfma", "fp8_e4m3fn", "mxfp8", "mxfp4"}, {"fp8_e4m3fnuz"}),
        ("gfx1100", "RDNA3", {"wmma", "wave32"}, {"mfma", "fp8_e4m3fn"}),
        ("gfx1201", "RDNA4", {"wmma", "wave32", "fp8_e4m3fn"}, {"mfma", "fp8_e4m3fnuz"}),
    ],
)
def test_a_chip_offers_what_its_generation_has(chip, name, has, lacks):
    assert generation(chip) == name
    assert has | {"hip", chip} <= capabilities_of(chip)
    assert lacks.isdisjoint(capabilities_of(chip))
    assert unsupported(chip) is None
    assert chip in CHIPS


def test_an_unknown_chip_offers_its_name_alone_so_that_no_kernel_runs_there():
    assert capabilities_of("gfx906") == {"gfx906"}
    assert "gfx906 is not supported" in unsupported("gfx906")
    assert all(not kernel.requires <= capabilities_of("gfx906") for kernel in BACKEND.kernels())


def test_only_known_products_have_peaks():
    assert peaks_of("AMD Instinct MI300X").bandwidth == 5300
    assert peaks_of("AMD Radeon Graphics") is None


def test_a_device_is_detected_with_its_generation_memory_and_kernels(rocm, monkeypatch):
    rocm(MI250X, MI300X)
    monkeypatch.setattr(torch.cuda, "power_draw", lambda device: 750)  # AMD SMI tells watts
    info = device_info(1)
    assert (info.name, info.chip, info.generation) == ("AMD Instinct MI300X", "gfx942", "CDNA3")
    assert (info.multiprocessors, info.memory, info.supports_fp8, info.is_hopper) == (304, 192 * GIB, True, False)
    assert (info.peaks.bf16_tflops, info.live.power, info.live.memory_used) == (1307.4, 750, 0)
    assert not device_info(0).supports_fp8
    assert BACKEND.unavailable() is None
    assert "fp8_e4m3fnuz" in BACKEND.capabilities(torch.device("cuda", 1))
    assert "fp8_e4m3fnuz" not in BACKEND.capabilities(CUDA)
    assert DeviceManager().roomiest() == torch.device("cuda", 1)
    assert memory_stats(0).total == 64 * GIB
    for kernel in BACKEND.kernels():
        needs_fp8 = "gpu_scaled_mm" in kernel.forward  # which MI250X has not
        assert (kernel.requires <= BACKEND.capabilities(CUDA)) != needs_fp8


def test_an_old_chip_is_seen_and_not_served(rocm):
    rocm(VEGA)
    assert "gfx906 is not supported" in why_unavailable()
    assert device_info().unsupported is not None
    assert DeviceManager().roomiest() is None
    assert environment().problems == (why_unavailable(),)


def test_every_kernel_is_offered_and_is_where_it_says():
    moe = {op for op in kpt_core.ops() if op.startswith("moe.")}
    assert {kernel.op for kernel in BACKEND.kernels()} == {
        *moe,
        "attention.dense",
        "attention.merge",
        "attention.paged",
        "attention.update_cache",
        "fp8.linear",
        "fp8.quantize",
        "fp8.scaled_mm",
    }
    for kernel in BACKEND.kernels():
        for target in filter(None, (kernel.forward, kernel.backward, kernel.unsupported, kernel.configs)):
            assert callable(load(target))


@pytest.mark.parametrize(("cuda", "says"), [(None, "is not built for a GPU"), ("13.0", "is built for CUDA 13.0")])
def test_a_torch_for_something_else_is_named_with_the_remedy(monkeypatch, cuda, says):
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    sentence = why_no_device()
    assert says in sentence
    assert "install one for ROCm: https://pytorch.org" in sentence
    assert BACKEND.capabilities(CUDA) == frozenset()
    with pytest.raises(InputError, match="not for ROCm"):
        device_info()
    with pytest.raises(InputError, match=r"not for ROCm.*manages main memory"):
        AMDMemoryManager().allocate(4)
    with pytest.raises(InputError, match=r"device 'cuda' can't be used: .*not for ROCm"):
        AMDOptimizer(device="cuda")


@pytest.mark.parametrize(
    ("exists", "allowed", "hidden", "says"),
    [
        (False, False, None, "no AMD driver answers.*--device /dev/kfd"),
        (True, False, None, "this user may not open .*usermod -aG render,video"),
        (True, True, "3", "HIP_VISIBLE_DEVICES='3' may leave no device"),
        (True, True, None, "look whether `rocminfo` lists one"),
    ],
)
def test_why_no_device_is_seen_is_told_with_the_remedy(rocm, monkeypatch, tmp_path, exists, allowed, hidden, says):
    rocm()
    driver = tmp_path / "kfd"
    if exists:
        driver.touch()
    monkeypatch.setattr(environment_function.__globals__["Path"], "exists", lambda path: exists)
    monkeypatch.setattr("os.access", lambda path, mode: allowed)
    if hidden:
        monkeypatch.setenv("HIP_VISIBLE_DEVICES", hidden)
    assert re.search(says, why_unavailable())
    assert environment().devices == ()


def test_a_missing_triton_is_told_with_the_remedy(rocm, monkeypatch):
    rocm(MI300X)
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "triton is not installed" in why_unavailable()


def test_the_environment_tells_versions_and_what_could_be_better(rocm, monkeypatch):
    rocm(MI300X)
    monkeypatch.setenv("TORCH_BLAS_PREFER_HIPBLASLT", "0")
    found = environment()
    assert (found.hip, found.devices, found.problems) == ("6.4.1", ("AMD Instinct MI300X",), ())
    assert "hipBLASLt" in found.advice[0]


def test_a_model_is_prepared_as_the_configuration_says(rocm):
    class Model(nn.Linear):
        def to(self, *args, **kwargs):
            sent.append(kwargs)
            return self

    sent: list[dict] = []
    rocm(MI300X)
    prepared = AMDBackend(AMDConfig(dtype="bfloat16", pad=False)).prepare_model(Model(63, 130))
    assert sent[0] == {"device": torch.device("cuda", 0), "dtype": torch.bfloat16}
    assert "it is on cuda:0, cast to bfloat16" in prepared.changes
    assert "130x63; 136x64" in str(prepared) or "130x63" in str(prepared)


def test_wrong_settings_are_refused_with_what_was_expected():
    with pytest.raises(UnknownNameError, match="memory_fraction"):
        AMDConfig.from_mapping({"memory_fracton": 0.5})
    with pytest.raises(InputError, match="must be an AMDConfig"):
        AMDBackend({"pad": True})
    with pytest.raises(InputError, match=r"model must be a torch\.nn\.Module"):
        BACKEND.prepare_model(None)
    with pytest.raises(UnknownNameError, match="did you mean 'balanced'"):
        AMDOptimizer("balance")


@pytest.mark.parametrize("level", ["conservative", "balanced", "aggressive"])
def test_each_level_tries_its_steps_and_says_why_not_the_others(level):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(24, 40), nn.ReLU(), nn.Linear(40, 24)), torch.randn(8, 24)
    config = OptimizerConfig(compile_backend="eager", seconds=0.05)
    found = AMDOptimizer(level, config=config).optimize_for_inference(model, x)
    reasons = {outcome.step: outcome.reason for outcome in found.report.outcomes if outcome.status == "not tried"}
    assert ("mixed_precision" in reasons) == (level == "conservative")
    if level == "aggressive":
        assert reasons["cuda_graph"] == "needs a device of type cuda; the model is on cpu"
    torch.testing.assert_close(found.model(x), model(x), rtol=0.1, atol=0.1)


def test_training_is_optimised_and_learns():
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    x, config = torch.randn(16, 8), OptimizerConfig(compile_backend="eager", seconds=0.05)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    found = AMDOptimizer("conservative", config=config).optimize_for_training(
        model, x, lambda y: (y - x).square().mean(), optimizer
    )
    first = found.step(x)
    for _ in range(20):
        last = found.step(x)
    assert last < 0.5 * first


def test_without_a_sample_nothing_is_claimed():
    with pytest.warns(OptimizationWarning, match="no step was tried"):
        found = AMDOptimizer().optimize_for_inference(nn.Linear(4, 4))
    assert found.report.kept == ()


def test_memory_is_managed_with_a_margin_on_the_host_too():
    manager = AMDMemoryManager("cpu", safety_margin=0.1)
    cache = manager.allocate((16, 16), torch.bfloat16)
    assert (cache.shape, manager.statistics().allocations) == ((16, 16), 1)
    with pytest.raises(kpt_backend_amd.OutOfMemoryError, match="can never fit"):
        manager.allocate(manager.memory().total)


def test_installing_it_brings_nothing_of_other_vendors_and_no_triton_of_its_own():
    names = {re.split(r"[^\w-]", requirement)[0] for requirement in requires("kpt-backend-amd") or ()}
    assert names == {"kpt-core", "kpt-optimize", "kpt-triton"}  # torch for ROCm brings the Triton that fits it


def test_importing_it_imports_no_compiler_and_starts_no_driver():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["kernels"] >= 5
    assert not found["initialised"]
    assert {"triton", "kpt_moe", "transformers", "pynvml", "kpt_backend_nvidia"}.isdisjoint(found["new"])


def test_the_entry_point_names_it_and_all_that_is_promised_is_there():
    assert kpt_core.backends()["amd"] is BACKEND
    assert [name for name in kpt_backend_amd.__all__ if not hasattr(kpt_backend_amd, name)] == []
    assert Path(kpt_backend_amd.__file__).with_name("py.typed").exists()


def test_chips_that_are_not_here_are_described_and_each_has_a_product():
    assert {peaks.chip for peaks in BACKEND.products.values()} == set(CHIPS)
    for name, peaks in BACKEND.products.items():
        told = BACKEND.describe(BACKEND.properties_of(name, peaks.chip))
        assert (told["chip"], told["unsupported"], told["peaks"]) == (peaks.chip, None, peaks)
        assert (peaks.fp8_tflops is not None) == (not {"fp8_e4m3fn", "fp8_e4m3fnuz"}.isdisjoint(told["capabilities"]))
