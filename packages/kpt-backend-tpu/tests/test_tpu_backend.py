"""The backend for TPUs: without one it says what is missing; with one, simulated here, what is asked of it."""

import json
import os
import random
import re
import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path
from types import ModuleType

import numpy
import pytest
import torch

import kpt_backend_tpu
import kpt_core
from kpt_backend_tpu import (
    BACKEND,
    CHIPS,
    TPUS,
    Bucketed,
    TPUBackend,
    TPUConfig,
    TPUOptimizer,
    bridge,
    compilations,
    device_info,
    environment,
    keep_compilations,
    memory_stats,
    powers_of_two,
)
from kpt_backend_tpu.chips import attached, capabilities_of
from kpt_backend_tpu.tiles import LANES, MOST_TILES, most_rows, tile_of
from kpt_core import InputError
from kpt_core.contract import load
from kpt_optimize.devices.targets import target_of
from simulated_tpu import INSTALLED

XLA = torch.device("xla", 0)
PROGRAM = """
import json, sys, warnings
warnings.simplefilter("error")
import torch
before = set(sys.modules)
import kpt_backend_tpu
kernels, unavailable = kpt_backend_tpu.BACKEND.kernels(), kpt_backend_tpu.BACKEND.unavailable()
kpt_backend_tpu.environment()
print(json.dumps({"new": sorted({name.partition(".")[0] for name in set(sys.modules) - before}),
                  "kernels": len(kernels), "unavailable": unavailable}))
"""


@pytest.mark.parametrize("chip", CHIPS)
def test_a_chip_is_told_by_the_pci_bus_with_what_it_can_do(see, chip):
    see(chip, None, chip)
    info = device_info(1)
    assert attached() == (chip, chip)
    assert (info.index, info.chip, info.unsupported) == (1, chip, None)
    assert info.peaks is BACKEND.products[info.name]
    assert info.memory == info.peaks.memory * 2**30
    assert info.shared_memory_per_block == TPUS[chip].vmem
    assert info.supports_fp8 == (chip == "tpu7x")
    assert BACKEND.unavailable() is None
    assert BACKEND.capabilities(XLA) == capabilities_of(chip)
    assert all(kernel.requires <= BACKEND.capabilities(XLA) for kernel in BACKEND.kernels())
    assert (environment().chips, environment().problems) == ((chip, chip), ())
    assert BACKEND.device_name(XLA) == info.name


@pytest.mark.parametrize(
    ("found", "given", "variables", "says"),
    [
        ((), INSTALLED, {}, "no TPU is on this machine's PCI bus; on Google Cloud take a TPU VM"),
        (("0x0042",), INSTALLED, {}, "no TPU is on"),  # gVNIC, Google's network interface
        (("v5e",), {}, {}, r"jax and torchax and flax are not installed: pip install './packages/kpt-backend-tpu\["),
        (("v5e",), INSTALLED | {"torchax": None}, {}, "^torchax is not installed"),
        (("v5e",), INSTALLED | {"torch-xla": "2.1.0"}, {}, r"torch-xla 2\.1\.0 runs beside torch 2\.1 alone; this is"),
        (("v5e",), INSTALLED, {"PJRT_DEVICE": "CPU"}, "PJRT_DEVICE='CPU' has torch_xla use another device; set it"),
        (("v5e",), INSTALLED | {"libtpu": None}, {}, "libtpu is not installed"),
        (("0x0027",), INSTALLED, {}, "v2 or v3 is not supported: KPT's kernels are compiled and checked for v4, v5e"),
    ],
)  # fmt: skip
def test_what_is_missing_is_told_with_the_remedy(see, monkeypatch, found, given, variables, says):
    see(*found, distributions=given)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert re.search(says, BACKEND.unavailable())
    assert environment().problems == (BACKEND.unavailable(),)


def test_without_a_tpu_nothing_can_be_asked_of_it(see):
    see()
    assert BACKEND.capabilities(XLA) == frozenset()
    for ask in (device_info, memory_stats, BACKEND.device):
        with pytest.raises(InputError, match="no TPU is on this machine's PCI bus"):
            ask()
    prepared = BACKEND.prepare_model(torch.nn.Linear(4, 4))
    assert "no TPU" in str(prepared.unavailable)
    assert prepared.device == torch.device("cpu")


