"""The command `kpt doctor`: devices, packages, the kernels that serve, and what is broken."""

import difflib
import os
import platform
import shutil
import sys
import sysconfig
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .console import heading, out, print_json, progress, say, say_all, some, table
from .convert import fp8_checkpoints
from .errors import CliError
from .offers import DTYPES, missing_party, say_optional, serving, summary
from .options import Json
from .plugins import installed_version, packages
from .settings import settings_of, variables

if TYPE_CHECKING:
    from kpt_core import Backend
    from kpt_optimize.devices.machine import Present

BROKEN = 1
Document = dict[str, Any]  #: the report, or a part of it, as in JSON
#: Variables that KPT reads, beside those of the options of commands.
KNOWN = (
    "KPT_CONFIG",
    "KPT_CPU_BUILD",
    "KPT_CPU_ISA",
    "KPT_DEBUG",
    "KPT_DISABLE",
    "KPT_STRICT",
    "KPT_TUNING",
    "KPT_USE",
    "KPT_VLLM",
)
#: Distributions that some part of KPT can use; they are looked up, never imported.
THIRD_PARTIES = (
    *("transformers", "safetensors", "triton", "jax", "torch-xla", "torchax", "intel-extension-for-pytorch"),
    "flash-attn",
)
IPEX = "intel-extension-for-pytorch"
#: Of those, what is no longer maintained, and what that means.
END_OF_LIFE = {IPEX: "is archived upstream since March 2026 and gets no security fixes; torch's own xpu replaced it"}


def doctor(
    ctx: typer.Context,
    checkpoint: Annotated[
        Path | None,
        typer.Argument(help="Only check this folder: its files, scales and 8-bit weights.", show_default=False),
    ] = None,
    lock: Annotated[
        Path | None, typer.Option(help="Only compare with this lock file of `kpt lock`.", show_default=False)
    ] = None,
    as_json: Json = False,
) -> None:
    """Show devices, packages, which kernel serves what, and what is broken; or what is wrong with an FP8 checkpoint.

    Exit code: 0 all is well, 1 something is broken or differs from the lock file.
    """
    if checkpoint is not None and lock is not None:
        raise CliError(f"{checkpoint} and --lock {lock} ask for two reports; give one of them")
    if checkpoint is not None:
        _check(checkpoint, as_json)
    elif lock is not None:
        _compare(lock, as_json)
    else:
        _report(ctx, as_json)


def _report(ctx: typer.Context, as_json: bool) -> None:
    import kpt_core

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", kpt_core.PluginWarning)  # every one is among the report's problems
        report = examine({*variables(ctx.find_root().command)}, settings_of(ctx).applied)
    if as_json:
        print_json(report)
    else:
        _show(report)
    if report["problems"]:
        raise typer.Exit(BROKEN)


def _compare(path: Path, as_json: bool) -> None:
    from kpt_optimize.lock import read_lock

    found = read_lock(path).differences()
    document = {"lock": str(path), "differences": found}
    _conclude(document, found, "difference", f"from {path}.", f"All is as in {path}.", as_json)


def _check(path: Path, as_json: bool) -> None:
    with progress() as tell:
        found = fp8_checkpoints("kpt doctor CHECKPOINT").examine_checkpoint(path, progress=tell)
    if not as_json:
        say(str(found))
    _conclude(found.as_dict(), found.faults, "fault", f"in {path}.", f"No fault in {path}.", as_json)


def _conclude(document: Document, sentences: Sequence[str], noun: str, place: str, well: str, as_json: bool) -> None:
    """Print the sentences and how many there are, or that all is well; leave with an exit code if there is one."""
    if as_json:
        print_json({"ok": not sentences, **document})
    else:
        for sentence in sentences:
            say(sentence, style="red")
        verdict = f"{len(sentences)} {noun}{'s' * (len(sentences) > 1)} {place}" if sentences else well
        out().print(verdict, style="bold red" if sentences else "bold green", soft_wrap=True)
    if sentences:
        raise typer.Exit(BROKEN)


