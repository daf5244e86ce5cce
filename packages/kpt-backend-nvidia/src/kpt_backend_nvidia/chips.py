"""NVIDIA's chips by compute capability: their names, what code for them may use, and the peaks of known products.

Two rules decide which code runs where (CUDA C++ Programming Guide, "Binary Compatibility", "PTX Compatibility" and
"Feature Availability"):

- Machine code for X.y runs on X.z with z >= y, on discrete GPUs; the integrated ones (Jetson, Drive) run their own
  alone. So sm86 and sm89 offer `sm80` too, sm103 `sm100` and sm121 `sm120`.
- An instruction of the base set, once there, stays in every later chip (`cp.async`, `mma.sync`, TMA, clusters, FP8);
  those of `sm_90a`, `sm_100f` and the like belong to that chip or family alone (`wgmma`, `tcgen05`, block scales).

That code runs does not mean that a launch fits: shared memory differs inside a family (sm80 has 163 KiB for a block,
sm86 99 KiB), so that is asked from the device (`device_info`).
"""

import re
from functools import cache

from kpt_core import Capability, UnknownNameError
from kpt_optimize.devices import Peaks
from kpt_optimize.devices.products import PRODUCTS as ALL_PRODUCTS
from kpt_triton.chips import NVIDIA

#: What kernels are compiled for.
CHIPS = NVIDIA

#: The oldest compute capability that is served.
OLDEST = (8, 0)

#: Integrated GPUs, which share no machine code with the discrete ones of their generation.
_INTEGRATED = frozenset({(8, 7), (8, 8), (10, 1), (11, 0)})

#: Capability to the first compute capability that has it; every later one does.
_SINCE: dict[Capability, tuple[int, int]] = {
    "cuda": (8, 0),
    "fp16": (8, 0),
    "bf16": (8, 0),
    "tf32": (8, 0),
    "cp_async": (8, 0),
    "mma_sync": (8, 0),
    "fp8_e4m3fn": (8, 9),
    "fp8_e5m2": (8, 9),
    "tma": (9, 0),
    "clusters": (9, 0),
}

#: Capability to the generations that have it; a later one need not.
_ONLY_IN: dict[Capability, frozenset[int]] = {
    "wgmma": frozenset({9}),
    "tcgen05": frozenset({10, 11}),
    "mxfp8": frozenset({10, 11, 12}),
    "nvfp4": frozenset({10, 11, 12}),
}

_GENERATIONS = {
    5: "Maxwell",
    6: "Pascal",
    7: "Volta",
    8: "Ampere",
    9: "Hopper",
    10: "Blackwell",
    11: "Blackwell",
    12: "Blackwell",
}


#: By the name that the driver gives.
PRODUCTS = ALL_PRODUCTS["nvidia"]


def chip_name(capability: tuple[int, int]) -> str:
    """The name of a chip, for instance `sm90` for compute capability (9, 0)."""
    major, minor = capability
    return f"sm{major}{minor}"


def compute_capability(chip: str) -> tuple[int, int]:
    """The compute capability of a chip, (9, 0) for `sm90`.

    Raises:
        UnknownNameError: it is no such name.
    """
    if re.fullmatch(r"sm[1-9]\d+", chip) is None:
        raise UnknownNameError("chip", chip, CHIPS)
    return int(chip[2:-1]), int(chip[-1])


def generation(capability: tuple[int, int]) -> str:
    """The name of a chip's architecture, for instance `Hopper`; `unknown` for one that is not listed."""
    if capability == (7, 5):
        return "Turing"
    if capability == (8, 9):
        return "Ada"
    return _GENERATIONS.get(capability[0], "unknown")


def unsupported(capability: tuple[int, int]) -> str | None:
    """Why a chip is not served, as a sentence, or None."""
    if capability >= OLDEST:
        return None
    major, minor = capability
    name = generation(capability)
    return (
        f"compute capability {major}.{minor} ({chip_name(capability)}, {name}) is not supported: KPT's kernels need "
        "8.0 (sm80, Ampere) or newer"
    )


@cache
def capabilities_of(capability: tuple[int, int]) -> frozenset[Capability]:
    """Return what a chip of a compute capability can do, in KPT's words.

    A chip newer than those known here has the base set, which stays, and none of what belongs to a family.

    Args:
        capability: major and minor number, as `torch.cuda.get_device_capability` gives them.

    Returns:
        The features, the chip's own name (`sm103`) and that of the family whose code it runs (`sm100`). For a chip
        that is too old it is the name alone, so that no kernel that needs anything runs there.
    """
    name = chip_name(capability)
    if unsupported(capability):
        return frozenset({name})
    major = capability[0]
    found = {feature for feature, first in _SINCE.items() if capability >= first}
    found |= {feature for feature, generations in _ONLY_IN.items() if major in generations}
    family = name if capability in _INTEGRATED else chip_name((major, 0))
    return frozenset(found | {name, family})


def peaks_of(product: str) -> Peaks | None:
    """Return the peaks of a product, for rooflines.

    Args:
        product: as the driver names it, for instance `NVIDIA H100 80GB HBM3` (that is the SXM module).

    Returns:
        None if the product is not listed.
    """
    return PRODUCTS.get(product)
