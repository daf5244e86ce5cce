"""The chips that kernels are compiled for: the compiler's target and the limits of a launch."""

from dataclasses import dataclass
from typing import Any, Literal

from kpt_core import UnknownNameError

Vendor = Literal["nvidia", "amd", "intel", "tpu"]
KIB = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """One target.

    NVIDIA's numbers are those of the CUDA C++ Programming Guide ("Technical Specifications per Compute Capability"),
    AMD's those of LLVM's AMDGPU backend (`getLocalMemorySize`, `getMaxWavesPerEU`), Intel's those of the oneAPI GPU
    optimisation guide. On a TPU the compiler itself
    refuses what does not fit, so no limit is needed here.

    Attributes:
        name: as in `sm90`, `gfx942`, `v5e`.
        vendor: decides compiler, instructions and words of a contract.
        example: a product that has it.
        target: what the compiler is asked for: an architecture, or the topology of a TPU.
        warp: threads of a warp (wave).
        block_memory: bytes of shared memory (LDS) that one block may have.
        unit_memory: bytes of shared memory (LDS) that the blocks on one multiprocessor share. The unit of gfx11 and
            gfx12 is the workgroup processor, whose two compute units share it.
        unit_warps: warps that one multiprocessor holds.
        unit_blocks: blocks that one multiprocessor holds.
        unit_registers: 32-bit registers of one multiprocessor; 0 where the compiler gives the occupancy.
        reserved: bytes of shared memory that the driver takes of each block.
    """

    name: str
    vendor: Vendor
    example: str
    target: int | str
    warp: int = 0
    block_memory: int | None = None
    unit_memory: int = 0
    unit_warps: int = 0
    unit_blocks: int = 0
    unit_registers: int = 0
    reserved: int = 0

    @property
    def memory_word(self) -> str:
        """Return what a contract calls the memory that a kernel manages itself."""
        return {"nvidia": "smem", "amd": "lds", "intel": "slm", "tpu": "vmem"}[self.vendor]


def _gpu(vendor: Vendor, name: str, example: str, *, warp: int, block: int, unit: int, **more: Any) -> Chip:
    """Return a chip whose memories are given in KiB."""
    memory = {"block_memory": block * KIB, "unit_memory": unit * KIB}
    return Chip(name=name, vendor=vendor, example=example, warp=warp, **memory, **more)


def _nvidia(capability: int, example: str, block: int, unit: int, warps: int, blocks: int) -> Chip:
    more = {"target": capability, "unit_warps": warps, "unit_blocks": blocks, "unit_registers": 65536, "reserved": KIB}
    return _gpu("nvidia", f"sm{capability}", example, warp=32, block=block, unit=unit, **more)


def _amd(name: str, example: str, wave: int, block: int, unit: int, waves: int) -> Chip:
    more = {"target": name, "unit_warps": waves, "unit_blocks": waves}
    return _gpu("amd", name, example, warp=wave, block=block, unit=unit, **more)


def _intel(name: str, example: str, block: int, unit: int) -> Chip:
    return _gpu("intel", name, example, warp=16, block=block, unit=unit, target=name)  # a DPAS is of 16 threads


def _tpu(name: str, example: str, topology: str) -> Chip:
    return Chip(name=name, vendor="tpu", example=example, target=topology)


#: Every known chip by name.
CHIPS = {
    chip.name: chip
    for chip in (
        _nvidia(80, "A100", block=163, unit=164, warps=64, blocks=32),
        _nvidia(86, "A10", block=99, unit=100, warps=48, blocks=16),
        _nvidia(89, "L40S", block=99, unit=100, warps=48, blocks=24),
        _nvidia(90, "H100", block=227, unit=228, warps=64, blocks=32),
        _nvidia(100, "B200", block=227, unit=228, warps=64, blocks=32),
        _nvidia(120, "RTX 5090", block=99, unit=100, warps=48, blocks=24),
        _amd("gfx90a", "MI250", wave=64, block=64, unit=64, waves=32),
        _amd("gfx942", "MI300X", wave=64, block=64, unit=64, waves=32),
        _amd("gfx950", "MI355X", wave=64, block=160, unit=160, waves=32),
        _amd("gfx1100", "RX 7900 XTX", wave=32, block=64, unit=128, waves=64),
        _amd("gfx1201", "RX 9070 XT", wave=32, block=64, unit=128, waves=64),
        _intel("pvc", "Max 1550", block=128, unit=512),
        _intel("bmg_g21", "Arc B580", block=128, unit=256),
        _tpu("v4", "TPU v4", "v4:2x2x1"),
        _tpu("v5e", "TPU v5e", "v5e:2x2"),
        _tpu("v5p", "TPU v5p", "v5p:2x2x1"),
        _tpu("v6e", "TPU v6e", "v6e:2x2"),
        _tpu("tpu7x", "TPU7x", "tpu7x:2x2x1"),
    )
}


def chip_named(name: str) -> Chip:
    """Return the chip of that name, or raise `UnknownNameError`, whose message offers the nearest."""
    if name not in CHIPS:
        raise UnknownNameError("chip", name, CHIPS)
    return CHIPS[name]