def test_without_a_tpu_kernels_are_interpreted_where_that_is_asked_for(see, monkeypatch):
    see(devices=1)
    monkeypatch.setenv("KPT_TPU_INTERPRET", "1")
    assert BACKEND.unavailable() is None
    assert all(kernel.requires <= BACKEND.capabilities(XLA) for kernel in BACKEND.kernels())


def test_devices_that_are_not_there_are_refused(see):
    see("v6e")
    assert BACKEND.device() == XLA
    with pytest.raises(InputError, match="xla:3 was asked for; torch has 1 of them"):
        BACKEND.device(3)
    with pytest.raises(InputError, match="must be of type xla; got 'cuda'"):
        BACKEND.device("cuda")
    with pytest.raises(InputError, match="must be of type xla or tpu; got cpu"):
        BACKEND.capabilities(torch.device("cpu"))


def test_memory_is_told_where_the_platform_tells_it(see):
    see("v5p", memory={"bytes_used": 3 << 30, "bytes_limit": 95 << 30, "peak_bytes_used": 4 << 30})
    found = memory_stats()
    assert (found.total, found.free, found.allocated, found.allocated_peak) == tuple(n << 30 for n in (95, 92, 3, 4))
    assert found.available == 92 << 30


def test_memory_that_is_not_told_is_an_error_that_says_so(see):
    see("v5p")
    with pytest.raises(InputError, match="xla:0 does not tell its memory: UNIMPLEMENTED: GetAllocatorStats"):
        memory_stats()


def test_synchronising_runs_the_graph_and_waits(see):
    see("v4")
    BACKEND.synchronize(XLA)
    assert see.synced == [True]


def test_a_model_is_prepared_as_the_configuration_says(see):
    class Model(torch.nn.Linear):
        def to(self, *args, **kwargs):
            sent.append(kwargs)
            return self

    sent = []
    see("v6e")
    prepared = TPUBackend(TPUConfig(dtype="bfloat16")).prepare_model(Model(8, 8))
    assert sent == [{"device": XLA, "dtype": torch.bfloat16}]
    assert "it is on xla:0, cast to bfloat16" in prepared.changes


@pytest.mark.parametrize("name", ["channels_last", "allow_tf32", "cudnn_benchmark", "deterministic", "memory_fraction"])
def test_settings_of_other_vendors_are_refused(name):
    with pytest.raises(InputError, match=f"{name} must be left as it is on a TPU"):
        TPUConfig(**{name: 0.5 if name == "memory_fraction" else True})
    with pytest.raises(InputError, match="must be an TPUConfig"):
        TPUBackend({name: True})


@pytest.mark.parametrize("chip", CHIPS)
def test_a_chip_is_a_target_to_plan_for(chip):
    found = target_of(chip)
    assert (found.chip, found.backend, found.unsupported, found.device_type) == (chip, BACKEND, None, "xla")
    assert found.memory == found.peaks.memory * 2**30
    assert found.tflops("bfloat16") == found.peaks.bf16_tflops
    assert found.tflops("float8_e4m3fn") == (2307 if chip == "tpu7x" else found.peaks.bf16_tflops)


