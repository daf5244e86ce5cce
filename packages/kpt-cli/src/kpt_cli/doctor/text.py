"""The report of `kpt doctor` for people."""

from kpt_cli.console import heading, out, say, table
from kpt_cli.offers import Serving

from .report import OpState, Report


def show(report: Report) -> None:
    """Print the report: the verdict comes last, where the eye is."""
    _show_versions(report)
    _show_devices(report)
    _show_backends(report)
    _show_ops(report)
    _show_sentences("Environment", [f"{name}={value}" for name, value in report.environment.items()])
    _show_sentences("Notes", list(report.notes))
    _show_sentences("Advice", list(report.advice))
    _show_sentences("Problems", list(report.problems), style="red")
    count = len(report.problems)
    verdict = "All is well." if count == 0 else f"{count} problem{'s' if count > 1 else ''} found."
    out().print(f"\n{verdict}", style="bold green" if count == 0 else "bold red")


def _show_sentences(title: str, sentences: list[str], style: str = "") -> None:
    if sentences:
        heading(title)
    for sentence in sentences:
        say(f"  {sentence}", style=style)


def _show_versions(report: Report) -> None:
    heading("Installed")
    made = table("what", "version", "offers")
    for name, version in report.versions.items():
        if version is not None and not name.startswith("kpt-"):
            made.add_row(name, version, "")
    for package in report.packages:
        made.add_row(package.name, package.version, ", ".join(package.offers))
    for name, version in report.third_parties.items():
        if version is not None:
            made.add_row(name, version, "")
    out().print(made)
    absent = [name for name, version in report.third_parties.items() if version is None]
    if absent:
        say(f"Optional and not installed: {', '.join(absent)}", style="dim")


def _show_devices(report: Report) -> None:
    heading("Devices")
    made = table("device", "name", "memory", "features", right=("memory",))
    for device in report.devices:
        memory = "-" if device.memory_bytes is None else f"{device.memory_bytes / 2**30:.1f} GiB"
        made.add_row(device.device, device.name, memory, ", ".join(device.features))
    out().print(made)


def _show_backends(report: Report) -> None:
    heading("Backends")
    made = table("backend", "from", "serves", "state", "capabilities")
    for backend in report.backends:
        if backend.broken:
            state = "broken"
        elif backend.unavailable is None:
            state = "ready"
        else:
            state = backend.unavailable
        told = "; ".join(f"{device}: {', '.join(names)}" for device, names in backend.capabilities.items())
        made.add_row(backend.name, backend.origin, ", ".join(backend.device_types) or "all", state, told)
    out().print(made)
    if len(report.backends) == 1:
        say("No vendor's backend is installed: everything runs in plain PyTorch.", style="dim")


def _show_ops(report: Report) -> None:
    if not report.ops:
        return
    heading("What runs")
    made = table("op", "device", "dtype", "kernel")
    refusals: dict[str, None] = {}
    for op in report.ops:
        for device, dtypes, runs in _rows(op):
            made.add_row(op.op, device, dtypes, runs)
        for found in op.servings:
            refusals.update(dict.fromkeys(_refusals(found)))
    out().print(made)
    if any(" if " in runs for op in report.ops for _, _, runs in _rows(op)):
        say("'if it takes the call': a kernel without a backward, or one that looks at arguments first.", style="dim")
    tuned = {found.op: None for op in report.ops for found in op.servings if found.tuned}
    if tuned:
        say(f"For some sizes of {', '.join(tuned)}, what `kpt tune` measured comes first.", style="dim")
    _show_sentences("Not used, and why (`kpt kernels` shows all)", list(refusals))


def _rows(op: OpState) -> list[tuple[str, str, str]]:
    """Device, dtypes and what runs; dtypes that are served alike share a row."""
    alike: dict[tuple[str, str], list[str]] = {}
    for found in op.servings:
        alike.setdefault((found.device, _runs(found)), []).append(found.dtype)
    return [(device, ", ".join(dtypes), runs) for (device, runs), dtypes in alike.items()]


def _runs(found: Serving) -> str:
    chain = [f"{each.kernel}{' if it takes the call' if each.conditional else ''}" for each in found.runs]
    if found.ends_in_reference:
        chain.append("reference")
    if not chain:
        return f"nothing: {found.explicit} was asked for and can't serve it"
    return "\nelse ".join(chain)


def _refusals(found: Serving) -> list[str]:
    # A kernel for a kind of device that this call is not on needs no explanation, nor one in plain PyTorch for host
    # memory alone; and advice names what to install.
    return [
        f"{found.op}: {refused.kernel or refused.backend}: {refused.reason}"
        for refused in found.refused
        if refused.kernel is not None and refused.backend != "torch" and not refused.reason.startswith("runs on ")
    ]
