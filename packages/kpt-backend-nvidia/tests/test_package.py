"""What installing and importing the package brings along."""

import json
import re
import subprocess
import sys
from importlib.metadata import requires

import kpt_backend_nvidia
from kpt_core import backends

PROGRAM = """
import json, sys, warnings
warnings.simplefilter("error")
import torch
before = set(sys.modules)
import kpt_backend_nvidia
kernels = [kernel.forward for kernel in kpt_backend_nvidia.BACKEND.kernels()]
unavailable = kpt_backend_nvidia.BACKEND.unavailable()
print(json.dumps({"new": sorted({name.partition(".")[0] for name in set(sys.modules) - before}),
                  "cuda": torch.cuda.is_initialized(), "kernels": len(kernels)}))
"""


def test_installing_it_brings_triton_and_nothing_of_other_vendors():
    found = requires("kpt-backend-nvidia") or ()
    names = {re.split(r"[^\w-]", requirement)[0] for requirement in found if "extra ==" not in requirement}
    assert names == {"kpt-core", "kpt-optimize", "kpt-triton", "nvidia-ml-py", "triton"}


def test_importing_it_imports_no_compiler_and_starts_no_cuda():
    result = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["kernels"] >= 5
    assert not found["cuda"]
    assert {"triton", "kpt_moe", "transformers", "jax"}.isdisjoint(found["new"])


def test_the_entry_point_names_it():
    assert backends()["nvidia"] is kpt_backend_nvidia.BACKEND


def test_all_that_is_promised_is_there():
    missing = [name for name in kpt_backend_nvidia.__all__ if not hasattr(kpt_backend_nvidia, name)]
    assert missing == []
