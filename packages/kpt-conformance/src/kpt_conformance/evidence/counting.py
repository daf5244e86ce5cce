"""How many checks the suite has for a kernel, and configurations its library for a chip, counted without a run."""

from collections import Counter

import kpt_core
from kpt_core import KptError
from kpt_core.evidence import Claim, Level, Record


class Counts:
    """Counts once for each backend and type of device."""

    def __init__(self) -> None:
        self._checks: dict[tuple[str, str], Counter[tuple[str, str]]] = {}

    def expected(self, claim: Claim, record: Record) -> int | None:
        """How many checks (configurations) a record must tell of; None where that can't be counted here."""
        if record.level is Level.COMPILED:
            return _configurations(claim, record.chip)
        where = (claim.backend, record.device)
        if where not in self._checks:
            self._checks[where] = _checks(*where)
        return self._checks[where][claim.op, claim.kernel] or None


def _checks(backend: str, device: str) -> Counter[tuple[str, str]]:
    """The checks of each kernel of a backend, by op and function."""
    from kpt_conformance.generation import MAKERS, _subject

    found: Counter[tuple[str, str]] = Counter()
    try:
        for _, make in MAKERS.values():
            # By name, as tests are: of two checks with one name pytest would refuse both.
            for subject in {name: _subject(values) for name, values in make(backend, device)}.values():
                if subject is not None and not subject.composite:
                    found[subject.op.name, subject.target] += 1
    except KptError:
        return Counter()
    return found


def _configurations(claim: Claim, chip: str) -> int | None:
    """What is compiled of a kernel for a chip, as its library declares."""
    from kpt_conformance.aot.declared import Task, declared

    tasks = list(declared({claim.backend: kpt_core.backends()[claim.backend]}, frozenset({chip})))
    own = [task for task in tasks if isinstance(task, Task) and task.kernel == claim.offered]
    wrong = [row for row in tasks if not isinstance(row, Task) and row.kernel == claim.kernel]
    return None if wrong else sum(task.contract.not_offered is None for task in own)
