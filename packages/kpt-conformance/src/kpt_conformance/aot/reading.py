"""What was read from one kernel as compiled for one chip, and which of it a launch would refuse."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from .chips import KIB, Chip

#: Columns of tensor memory that one block of sm100 may have.
TENSOR_MEMORY = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Numbers from a compiler's output; `nvidia.py`, `amd.py` and `tpu.py` say where each comes from.

    Attributes:
        failure: why the compiler refused, None if it compiled.
        registers: 32-bit registers of one thread.
        spills: bytes of registers that one thread writes to memory for lack of room; on a TPU, bytes of vector
            registers that the program does.
        stack: bytes of local memory of one thread, spills included.
        shared_memory: bytes of memory that the kernel manages itself: shared memory of a block, LDS, VMEM.
        tensor_memory: columns of tensor memory of a block (sm100).
        warps: of one block.
        occupancy: warps that one multiprocessor (compute unit, on gfx11 and gfx12 workgroup processor) holds at once.
        instructions: how often each instruction that a contract may ask for stands in the code, by its full name.
        notes: what the compiler said of the code's speed.
    """

    failure: str | None = None
    registers: int | None = None
    spills: int | None = None
    stack: int | None = None
    shared_memory: int | None = None
    tensor_memory: int | None = None
    warps: int | None = None
    occupancy: int | None = None
    instructions: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def launch_refusal(self, chip: Chip) -> str | None:
        """Why a driver would refuse to launch what was compiled, or None.

        Triton finds this when a kernel is first launched; compiling alone never does.
        """
        memory, limit = self.shared_memory or 0, chip.block_memory
        if limit is not None and memory > limit:
            return (
                f"needs {memory / KIB:.1f} KiB of {chip.memory_word}, but a block of {chip.name} has {limit / KIB:g}"
                " KiB; use smaller tiles or fewer stages"
            )
        if self.tensor_memory is not None and self.tensor_memory > TENSOR_MEMORY:
            return f"needs {self.tensor_memory} columns of tensor memory, but a block has {TENSOR_MEMORY}"
        if self.occupancy == 0:
            return (
                f"{self.warps} warps of {self.registers} registers do not fit on a multiprocessor of {chip.name};"
                " use fewer warps"
            )
        return None
