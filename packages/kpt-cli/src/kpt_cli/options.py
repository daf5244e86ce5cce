"""Options that several commands have: their checks, before anything heavy is imported, and their completion."""

import ast
import difflib
import math
from collections.abc import Iterable, Sequence
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .errors import CliError
from .plugins import OPS

if TYPE_CHECKING:
    import torch

LEVELS = ("conservative", "balanced", "aggressive")
OBJECTIVES = ("latency", "memory")
DTYPES = ("float32", "bfloat16", "float16", "float64")
#: Of a model's weights; `auto` is the dtype that the model's config names.
WEIGHTS = ("auto", "float32", "bfloat16", "float16")
DEVICE_TYPES = ("cpu", "cuda", "xpu", "mps", "xla", "hpu", "mtia")  #: types of devices that torch has a name for
#: Settings of every group of commands.
GROUP: dict[str, Any] = {
    "no_args_is_help": True,
    "add_completion": False,
    "context_settings": {"help_option_names": ["-h", "--help"]},
}


def op_names() -> list[str]:
    """Read the names of ops from the source of the packages that offer some: importing them would cost seconds."""
    found: set[str] = set()
    for entry in entry_points(group=OPS):
        spec = find_spec(entry.module.partition(".")[0])
        folders = (spec and spec.submodule_search_locations) or ()
        files = [file for folder in folders for file in Path(folder).glob("*.py")]
        if spec is not None and not folders and spec.origin:
            files = [Path(spec.origin)]
        for file in files:
            found |= _declared(file.read_text(encoding="utf-8"))
    return sorted(found)


def _declared(source: str) -> set[str]:
    """Return the first arguments of the calls of `op` in a module, whether they are written there or have a name."""
    if "op(" not in source:
        return set()
    tree = ast.parse(source)
    named: dict[str, ast.expr] = {}
    for each in tree.body:
        if isinstance(each, ast.Assign):
            target, value = each.targets[0], each.value
            pairs: list[tuple[ast.expr, ast.expr]] = [(target, value)]
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                pairs = list(zip(target.elts, value.elts, strict=False))
            named |= {name.id: given for name, given in pairs if isinstance(name, ast.Name)}
    found = set()
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "op" and call.args:
            first = call.args[0]
            given = named.get(first.id) if isinstance(first, ast.Name) else first
            if isinstance(given, ast.Constant) and isinstance(given.value, str):
                found.add(given.value)
    return found


def require_name(kind: str, name: str, names: Sequence[str]) -> None:
    """Raise `CliError`, which offers the nearest, unless a name is one of these."""
    if name not in names:
        near = difflib.get_close_matches(name, names, n=2, cutoff=0.5)
        offer = f"did you mean {' or '.join(near)}? (" if near else "("
        raise CliError(f"unknown {kind} {name!r}: {offer}known: {', '.join(names)})")


def one_of(kind: str, names: Sequence[str], text: str, **options: Any) -> Any:
    """Return an option that takes one of these names, or several of them where it is a list."""

    def check(given: Any) -> Any:
        for name in given if isinstance(given, list | tuple) else () if given is None else (given,):
            require_name(kind, name, names)
        return given

    return typer.Option(help=text, autocompletion=lambda: names, callback=check, **options)


def _check_max_error(given: float | None) -> float | None:
    if given is not None and not (given >= 0 and math.isfinite(given)):
        raise CliError(
            f"--max-error {given:g}: expected a relative error of 0 or more, for instance 1e-3; leave it out for the "
            "level's own budget"
        )
    return given


Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Device = Annotated[
    str | None,
    typer.Option(
        help="As torch spells it; the first accelerator or the CPU if left out.", autocompletion=lambda: DEVICE_TYPES
    ),
]
Dtypes = Annotated[
    list[str] | None,
    one_of("dtype", DTYPES, f"{', '.join(DTYPES)}; may be repeated.", show_default="those of the cases"),
]
WeightDtype = Annotated[str, one_of("dtype", WEIGHTS, f"Of the weights in memory: {', '.join(WEIGHTS)}.")]
Level = Annotated[str, one_of("level", LEVELS, f"What may change: {', '.join(LEVELS)}.")]
Objective = Annotated[str, one_of("objective", OBJECTIVES, f"What to gain: {' or '.join(OBJECTIVES)}.")]
MaxError = Annotated[
    float | None,
    typer.Option(
        help="Largest relative error of a module's output; the level's own if left out.", callback=_check_max_error
    ),
]
Force = Annotated[bool, typer.Option("--force", "--yes", "-y", help="Replace an existing output.")]
TextSeed = Annotated[int, typer.Option(min=0, help="Decides which text, or which random token ids.")]


def dtypes_named(names: Iterable[str] | None) -> "list[torch.dtype]":
    """Return torch's dtypes of these names."""
    import torch

    return [getattr(torch, name) for name in names or ()]


def check_device(given: str | None) -> "torch.device":
    """Return the device that was named, or the first accelerator, or the CPU; `CliError` if it is not there."""
    import torch

    from kpt_optimize.devices.machine import present

    devices = present().devices
    if given is None:
        return torch.device(next((device.device for device in devices if device.type != "cpu"), "cpu"))
    first = next((device.device for device in devices if given in (device.device, device.type)), None)
    if first is None:
        known = ", ".join(device.device for device in devices)
        what = f"no {given} is usable here" if given.partition(":")[0] in DEVICE_TYPES else f"unknown device {given!r}"
        raise CliError(f"{what}: this machine has {known} (`kpt doctor` says what it found)")
    return torch.device(first)


def usable_device(given: str | None) -> "torch.device":
    """Check `KPT_*` variables too, as every op will, so that a slip in them is found before a model is loaded."""
    import kpt_core

    from .offers import serving

    device = check_device(given)
    for op in kpt_core.ops().values():
        serving(op, str(device), "float32")
    return device