def test_every_kernel_is_where_it_says():
    assert {kernel.op for kernel in BACKEND.kernels()} <= kpt_core.ops().keys()
    pytest.importorskip("jax")
    for kernel in BACKEND.kernels():
        for target in filter(None, (kernel.forward, kernel.backward, kernel.unsupported, kernel.aot)):
            assert load(target) is not None


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("rows", [1, 40, 4097, 1 << 20, None])
def test_tiles_are_whole_fit_in_vmem_and_are_not_too_many(rows, itemsize):
    rows = rows or most_rows(itemsize)
    for groups, inner, columns in ((1, 1, 1), (8, 4096, 14336), (256, 7168, 2048), (3, 130, 5000)):
        tile = tile_of(rows, groups, inner, columns, itemsize)
        assert -(-rows // tile.rows) <= MOST_TILES
        assert (tile.rows % 32, tile.inner % LANES, tile.columns % LANES) == (0, 0, 0)
        operands = (tile.rows + tile.columns) * tile.inner + tile.rows * tile.columns
        assert 2 * operands * itemsize + 4 * tile.rows * tile.columns <= 16 * 2**20


def test_installing_it_brings_the_core_alone():
    needed = [each for each in requires("kpt-backend-tpu") or () if "extra ==" not in each]
    assert {re.split(r"[^\w-]", requirement)[0] for requirement in needed} == {"kpt-core", "kpt-optimize"}


def test_importing_it_imports_neither_torch_xla_nor_jax():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["kernels"] >= 3
    assert {"torch_xla", "jax", "jaxlib", "libtpu", "kpt_moe", "triton"}.isdisjoint(found["new"])


def test_what_is_imported_for_the_first_call_leaves_the_process_as_it_was(monkeypatch):
    monkeypatch.setenv("KPT_ONE", "1")
    before = random.getstate(), str(numpy.random.get_state()), dict(os.environ)
    with bridge._process_kept():
        random.random()
        numpy.random.rand()
        os.environ.update(KPT_ONE="2", KPT_TWO="2")
    assert (random.getstate(), str(numpy.random.get_state()), dict(os.environ)) == before


def test_the_entry_point_names_it_and_all_that_is_promised_is_there():
    assert kpt_core.backends()["tpu"] is BACKEND
    assert [name for name in kpt_backend_tpu.__all__ if not hasattr(kpt_backend_tpu, name)] == []
    assert Path(kpt_backend_tpu.__file__).with_name("py.typed").exists()


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (lambda: Bucketed(torch.nn.Identity(), (8, 4)), r"sizes must be positive and rise; got \[8, 4\]"),
        (lambda: Bucketed(torch.nn.Identity(), (4, 8))(torch.ones(9, 2)), "9 rows; the largest size is 8"),
        (lambda: Bucketed(torch.nn.Identity(), (4,))(torch.ones(2), torch.ones(3)), "inputs must have one size of dim"),
        (lambda: powers_of_two(0, 4), "sizes must be positive and rise; got 0 and 4"),
        (compilations, "compilations are counted by torch_xla: "),
        (lambda: TPUOptimizer(device="xla"), "device 'xla' can't be used: "),
    ],
)
def test_wrong_use_of_what_is_for_xla_is_a_sentence(see, action, message):
    see()
    with pytest.raises(InputError, match=message):
        action()


def test_rows_that_were_added_are_cut_off_again():
    seen = []

    def module(x, y):
        seen.append(tuple(x.shape))
        return x + 1, y * 2

    x, y = torch.randn(2, 5, 3), torch.randn(2, 5)
    one, two = Bucketed(module, powers_of_two(4, 9), dim=1)(x, y)
    assert seen == [(2, 8, 3)]
    assert torch.equal(one, x + 1)
    assert torch.equal(two, y * 2)


@pytest.mark.parametrize("read_only", [False, True])
def test_xla_is_told_the_folder_of_compilations(see, monkeypatch, tmp_path, read_only):
    see("v5e")
    told, runtime = [], ModuleType("torch_xla.runtime")
    runtime.initialize_cache = lambda path, readonly: told.append((path, readonly))
    monkeypatch.setitem(sys.modules, "torch_xla.runtime", runtime)
    monkeypatch.setattr(sys.modules["torch_xla"], "runtime", runtime, raising=False)
    folder = tmp_path / "kept" / "here"
    assert keep_compilations(folder, read_only=read_only) == folder
    assert folder.is_dir()
    assert told == [(str(folder), read_only)]


def test_a_folder_of_compilations_after_the_first_is_refused(see, monkeypatch, tmp_path):
    see("v5e")

    def refuse(path, readonly):
        raise AssertionError("already computed")

    runtime = ModuleType("torch_xla.runtime")
    runtime.initialize_cache = refuse
    monkeypatch.setitem(sys.modules, "torch_xla.runtime", runtime)
    monkeypatch.setattr(sys.modules["torch_xla"], "runtime", runtime, raising=False)
    with pytest.raises(InputError, match="call it before anything is computed on xla"):
        keep_compilations(tmp_path)
