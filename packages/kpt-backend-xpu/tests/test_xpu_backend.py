"""The backend for Intel GPUs: without one it says what is missing; with one, simulated here, what is asked of it."""

import json
import re
import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import kpt_backend_xpu
import kpt_core
from kpt_backend_xpu import (
    BACKEND,
    CHIPS,
    DeviceManager,
    OptimizationWarning,
    OptimizerConfig,
    XPUBackend,
    XPUConfig,
    XPUMemoryManager,
    XPUOptimizer,
    device_info,
    environment,
    memory_stats,
)
from kpt_backend_xpu.chips import capabilities_of, chip_of, generation, unsupported
from kpt_core import InputError, UnknownNameError
from kpt_core.contract import load
from kpt_triton import chips, launching
from kpt_triton.moe import tiles
from kpt_triton.numeric import INTERPRETED
from simulated_xpu import GIB, device

MODULE = sys.modules["kpt_backend_xpu.environment"]
XPU = torch.device("xpu")
MAX = device()
ARC = device(
    0x500400400, "Intel(R) Arc(TM) B580 Graphics", has_fp64=False, total_memory=12 * GIB, gpu_subslice_count=20
)
METEOR_LAKE = device(
    0x311C00400, "Intel(R) Arc(TM) Graphics", has_subgroup_matrix_multiply_accumulate=False, total_memory=16 * GIB
)
PROGRAM = """
import json, sys, warnings
warnings.simplefilter("error")
import torch
before = set(sys.modules)
import kpt_backend_xpu
kernels, unavailable = kpt_backend_xpu.BACKEND.kernels(), kpt_backend_xpu.BACKEND.unavailable()
print(json.dumps({"new": sorted({name.partition(".")[0] for name in set(sys.modules) - before}),
                  "initialised": torch.xpu.is_initialized(), "kernels": len(kernels)}))
"""


@pytest.mark.parametrize(
    ("architecture", "chip", "name"),
    [
        (0x30F000700, "pvc", "Xe-HPC"),
        (0x30DC00800, "acm_g10", "Xe-HPG"),
        (0x500400400, "bmg_g21", "Xe2"),
        (0x501000400, "lnl_m", "Xe2"),
        (0x312800400, "arl_h", "Xe-LPG+"),
        (0x780000400, "xe_30_0", "unknown"),
    ],
)
def test_a_chip_is_told_by_the_number_of_its_architecture(architecture, chip, name):
    found = device(architecture)
    assert (chip_of(found), generation(chip)) == (chip, name)
    assert (unsupported(found) is None) == (name in ("Xe-HPC", "Xe2"))
    assert {"xpu", "dpas", "bf16", chip} <= capabilities_of(found)


def test_what_a_device_lacks_is_told_by_the_device():
    assert "fp64" in capabilities_of(MAX)
    assert "fp64" not in capabilities_of(ARC)
    assert unsupported(METEOR_LAKE) == "mtl_h is not supported: it lacks dpas"
    assert all(not kernel.requires <= capabilities_of(METEOR_LAKE) for kernel in BACKEND.kernels())


def test_devices_are_detected_with_their_memory_and_kernels(see):
    see(METEOR_LAKE, ARC, MAX)
    info = device_info(2)
    assert (info.name, info.chip, info.generation) == (MAX.name, "pvc", "Xe-HPC")
    assert (info.multiprocessors, info.memory, info.shared_memory_per_block) == (512, 64 * GIB, 128 * 1024)
    assert (info.live.power, info.peaks.bandwidth, info.supports_fp8) == (300, 1638.4, False)
    assert BACKEND.unavailable() is None
    assert BACKEND.capabilities(torch.device("xpu", 1)) == capabilities_of(ARC)
    assert DeviceManager().roomiest() == torch.device("xpu", 2)
    assert memory_stats(1).total == 12 * GIB
    for kernel in BACKEND.kernels():
        assert kernel.requires <= BACKEND.capabilities(torch.device("xpu", 2))
    assert environment().problems == (f"xpu:0 ({METEOR_LAKE.name}): {unsupported(METEOR_LAKE)}",)
    assert environment().driver == "1.6.33578"


