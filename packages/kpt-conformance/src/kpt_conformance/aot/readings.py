"""What is read of one kernel as compiled for one chip, and the line of the matrix that comes of it."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from .chips import KIB, Chip, Vendor

#: Columns of tensor memory that one block of sm100 may have.
TENSOR_MEMORY = 512

#: By vendor and name in a contract: the instruction as a regular expression, without what follows it in its name.
#: NVIDIA's are of PTX, AMD's of the assembly, Intel's of what `read_intel` makes of LLVM's, a TPU's of HLO (`mosaic`)
#: and of the final bundles.
FAMILIES: Mapping[Vendor, Mapping[str, str]] = {
    "nvidia": {
        "wgmma": r"wgmma\.mma_async",
        "tcgen05": r"tcgen05\.mma",
        "mma.sync": r"mma\.sync",
        "tma": r"cp\.async\.bulk\.tensor",
        "cp.async": r"cp\.async\.c[ag]",
        "setmaxnreg": r"setmaxnreg",
        "ldmatrix": r"ldmatrix",
        "stmatrix": r"stmatrix",
    },
    "amd": {
        "v_mfma": r"v_mfma",
        "v_smfmac": r"v_smfmac",
        "v_wmma": r"v_wmma",
        "v_swmmac": r"v_swmmac",
        "v_dot": r"v_dot\d",
        "load_lds": r"(?:global|buffer)_load_lds",
        "buffer_load": r"buffer_load",
        "global_load": r"global_load",
        "ds_read_tr": r"ds_(?:read|load)_(?:b\d+_)?tr",
    },
    "intel": {
        "dpas": r"dpas",
    },
    "tpu": {
        "mosaic": r"tpu_custom_call",
        "mxu": r"vmatmul",
    },
}

#: `ok`: compiled, and the contract holds. `unsupported`, `not offered`: as the contract says. `broken`: compiled, but
#: the contract does not hold. `error`: not compiled, or nothing that could be.
Status = Literal["ok", "unsupported", "not offered", "broken", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """Numbers from a compiler's output; `gpus.py` and `tpu.py` say where each comes from.

    Attributes:
        registers: 32-bit registers of one thread.
        spills: bytes of registers that one thread writes to memory for lack of room; on a TPU, bytes of vector
            registers that the program does.
        hot: the part of them that the shortest innermost loop with products of matrices writes and reads; on NVIDIA's.
        stack: bytes of local memory of one thread, spills included.
        shared_memory: bytes of memory that the kernel manages itself: shared memory of a block, LDS, VMEM.
        occupancy: warps that one multiprocessor (compute unit, on gfx11 and gfx12 workgroup processor) holds at once.
        instructions: how often each instruction that a contract may ask for stands in the code, by its full name.
        notes: what the compiler said of the code's speed.
    """

    registers: int | None = None
    spills: int | None = None
    hot: int | None = None
    stack: int | None = None
    shared_memory: int | None = None
    occupancy: int | None = None
    instructions: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading(Code):
    """What came of compiling.

    Attributes:
        failure: why the compiler refused, None if it compiled.
        tensor_memory: columns of tensor memory of a block (sm100).
        warps: of one block.
    """

    failure: str | None = None
    tensor_memory: int | None = None
    warps: int | None = None

    def launch_refusal(self, chip: Chip) -> str | None:
        """Return why a driver would refuse to launch what was compiled, or None.

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Row(Code):
    """What became of one configuration of one program of a kernel on one chip.

    Attributes:
        kernel: its full name.
        program: name of what was compiled: a kernel may have one for each pass and dtype.
        chip: empty if the declaration itself is at fault.
        configuration: empty likewise.
        contract: as declared.
        detail: why the status is what it is, empty for `ok`.
        versions: of the compilers.
    """

    backend: str
    op: str
    kernel: str
    status: Status
    program: str = ""
    chip: str = ""
    configuration: str = ""
    contract: str | None = None
    detail: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def good(self) -> bool:
        """Return whether everything is as the contract says."""
        return self.status not in ("broken", "error")


def find_instructions(vendor: Vendor, code: str) -> dict[str, int]:
    """Return how often each instruction of a family stands in `code`, by its full name."""
    families = "|".join(FAMILIES[vendor].values())
    names = re.findall(rf"(?<![\w.])(?:{families})[\w.:]*", code)
    return dict(sorted(Counter(names).items()))


def count(vendor: Vendor, family: str, instructions: Mapping[str, int], of_type: str | None = None) -> int:
    """Return how many instructions of a family there are; with `of_type`, those that have it in their name (`bf16`)."""
    pattern = FAMILIES[vendor][family]
    return sum(
        number
        for name, number in instructions.items()
        if re.match(pattern, name) and (of_type is None or _has_type(name, of_type))
    )


def families_in(vendor: Vendor, instructions: Mapping[str, int]) -> Iterable[tuple[str, int]]:
    """Yield the families that occur, with their numbers."""
    for family in FAMILIES[vendor]:
        number = count(vendor, family, instructions)
        if number:
            yield family, number


def _has_type(name: str, of_type: str) -> bool:
    # `f16` is not to be found in `bf16`, but in `v_mfma_f32_32x32x8f16`.
    return re.search(rf"(?<![a-z]){re.escape(of_type)}(?![0-9])", name) is not None
