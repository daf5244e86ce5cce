"""Reading what Triton compiled for GPUs, and where each number comes from.

NVIDIA:

- registers, spills, stack: the report of `ptxas -v`, which Triton's wheel carries and Triton runs. Spills are the
  larger of spill stores and spill loads.
- shared memory, tensor memory, warps: the metadata of Triton's compiled kernel, whose launcher uses them. With warp
  specialisation there are more warps than `num_warps`.
- hot: the code itself, as `nvdisasm` of Triton's wheel shows it, of kernels that spill; of the loops with products of
  matrices and no loop in them the one of fewest instructions, which a kernel of two has for what no mask touches.
- instructions: the PTX.
- occupancy: computed from these and the chip's limits, as in NVIDIA's occupancy calculator.

AMD:

- registers, spills, stack: the `.amdgpu_metadata` at the end of LLVM's assembly: `.vgpr_count` (accumulation registers
  included, where there is one file for both), `.vgpr_spill_count` at 4 bytes each, `.private_segment_fixed_size`.
  Scalar registers that spill go to lanes of vector registers, not to memory, and do not count.
- shared memory, warps: the metadata of Triton's compiled kernel; the assembly's own LDS size is 0, because Triton asks
  for LDS at launch.
- instructions: the assembly.
- occupancy: LLVM's `; Occupancy:` (waves of one SIMD, from registers alone), times four SIMDs, and no more than the LDS
  allows.

Intel:

- what is compiled is SPIR-V, of which the driver makes code on the machine: no registers, spills or occupancy.
- shared memory, warps: the metadata of Triton's compiled kernel.
- instructions: DPAS is a call of a built-in function in LLVM's code, named for its operands; here `dpas.bf16.bf16`.
"""

import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from .chips import Chip
from .readings import Reading, find_instructions

#: NVIDIA's registers are given out to a warp in pieces of this size.
_REGISTER_UNIT = 256
#: Bytes of loads and stores that are wider than a register.
_WIDE = {".64": 8, ".128": 16}
#: SIMDs of one of AMD's compute units.
_SIMDS = 4


def read_nvidia(chip: Chip, compiled: Any, log: str) -> Reading:
    """Read a `CompiledKernel` for NVIDIA and the report of ptxas; raise `RuntimeError` if that is not as expected."""
    registers = [int(number) for number in re.findall(r"Used (\d+) registers", log)]
    frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    if not registers or not frames:
        raise RuntimeError(f"ptxas did not report registers and spills; it said {log.strip()!r:.300}")
    shared, warps = int(compiled.metadata.shared), int(compiled.metadata.num_warps)
    spills = sum(max(int(stores), int(loads)) for _, stores, loads in frames)
    return Reading(
        registers=max(registers),
        spills=spills,
        hot=spills_of_hot_loop(_disassembled(compiled.asm["cubin"])) if spills else 0,
        stack=sum(int(frame) for frame, _, _ in frames),
        shared_memory=shared,
        tensor_memory=getattr(compiled.metadata, "tmem_size", None),
        warps=warps,
        occupancy=_occupancy(chip, max(registers), warps, shared),
        instructions=find_instructions("nvidia", compiled.asm["ptx"]),
        notes=tuple(sorted(set(re.findall(r"Potential Performance Loss.*", log)))),
    )


def _disassembled(cubin: bytes) -> str:
    from triton.knobs import nvidia

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.cubin")
        file.write_bytes(cubin)
        return subprocess.run([nvidia.nvdisasm.path, "-c", file], capture_output=True, text=True, check=True).stdout


def spills_of_hot_loop(sass: str) -> int:
    """Return the bytes of spilled registers that the shortest innermost loop with products writes and reads."""
    places: dict[str, int] = {}
    code: list[str] = []
    for line in sass.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            places[label[1]] = len(code)
        elif instruction := re.search(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            code.append(instruction[1])
    loops = [
        range(places[jump[1]], end + 1)
        for end, each in enumerate(code)
        if (jump := re.search(r"\bBRA\b.*`\((\.L_x_\d+)\)", each)) and places.get(jump[1], end + 1) <= end
    ]
    hot: list[range] = []
    for loop in loops:
        inner = any(loop.start <= other.start and other.stop <= loop.stop and other != loop for other in loops)
        if not inner and any(re.search(r"H[GM]*MMA|QGMMA|IMMA", code[place]) for place in loop):
            hot.append(loop)
    if not hot:
        return 0
    found = (re.search(r"\b(?:LDL|STL)((?:\.\w+)*)", code[place]) for place in min(hot, key=len))
    return sum(next((size for kind, size in _WIDE.items() if kind in each[1]), 4) for each in found if each)


def _occupancy(chip: Chip, registers: int, warps: int, shared: int) -> int:
    """Return how many warps one multiprocessor holds at once."""
    of_a_warp = -(-registers * chip.warp // _REGISTER_UNIT) * _REGISTER_UNIT
    blocks = min(
        chip.unit_blocks,
        chip.unit_warps // warps,
        chip.unit_registers // (of_a_warp * warps),
        chip.unit_memory // (shared + chip.reserved),
    )
    return blocks * warps


def read_amd(chip: Chip, compiled: Any, log: str) -> Reading:
    """Read one for AMD; there is no report."""
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


def read_intel(chip: Chip, compiled: Any, log: str) -> Reading:
    """Read one for Intel; there is no report."""
    operands = re.findall(r"call[^@\n]*@\w*intel_sub_group_(\w+?)_matrix_mad", compiled.asm["llir"])
    return Reading(
        shared_memory=int(compiled.metadata.shared),
        warps=int(compiled.metadata.num_warps),
        instructions=dict(Counter(f"dpas.{found.replace('_', '.')}" for found in sorted(operands))),
    )


def _number(assembly: str, pattern: str) -> int:
    found = re.findall(pattern, assembly, re.MULTILINE)
    if not found:
        raise RuntimeError(f"the assembly has no line like {pattern!r}")
    return max(map(int, found))