def examine(known: Collection[str] = (), applied: Mapping[str, str] | None = None) -> Document:
    """Look at everything, and return the report; nothing is computed and no third party is imported.

    A `KPT_*` variable that every op refuses is among `problems`, and the rest is as without it.

    Args:
        known: variables of options.
        applied: variables that a file or preset set, and which.
    """
    import torch

    import kpt_core
    from kpt_core.contract import TORCH
    from kpt_core.registry import problems
    from kpt_optimize.devices.machine import present

    environment = {name: value for name, value in sorted(os.environ.items()) if name.startswith("KPT_")}
    with _readable_variables() as faults:
        there = present()
        offered = sorted(kpt_core.backends().items(), key=lambda each: (each[0] == TORCH, each[0]))
        backends = [_backend(backend, there) for _, backend in offered]
        ops: list[Document] = []
        for name, op in sorted(kpt_core.ops().items()):
            servings = [serving(op, device.device, dtype).as_dict() for device in there.kinds for dtype in DTYPES]
            ops.append({"op": name, "summary": summary(op), "servings": servings})
        wrong = faults + [str(problem) for problem in problems()]  # last: looking at kernels may find more
    wrong += [text for backend in backends for text in backend["broken"]]
    wrong += [text for op in ops for found in op["servings"] for text in found["broken"]]
    third_parties = {name: installed_version(name) for name in THIRD_PARTIES}
    ended = [f"{name} {third_parties[name]} {why}" for name, why in END_OF_LIFE.items() if third_parties[name]]
    return {
        "versions": {
            "kpt-cli": installed_version("kpt-cli"),
            "kpt-core": installed_version("kpt-core"),
            "torch": str(torch.__version__),
            "torch built for CUDA": torch.version.cuda,
            "torch built for ROCm": torch.version.hip,
            "python": platform.python_version(),
            "python at": sys.executable,
            "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        },
        "packages": [package._asdict() for package in packages()],
        "third_parties": third_parties,
        "environment": environment,
        "set_by": dict(applied or {}),
        "devices": [device.as_dict() for device in there.devices],
        "backends": backends,
        "ops": ops,
        "problems": list(dict.fromkeys(wrong)),
        "advice": [*_slips(environment, {*KNOWN, *known}), *_namesake(), *_advice(there, ops), *ended],
        "notes": list(there.notes),
        "ok": not wrong,
    }


def _backend(backend: "Backend", there: "Present") -> Document:
    """Ask a backend why it can't run here, and what each device can do; it is `broken` if it raises."""
    import torch

    from kpt_core.registry import origin

    unavailable, capabilities, broken = None, {}, []
    try:
        unavailable = backend.unavailable()
        for device in there.kinds if unavailable is None else ():
            if backend.serves(device.type):
                capabilities[device.device] = sorted(backend.capabilities(torch.device(device.device)))
    except Exception as error:  # foreign code: its failure is what is reported
        broken.append(f"backend {backend.name!r} of {origin(backend.name)}: {type(error).__name__}: {error}")
    about = {"name": backend.name, "device_types": backend.device_types, "origin": origin(backend.name)}
    return about | {"unavailable": unavailable, "capabilities": capabilities, "broken": broken}


def _slips(variables: Iterable[str], known: Collection[str]) -> Iterator[str]:
    """Name the variables that are nearly one of ours: nothing else would tell."""
    for name in variables:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
        if name not in known and near:
            yield f"{name} is not read by anything; did you mean {near[0]}?"


def _namesake() -> Iterator[str]:
    """Name another program that answers to `kpt`: Google's, for Kubernetes, has the same name."""
    first, own = shutil.which("kpt"), Path(sysconfig.get_path("scripts")) / "kpt"
    if first is not None and own.exists() and Path(first).resolve() != own.resolve():
        yield (
            f"the command kpt that PATH finds is {first}, not this environment's {own}: put {own.parent} first in "
            f"PATH, as activating the environment does, or run {sys.executable} -m kpt_cli"
        )


@contextmanager
def _readable_variables() -> Iterator[list[str]]:
    """Leave out, while the block runs, the variables that every op would refuse; gives a sentence for each."""
    import kpt_core

    removed: dict[str, str] = {}
    faults: list[str] = []
    try:
        while fault := _fault():
            name = next(name for name in KNOWN if name in fault and name in os.environ)
            removed[name] = os.environ.pop(name)
            faults.append(f"{fault}; every op raises this, and what is shown here leaves {name} out")
            kpt_core.refresh()
        yield faults
    finally:
        if removed:
            os.environ.update(removed)
            kpt_core.refresh()


def _fault() -> str | None:
    """Say what is wrong with the variables, None if nothing is."""
    from kpt_core import InputError, UnknownNameError
    from kpt_core.dispatch.settings import environment
    from kpt_core.registry import known_choices, ops

    try:
        choices = environment().choices
    except InputError as error:
        return str(error)
    for op, name in choices:
        kind, asked, known = ("op", op, {*ops(), "*"}) if name in known_choices() else ("name", name, known_choices())
        if asked not in known:
            near = UnknownNameError(kind, asked, known).nearest
            offer = f"did you mean {' or '.join(near)}?" if near else "`kpt kernels` lists all"
            return f"KPT_USE={os.environ['KPT_USE']}: no {kind} {asked!r} is installed ({offer})"
    return None


def _advice(there: "Present", ops: Sequence[Document]) -> Iterator[str]:
    if not ops:
        yield "No ops are installed; feature packages bring them: kpt-moe has some"
    missing: dict[str, dict[str, None]] = {}
    for found in (found for op in ops for found in op["servings"]):
        if any(refused["kernel"] is None and refused["reason"] == "none is installed" for refused in found["refused"]):
            missing.setdefault(found["device"], {})[found["op"]] = None
    for device, names in missing.items():
        yield f"A backend for {device} would serve {some(names)} faster; none is installed"
    if {device.type for device in there.devices} == {"cpu"} and there.notes:
        yield "No accelerator is usable; the notes say what a driver complained about"


def _show(report: Document) -> None:
    """Print the report: the verdict comes last, where the eye is."""
    heading("Installed")
    made = table("what", "version", "offers")
    ours = {each["name"]: each for each in report["packages"]}
    versions = {name: found for name, found in report["versions"].items() if not name.startswith("kpt-")}
    versions |= {name: each["version"] for name, each in ours.items()} | report["third_parties"]
    for name, found in versions.items():
        if found is not None:
            made.add_row(name, found, ", ".join(ours[name]["offers"]) if name in ours else "")
    out().print(made)
    optional = {
        backend["name"]: party
        for backend in report["backends"]
        if (party := missing_party(backend["device_types"], backend["unavailable"])) is not None
    }
    absent = [name for name, found in report["third_parties"].items() if found is None] + [*optional.values()]
    say_optional({name: [backend for backend, party in optional.items() if party == name] for name in absent})
    heading("Devices")
    made = table("device", "name", "memory", "features", right=("memory",))
    for device in report["devices"]:
        size = device["memory_bytes"]
        memory = "-" if size is None else f"{size / 2**30:.1f} GiB"
        made.add_row(device["device"], device["name"], memory, ", ".join(device["features"]))
    out().print(made)
    heading("Backends")
    made = table("backend", "from", "serves", "state", "capabilities")
    for backend in report["backends"]:
        if backend["name"] in optional:
            continue
        state = "broken" if backend["broken"] else backend["unavailable"] or "ready"
        told = "; ".join(f"{device}: {', '.join(names)}" for device, names in backend["capabilities"].items())
        made.add_row(backend["name"], backend["origin"], ", ".join(backend["device_types"]) or "all", state, told)
    out().print(made)
    if len(report["backends"]) == 1:
        say("No vendor's backend is installed: everything runs in plain PyTorch.", style="dim")
    if report["ops"]:
        _show_servings([found for op in report["ops"] for found in op["servings"]], optional)
    by = {name: f" ({source})" for name, source in report["set_by"].items()}
    say_all("Environment", [f"{name}={value}{by.get(name, '')}" for name, value in report["environment"].items()])
    say_all("Notes", report["notes"])
    say_all("Advice", report["advice"])
    say_all("Problems", report["problems"], style="red")
    count = len(report["problems"])
    verdict = "All is well." if count == 0 else f"{count} problem{'s' if count > 1 else ''} found."
    out().print(f"\n{verdict}", style="bold green" if count == 0 else "bold red")


def _show_servings(servings: Sequence[Document], optional: Collection[str]) -> None:
    heading("What runs")
    alike: dict[tuple[str, str, str], list[str]] = {}  # dtypes that are served alike share a row
    for found in servings:
        alike.setdefault((found["op"], found["device"], _runs(found)), []).append(found["dtype"])
    made = table("op", "device", "dtype", "kernel")
    for (op, device, runs), dtypes in alike.items():
        made.add_row(op, device, ", ".join(dtypes), runs)
    out().print(made)
    if any(" if " in runs for _, _, runs in alike):
        say("'if it takes the call': a kernel without a backward, or one that looks at arguments first.", style="dim")
    if tuned := dict.fromkeys(found["op"] for found in servings if found["tuned"]):
        say(f"For some sizes of {', '.join(tuned)}, what `kpt tune` measured comes first.", style="dim")
    # A kernel for a kind of device that this call is not on needs no explanation, nor one in plain PyTorch for host
    # memory alone; and advice names what to install.
    refusals = [
        f"{found['op']}: {refused['kernel']}: {refused['reason']}"
        for found in servings
        for refused in found["refused"]
        if refused["kernel"]
        and refused["backend"] not in ("torch", *optional)
        and not refused["reason"].startswith("runs on ")
    ]
    say_all("Not used, and why (`kpt kernels` shows all)", refusals)


def _runs(found: Document) -> str:
    conditional = {each["kernel"] for each in found["accepted"] if each["conditional"]}
    chain = [f"{kernel}{' if it takes the call' if kernel in conditional else ''}" for kernel in found["runs"]]
    return "\nelse ".join(chain) or f"nothing: {found['explicit']} was asked for and can't serve it"
