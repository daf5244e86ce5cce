"""`tune`: which ops are tried on which cases, in which order, and what of the results is kept."""

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from kpt_core.contract import Op
from kpt_core.errors import InputError, UnknownNameError
from kpt_core.registry import forget_selections, get_op, kernels, ops
from kpt_optimize.cases import Case, CaseTable, case_tables

from .files import TuningEntry, merge_into, packages_of
from .tables import device_name, user_table
from .trials import TuningResult, try_case

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True)
class Tuning:
    """What `tune` found.

    Attributes:
        results: one for each op, dtype and case.
        entries: what of them is for the table: one for each op, dtype and key.
        skipped: op, or op and dtype, to the sentence that says why it was not tried.
        path: the table that was written, None if none was.
        aside: where an old table that could not be used was kept.
    """

    device: str
    results: tuple[TuningResult, ...]
    entries: tuple[TuningEntry, ...]
    skipped: dict[str, str]
    path: Path | None
    aside: Path | None


def model_cases(table: CaseTable, device: torch.device, names: Iterable[str] = ()) -> list[Case]:
    """Return the rows of a case table that stand for real use on a device: of real models, and on a CPU small ones.

    With `names` these rows instead, whatever they are.
    """
    if names := set(names):
        return [case for case in table.cases if case.name in names]
    return [case for case in table.cases if case.model and not (case.large and device.type == "cpu")]


def tune(
    names: Iterable[str] = (),
    *,
    device: torch.device | str = "cpu",
    dtypes: Iterable[torch.dtype] = (),
    cases: Iterable[str] = (),
    seconds: float = 1.0,
    training: bool = False,
    path: str | os.PathLike[str] | None = None,
    dry_run: bool = False,
    on_progress: Progress = lambda done, total, what: None,
) -> Tuning:
    """Measure which kernels and configurations are fastest on a device, and have dispatch put them first.

    What runs without tuning is always among what is timed, and stays unless something else is surely faster. Results
    are written after each op: an interrupted run keeps what it measured.

    Args:
        names: of ops; all that have cases if left out. Ops that others call come first, so that those are tried as
            they will run.
        device: where to run.
        dtypes: those of each op's cases if left out.
        cases: names of cases, instead of those of real models.
        seconds: about how long to measure each case.
        training: time forward and backward, for calls that need a gradient; without it, calls that need none.
        path: table to write; the user's table of this device if left out, which takes effect at the next call.
        dry_run: write nothing.
        on_progress: called with the number of trials done, of all, and what is next.

    Raises:
        UnknownNameError: no op or no case has such a name.
        InputError: a choice of kernels (`use`, `KPT_USE`) is in force, or there is nowhere to write.
    """
    device = torch.device(device)
    names, dtypes, cases = tuple(names), tuple(dtypes), tuple(cases)
    chosen = [get_op(name) for name in names] if names else [op for _, op in sorted(ops().items())]
    tables = case_tables()
    known = {case.name for op in chosen if op.name in tables for case in tables[op.name].cases}
    for case in cases:
        if case not in known:
            raise UnknownNameError("case", case, known)
    model = device_name(device)
    target = None if dry_run else Path(path) if path is not None else user_table(model)
    if target is not None:
        _require_writable(target)
    skipped: dict[str, str] = {}
    trials = []
    for op in _callees_first(chosen):
        table = tables.get(op.name)
        if table is None:
            skipped[op.name] = "no case table is installed for it (entry points of the group kpt.cases)"
        elif op.mutates:
            skipped[op.name] = "it changes its arguments, and so each kernel's would differ"
        elif training and not table.gradients:
            skipped[op.name] = "its cases name no argument with a gradient"
        else:
            rows = model_cases(table, device, cases)
            if not rows and not cases:
                skipped[op.name] = f"none of its cases is a real model's that fits {device.type}; name one"
            trials.append((op, table, [(dtype, row) for dtype in dtypes or table.dtypes for row in rows]))
    total = sum(len(runs) for _, _, runs in trials)
    results: list[TuningResult] = []
    entries: list[TuningEntry] = []
    aside = None
    for op, table, runs in trials:
        of_op: list[TuningResult] = []
        for dtype, row in runs:
            on_progress(len(results) + len(of_op), total, f"{op.name}: {row.name}")
            of_op.append(try_case(op, table, row, device=device, dtype=dtype, seconds=seconds, training=training))
        results += of_op
        settled = list(_settled(of_op))
        entries += settled
        if settled and target is not None:
            aside = merge_into(target, model, settled) or aside
            forget_selections()
    written = target if entries else None
    return Tuning(model, tuple(results), tuple(entries), skipped, written, aside)


def _require_writable(table: Path) -> None:
    """Raise `InputError` unless a table can be written, before minutes are spent on what it is to hold."""
    there = next(folder for folder in table.absolute().parents if folder.exists())  # the rest is made when it is needed
    try:
        # A superuser has permission where nothing can be written, in /proc say: asking alone is not enough.
        tempfile.TemporaryFile(dir=there).close()
    except OSError as error:
        raise InputError(
            f"tune: the table {table} can't be written ({error.strerror}): choose another place (path=, or --output of "
            "`kpt tune`), or measure without one (dry_run=True, --dry-run)"
        ) from error


def _callees_first(chosen: list[Op[..., Any]]) -> Iterator[Op[..., Any]]:
    """Yield the ops, each after those of them that its kernels call."""
    waiting = {op.name: op for op in chosen}

    def take(op: Op[..., Any]) -> Iterator[Op[..., Any]]:
        if waiting.pop(op.name, None) is not None:
            for name in sorted({part for _, kernel in kernels(op.name) for part in kernel.composed_of}):
                if name in waiting:
                    yield from take(waiting[name])
            yield op

    for op in chosen:
        yield from take(op)


def _settled(results: Iterable[TuningResult]) -> Iterator[TuningEntry]:
    """Yield one entry for the cases of a key: the default stays unless all of them have the same winner."""
    by_calls: dict[object, list[TuningEntry]] = {}
    for result in results:
        if result.entry is not None:
            by_calls.setdefault(result.entry.calls, []).append(result.entry)
    for group in by_calls.values():
        first = group[0]
        if all((entry.kernel, entry.config) == (first.kernel, first.config) for entry in group):
            yield min(group, key=lambda entry: entry.gain)
            continue
        distribution, version = packages_of(first.op)[first.default]
        yield replace(
            first,
            kernel=first.default,
            config=None,
            seconds=first.seconds * first.gain,
            gain=1.0,
            noise=0.0,
            case=", ".join(entry.case for entry in group),
            distribution=distribution,
            version=version,
        )
