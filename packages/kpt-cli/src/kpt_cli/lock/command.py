"""The command `kpt lock`."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kpt_cli.completion import DEVICE_TYPES, one_of
from kpt_cli.console import out, print_json, progress, say, table
from kpt_cli.dtypes import KNOWN, dtypes_named
from kpt_cli.offers import function_of
from kpt_cli.output_file import check_output_file

if TYPE_CHECKING:
    import torch

    from kpt_core import Selection


def lock(
    output: Annotated[Path, typer.Option("--out", "-o", help="File to write.")] = Path("kpt.lock"),
    device: Annotated[
        str | None,
        typer.Option(
            help="As torch spells it.",
            show_default="the first accelerator, or the CPU",
            autocompletion=one_of(DEVICE_TYPES),
        ),
    ] = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option(
            help=f"{', '.join(KNOWN)}; may be repeated.",
            show_default="those of the cases",
            autocompletion=one_of(KNOWN),
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Write down which kernels, of which version and tuning, serve the ops of real models on this machine.

    `kpt doctor --lock FILE` compares. Nothing is computed. To lock a run of yours instead, record it:
    `with kpt_core.record() as log: ...` and `kpt_optimize.lock.write_lock("kpt.lock", log)`.
    """
    check_output_file(output, "--out")
    dtypes = dtypes_named(dtype or [])
    from dataclasses import asdict

    from kpt_cli.optimize.choices import check_device
    from kpt_core.registry import ops
    from kpt_optimize.cases import case_tables
    from kpt_optimize.lock import write_lock

    with progress() as tell:
        selections = _selections(check_device(device), dtypes, tell)
    written = write_lock(output, selections)
    without = sorted(set(ops()) - set(case_tables()))
    if as_json:
        print_json({"path": str(output), "versions": written.versions, "entries": list(map(asdict, written.entries))})
        return
    made = table("op", "dtype", "sizes", "kernel", "from")
    for entry in written.entries:
        config = "".join(f"\n{name}={value}" for name, value in (entry.config or {}).items())
        source = f"{entry.distribution} {entry.version}" if entry.distribution else "-"
        kernel = f"{function_of(entry.kernel)}{config}"
        made.add_row(entry.op, entry.dtype, ", ".join(map(str, entry.key)), kernel, source)
    out().print(made)
    if without:
        say(f"Not locked, for want of cases: {', '.join(without)}.")
    say(f"Wrote {output}. `kpt doctor --lock {output}` compares.")


def _selections(
    device: "torch.device", dtypes: "list[torch.dtype]", tell: Callable[[int, int | None, str], None]
) -> "list[Selection]":
    """What the cases of every op would run."""
    from kpt_core.registry import ops
    from kpt_optimize.cases import case_tables
    from kpt_optimize.tuning.run import model_cases

    tables = case_tables()
    calls = [
        (op, tables[name], case, dtype)
        for name, op in sorted(ops().items())
        if name in tables
        for case in model_cases(tables[name], device)
        for dtype in dtypes or tables[name].dtypes
    ]
    found = []
    for done, (op, rows, case, dtype) in enumerate(calls):
        tell(done, len(calls), f"{op.name}: {case.name}")
        found.append(op.explain(**rows.arguments(case, dtype=dtype, device=device)))
    return found
