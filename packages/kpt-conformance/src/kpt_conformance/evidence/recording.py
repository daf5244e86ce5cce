"""Making records: of a suite that passed, and of kernels that were compiled."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kpt_conformance.interpreter import interpreting
from kpt_core.evidence import Claim, EvidenceError, Level, Record, Sources
from kpt_core.evidence.installed import read
from kpt_core.evidence.record import hash_of, now
from kpt_core.files import write_whole

from .claims import claim_of
from .history import history_of_sources
from .provenance import INTERPRETER, chip_name, made_with_triton, ran_with, versions
from .suite_files import suite_of

if TYPE_CHECKING:
    from kpt_conformance.aot import Row


#: What stands for a folder where records go into the packages that offer the kernels.
IN_PACKAGES = "package"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcomes:
    """What became of a kernel's checks.

    Attributes:
        each: as in `Record.outcomes`.
        absent: as in `Record`.
        tiles: what a Triton kernel's functions were launched with.
    """

    each: str
    absent: tuple[Mapping[str, Any], ...] = ()
    tiles: frozenset[str] = field(default=frozenset())


def level_here(claim: Claim) -> Level:
    """What a run of the suite in this process proves of a kernel."""
    return Level.INTERPRETED if interpreting() and made_with_triton(claim) else Level.RAN


def record_success(
    folder: Path | None, *, op: str, kernel: str, backend: str, device: torch.device, outcomes: Outcomes
) -> Path:
    """Record that a kernel passed the whole suite on a device.

    Under `TRITON_INTERPRET=1` a kernel that is made with Triton was interpreted; any other one ran.

    Args:
        folder: of the records, in it a folder for each package; None for the package that offers the kernel.
        op: name of the op.
        kernel: the kernel's forward function, or `reference`.
        backend: the kernel's backend, or `reference`.
        device: where the checks ran.
        outcomes: of its checks.

    Returns:
        The record's file.

    Raises:
        UnknownNameError: no such kernel is registered.
        EvidenceError: the kernel's source can't be read or is not committed, or a file that is no record is in the
            record's place.
        KptError: what runs beside Python is not what was built.
    """
    claim = claim_of(op, kernel, backend)
    level = level_here(claim)
    beside = ran_with(claim)
    interpreted = level is Level.INTERPRETED
    return _save(
        folder,
        claim,
        chip=INTERPRETER if interpreted else chip_name(device, beside.get("isa")),
        device=device.type,
        level=level,
        ran_with=beside | ({"tiles": "; ".join(sorted(outcomes.tiles))} if outcomes.tiles else {}),
        passed=outcomes.each.count("p"),
        refused=outcomes.each.count("r"),
        skipped=outcomes.each.count("s"),
        outcomes=outcomes.each,
        absent=outcomes.absent,
    )


def record_compiled(folder: Path | None, rows: "Iterable[Row]") -> list[Path]:
    """Record the kernels that were compiled for a chip in every configuration that their contracts offer there.

    Args:
        folder: of the records, in it a folder for each package; None for the packages that offer the kernels.
        rows: of `kpt_conformance.aot.run`: all configurations of a kernel and chip, or none.

    Returns:
        The records' files; none for a kernel and chip of which some configuration is broken, or none was compiled.

    Raises:
        EvidenceError: as in `record_success`.
    """

    def kernel_of(row: "Row") -> tuple[str, str, str]:
        return (row.backend, row.op, row.kernel)

    def chip_of(row: "Row") -> str:
        return row.chip

    files = []
    for (backend, op, kernel), of_kernel in groupby(sorted(rows, key=kernel_of), kernel_of):
        by_chip = {chip: list(group) for chip, group in groupby(sorted(of_kernel, key=chip_of), chip_of)}
        for chip, configurations in by_chip.items() if "" not in by_chip else ():
            compiled = [row for row in configurations if row.status == "ok"]
            if compiled and all(row.good for row in configurations):
                claim = claim_of(op, kernel, backend)
                compilers = {name: version for row in compiled for name, version in row.versions.items()}
                tried = ", ".join(sorted({row.configuration for row in compiled if row.configuration}))
                files.append(
                    _save(
                        folder,
                        claim,
                        chip=chip,
                        device=next(iter(claim.device_types), "any"),
                        level=Level.COMPILED,
                        ran_with=compilers | ({"configurations": tried} if tried else {}),
                        passed=len(compiled),
                        refused=sum(row.status == "unsupported" for row in configurations),
                        details=_details(compiled),
                    )
                )
    return files


def save(folder: Path, record: Record) -> Path:
    """Write a record into a package's folder, unless a higher level of the same files is there.

    Returns:
        The file, whichever record it holds.

    Raises:
        EvidenceError: a file that is no record is in its place.
    """
    file = folder / record.place
    if file.exists():
        before = read(folder, record.place)
        same = all(before.hashes[part] == record.hashes[part] for part in ("kernel", "contract", "suite"))
        if same and before.level > record.level:
            return file
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, record.dumps())
    return file


def committed(claim: Claim, sources: Sources) -> str | None:
    """The present commit, if it has a kernel's files; None where they lie in no git work tree.

    Raises:
        EvidenceError: they are not committed as they are: nobody could look up later what was proven.
    """
    history = history_of_sources(sources)
    head = history.head if history is not None else None
    if history is None or head is None:
        return None
    changed = history.changed(head, sources)
    if changed:
        raise EvidenceError(
            f"{claim.kernel} of {claim.op} is made of {', '.join(changed[:3])}{', ...' * (len(changed) > 3)}, which "
            f"commit {head} has otherwise or not at all; commit first, then prove it"
        )
    return head


def _details(rows: "list[Row]") -> dict[str, Any]:
    """The worst of all configurations."""
    details: dict[str, Any] = {}
    for name in ("registers", "spills", "shared_memory"):
        known = [value for value in (getattr(row, name) for row in rows) if value is not None]
        if known:
            details[name] = max(known)
    contracts = sorted({str(row.contract) for row in rows if row.contract})
    return details | ({"contract": "; ".join(contracts)} if contracts else {})


def _save(folder: Path | None, claim: Claim, *, level: Level, ran_with: Mapping[str, str], **proven: Any) -> Path:
    place = claim.folder if folder is None else folder / claim.package
    if place is None:
        raise EvidenceError(
            f"{claim.kernel} of {claim.op} lies in no package that could hold its record: name a folder"
        )
    sources = claim.sources()
    hashes = {
        "kernel": sources.hash,
        "contract": claim.contract().hash,
        "suite": suite_of(claim, level).hash,
        "library": hash_of(ran_with),
    }
    record = Record(
        op=claim.op,
        kernel=claim.kernel,
        backend=claim.backend,
        level=level,
        hashes=hashes,
        ran_with=dict(ran_with),
        versions=versions(),
        date=now(),
        commit=committed(claim, sources),
        **proven,
    )
    return save(place, record)
