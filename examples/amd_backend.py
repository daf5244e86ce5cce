"""The AMD backend: what is here, what each chip can do, and what a kernel becomes on a chip that is not here.

Without ROCm the parts that need a device say so in a sentence; compiling needs Triton alone.
"""

import torch
import triton
import triton.language as tl

import kpt_core
from kpt_backend_amd import BACKEND, CHIPS, DeviceManager, ROCmCompiler, capabilities_of, environment
from kpt_moe import MoEConfig, MoELayer


@triton.jit
def product(x, y, out, n, BLOCK: tl.constexpr):  # noqa: ANN001, ANN201
    """A product of two square tiles."""
    place = tl.arange(0, BLOCK)[:, None] * n + tl.arange(0, BLOCK)[None, :]
    tl.store(out + place, tl.dot(tl.load(x + place), tl.load(y + place)))


def show_machine() -> None:
    """The software around the device, and the devices."""
    found = environment()
    print(f"torch {found.torch}, ROCm {found.hip}, triton {found.triton}")
    for problem in found.problems:
        print(f"  problem: {problem}")
    for device in DeviceManager().devices:
        print(f"  cuda:{device.index}: {device.name} ({device.chip}), {device.multiprocessors} compute units")


def show_layer() -> None:
    """The same layer on whatever is here, and why not on the others' kernels."""
    device = "cuda" if BACKEND.unavailable() is None else "cpu"
    layer = MoELayer(MoEConfig(hidden_size=64, num_experts=8, top_k=2, intermediate_size=128)).to(device)
    with kpt_core.record() as selections:
        layer(torch.randn(32, 64, device=device))
    print(f"moe on {device}: {selections[-1].kernel} of {selections[-1].backend}")


def show_compiler() -> None:
    """What a product of 64 by 64 needs on each chip."""
    types = {"x": "*bf16:16", "y": "*bf16:16", "out": "*fp32:16", "n": "i32:16"}
    for chip in CHIPS:
        made = ROCmCompiler(chip).compile(product, types, {"BLOCK": 64})
        matrix = "matrix instructions" if made.matrix else "no matrix instructions"
        print(
            f"{chip:8} {made.registers} registers, {made.spills} spills, {made.lds >> 10} KiB of local memory, {matrix}"
        )
        print(f"         {', '.join(sorted(capabilities_of(chip)))}")


if __name__ == "__main__":
    show_machine()
    show_layer()
    show_compiler()
