"""The whole matrix: what is declared, compiled, and judged."""

import os
from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from importlib.metadata import version
from typing import Any

import kpt_core
from kpt_core import InputError, UnknownNameError

from .chips import chip_named
from .compiling import compile_all
from .declared import Job, PallasProgram, Task, TritonProgram, declared, why_not_compiled
from .readings import Code, Reading, Row
from .triton_compiler import split


def run(
    *,
    backends: Iterable[str] | None = None,
    chips: Iterable[str] | None = None,
    ops: Iterable[str] | None = None,
    processes: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Row]:
    """Compile what the installed backends declare, and check every contract.

    Args:
        backends: names of backends; None for all.
        chips: names of chips; None for all that a backend claims.
        ops: how the names of ops begin, as in `fp8.`; None for all.
        processes: how many compile at the same time; None for one for each CPU.
        progress: called with the numbers of jobs that are done and that are to be done.

    Returns:
        A row for each program, chip and configuration, and one for each declaration that is wrong.
    """
    installed = kpt_core.backends()
    names = list(installed) if backends is None else list(backends)
    for name in names:
        if name not in installed:
            raise UnknownNameError("backend", name, installed)
    only = None if chips is None else frozenset(chip_named(name).name for name in chips)
    begins = ("",) if ops is None else tuple(ops)
    found = list(declared({name: installed[name] for name in names}, only, begins))
    entries = [(entry, entry if isinstance(entry, Row) else _declared_row(entry)) for entry in found]
    jobs = {entry.job: None for entry, row in entries if isinstance(entry, Task) and not row.detail}
    results: dict[Job, Reading | str] = {}
    for job, result in compile_all(jobs, min(processes or len(os.sched_getaffinity(0)), len(jobs))) if jobs else ():
        results[job] = result
        if progress is not None:
            progress(len(results), len(jobs))
    return [
        _judged(row, entry, results[entry.job]) if isinstance(entry, Task) and not row.detail else row
        for entry, row in entries
    ]


def _declared_row(task: Task) -> Row:
    """Return the row of a task before it is compiled; with a detail if it can't be."""
    names: dict[str, Any] = {
        "backend": task.backend,
        "op": task.kernel.op,
        "kernel": task.kernel.forward,
        "program": task.program,
    }
    job: dict[str, Any] = {
        "chip": task.job.chip.name,
        "configuration": task.job.configuration,
        "contract": task.contract.text,
    }
    row = Row(**names, **job, status="error")
    if task.contract.not_offered is not None:
        return replace(row, status="not offered", detail=task.contract.not_offered)
    try:
        program = task.job.program()
        row = replace(row, versions=_versions(program))
        settings = task.job.settings()
        if isinstance(program, TritonProgram):
            if not hasattr(program.function, "cache_key"):
                raise InputError(
                    f"{program.name!r} is not a compiled Triton function: unset TRITON_INTERPRET, use @triton.jit"
                )
            split(program, settings, program.signature)
    except Exception as error:
        return replace(row, detail=why_not_compiled(error))
    return row


def _versions(program: TritonProgram | PallasProgram) -> dict[str, str]:
    if isinstance(program, TritonProgram):
        import triton  # whichever is found first: Intel's has another name in the index

        return {"triton": triton.__version__}
    return {name: version(name) for name in ("jax", "jaxlib", "libtpu")}


def _judged(row: Row, task: Task, result: Reading | str) -> Row:
    """Return the row with what was read, and whether the contract holds."""
    if isinstance(result, str):
        return replace(row, status="error", detail=result)
    row = replace(row, **{each.name: getattr(result, each.name) for each in fields(Code)})
    contract, chip = task.contract, task.job.chip
    refusal = result.failure or result.launch_refusal(chip)
    if contract.unsupported is not None:
        if refusal is not None:
            return replace(row, status="unsupported", detail=f"{contract.unsupported} ({refusal})")
        stale = f"the contract says that {chip.name} can't have it, but it compiles; say what its code must be instead"
        return replace(row, status="broken", detail=stale)
    if result.failure is not None:
        return replace(row, status="error", detail=result.failure)
    breaches = [*([refusal] if refusal else []), *contract.breaches(result)]
    return replace(row, status="broken" if breaches else "ok", detail="; ".join(breaches))
