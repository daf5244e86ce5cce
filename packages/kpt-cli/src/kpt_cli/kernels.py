"""The command `kpt kernels`: every op, its kernels, and which of them run on the devices of this machine."""

import inspect
import json
import sys
import warnings
from collections.abc import Collection, Sequence
from contextlib import suppress
from functools import cache
from importlib import resources
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.padding import Padding

from .console import complain, heading, out, print_json, say, table
from .offers import DTYPES, Serving, missing_party, say_optional, serving, summary
from .options import Json, op_names, require_name
from .plugins import OPS

if TYPE_CHECKING:
    from kpt_optimize.devices.machine import Device


def op_row(name: str, devices: "Sequence[Device]") -> dict[str, Any]:
    """Look at one op; return it and its kernels, best first, those in plain PyTorch last, as in JSON.

    Evidence is what a run showed on a chip, with date and commit, as docs/support.md has it; `on` says what becomes of
    a kernel on a device, `broken` what those raised that can't be loaded.
    """
    from kpt_core.registry import get_op, kernels

    op, known = get_op(name), levels()
    servings = {device.device: [serving(op, device.device, dtype) for dtype in DTYPES] for device in devices}
    rows = [
        {
            "backend": backend.name,
            "kernel": kernel.forward,
            "priority": kernel.priority,
            "requires": sorted(kernel.requires),
            "composed_of": kernel.composed_of,
            "evidence": known.get(f"{backend.name}/{name}/{kernel.forward}", {}),
            "on": {device: _over_dtypes(backend.name, kernel.forward, found) for device, found in servings.items()},
        }
        for backend, kernel in kernels(name)
    ]
    refused = f"{next(iter(servings.values()))[0].explicit} was asked for (use or KPT_USE)"
    return {
        "op": name,
        "summary": summary(op),
        "contract": inspect.getdoc(op.reference) or "",
        "reference": op.defined_in,
        "kernels": rows,
        "reference_evidence": known.get(f"reference/{name}/reference", {}),
        "reference_on": {
            device: "accepted" if all(each.reference for each in found) else refused
            for device, found in servings.items()
        },
        "broken": list(dict.fromkeys(text for found in servings.values() for each in found for text in each.broken)),
    }


@cache
def levels() -> dict[str, dict[str, str]]:
    """Read what the reports of runs say of each kernel: kernel -> chip -> level, date and commit."""
    text = resources.files("kpt_cli").joinpath("support.json").read_text(encoding="utf-8")
    found: dict[str, dict[str, str]] = json.loads(text)
    return found


def best(evidence: dict[str, str]) -> str:
    """Return the best level, and on which chips it was reached."""
    for level, place in (("ran", "on"), ("interpreted", "by"), ("compiled", "for"), ("failed", "on")):
        if chips := [chip for chip, words in evidence.items() if words.partition(" ")[0] == level]:
            return f"{level} {place} {', '.join(chips)}"
    return "claimed"


def _over_dtypes(backend: str, kernel: str, servings: list[Serving]) -> str:
    """Return one sentence for all dtypes if they agree, else one for each."""
    said = {found.dtype: found.sentence(backend, kernel) for found in servings}
    first, *others = dict.fromkeys(said.values())
    return first if not others else "; ".join(f"{dtype}: {text}" for dtype, text in said.items())


def kernels(
    op: Annotated[
        str | None,
        typer.Argument(
            metavar="OP", help="Show this op alone, with its contract.", show_default=False, autocompletion=op_names
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """List the ops, their kernels, what is proven of each, and what becomes of it on this machine's devices."""
    ours = all(each.module.startswith("kpt_") for each in entry_points(group=OPS))  # others may make up names
    if op is not None and ours and "kpt_core" not in sys.modules:
        require_name("op", op, op_names())
    import kpt_core
    from kpt_core.registry import problems
    from kpt_optimize.devices.machine import present

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", kpt_core.PluginWarning)  # told below, each once
        devices = present().kinds
        rows = [op_row(name, devices) for name in ([op] if op is not None else sorted(kpt_core.ops()))]
        found = problems()
    for problem in found:
        complain("warning", f"KPT goes on without {problem}")
    for text in dict.fromkeys(text for row in rows for text in row["broken"]):
        complain("warning", text)
    if as_json:
        on = [device.as_dict() for device in devices]
        print_json({"devices": on, "ops": rows, "problems": list(map(str, found))})
        return
    if not rows:
        say("No ops are installed; feature packages bring them, for instance kpt-moe.")
    optional = _optional()
    for row in rows:
        _show(row, optional, contract=op is not None)
    offered = {kernel["backend"] for row in rows for kernel in row["kernels"]}
    absent: dict[str, list[str]] = {}
    for name in sorted(offered & optional.keys()):
        absent.setdefault(optional[name], []).append(name)
    say_optional(absent)


def _optional() -> dict[str, str]:
    """Return the backends that need a third party which is not installed, and its name; their kernels are not shown."""
    from kpt_core import backends

    found: dict[str, str] = {}
    for name, backend in backends().items():
        with suppress(Exception):  # foreign code; what it raises is told where its kernels are asked for
            party = missing_party(backend.device_types, backend.unavailable())
            if party is not None:
                found[name] = party
    return found


def _show(row: dict[str, Any], optional: Collection[str], *, contract: bool) -> None:
    heading(row["op"])
    shown = [kernel for kernel in row["kernels"] if kernel["backend"] not in optional]
    told = [row["contract" if contract else "summary"]]
    for kernel in shown:
        if kernel["composed_of"]:
            calls = ", ".join(kernel["composed_of"])
            told.append(f"{kernel['kernel']} calls {calls}, each of which is chosen for itself")
    for text in filter(None, told):
        out().print(Padding(text, (0, 0, 0, 2), expand=False))
    out().print()
    made = table("priority", "kernel", "backend", "needs", "evidence", *row["reference_on"], right=("priority",))
    for kernel in shown:
        about = (str(kernel["priority"]), kernel["kernel"], kernel["backend"], ", ".join(kernel["requires"]) or "-")
        made.add_row(*about, best(kernel["evidence"]), *kernel["on"].values())
    proof = best(row["reference_evidence"])
    made.add_row("last", row["reference"], "reference", "-", proof, *row["reference_on"].values())
    out().print(made)
