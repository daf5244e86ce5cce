"""What `kpt doctor` finds out."""

import platform
import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from kpt_cli.devices import Device, Present, present
from kpt_cli.offers import DTYPES, Serving, serving, summary
from kpt_cli.plugins import Package, installed_version, packages, third_parties

from .environment import readable, slips, variables

if TYPE_CHECKING:
    from kpt_core import Backend


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendState:
    """An installed backend.

    Attributes:
        name: as `use` and `KPT_USE` name it.
        device_types: torch's types of the devices that it serves; none stands for all.
        origin: the distribution that it comes from.
        unavailable: the sentence that says why it can't run here, None if it is ready.
        capabilities: device to what the backend says the device can do.
        broken: what it raised when it was asked, as sentences.
    """

    name: str
    device_types: tuple[str, ...]
    origin: str
    unavailable: str | None
    capabilities: dict[str, tuple[str, ...]]
    broken: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpState:
    """An op, and what serves it on each kind of device."""

    op: str
    summary: str
    servings: tuple[Serving, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All of it.

    Attributes:
        problems: what is broken; none means that all is well.
        advice: what to install or set to get more out of this machine.
        notes: what a driver or torch complained about.
    """

    versions: dict[str, str | None]
    packages: tuple[Package, ...]
    third_parties: dict[str, str | None]
    environment: dict[str, str]
    devices: tuple[Device, ...]
    backends: tuple[BackendState, ...]
    ops: tuple[OpState, ...]
    problems: tuple[str, ...]
    advice: tuple[str, ...]
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {
            "ok": not self.problems,
            "devices": [device.as_dict() for device in self.devices],
            "ops": [
                {
                    "op": op.op,
                    "summary": op.summary,
                    "servings": [found.as_dict() for found in op.servings],
                }
                for op in self.ops
            ],
        }


def examine() -> Report:
    """Look at everything; nothing is computed and no third party is imported.

    A `KPT_*` variable that every op refuses is a problem, and the rest is as without it.
    """
    shown = variables()
    with readable() as faults:
        return _examine(shown, faults)


def _examine(shown: dict[str, str], faults: list[str]) -> Report:
    import kpt_core
    from kpt_core.contract import TORCH
    from kpt_core.registry import problems

    there = present()
    offered = sorted(kpt_core.backends().items(), key=lambda each: (each[0] == TORCH, each[0]))
    backends = tuple(_backend_state(backend, there) for _, backend in offered)
    ops = tuple(
        OpState(
            op=name,
            summary=summary(op),
            servings=tuple(serving(op, device.device, dtype) for device in there.kinds for dtype in DTYPES),
        )
        for name, op in sorted(kpt_core.ops().items())
    )
    wrong = faults + [str(problem) for problem in problems()]  # last: looking at kernels may find more
    wrong += [text for backend in backends for text in backend.broken]
    wrong += [text for op in ops for found in op.servings for text in found.broken]
    return Report(
        versions=_versions(),
        packages=tuple(packages()),
        third_parties=third_parties(),
        environment=shown,
        devices=there.devices,
        backends=backends,
        ops=ops,
        problems=tuple(dict.fromkeys(wrong)),
        advice=(*slips(), *_advice(there, ops)),
        notes=there.notes,
    )


def _versions() -> dict[str, str | None]:
    import torch

    return {
        "kpt-cli": installed_version("kpt-cli"),
        "kpt-core": installed_version("kpt-core"),
        "torch": str(torch.__version__),
        "torch built for CUDA": torch.version.cuda,
        "torch built for ROCm": torch.version.hip,
        "python": platform.python_version(),
        "python at": sys.executable,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }


def _backend_state(backend: "Backend", there: Present) -> BackendState:
    import torch

    from kpt_core.registry import origin

    unavailable, capabilities, broken = None, {}, []
    try:
        unavailable = backend.unavailable()
        if unavailable is None:
            for device in there.kinds:
                if backend.serves(device.type):
                    told = backend.capabilities(torch.device(device.device))
                    capabilities[device.device] = tuple(sorted(told))
    except Exception as error:  # foreign code: its failure is what is reported
        broken.append(f"backend {backend.name!r} of {origin(backend.name)}: {type(error).__name__}: {error}")
    return BackendState(
        name=backend.name,
        device_types=backend.device_types,
        origin=origin(backend.name),
        unavailable=unavailable,
        capabilities=capabilities,
        broken=tuple(broken),
    )


def _advice(there: Present, ops: tuple[OpState, ...]) -> list[str]:
    advice = []
    if not ops:
        advice.append("No ops are installed; feature packages bring them: kpt-moe has some")
    missing: dict[str, list[str]] = {}
    for op in ops:
        for found in op.servings:
            for refused in found.refused:
                if refused.kernel is None and refused.reason == "none is installed":
                    missing.setdefault(found.device, []).append(op.op)
    for device, waiting in missing.items():
        names = list(dict.fromkeys(waiting))
        what = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        advice.append(f"A backend for {device} would serve {what} faster; none is installed")
    known = {device.type for device in there.devices}
    if known == {"cpu"} and there.notes:
        advice.append("No accelerator is usable; the notes say what a driver complained about")
    return advice
