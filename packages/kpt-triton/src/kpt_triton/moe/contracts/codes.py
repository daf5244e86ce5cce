"""What is promised of programs that multiply the codes themselves, on chips that have units for them."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kpt_triton.aot import Program
from kpt_triton.chips import SHORT_SUMS
from kpt_triton.contracts import BF16, products

_NO_UNITS = "not offered: it has no units for e4m3fn and e5m2; codes are widened there"
#: What multiplies codes in tiles of 64 rows and more, and in those of fewer.
_UNITS = {
    "sm89": ("mma.sync of e4m3", "mma.sync of e4m3"),
    # Triton widens the codes itself, to float16, where tiles are too small for these.
    "sm90": ("wgmma of e4m3", "mma.sync of f16"),
    "sm100": ("tcgen05 of f8f6f4", "mma.sync of f16"),
    "sm120": ("mma.sync of e4m3", "mma.sync of e4m3"),
    "gfx950": ("v_mfma of f8f6f4", "v_mfma of f8f6f4"),
    "gfx1201": ("v_wmma of fp8", "v_wmma of fp8"),
}


def of_units(*, tall: bool = True, aligned: bool = True) -> dict[str, str]:
    """Return the contract of each chip for codes that are multiplied as they are."""
    found = {}
    for chip, clauses in products(BF16).items():
        if chip not in _UNITS:
            found[chip] = _NO_UNITS
            continue
        units = _UNITS[chip][not tall]
        if chip == "gfx950" and not aligned:  # steps are too short for f8f6f4
            units = "v_mfma of fp8"
        loads = "cp.async, " if chip.startswith("sm") and aligned else ""
        found[chip] = f"{units}, {loads}{clauses[clauses.index('no spills') :]}"
    return found


def multiplying_codes(given: Program) -> Program:
    """Return a program with codes on both sides as each chip multiplies them; none where it has no units for them."""

    def launches(chip: str) -> Mapping[str, Mapping[str, Any]]:
        if chip not in _UNITS:
            return {}
        how = {"CODES": "promoted" if chip in SHORT_SUMS else "native"}
        return {tile: {**launch, **how} for tile, launch in given.launches(chip).items()}

    return replace(given, launches=launches)
