"""Compiling for AMD with Triton, and where each number comes from.

- registers, spills, stack: the `.amdgpu_metadata` at the end of LLVM's assembly: `.vgpr_count` (accumulation registers
  included, where there is one file for both), `.vgpr_spill_count` at 4 bytes each, `.private_segment_fixed_size`.
  Scalar registers that spill go to lanes of vector registers, not to memory, and do not count.
- shared memory, warps: the metadata of Triton's compiled kernel; the assembly's own LDS size is 0, because Triton asks
  for LDS at launch.
- instructions: the assembly.
- occupancy: LLVM's `; Occupancy:` (waves of one SIMD, from registers alone), times four SIMDs, and no more than the LDS
  allows.
"""

import re
from typing import Any

from .chips import Chip
from .instructions import find_instructions
from .reading import Reading

_SIMDS = 4


def read_amd(chip: Chip, compiled: Any, log: str) -> Reading:
    """Read what Triton compiled.

    Args:
        chip: that it was compiled for.
        compiled: Triton's `CompiledKernel`.
        log: not used.

    Raises:
        RuntimeError: the assembly has not the expected lines.
    """
    assembly: str = compiled.asm["amdgcn"]
    shared, warps = int(compiled.metadata.shared), int(compiled.metadata.num_warps)
    occupancy = _number(assembly, r"^; Occupancy: (\d+)") * _SIMDS
    if shared:
        occupancy = min(occupancy, chip.unit_memory // shared * warps)
    return Reading(
        registers=_number(assembly, r"^\s*-?\s*\.vgpr_count:\s+(\d+)"),
        spills=_number(assembly, r"^\s*-?\s*\.vgpr_spill_count:\s+(\d+)") * 4,
        stack=_number(assembly, r"^\s*-?\s*\.private_segment_fixed_size:\s+(\d+)"),
        shared_memory=shared,
        warps=warps,
        occupancy=occupancy,
        instructions=find_instructions("amd", assembly),
    )


def _number(assembly: str, pattern: str) -> int:
    found = re.findall(pattern, assembly, re.MULTILINE)
    if not found:
        raise RuntimeError(f"the assembly has no line like {pattern!r}")
    return max(map(int, found))
