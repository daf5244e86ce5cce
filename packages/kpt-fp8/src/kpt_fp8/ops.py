"""The ops of this package and their kernels in plain PyTorch, for the entry-point group `kpt.ops`."""

from kpt_core import Kernel
from kpt_core.contract import GPU

from .dequantize import dequantize
from .linear import linear
from .quantize import quantize
from .scaled_mm import scaled_mm

_HERE = f"{__package__}.torch_kernels"
#: They look at codes on the host.
_HOST = frozenset({"host_memory"})

KERNELS = (
    Kernel("fp8.dequantize", forward=f"{_HERE}.dequantize:forward", requires=_HOST, deterministic=True),
    Kernel("fp8.dequantize", forward=f"{_HERE}.gpu_dequantize:forward", requires={GPU}, deterministic=True),
    Kernel(
        "fp8.linear",
        forward=f"{_HERE}.linear:forward",
        backward=f"{_HERE}.linear:backward",
        requires=_HOST,
        composed_of=("fp8.quantize", "fp8.dequantize"),
        deterministic=True,
    ),
    Kernel(
        "fp8.linear",
        forward=f"{_HERE}.gpu_linear:forward",
        backward=f"{_HERE}.gpu_linear:backward",
        unsupported=f"{_HERE}.gpu_linear:unsupported",
        requires={GPU},
        priority=10,
        composed_of=("fp8.quantize", "fp8.dequantize", "fp8.scaled_mm"),
    ),
    Kernel(
        "fp8.scaled_mm",
        forward=f"{_HERE}.gpu_scaled_mm_wide:forward",
        unsupported=f"{_HERE}.gpu_scaled_mm_wide:unsupported",
        requires={GPU},
        priority=10,
    ),
    Kernel("fp8.scaled_mm", forward=f"{_HERE}.scaled_mm:forward", requires=_HOST, deterministic=True),
)

OPS = (dequantize, linear, quantize, scaled_mm, *KERNELS)
"""The ops of this package in plain PyTorch that is fast: kernels of the core's backend `torch`."""
