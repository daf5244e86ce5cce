"""Every op, its kernels, and what becomes of each kernel on the devices of this machine."""

import inspect
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from kpt_cli.devices import Device
from kpt_cli.offers import DTYPES, Serving, serving, summary

if TYPE_CHECKING:
    from kpt_core import Backend
    from kpt_core.evidence import Claim


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What is known of a kernel.

    Attributes:
        level: the best that a record proves: `claimed`, `compiled`, `interpreted` or `ran`.
        chips: chip to level, for each record that the installed files still deserve.
        fault: why no record can be believed, None if they can.
    """

    level: str
    chips: dict[str, str]
    fault: str | None = None

    def __str__(self) -> str:
        best = [chip for chip, level in self.chips.items() if level == self.level]
        where = {"ran": "on", "compiled": "for", "interpreted": "by"}.get(self.level)
        return f"{self.level} {where} {', '.join(best)}" if where else self.level


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRow:
    """One kernel of an op.

    Attributes:
        backend: who offers it.
        kernel: its full name.
        priority: the higher one is tried first.
        requires: capabilities that the device must have.
        composed_of: the ops that it calls.
        evidence: what is known of it.
        on: device to the sentence that says what becomes of it there.
    """

    backend: str
    kernel: str
    priority: int
    requires: tuple[str, ...]
    composed_of: tuple[str, ...]
    evidence: Proof
    on: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpRow:
    """One op and its kernels, best first.

    Attributes:
        op: its name.
        summary: the first line of its docstring.
        contract: its whole docstring.
        reference: where its reference is defined.
        kernels: what backends offer; those in plain PyTorch, of backend `torch`, come last.
        reference_evidence: what is known of the reference.
        reference_on: device to whether the reference may run there.
        broken: what those raised that can't be loaded.
    """

    op: str
    summary: str
    contract: str
    reference: str
    kernels: tuple[KernelRow, ...]
    reference_evidence: Proof
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
    from kpt_core.evidence import claim_of_kernel, claim_of_reference
    from kpt_core.registry import get_op, kernels

    op = get_op(name)
    servings = {device.device: [serving(op, device.device, dtype) for dtype in DTYPES] for device in devices}
    rows = [
        KernelRow(
            backend=backend.name,
            kernel=kernel.forward,
            priority=kernel.priority,
            requires=tuple(sorted(kernel.requires)),
            composed_of=kernel.composed_of,
            evidence=_proof(claim_of_kernel(backend, kernel), backend),
            on={device: _over_dtypes(backend.name, kernel.forward, found) for device, found in servings.items()},
        )
        for backend, kernel in kernels(name)
    ]
    return OpRow(
        op=name,
        summary=summary(op),
        contract=inspect.getdoc(op.reference) or "",
        reference=op.defined_in,
        kernels=tuple(rows),
        reference_evidence=_proof(claim_of_reference(op), None),
        reference_on={device: _reference(found) for device, found in servings.items()},
        broken=tuple(dict.fromkeys(text for found in servings.values() for each in found for text in each.broken)),
    )


def _proof(claim: "Claim", backend: "Backend | None") -> Proof:
    from kpt_core import KptError
    from kpt_core.evidence import Level, proofs

    try:
        if backend is not None:
            backend.library()
        chips = {record.chip: record.level.word for record in proofs(claim)}
    except KptError as error:
        return Proof(level=Level.CLAIMED.word, chips={}, fault=str(error))
    return Proof(level=next(iter(chips.values()), Level.CLAIMED.word), chips=chips)


def _reference(servings: list[Serving]) -> str:
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
