"""Making records: of a suite that passed, and of kernels that were compiled."""

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kpt_conformance.interpreter import interpreting

from .claims import Claim, claim_of
from .provenance import chip_name, commit_of, versions
from .record import Level, Record
from .store import save

if TYPE_CHECKING:
    from kpt_conformance.aot import Row

#: What stands for the chip where Triton's interpreter took its place.
INTERPRETER = "Triton's interpreter"


def record_success(
    folder: Path,
    *,
    op: str,
    kernel: str,
    backend: str,
    device: torch.device,
    checks: int,
    expected_failures: int = 0,
) -> Path:
    """Record that a kernel passed the whole suite on a device.

    Under `TRITON_INTERPRET=1` a kernel that is made with Triton was interpreted; any other one ran.

    Args:
        folder: of the records; made if it is not there.
        op: name of the op.
        kernel: the kernel's forward function, or `reference`.
        backend: the kernel's backend, or `reference`.
        device: where the checks ran.
        checks: how many passed.
        expected_failures: how many failed as the backend says that they do.

    Returns:
        The record's file.

    Raises:
        UnknownNameError: no such kernel is registered.
        EvidenceError: the kernel's source can't be read, or a file that is no record is in the record's place.
    """
    claim = claim_of(op, kernel, backend)
    interpreted = interpreting() and "triton" in claim.sources().third_parties
    return _save(
        folder,
        claim,
        chip=INTERPRETER if interpreted else chip_name(device),
        level=Level.INTERPRETED if interpreted else Level.RAN,
        checks=checks,
        expected_failures=expected_failures,
    )


def record_compiled(folder: Path, rows: "Iterable[Row]") -> list[Path]:
    """Record the kernels that were compiled for a chip in every configuration that their contracts offer there.

    Args:
        folder: of the records; made if it is not there.
        rows: of `kpt_conformance.aot.run`: all configurations of a kernel and chip, or none.

    Returns:
        The records' files; none for a kernel and chip of which some configuration is broken, or none was compiled.
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
                compilers = {name: version for row in compiled for name, version in row.versions.items()}
                files.append(
                    _save(
                        folder,
                        claim_of(op, kernel, backend),
                        chip=chip,
                        level=Level.COMPILED,
                        checks=len(compiled),
                        details=_details(compiled),
                        compilers=compilers,
                    )
                )
    return files


def _details(rows: "list[Row]") -> dict[str, Any]:
    """The worst of all configurations."""
    details: dict[str, Any] = {}
    for name in ("registers", "spills", "shared_memory"):
        known = [value for value in (getattr(row, name) for row in rows) if value is not None]
        if known:
            details[name] = max(known)
    contracts = sorted({str(row.contract) for row in rows if row.contract})
    return details | ({"contract": "; ".join(contracts)} if contracts else {})


def _save(
    folder: Path,
    claim: Claim,
    *,
    chip: str,
    level: Level,
    checks: int,
    expected_failures: int = 0,
    details: Mapping[str, Any] | None = None,
    compilers: Mapping[str, str] | None = None,
) -> Path:
    sources = claim.sources()
    record = Record(
        op=claim.op,
        kernel=claim.kernel,
        backend=claim.backend,
        chip=chip,
        level=level,
        source=sources.hash,
        versions=versions() | dict(compilers or {}),
        date=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        commit=commit_of(sources.files.values()),
        checks=checks,
        expected_failures=expected_failures,
        details=details or {},
    )
    return save(folder, record)
