"""Every op, its kernels, and what becomes of each kernel on the devices of this machine."""

import inspect
from dataclasses import asdict, dataclass
from typing import Any

from kpt_cli.devices import Device
from kpt_cli.offers import DTYPES, Serving, offered, serving, summary


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRow:
    """One kernel of an op.

    Attributes:
        backend: who offers it.
        kernel: its full name.
        priority: the higher one is tried first.
        requires: capabilities that the device must have.
        on: device to the sentence that says what becomes of it there.
    """

    backend: str
    kernel: str
    priority: int
    requires: tuple[str, ...]
    on: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpRow:
    """One op and its kernels, best first.

    Attributes:
        op: its name.
        summary: the first line of its docstring.
        contract: its whole docstring.
        reference: where its reference is defined.
        composed_of: the ops that the reference calls.
        kernels: what backends offer.
        reference_on: device to whether the reference may run there.
        broken: what is wrong with its kernels rather than unsuitable.
    """

    op: str
    summary: str
    contract: str
    reference: str
    composed_of: tuple[str, ...]
    kernels: tuple[KernelRow, ...]
    reference_on: dict[str, str]
    broken: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def op_row(name: str, devices: tuple[Device, ...]) -> OpRow:
    """Look at one op.

    Raises:
        UnknownNameError: no op has that name, or `KPT_USE` names something that is not installed.
    """
    import kpt_core

    op = kpt_core.get_op(name)
    servings = {device.device: [serving(op, device.device, dtype) for dtype in DTYPES] for device in devices}
    rows = [
        KernelRow(
            backend=backend,
            kernel=kernel.target,
            priority=kernel.priority,
            requires=tuple(sorted(kernel.requires)),
            on={device: _over_dtypes(backend, kernel.target, found) for device, found in servings.items()},
        )
        for backend, kernel in offered(name)
    ]
    return OpRow(
        op=name,
        summary=summary(op),
        contract=inspect.getdoc(op.reference) or "",
        reference=op.defined_in,
        composed_of=op.composed_of,
        kernels=tuple(rows),
        reference_on={device: _reference(found) for device, found in servings.items()},
        broken=tuple(dict.fromkeys(each.broken for found in servings.values() for each in found if each.broken)),
    )


def _reference(servings: list[Serving]) -> str:
    if any(found.broken for found in servings):
        return "not reached: a kernel is broken"
    explicit = servings[0].explicit
    if not all(found.reference for found in servings):
        return f"{explicit} was asked for (use or KPT_USE)"
    return "accepted"


def _over_dtypes(backend: str, kernel: str, servings: list[Serving]) -> str:
    """One sentence for all dtypes if they agree, else one for each."""
    said = {found.dtype: found.sentence(backend, kernel) for found in servings}
    different = set(said.values())
    if len(different) == 1:
        return different.pop()
    return "; ".join(f"{dtype}: {text}" for dtype, text in said.items())
