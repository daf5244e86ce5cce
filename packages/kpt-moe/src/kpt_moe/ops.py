"""The ops of this package and their kernels in plain PyTorch, for the entry-point group `kpt.ops`."""

from typing import Any

from kpt_core import Kernel

from .experts import experts
from .grouped_mm import grouped_mm, grouped_mm_wgrad
from .scaled_grouped_mm import scaled_grouped_mm
from .top_k_gating import top_k_gating


def _kernel(op: str, forward: str, backward: str, **more: Any) -> Kernel:
    here = f"{__package__}.torch_kernels"
    return Kernel(op, forward=f"{here}.{forward}", backward=f"{here}.{backward}", **more)


def _loop(op: str, forward: str, backward: str) -> Kernel:
    """A kernel that reads on the host where experts end, which is best where that costs nothing."""
    return _kernel(op, forward, backward, requires={"host_memory"}, priority=10, deterministic=True)


KERNELS = (
    _loop("moe.experts", "experts_loop:forward", "experts_loop:backward"),
    _kernel(
        "moe.experts",
        "experts_grouped:forward",
        "experts_grouped:backward",
        composed_of=("moe.grouped_mm", "moe.grouped_mm_wgrad", "moe.scaled_grouped_mm"),
        traceable=True,
    ),
    Kernel(
        "moe.experts",
        forward=f"{__package__}.torch_kernels.experts_plain:forward",
        requires={"host_memory"},
        priority=-10,
        differentiable=True,
        deterministic=True,
    ),
    _loop("moe.grouped_mm", "grouped_mm:loop", "grouped_mm:backward"),
    _kernel("moe.grouped_mm", "grouped_mm:product", "grouped_mm:backward"),
    _loop("moe.grouped_mm_wgrad", "grouped_mm:loop_wgrad", "grouped_mm:backward_wgrad"),
    _kernel("moe.grouped_mm_wgrad", "grouped_mm:product_wgrad", "grouped_mm:backward_wgrad"),
    _loop("moe.scaled_grouped_mm", "scaled_grouped_mm:loop", "scaled_grouped_mm:backward"),
    _kernel("moe.scaled_grouped_mm", "scaled_grouped_mm:tiled", "scaled_grouped_mm:backward"),
)

OPS = (experts, grouped_mm, grouped_mm_wgrad, scaled_grouped_mm, top_k_gating, *KERNELS)
