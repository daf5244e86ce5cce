"""What the contracts share: launches of a program, types of arguments, clauses for each chip."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from kpt_triton.chips import AMD, INTEL, MEMORY, NVIDIA
from kpt_triton.tile import Tile

#: Names of types as signatures have them.
BF16, FP16, FP32, E4M3, E5M2 = "bf16", "fp16", "fp32", "fp8e4nv", "fp8e5"

#: The larger instructions, which tiles of 64 rows and more can have.
_TALL = {"sm90": "wgmma", "sm100": "tcgen05"}
_KIND = {BF16: "bf16", FP16: "f16"}

_NO_TMA = "not offered: it has no loads by descriptors"
_NO_OWN_WARPS = {
    "sm90": "not offered: Triton 3.6 and 3.9 leave this loop's warps as they are (8 of them) or fail (4)",
    **dict.fromkeys(("sm80", "sm86", "sm89", *AMD, *INTEL), _NO_TMA),
}

#: The tiles of a program on a chip.
Tiles = Callable[[str], Iterable[Tile]]


def launches(
    tiles: Tiles, constants: Callable[[Tile], Mapping[str, Any]], fixed: Mapping[str, Any]
) -> Callable[[str], Mapping[str, Mapping[str, Any]]]:
    """The launches of a kernel: its tiles, with the constexprs that follow from a tile, and those that do not."""
    return lambda chip: {str(tile): {**constants(tile), **fixed, **tile.options()} for tile in tiles(chip)}


def blocks(tile: Tile) -> dict[str, int]:
    """The constexprs that follow from a tile."""
    return {"BLOCK_M": tile.m, "BLOCK_N": tile.n, "BLOCK_K": tile.k, "GROUP": tile.group}


def products(dtype: str, *, tall: bool = True, loads: str = "cp.async") -> dict[str, str]:
    """The contract of each chip for products of a 16-bit type.

    Args:
        dtype: of what is multiplied.
        tall: tiles have 64 rows or more.
        loads: how NVIDIA's chips read the operands.
    """
    found = {}
    for chip, memory in MEMORY.items():
        if chip in INTEL:
            found[chip] = f"dpas of {_KIND[dtype]}, {memory}"
            continue
        if chip in AMD:
            clauses = f"{'v_mfma' if chip.startswith('gfx9') else 'v_wmma'} of {_KIND[dtype]}"
        else:
            instruction = _TALL.get(chip, "mma.sync") if tall else "mma.sync"
            # tcgen05 does not tell 16-bit types apart.
            kind = "" if instruction == "tcgen05" else f" of {_KIND[dtype]}"
            clauses = f"{instruction}{kind}, {loads}"
        found[chip] = f"{clauses}, no spills, {memory}"
    return found


def products_by_descriptors(dtype: str) -> dict[str, str]:
    """Likewise, where operands are read by descriptors."""
    return products(dtype, loads="tma") | dict.fromkeys(("sm80", "sm86", "sm89", *AMD, *INTEL), _NO_TMA)


def products_with_own_warps(dtype: str) -> dict[str, str]:
    """Likewise, where loads have warps of their own too."""
    return products(dtype, loads="tma, setmaxnreg") | _NO_OWN_WARPS


def lean(loads: str = "") -> dict[str, str]:
    """The contract of each chip for code without matrix instructions; `loads` as NVIDIA's chips do them."""
    first = f"{loads}, " if loads else ""
    found = {chip: f"{first if chip in NVIDIA else ''}no spills, {memory}" for chip, memory in MEMORY.items()}
    found |= {chip: MEMORY[chip] for chip in INTEL}  # SPIR-V has no registers that could spill
    return found


def tf32(*, tall: bool = True) -> dict[str, str]:
    """The contract of each chip for products of float32 by rounded ones; `tall`: of tiles of 64 rows or more."""
    larger = _TALL if tall else {}
    return {
        chip: f"{larger.get(chip, 'mma.sync')}, {clauses}"
        if chip in NVIDIA
        else "not offered: others have full float32"
        for chip, clauses in lean("cp.async").items()
    }


def spilling(contracts: Mapping[str, str], limits: Mapping[str, int], hot: int | None = None) -> dict[str, str]:
    """Let code for some chips spill so many bytes; on NVIDIA's `hot` of them in the shortest loop with products."""
    found = dict(contracts)
    for chip, limit in limits.items():
        allowed = f"spills <= {limit} B"
        if hot is not None and chip in NVIDIA:
            allowed += f", hot <= {hot} B"
        found[chip] = found[chip].replace("no spills", allowed)
    return found


def unaligned(dtype: str, *, tall: bool = True) -> dict[str, str]:
    """The contract of each chip for products whose numbers are loaded one by one."""
    return {chip: clauses.replace("cp.async, ", "") for chip, clauses in products(dtype, tall=tall).items()}


def unaligned_fp32() -> dict[str, str]:
    """The contract of each chip for float32 that is loaded number by number; ptxas spills a few bytes for occupancy."""
    return {chip: clauses.replace("no spills", "spills <= 32 B") for chip, clauses in lean().items()}


def pointers(names: str, dtype: str) -> dict[str, str]:
    """Aligned pointers of one type."""
    return dict.fromkeys(names.split(), f"*{dtype}:16")


def integers(names: str, hint: str = ":16") -> dict[str, str]:
    """32-bit integers, multiples of 16 unless `hint` says else."""
    return dict.fromkeys(names.split(), f"i32{hint}")
