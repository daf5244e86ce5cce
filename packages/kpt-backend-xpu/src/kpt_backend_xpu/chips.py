"""Tell what Intel's GPUs can do, by what `torch.xpu` knows of a device, and which of them KPT's kernels serve.

A device tells most by itself: whether it has matrix units (DPAS, which Intel calls XMX), bfloat16, 64-bit numbers and
loads of two-dimensional blocks. Sources: the oneAPI GPU optimisation guide, and OpenCL's extensions of Intel.
"""

from types import SimpleNamespace
from typing import Any

from kpt_core import Capability
from kpt_optimize.devices.products import PRODUCTS as ALL_PRODUCTS
from kpt_triton.chips import INTEL, architecture_of, intel_chip

__all__ = ["CHIPS", "PRODUCTS", "capabilities_of", "chip_of", "generation", "properties_of", "unsupported"]

#: What kernels are compiled for.
CHIPS = INTEL

_GENERATIONS = {
    **dict.fromkeys(("acm_g10", "acm_g11", "acm_g12"), "Xe-HPG"),
    **dict.fromkeys(("pvc", "pvc_vg"), "Xe-HPC"),
    **dict.fromkeys(("mtl_u", "mtl_h"), "Xe-LPG"),
    "arl_h": "Xe-LPG+",
    **dict.fromkeys(("bmg_g21", "bmg_g31", "lnl_m"), "Xe2"),
}
#: What torch calls a fact, and KPT's word for it.
_FACTS = {
    "has_fp16": "fp16",
    "has_bfloat16_conversions": "bf16",
    "has_fp64": "fp64",
    "has_subgroup_matrix_multiply_accumulate": "dpas",
    "has_subgroup_2d_block_io": "block_io",
}


#: What torch tells of every chip of a generation.
_FACTS_OF = {
    "Xe-HPC": tuple(_FACTS),
    "Xe2": tuple(_FACTS),
    "Xe-HPG": ("has_fp16", "has_bfloat16_conversions", "has_subgroup_matrix_multiply_accumulate"),
}
#: By the name that the driver gives.
PRODUCTS = ALL_PRODUCTS["xpu"]


def properties_of(product: str, chip: str) -> Any:
    """Return what torch would tell of a device that is not here, as far as its generation decides it."""
    facts = dict.fromkeys(_FACTS_OF.get(generation(chip), ()), True)
    return SimpleNamespace(name=product, architecture=architecture_of(chip), **facts)


def chip_of(properties: Any) -> str:
    """Return the name of a device's chip by torch's properties of it, as in `pvc`."""
    return intel_chip(int(getattr(properties, "architecture", 0)))


def generation(chip: str) -> str:
    """Return the architecture of a chip, for instance `Xe-HPC`; `unknown` for one that is not listed."""
    return _GENERATIONS.get(chip, "unknown")


def capabilities_of(properties: Any) -> frozenset[Capability]:
    """Return what a device can do, in KPT's words, with its chip's own name."""
    found = {word for fact, word in _FACTS.items() if getattr(properties, fact, False)}
    return frozenset({"xpu", chip_of(properties), *found})


def unsupported(properties: Any) -> str | None:
    """Return why a device is not served, as a sentence, or None."""
    chip = chip_of(properties)
    missing = sorted({"dpas", "bf16"} - capabilities_of(properties))
    if missing:
        return f"{chip} is not supported: it lacks {' and '.join(missing)}"
    # The DPAS of Arc A and Arrow Lake is of 8 threads: Intel's Triton 3.3 crashes where it compiles products for it.
    if generation(chip) in ("Xe-HPC", "Xe2"):
        return None
    return f"{chip} is not supported: KPT's kernels are compiled and checked for {', '.join(CHIPS)} and their like"