def test_a_chip_without_matrix_units_is_seen_and_not_served(see):
    see(METEOR_LAKE)
    assert BACKEND.unavailable() == f"{METEOR_LAKE.name}: {unsupported(METEOR_LAKE)}"
    assert DeviceManager().roomiest() is None


def test_kernels_launch_on_the_device_with_its_own_tiles(see):
    see(ARC, MAX)
    chips.chip_of.cache_clear(), launching._processors.cache_clear()
    try:
        interpreted = INTERPRETED.value
        where = torch.device("xpu", 1)
        assert chips.chip_of(where) == ("interpreter" if interpreted else "pvc")
        assert launching._processors(where) == (1 if interpreted else 64)
        assert chips.converts_codes(chips.chip_of(where)) is interpreted
        for chip in CHIPS:
            assert chips.family_of(chip) == "xe"
            tile = tiles.default_tile("plain", chip, 2, 1 << 14, 8)
            assert tile.m * tile.n // (tile.warps * 16) == 32  # sums that a thread holds; it has 128 registers
    finally:
        chips.chip_of.cache_clear(), launching._processors.cache_clear()


def test_every_kernel_is_offered_and_is_where_it_says():
    moe = {op for op in kpt_core.ops() if op.startswith("moe.")}
    attention = {f"attention.{name}" for name in ("dense", "merge", "paged", "update_cache")}
    fp8 = {"fp8.linear", "fp8.quantize", "fp8.scaled_mm"}
    assert {kernel.op for kernel in BACKEND.kernels()} == moe | attention | fp8
    for kernel in BACKEND.kernels():
        for target in filter(None, (kernel.forward, kernel.backward, kernel.unsupported, kernel.configs)):
            assert callable(load(target))


def test_a_torch_for_something_else_is_named_with_the_remedy():
    sentence = BACKEND.why_no_device()
    assert "is not built for Intel GPUs" in sentence
    assert "https://pytorch.org" in sentence
    assert BACKEND.capabilities(XPU) == frozenset()
    with pytest.raises(InputError, match="not built for Intel GPUs"):
        device_info()
    with pytest.raises(InputError, match=r"not built for Intel GPUs.*manages main memory"):
        XPUMemoryManager().allocate(4)
    with pytest.raises(InputError, match=r"device 'xpu' can't be used: .*not built for Intel GPUs"):
        XPUOptimizer(device="xpu")


@pytest.mark.parametrize(
    ("drivers", "allowed", "hidden", "says"),
    [
        ([], False, None, "no driver answers.*docker run --device /dev/dri"),
        ([Path("renderD128")], False, None, "may open no device in .*usermod -aG render"),
        ([Path("renderD128")], True, "1", "ZE_AFFINITY_MASK='1' may leave no device"),
        ([Path("renderD128")], True, None, "look whether `sycl-ls` lists one"),
    ],
)
def test_why_no_device_is_seen_is_told_with_the_remedy(see, monkeypatch, drivers, allowed, hidden, says):
    see()
    monkeypatch.setattr(MODULE.Path, "glob", lambda folder, pattern: iter(drivers))
    monkeypatch.setattr("os.access", lambda path, mode: allowed)
    if hidden:
        monkeypatch.setenv("ZE_AFFINITY_MASK", hidden)
    assert re.search(says, BACKEND.unavailable())
    assert environment().devices == ()


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (None, "triton is not installed"),
        (SimpleNamespace(submodule_search_locations=["/nowhere"]), "has no part for Intel GPUs"),
    ],
)
def test_a_triton_that_does_not_do_is_told_with_the_remedy(see, monkeypatch, found, says):
    original = MODULE._why_no_triton
    see(MAX)
    monkeypatch.setattr(MODULE, "_why_no_triton", original)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: found)
    assert says in BACKEND.unavailable()


def test_the_archived_extension_is_advised_against(monkeypatch):
    monkeypatch.setattr(MODULE, "version", lambda name: {"intel_extension_for_pytorch": "2.8.0"}.get(name))
    (advice,) = environment().advice
    assert "intel_extension_for_pytorch 2.8.0 is installed; it is archived upstream" in advice


