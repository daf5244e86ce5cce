"""The ops of this package and their kernels in plain PyTorch, for the entry-point group `kpt.ops`."""

from kpt_core import Kernel
from kpt_core.contract import GPU

from .dense import dense
from .merge import merge
from .paged import paged, update_cache

_HERE = f"{__package__}.torch_kernels"

OPS = (
    dense,
    merge,
    paged,
    update_cache,
    Kernel(
        "attention.dense",
        forward=f"{_HERE}.sdpa:forward",
        unsupported=f"{_HERE}.sdpa:unsupported",
        requires={"host_memory"},
        priority=10,
    ),
    Kernel(
        "attention.dense",
        forward=f"{_HERE}.gpu_sdpa:forward",
        unsupported=f"{_HERE}.gpu_sdpa:unsupported",
        requires={GPU},
        priority=10,
        differentiable=True,
        traceable=True,
    ),
    Kernel(
        "attention.dense",
        forward=f"{_HERE}.gpu_flex:forward",
        unsupported=f"{_HERE}.gpu_flex:unsupported",
        requires={GPU},
        priority=5,
        differentiable=True,
    ),
    Kernel(
        "attention.dense",
        forward=f"{_HERE}.tiles:forward",
        backward=f"{_HERE}.tiles:backward",
        deterministic=True,
    ),
    Kernel("attention.merge", forward=f"{_HERE}.gpu_merge:forward", requires={GPU}, differentiable=True),
    Kernel(
        "attention.paged",
        forward=f"{_HERE}.gpu_paged:forward",
        unsupported=f"{_HERE}.gpu_paged:unsupported",
        requires={GPU},
        priority=10,
        deterministic=True,
    ),
    Kernel(
        "attention.paged",
        forward=f"{_HERE}.gpu_paged:prefill",
        unsupported=f"{_HERE}.gpu_paged:unsupported_prefill",
        requires={GPU},
        priority=9,
        composed_of=("attention.dense",),
    ),
    Kernel(
        "attention.update_cache",
        forward=f"{_HERE}.gpu_paged:update",
        requires={GPU},
        priority=10,
        deterministic=True,
    ),
    Kernel("attention.paged", forward=f"{_HERE}.paged:forward", deterministic=True),
    Kernel("attention.update_cache", forward=f"{_HERE}.paged:update", requires={"host_memory"}, deterministic=True),
)
