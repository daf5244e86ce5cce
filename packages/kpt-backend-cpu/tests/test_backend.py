"""The backend: what it says of devices, what importing it brings along, and that kernels name what is there."""

import json
import re
import subprocess
import sys
from importlib.metadata import requires

import pytest
import torch

import kpt_backend_cpu
from kpt_backend_cpu import BACKEND
from kpt_core import Backend, InputError, backends, ops

PROGRAM = """
import json, sys, warnings
warnings.simplefilter("error")
import torch
before = set(sys.modules)
import kpt_backend_cpu
targets = [kernel.forward for kernel in kpt_backend_cpu.BACKEND.kernels()]
print(json.dumps({"new": sorted(set(sys.modules) - before), "kernels": targets,
                  "loaded": kpt_backend_cpu.native._library is not None}))
"""


def test_it_is_a_backend_and_the_entry_point_names_it():
    assert isinstance(BACKEND, Backend)
    assert backends()["cpu"] is BACKEND


def test_installing_it_brings_torch_and_the_core_alone():
    names = {re.split(r"[^\w-]", requirement)[0] for requirement in requires("kpt-backend-cpu") or ()}
    assert names == {"kpt-core", "torch"}


def test_importing_it_and_naming_its_kernels_loads_no_library_and_no_kernel():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found["kernels"]) == 13
    assert not found["loaded"]
    assert [
        name
        for name in found["new"]
        if name.startswith(("kpt_backend_cpu.moe.", "kpt_backend_cpu.fp8.", "kpt_backend_cpu.attention."))
    ] == []
    assert {name.partition(".")[0] for name in found["new"]}.isdisjoint(
        {"kpt_moe", "kpt_attention", "triton", "transformers", "numpy"}
    )


def test_every_op_of_moe_has_a_kernel():
    own = {kernel.op for kernel in BACKEND.kernels()}
    assert {name for name in own if name.startswith("moe.")} == {name for name in ops() if name.startswith("moe.")}
    assert {"fp8.linear", "fp8.scaled_mm", "attention.dense"} <= own


def test_capabilities_are_of_cpus_alone(kernels):
    told = BACKEND.capabilities(torch.device("cpu"))
    assert {"baseline", "bf16", "fp16"} <= told
    assert told == BACKEND.capabilities(torch.device("cpu", 0))
    with pytest.raises(InputError, match="cuda:0"):
        BACKEND.capabilities(torch.device("cuda", 0))


def test_a_kernel_serves_every_dtype_but_float64(kernels):
    x, offsets = torch.randn(3, 4), torch.tensor([1, 3], dtype=torch.int32)
    weight = torch.randn(2, 4, 5)
    grouped_mm = ops()["moe.grouped_mm"]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        selection = grouped_mm.explain(x.to(dtype), weight.to(dtype), offsets)
        assert selection.backend == "cpu", selection
    assert grouped_mm.explain(x.double(), weight.double(), offsets).backend != "cpu"


def test_all_that_is_promised_is_there():
    missing = [name for name in kpt_backend_cpu.__all__ if not hasattr(kpt_backend_cpu, name)]
    assert missing == []
