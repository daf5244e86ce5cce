"""The backend for Intel GPUs: what is here, a layer on whatever serves it, and what would serve and be compiled there.

Without an Intel GPU the parts that need one say so in a sentence.
"""

import os
from typing import Any

import torch
from triton.backends import backends as compilers

import kpt_core
import kpt_fp8  # noqa: F401  registers its ops
from kpt_attention import attention  # noqa: F401  likewise
from kpt_backend_xpu import BACKEND, CHIPS, DeviceManager, environment
from kpt_conformance import aot
from kpt_moe import MoEConfig, MoELayer
from kpt_optimize.cases import Case, case_tables
from kpt_optimize.devices.targets import served, target_of

_HEADS: dict[str, Any] = {"kv_heads": 2, "groups": 4, "head_dim": 64, "value_dim": 64}
#: Op, and sizes of a call that is asked about.
CALLS: dict[str, dict[str, Any]] = {
    "attention.dense": {**_HEADS, "batch": 1, "queries": 256, "keys": 256, "mask": "causal", "return_lse": False},
    "attention.paged": {**_HEADS, "page_size": 16},
    "fp8.linear": {"rows": 64, "inner": 64, "columns": 64},
    "moe.experts": {"tokens": 64, "hidden": 64, "inner": 64, "num_experts": 8, "top_k": 2},
}


def show_machine() -> None:
    """Print the software around the device, and the devices."""
    found = environment()
    print(f"torch {found.torch}, driver {found.driver}, triton {found.triton}")
    print(f"kernels are compiled for {', '.join(CHIPS)}")
    for sentence in (*found.problems, *found.advice):
        print(f"  {sentence}")
    for device in DeviceManager().devices:
        print(f"  xpu:{device.index}: {device.name} ({device.chip}), {', '.join(sorted(device.capabilities))}")


def show_layer() -> None:
    """Run a layer on what is here, and print why Intel's kernels did not serve it, if they did not."""
    device = "xpu" if BACKEND.unavailable() is None else "cpu"
    layer = MoELayer(MoEConfig(hidden_size=64, num_experts=8, top_k=2, intermediate_size=128)).to(device)
    with kpt_core.record() as selections:
        layer(torch.randn(32, 64, device=device))
    print(f"moe on {device}: {selections[-1].kernel} of {selections[-1].backend}")
    for refusal in selections[-1].refusals:
        if refusal.backend == BACKEND.name:
            print(f"  not {refusal}")


def show_plan() -> None:
    """Print what would serve on an Arc B580, in bfloat16: dispatch is asked as it is there, and nothing runs."""
    target = target_of("B580")
    print(f"on {target.product} ({target.chip}) would serve")
    for name, sizes in CALLS.items():
        made = case_tables()[name].arguments(Case(name="", sizes=sizes), dtype=torch.bfloat16)
        on_meta = {key: value.to("meta") if isinstance(value, torch.Tensor) else value for key, value in made.items()}
        found = served(kpt_core.get_op(name), kpt_core.get_op(name).bind(**on_meta), target)
        print(f"  {name}: {found.kernel.forward if found.kernel else 'the reference'} of {found.backend}")


def show_code() -> None:
    """Print what the kernels become on Intel's chips: matrix instructions (DPAS), and whether contracts hold."""
    if "intel" not in compilers:
        print(f"code for {', '.join(CHIPS)}: not shown: the Triton here compiles for {', '.join(sorted(compilers))};")
        print("  Intel's, which `nox -s xpu` installs, does with PYTHONPATH=.nox/xpu")
        return
    os.environ.setdefault("KPT_AOT_TILES", "usual")  # not every tile that tuning may choose
    for row in aot.run(backends=[BACKEND.name], chips=CHIPS[:1]):  # it takes minutes
        matrix = sum(number for name, number in row.instructions.items() if "dpas" in name.lower())
        print(f"  {row.chip} {row.op} {row.program} {row.configuration}: {row.status}, {matrix} of DPAS")


if __name__ == "__main__":
    show_machine()
    show_layer()
    show_plan()
    show_code()
