"""The command `kpt kernels`."""

import warnings
from typing import TYPE_CHECKING, Annotated

import typer
from rich.padding import Padding

from kpt_cli.completion import op_names
from kpt_cli.console import complain, heading, out, print_json, say, table

if TYPE_CHECKING:
    from .report import OpRow


def kernels(
    op: Annotated[
        str | None,
        typer.Argument(
            metavar="OP", help="Show this op alone, with its contract.", show_default=False, autocompletion=op_names
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """List the ops, their kernels, what is proven of each, and what becomes of it on this machine's devices."""
    import kpt_core
    from kpt_cli.devices import present
    from kpt_core.registry import problems

    from .report import op_row

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", kpt_core.PluginWarning)  # told below, each once
        devices = present().kinds
        rows = [op_row(name, devices) for name in ([op] if op is not None else sorted(kpt_core.ops()))]
        found = problems()
    for problem in found:
        complain("warning", f"KPT goes on without {problem}")
    unbelieved = (kernel.evidence.fault for row in rows for kernel in row.kernels)
    for text in dict.fromkeys([*(text for row in rows for text in row.broken), *filter(None, unbelieved)]):
        complain("warning", text)
    if as_json:
        print_json(
            {
                "devices": [device.as_dict() for device in devices],
                "ops": [row.as_dict() for row in rows],
                "problems": [str(problem) for problem in found],
            }
        )
        return
    if not rows:
        say("No ops are installed; feature packages bring them, for instance kpt-moe.")
    for row in rows:
        _show(row, contract=op is not None)


def _show(row: "OpRow", *, contract: bool) -> None:
    heading(row.op)
    if contract:
        out().print(Padding(row.contract, (0, 0, 0, 2), expand=False))
    elif row.summary:
        say(f"  {row.summary}")
    for kernel in row.kernels:
        if kernel.composed_of:
            calls = f"{kernel.kernel} calls {', '.join(kernel.composed_of)}, each of which is chosen for itself"
            out().print(Padding(calls, (0, 0, 0, 2), expand=False))
    out().print()
    devices = list(row.reference_on)
    made = table("priority", "kernel", "backend", "needs", "evidence", *devices, right=("priority",))
    for kernel in row.kernels:
        needs = ", ".join(kernel.requires) or "-"
        proof = str(kernel.evidence)
        made.add_row(str(kernel.priority), kernel.kernel, kernel.backend, needs, proof, *kernel.on.values())
    proof = str(row.reference_evidence)
    made.add_row("last", row.reference, "reference", "-", proof, *row.reference_on.values())
    out().print(made)
