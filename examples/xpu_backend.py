"""The backend for Intel GPUs: what is here, what each chip can do, and the same layer on whatever serves it.

Without an Intel GPU the parts that need one say so in a sentence.
"""

import torch

import kpt_core
from kpt_backend_xpu import BACKEND, CHIPS, DeviceManager, environment
from kpt_moe import MoEConfig, MoELayer


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


if __name__ == "__main__":
    show_machine()
    show_layer()
