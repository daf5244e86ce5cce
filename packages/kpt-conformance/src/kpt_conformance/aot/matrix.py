"""The whole matrix: what is declared, compiled or read earlier, and judged."""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import kpt_core
from kpt_core import UnknownNameError

from .cache import default_folder, load_reading, save_reading
from .chips import Chip, chip_named
from .compiling import compile_all
from .contract import Contract
from .declared import Task, TritonProgram, declared, why_not_compiled
from .fingerprint import reading_key, source_hash, versions
from .reading import Reading
from .row import Row
from .triton_compiler import split


@dataclass(frozen=True, slots=True)
class _Pending:
    """A row whose reading is missing."""

    row: Row
    task: Task
    key: str


def run(
    *,
    backends: Iterable[str] | None = None,
    chips: Iterable[str] | None = None,
    cache: Path | None = None,
    processes: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    choose: Callable[[list[Task | Row]], list[Task | Row]] | None = None,
) -> list[Row]:
    """Compile what the installed backends declare, as far as it was not read before, and check every contract.

    Args:
        backends: names of backends; None for all.
        chips: names of chips; None for all that a backend claims.
        cache: folder of earlier readings; None for that of the user.
        processes: how many compile at the same time; None for one for each CPU.
        progress: called with the numbers of jobs that are done and that are to be done.
        choose: gives the part of what is declared that is looked at; None looks at all.

    Returns:
        A row for each program, chip and configuration, and one for each declaration that is wrong.

    Raises:
        UnknownNameError: there is no such backend or chip.
    """
    installed = kpt_core.backends()
    names = list(installed) if backends is None else list(backends)
    for name in names:
        if name not in installed:
            raise UnknownNameError("backend", name, installed)
    only = None if chips is None else frozenset(chip_named(name).name for name in chips)
    folder = default_folder() if cache is None else cache

    found = list(declared({name: installed[name] for name in names}, only))
    asked = found if choose is None else choose(found)
    entries = [entry if isinstance(entry, Row) else _look_up(entry, folder) for entry in asked]
    pending = {entry.key: entry.task for entry in entries if isinstance(entry, _Pending)}
    results = _compile(pending, folder, processes or len(os.sched_getaffinity(0)), progress)
    return [
        _judged(entry.row, entry.task, results[entry.key]) if isinstance(entry, _Pending) else entry
        for entry in entries
    ]


def _look_up(task: Task, folder: Path) -> Row | _Pending:
    """The row of a task if all is known, else what is to be compiled."""
    row = Row(
        backend=task.backend,
        op=task.kernel.op,
        kernel=task.kernel.forward,
        program=task.program,
        chip=task.job.chip.name,
        configuration=task.job.configuration,
        contract=task.contract.text,
        status="error",
    )
    if task.contract.not_offered is not None:
        return replace(row, status="not offered", detail=task.contract.not_offered)
    try:
        program = task.job.source.program()
        source = source_hash(program)
        row = replace(row, source_hash=source, versions=versions(program))
        settings = task.job.settings()
        if isinstance(program, TritonProgram):
            split(program, settings)
        key = reading_key(task.job, program, settings, source)
    except Exception as error:
        return replace(row, detail=why_not_compiled(error))
    reading = load_reading(folder, key)
    return _Pending(row, task, key) if reading is None else _judged(replace(row, cached=True), task, reading)


def _compile(
    pending: dict[str, Task], folder: Path, processes: int, progress: Callable[[int, int], None] | None
) -> dict[str, Reading | str]:
    """Compile each job once and keep what was read."""
    keys = {task.job: key for key, task in pending.items()}
    results: dict[str, Reading | str] = {}
    if keys:
        for job, result in compile_all(keys, min(processes, len(keys))):
            key = keys[job]
            results[key] = result
            # A refusal that no contract expects may come from this machine, so it is not kept.
            if isinstance(result, Reading) and (result.failure is None or pending[key].contract.unsupported):
                save_reading(folder, key, result)
            if progress is not None:
                progress(len(results), len(keys))
    return results


def _judged(row: Row, task: Task, result: Reading | str) -> Row:
    """The row with what was read, and whether the contract holds."""
    if isinstance(result, str):
        return replace(row, status="error", detail=result)
    row = replace(
        row,
        registers=result.registers,
        spills=result.spills,
        stack=result.stack,
        shared_memory=result.shared_memory,
        occupancy=result.occupancy,
        instructions=result.instructions,
        notes=result.notes,
    )
    return _verdict(row, task.contract, task.job.chip, result)


def _verdict(row: Row, contract: Contract, chip: Chip, reading: Reading) -> Row:
    refusal = reading.failure or reading.launch_refusal(chip)
    if contract.unsupported is not None:
        if refusal is not None:
            return replace(row, status="unsupported", detail=f"{contract.unsupported} ({refusal})")
        stale = f"the contract says that {chip.name} can't have it, but it compiles; say what its code must be instead"
        return replace(row, status="broken", detail=stale)
    if reading.failure is not None:
        return replace(row, status="error", detail=reading.failure)
    breaches = [*([refusal] if refusal else []), *contract.breaches(reading)]
    return replace(row, status="broken" if breaches else "ok", detail="; ".join(breaches))