def test_a_model_is_prepared_as_the_configuration_says(see):
    class Model(nn.Linear):
        def to(self, *args, **kwargs):
            sent.append(kwargs)
            return self

    sent: list[dict] = []
    see(MAX)
    prepared = XPUBackend(XPUConfig(dtype="bfloat16", pad=False)).prepare_model(Model(63, 130))
    assert sent[0] == {"device": torch.device("xpu", 0), "dtype": torch.bfloat16}
    assert "it is on xpu:0, cast to bfloat16" in prepared.changes


def test_wrong_settings_are_refused_with_what_was_expected():
    with pytest.raises(UnknownNameError, match="memory_fraction"):
        XPUConfig.from_mapping({"memory_fracton": 0.5})
    with pytest.raises(InputError, match="must be an XPUConfig"):
        XPUBackend({"pad": True})
    with pytest.raises(InputError, match=r"model must be a torch\.nn\.Module"):
        BACKEND.prepare_model(None)
    with pytest.raises(UnknownNameError, match="did you mean 'balanced'"):
        XPUOptimizer("balance")


@pytest.mark.parametrize("level", ["conservative", "balanced", "aggressive"])
def test_each_level_tries_its_steps_and_says_why_not_the_others(level):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(24, 40), nn.ReLU(), nn.Linear(40, 24)), torch.randn(8, 24)
    config = OptimizerConfig(compile_backend="eager", seconds=0.05)
    found = XPUOptimizer(level, config=config).optimize_for_inference(model, x)
    reasons = {outcome.step: outcome.reason for outcome in found.report.outcomes if outcome.status == "not tried"}
    assert ("mixed_precision" in reasons) == (level == "conservative")
    torch.testing.assert_close(found.model(x), model(x), rtol=0.1, atol=0.1)


def test_without_a_sample_nothing_is_claimed():
    with pytest.warns(OptimizationWarning, match="nothing can be measured|no step was tried"):
        found = XPUOptimizer().optimize_for_inference(nn.Linear(4, 4))
    assert found.report.kept == ()


def test_memory_is_managed_with_a_margin_on_the_host_too():
    manager = XPUMemoryManager("cpu", safety_margin=0.1)
    cache = manager.allocate((16, 16), torch.bfloat16)
    assert (cache.shape, manager.statistics().allocations) == ((16, 16), 1)
    with pytest.raises(kpt_backend_xpu.OutOfMemoryError, match="can never fit"):
        manager.allocate(manager.memory().total)


def test_installing_it_brings_nothing_of_other_vendors_and_no_triton_of_its_own():
    needed = [each for each in requires("kpt-backend-xpu") or () if "extra ==" not in each]
    names = {re.split(r"[^\w-]", requirement)[0] for requirement in needed}
    assert names == {"kpt-core", "kpt-optimize", "kpt-triton"}  # torch for Intel GPUs brings the Triton that fits it


def test_importing_it_imports_no_compiler_and_starts_no_driver():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["kernels"] >= 5
    assert not found["initialised"]
    assert {"triton", "kpt_moe", "transformers", "intel_extension_for_pytorch"}.isdisjoint(found["new"])


def test_the_entry_point_names_it_and_all_that_is_promised_is_there():
    assert kpt_core.backends()["xpu"] is BACKEND
    assert [name for name in kpt_backend_xpu.__all__ if not hasattr(kpt_backend_xpu, name)] == []
    assert Path(kpt_backend_xpu.__file__).with_name("py.typed").exists()


@pytest.mark.parametrize("chip", ["pvc", "bmg_g21", "acm_g10"])
def test_a_chip_that_is_not_here_is_described_as_if_it_were(chip):
    product = next(name for name, peaks in BACKEND.products.items() if peaks.chip == chip)
    told = BACKEND.describe(BACKEND.properties_of(product, chip))
    assert (told["chip"], told["peaks"]) == (chip, BACKEND.products[product])
    assert {"xpu", "dpas", "bf16", chip} <= told["capabilities"]
    assert (told["unsupported"] is None) == (chip in BACKEND.chips)
