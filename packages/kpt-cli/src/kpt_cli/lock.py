"""The command `kpt lock`."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from .console import out, print_json, progress, say, table
from .offers import function_of, with_config
from .options import Device, Dtypes, Json, check_device, dtypes_named
from .output_file import check_output_file


def lock(
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write.")] = Path("kpt.lock"),
    device: Device = None,
    dtype: Dtypes = None,
    as_json: Json = False,
) -> None:
    """Write down which kernels, of which version and tuning, serve the ops of real models on this machine.

    `kpt doctor --lock FILE` compares. Nothing is computed. To lock a run of yours instead, record it:
    `with kpt_core.record() as log: ...` and `kpt_optimize.lock.write_lock("kpt.lock", log)`.
    """
    check_output_file(output, "--output")
    from kpt_core.registry import ops
    from kpt_optimize.cases import case_tables
    from kpt_optimize.lock import write_lock
    from kpt_optimize.tuning.run import model_cases

    place, dtypes, tables = check_device(device), dtypes_named(dtype), case_tables()
    calls = [
        (op, tables[name], case, each)
        for name, op in sorted(ops().items())
        if name in tables
        for case in model_cases(tables[name], place)
        for each in dtypes or tables[name].dtypes
    ]
    selections = []
    with progress() as tell:
        for done, (op, rows, case, each) in enumerate(calls):
            tell(done, len(calls), f"{op.name}: {case.name}")
            selections.append(op.explain(**rows.arguments(case, dtype=each, device=place)))
    written = write_lock(output, selections)
    if as_json:
        print_json({"path": str(output), "versions": written.versions, "entries": list(map(asdict, written.entries))})
        return
    made = table("op", "dtype", "sizes", "kernel", "from")
    for entry in written.entries:
        source = f"{entry.distribution} {entry.version}" if entry.distribution else "-"
        kernel = with_config(function_of(entry.kernel), entry.config)
        made.add_row(entry.op, entry.dtype, ", ".join(map(str, entry.key)), kernel, source)
    out().print(made)
    if without := sorted(ops().keys() - tables.keys()):
        say(f"Not locked, for want of cases: {', '.join(without)}.")
    say(f"Wrote {output}. `kpt doctor --lock {output}` compares.")
