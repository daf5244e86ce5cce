"""What a record is about: a kernel that says it serves an op, or an op's reference, and the files of it."""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kpt_core import registry
from kpt_core.contract import REFERENCE, TORCH, Backend, Kernel

from .sources import NOT_THE_KERNEL, Sources, sources_of

if TYPE_CHECKING:
    from kpt_core.operation import Op


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A kernel that says it serves an op.

    Attributes:
        op: name of the op.
        kernel: the kernel's forward function, or `reference`.
        backend: the kernel's backend, or `reference`.
        package: import name of the package that offers it, in which its records lie.
        modules: that the kernel's functions lie in.
        device_types: torch's types of the devices that it is for, empty for all.
        offered: the kernel, None for a reference.
    """

    op: str
    kernel: str
    backend: str
    package: str
    modules: tuple[str, ...]
    device_types: tuple[str, ...] = ()
    offered: Kernel | None = None

    @property
    def key(self) -> tuple[str, str, str]:
        """What a record names it by."""
        return (self.backend, self.op, self.kernel)

    @property
    def identity(self) -> str:
        """Backend/op/function."""
        return "/".join(self.key)

    def sources(self) -> Sources:
        """What the kernel is made of.

        Raises:
            EvidenceError: a file of it is not there.
        """
        return sources_of(self.modules)

    def contract(self) -> Sources:
        """What the op is made of: its reference and its cases.

        Raises:
            EvidenceError: a file of it is not there.
        """
        table = registry.case_tables().get(self.op)
        cases = [] if table is None else [table.build.__module__]
        return sources_of([registry.get_op(self.op).reference.__module__, *cases])

    @property
    def folder(self) -> Path | None:
        """Where its records lie, None for what lies in no package of its own."""
        try:
            spec = None if self.package in NOT_THE_KERNEL else find_spec(self.package)
        except ValueError:  # a module made at run time
            spec = None
        places = spec.submodule_search_locations if spec is not None else None
        return Path(next(iter(places)), "evidence") if places else None


def claim_of_kernel(backend: Backend, kernel: Kernel) -> Claim:
    """What a backend says of a kernel that it offers."""
    targets = filter(None, (kernel.forward, kernel.backward, kernel.unsupported, kernel.configs))
    owner = kernel.forward if backend.name == TORCH else type(backend).__module__
    return Claim(
        op=kernel.op,
        kernel=kernel.forward,
        backend=backend.name,
        package=_top(owner),
        modules=tuple(dict.fromkeys(target.partition(":")[0] for target in targets)),
        device_types=tuple(backend.device_types),
        offered=kernel,
    )


def claim_of_reference(op: "Op[..., Any]") -> Claim:
    """What an op says of its reference."""
    module = op.reference.__module__
    return Claim(op=op.name, kernel=REFERENCE, backend=REFERENCE, package=_top(module), modules=(module,))


def _top(target: str) -> str:
    return target.partition(":")[0].partition(".")[0]
