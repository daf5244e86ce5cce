"""AMD's chips by LLVM's name: their generation, what code for them may use, and the peaks of known products.

Code for one chip runs on no other: there is no family of binaries as NVIDIA has. Numbers of 8 bits differ: gfx942 has
the *fnuz* forms alone (one NaN, no negative zero, e4m3 up to 240), gfx950 and gfx12 those of the Open Compute Project
(e4m3 up to 448), which PyTorch calls `float8_e4m3fn` and `float8_e5m2`. Sources: the instruction sets of CDNA2, CDNA3,
CDNA4, RDNA3 and RDNA4.
"""

from functools import cache

from kpt_core import Capability
from kpt_optimize.devices import Peaks
from kpt_optimize.devices.products import PRODUCTS as ALL_PRODUCTS
from kpt_triton.chips import AMD

#: What kernels are compiled for.
CHIPS = AMD

_GENERATIONS = {
    "gfx90a": "CDNA2",
    "gfx942": "CDNA3",
    "gfx950": "CDNA4",
    **dict.fromkeys(("gfx1100", "gfx1101", "gfx1102"), "RDNA3"),
    **dict.fromkeys(("gfx1200", "gfx1201"), "RDNA4"),
}
_OF_GENERATION: dict[str, frozenset[Capability]] = {
    "CDNA2": frozenset({"mfma", "wave64"}),
    "CDNA3": frozenset({"mfma", "wave64", "fp8_e4m3fnuz", "fp8_e5m2fnuz"}),
    "CDNA4": frozenset({"mfma", "wave64", "fp8_e4m3fn", "fp8_e5m2", "mxfp8", "mxfp4"}),
    "RDNA3": frozenset({"wmma", "wave32"}),
    "RDNA4": frozenset({"wmma", "wave32", "fp8_e4m3fn", "fp8_e5m2"}),
}

#: By the name that the driver gives.
PRODUCTS = ALL_PRODUCTS["amd"]


def chip_name(arch: str) -> str:
    """Return the name of a chip of what the driver calls it: `gfx942` of `gfx942:sramecc+:xnack-`."""
    return arch.split(":")[0]


def generation(chip: str) -> str:
    """Return the architecture of a chip, for instance `CDNA3`; `unknown` for one that is not listed."""
    return _GENERATIONS.get(chip, "unknown")


def unsupported(chip: str) -> str | None:
    """Return why a chip is not served, as a sentence, or None."""
    if chip in _GENERATIONS:
        return None
    return f"{chip} is not supported: KPT's kernels are compiled and checked for {', '.join(CHIPS)} and their like"


@cache
def capabilities_of(chip: str) -> frozenset[Capability]:
    """Return what a chip can do, in KPT's words, with its own name; that alone for one that is not served."""
    if unsupported(chip):
        return frozenset({chip})
    return _OF_GENERATION[generation(chip)] | {"hip", "fp16", "bf16", chip}


def peaks_of(product: str) -> Peaks | None:
    """Return the peaks of a product as the driver names it, for rooflines; None if it is not listed."""
    return PRODUCTS.get(product)
