"""The command `kpt kernels`: every op, its kernels, and what becomes of each on the devices of this machine."""

import inspect
import json
import warnings
from dataclasses import asdict, dataclass
from functools import cache
from importlib import resources
from typing import Annotated, Any

import typer
from rich.padding import Padding

from kpt_cli.completion import op_names
from kpt_cli.console import complain, heading, out, print_json, say, table
from kpt_cli.devices import Device
from kpt_cli.offers import DTYPES, Serving, serving, summary


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRow:
    """One kernel of an op.

    Attributes:
        backend: who offers it.
        kernel: its full name.
        priority: the higher one is tried first.
        requires: capabilities that the device must have.
        composed_of: the ops that it calls.
        evidence: chip to what a run showed on it, with date and commit, as docs/support.md has it.
        on: device to the sentence that says what becomes of it there.
    """

    backend: str
    kernel: str
    priority: int
    requires: tuple[str, ...]
    composed_of: tuple[str, ...]
    evidence: dict[str, str]
    on: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpRow:
    """One op and its kernels, best first.

    Attributes:
        op: its name.
        summary: the first line of its docstring.
        contract: its whole docstring.
        reference: where its reference is defined.
        kernels: what backends offer; those in plain PyTorch, of backend `torch`, come last.
        reference_evidence: likewise of the reference.
        reference_on: device to whether the reference may run there.
        broken: what those raised that can't be loaded.
    """

    op: str
    summary: str
    contract: str
    reference: str
    kernels: tuple[KernelRow, ...]
    reference_evidence: dict[str, str]
    reference_on: dict[str, str]
    broken: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def op_row(name: str, devices: tuple[Device, ...]) -> OpRow:
    """Look at one op.

    Raises:
        UnknownNameError: no op has that name, or `KPT_USE` names something that is not installed.
    """
    from kpt_core.registry import get_op, kernels

    op = get_op(name)
    servings = {device.device: [serving(op, device.device, dtype) for dtype in DTYPES] for device in devices}
    rows = [
        KernelRow(
            backend=backend.name,
            kernel=kernel.forward,
            priority=kernel.priority,
            requires=tuple(sorted(kernel.requires)),
            composed_of=kernel.composed_of,
            evidence=_levels().get(f"{backend.name}/{name}/{kernel.forward}", {}),
            on={device: _over_dtypes(backend.name, kernel.forward, found) for device, found in servings.items()},
        )
        for backend, kernel in kernels(name)
    ]
    return OpRow(
        op=name,
        summary=summary(op),
        contract=inspect.getdoc(op.reference) or "",
        reference=op.defined_in,
        kernels=tuple(rows),
        reference_evidence=_levels().get(f"reference/{name}/reference", {}),
        reference_on={device: _reference(found) for device, found in servings.items()},
        broken=tuple(dict.fromkeys(text for found in servings.values() for each in found for text in each.broken)),
    )


@cache
def _levels() -> dict[str, dict[str, str]]:
    """Read what the reports of runs say of each kernel: kernel -> chip -> level, date and commit."""
    text = resources.files("kpt_cli").joinpath("support.json").read_text(encoding="utf-8")
    found: dict[str, dict[str, str]] = json.loads(text)
    return found


def _told(evidence: dict[str, str]) -> str:
    """Return the best level, and on which chips it was reached."""
    found: dict[str, list[str]] = {}
    for chip, words in evidence.items():
        found.setdefault(words.partition(" ")[0], []).append(chip)
    for level, place in (("ran", "on"), ("interpreted", "by"), ("compiled", "for"), ("failed", "on")):
        if level in found:
            return f"{level} {place} {', '.join(found[level])}"
    return "claimed"


def _reference(servings: list[Serving]) -> str:
    explicit = servings[0].explicit
    if not all(found.reference for found in servings):
        return f"{explicit} was asked for (use or KPT_USE)"
    return "accepted"


def _over_dtypes(backend: str, kernel: str, servings: list[Serving]) -> str:
    """One sentence for all dtypes if they agree, else one for each."""
    said = {found.dtype: found.sentence(backend, kernel) for found in servings}
    different = set(said.values())
    if len(different) == 1:
        return different.pop()
    return "; ".join(f"{dtype}: {text}" for dtype, text in said.items())


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

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", kpt_core.PluginWarning)  # told below, each once
        devices = present().kinds
        rows = [op_row(name, devices) for name in ([op] if op is not None else sorted(kpt_core.ops()))]
        found = problems()
    for problem in found:
        complain("warning", f"KPT goes on without {problem}")
    for text in dict.fromkeys(text for row in rows for text in row.broken):
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


def _show(row: OpRow, *, contract: bool) -> None:
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
        proof = _told(kernel.evidence)
        made.add_row(str(kernel.priority), kernel.kernel, kernel.backend, needs, proof, *kernel.on.values())
    proof = _told(row.reference_evidence)
    made.add_row("last", row.reference, "reference", "-", proof, *row.reference_on.values())
    out().print(made)
