"""One line of the matrix."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

#: `ok`: compiled, and the contract holds. `unsupported`, `not offered`: as the contract says. `broken`: compiled, but
#: the contract does not hold. `error`: not compiled, or nothing that could be.
Status = Literal["ok", "unsupported", "not offered", "broken", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What became of one configuration of one program of a kernel on one chip.

    Attributes:
        backend: name of the backend that offers the kernel.
        op: name of the op.
        kernel: the kernel's full name.
        program: name of what was compiled: a kernel may have one for each pass and dtype.
        chip: name of the chip, empty if the declaration itself is at fault.
        configuration: name of the configuration, empty likewise.
        status: see `Status`.
        contract: as declared.
        detail: why the status is what it is, empty for `ok`.
        registers: see `Reading`.
        spills: see `Reading`.
        stack: see `Reading`.
        shared_memory: see `Reading`.
        occupancy: see `Reading`.
        instructions: see `Reading`.
        notes: see `Reading`.
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
    registers: int | None = None
    spills: int | None = None
    stack: int | None = None
    shared_memory: int | None = None
    occupancy: int | None = None
    instructions: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def good(self) -> bool:
        """Whether everything is as the contract says."""
        return self.status not in ("broken", "error")
