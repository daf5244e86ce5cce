"""Compiling a random share of what records prove was compiled, and all of what they don't."""

from importlib.metadata import PackageNotFoundError, version

from kpt_conformance.evidence import claim_of
from kpt_conformance.evidence.suite_files import suite_of
from kpt_conformance.sampling import Share
from kpt_core import KptError
from kpt_core.evidence import Level, proofs

from .declared import Task
from .row import Row

_COMPILERS = ("triton", "jax", "jaxlib", "libtpu")


def sample(found: list[Task | Row], share: Share) -> list[Task | Row]:
    """All of kernels and chips that no fresh record proves, a share of the configurations of the others.

    Args:
        found: what is declared.
        share: what is compiled of what is proven.
    """
    proven: dict[tuple[str, ...], bool] = {}
    for task in found:
        if isinstance(task, Task) and _place(task) not in proven:
            proven[_place(task)] = _is_proven(*_place(task))
    of_proven = [task for task in found if isinstance(task, Task) and proven[_place(task)]]
    chosen = share.chosen(of_proven, _place, _name)
    return [task for task in found if isinstance(task, Row) or not proven[_place(task)] or _name(task) in chosen]


def _place(task: Task) -> tuple[str, str, str, str]:
    return (task.backend, task.kernel.op, task.kernel.forward, task.job.chip.name)


def _name(task: Task) -> str:
    return " ".join((*_place(task), task.program, task.job.configuration))


def _is_proven(backend: str, op: str, kernel: str, chip: str) -> bool:
    """Whether a record says that these files were compiled for a chip, by the compilers that are here."""
    try:
        claim = claim_of(op, kernel, backend)
        suite = suite_of(claim, Level.COMPILED).hash
        records = [record for record in proofs(claim) if (record.level, record.chip) == (Level.COMPILED, chip)]
    except KptError:
        return False
    here = _versions()
    return any(
        record.hashes["suite"] == suite
        and {name: here.get(name) for name in _COMPILERS if name in record.ran_with}.items() <= record.ran_with.items()
        for record in records
    )


def _versions() -> dict[str, str]:
    found = {}
    for name in _COMPILERS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
