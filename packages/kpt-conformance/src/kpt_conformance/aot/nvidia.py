"""Compiling for NVIDIA with Triton, and where each number comes from.

- registers, spills, stack: the report of `ptxas -v`, which Triton's wheel carries and Triton runs. Spills are the
  larger of spill stores and spill loads.
- shared memory, tensor memory, warps: the metadata of Triton's compiled kernel, whose launcher uses them. With warp
  specialisation there are more warps than `num_warps`.
- instructions: the PTX.
- occupancy: computed from these and the chip's limits, as in NVIDIA's occupancy calculator.
"""

import re
from typing import Any

from .chips import Chip
from .instructions import find_instructions
from .reading import Reading

#: Registers are given out to a warp in pieces of this size.
_REGISTER_UNIT = 256


def read_nvidia(chip: Chip, compiled: Any, log: str) -> Reading:
    """Read what Triton compiled.

    Args:
        chip: that it was compiled for.
        compiled: Triton's `CompiledKernel`.
        log: the report of ptxas.

    Raises:
        RuntimeError: the report has not the expected lines.
    """
    registers = [int(number) for number in re.findall(r"Used (\d+) registers", log)]
    frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    if not registers or not frames:
        raise RuntimeError(f"ptxas did not report registers and spills; it said {log.strip()!r:.300}")
    shared, warps = int(compiled.metadata.shared), int(compiled.metadata.num_warps)
    return Reading(
        registers=max(registers),
        spills=sum(max(int(stores), int(loads)) for _, stores, loads in frames),
        stack=sum(int(frame) for frame, _, _ in frames),
        shared_memory=shared,
        tensor_memory=getattr(compiled.metadata, "tmem_size", None),
        warps=warps,
        occupancy=_occupancy(chip, max(registers), warps, shared),
        instructions=find_instructions("nvidia", compiled.asm["ptx"]),
        notes=tuple(sorted({_tidy(line) for line in log.splitlines() if "Potential Performance Loss" in line})),
    )


def _tidy(line: str) -> str:
    return line[line.index("Potential") :].strip()


def _occupancy(chip: Chip, registers: int, warps: int, shared: int) -> int:
    """Warps that one multiprocessor holds at once."""
    of_a_warp = -(-registers * chip.warp // _REGISTER_UNIT) * _REGISTER_UNIT
    blocks = min(
        chip.unit_blocks,
        chip.unit_warps // warps,
        chip.unit_registers // (of_a_warp * warps),
        chip.unit_memory // (shared + chip.reserved),
    )
    return blocks * warps
