"""Lock files: which kernel, of which version and with which tuning, served the ops of a run."""

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from kpt_core.dispatch.candidates import Candidates
from kpt_core.errors import InputError, KptError, UnknownNameError
from kpt_core.policy import Choice, Key
from kpt_core.registry import get_op
from kpt_core.selection import REFERENCE, Selection

from .tuning.files import load_document, packages_of, parse_entry, write_document
from .tuning.tables import device_name


@dataclass(frozen=True, slots=True, kw_only=True)
class LockEntry:
    """What served some calls of an op.

    Attributes:
        device: its name, as tuning tables have it.
        dtype: of the first tensor, as in `bfloat16`.
        key: the calls' size key, with `gradient` at its end for calls that needed one.
        kernel: identity of what ran (backend/op/function), or `reference`.
        distribution: the package that its code came from, of that version; None if no installed one has it.
        tuned: whether it came first because of a tuning table.
        config: the tuned configuration that it ran with, None for its default.
        refused: kernels that would have come first and refused these arguments.
    """

    op: str
    device_type: str
    device: str
    dtype: str
    key: Key
    kernel: str
    distribution: str | None
    version: str | None
    tuned: bool
    config: dict[str, Any] | None
    refused: tuple[str, ...]

    @property
    def calls(self) -> str:
        """The calls that it is for."""
        sizes = f", sizes {', '.join(map(str, self.key))}" if self.key else ""
        return f"{self.op} on {self.device}, {self.dtype}{sizes}"

    @property
    def package(self) -> str:
        """Distribution and version."""
        return _package(self.distribution, self.version)


@dataclass(frozen=True, slots=True)
class Lock:
    """The content of a lock file.

    Attributes:
        versions: of torch and kpt-core.
        entries: what served which calls.
    """

    versions: dict[str, str]
    entries: tuple[LockEntry, ...]

    def differences(self) -> list[str]:
        """Say what is no longer as it was locked, a sentence each; nothing if the same kernels would run the same way.

        Nothing is computed. A kernel that refused the arguments of a locked call is taken to refuse them still, as
        long as its package has the same version.
        """
        now = _versions()
        said = [
            f"{name} {self.versions[name]} was locked, {now.get(name, 'none')} is installed"
            for name in sorted(self.versions)
            if self.versions[name] != now.get(name)
        ]
        return list(dict.fromkeys([*said, *(each for entry in self.entries for each in _differences(entry))]))


def write_lock(path: str | os.PathLike[str], selections: Iterable[Selection]) -> Lock:
    """Write down what served a run.

    Args:
        path: of the file, which appears whole or not at all.
        selections: of the run, as `kpt_core.record()` collects them; those that they called in turn are locked too.
    """
    entries = {str(entry): entry for selection in selections for entry in _entries(selection)}
    lock = Lock(_versions(), tuple(entry for _, entry in sorted(entries.items())))
    write_document(path, lock.entries, versions=lock.versions)
    return lock


def read_lock(path: str | os.PathLike[str]) -> Lock:
    """Read a lock file.

    Raises:
        InputError: it is missing, or no lock file of a format that this version reads.
    """
    path = Path(path)
    try:
        data = load_document(path)
        versions = data.get("versions")
        if not (isinstance(versions, dict) and all(value and isinstance(value, str) for value in versions.values())):
            raise InputError(f"its versions are {versions!r:.60}, not an object of texts")
        return Lock(versions, tuple(parse_entry(LockEntry, raw) for raw in data["entries"]))
    except FileNotFoundError:
        raise InputError(f"no lock file at {path}: `kpt lock --output {path}` writes one") from None
    except OSError as error:
        raise InputError(f"lock file {path} can't be read: {error.strerror or error}") from error
    except InputError as error:
        raise InputError(f"{path} is no lock file: {error}; `kpt lock` writes one") from None


def _entries(selection: Selection) -> Iterator[LockEntry]:
    device = torch.device(selection.device)
    distribution, package_version = packages_of(selection.op).get(selection.identity, (None, None))
    yield LockEntry(
        op=selection.op,
        device_type=device.type,
        device=device_name(device),
        dtype=selection.dtype,
        key=selection.key,
        kernel=selection.identity,
        distribution=distribution,
        version=package_version,
        tuned=selection.tuned,
        config=None if selection.config is None else dict(selection.config),
        refused=tuple(
            sorted(f"{each.backend}/{selection.op}/{each.kernel}" for each in selection.refusals if each.of_call)
        ),
    )
    for child in selection.children:
        yield from _entries(child)


def _versions() -> dict[str, str]:
    found = {"torch": str(torch.__version__)}
    with suppress(PackageNotFoundError):  # run from its source, without being installed
        found["kpt-core"] = version("kpt-core")
    return found


def _package(distribution: str | None, package_version: str | None) -> str:
    return f"{distribution} {package_version}" if distribution else "a backend that the process added itself"


def _differences(entry: LockEntry) -> Iterator[str]:
    here = _devices(entry.device_type)
    device = here.get(entry.device)
    if device is None:
        there = f"this machine has {' and '.join(here)}" if here else f"this machine has no {entry.device_type} device"
        yield f"{entry.device} was locked, {there}"
        return
    try:
        op = get_op(entry.op)
        packages = packages_of(entry.op)
        found = op.candidates(device, getattr(torch, entry.dtype))
    except UnknownNameError as error:
        yield f"{entry.op} was locked: {error}"
        return
    except (KptError, AttributeError) as error:
        yield f"{entry.calls}: it can't run now: {error}"
        return
    package = packages.get(entry.kernel)
    if package is not None and package != (entry.distribution, entry.version):
        installed = package[1] if package[0] == entry.distribution else _package(*package)
        yield f"kernel {entry.kernel} of {entry.package} was locked for {entry.op}, {installed} is installed"
    tuned = None if found.tuned is None else found.tuned.entries.get(entry.key)
    runs = _runs(found, entry, tuned)
    if runs != entry.kernel:
        what = "nothing would run now" if runs is None else f"{runs} would run now"
        reason = _why(found, entry, runs, tuned) if package else f"no installed backend offers it ({entry.package} did)"
        yield f"{entry.calls}: {entry.kernel} was locked, {what} because {reason}"
        return
    configured = None if found.tuned is None else found.tuned.configuring(entry.key, entry.kernel)
    config = None if configured is None else configured.config
    if config != entry.config:
        told, now = _told(entry.config), _told(config)
        yield f"{entry.calls}: tuning differs: {told} was locked for {runs}, {now} is in force"


def _devices(device_type: str) -> dict[str, torch.device]:
    """Return the devices of a type that are here, by name."""
    if device_type in ("cpu", "meta"):
        return {device_name(device_type): torch.device(device_type)}
    try:
        count = torch.get_device_module(device_type).device_count()
        return {device_name(f"{device_type}:{i}"): torch.device(device_type, i) for i in reversed(range(count))}
    except (RuntimeError, AssertionError, AttributeError):  # torch was not built for it
        return {}


def _runs(found: Candidates, entry: LockEntry, tuned: Choice | None) -> str | None:
    """Return what would serve the locked calls now."""
    if tuned is not None and tuned.kernel == REFERENCE and found.explicit is None:
        return REFERENCE
    targets = [candidate.identity for candidate in found.accepted]
    if tuned is not None:
        targets.sort(key=lambda target: target != tuned.kernel)
    taking = (target for target in targets if target == entry.kernel or target not in entry.refused)
    return next(taking, REFERENCE if found.reference else None)


def _why(found: Candidates, entry: LockEntry, runs: str | None, tuned: Choice | None) -> str:
    for refused in found.refusals:
        if f"{refused.backend}/{entry.op}/{refused.kernel}" == entry.kernel:
            return f"the locked one is refused: {refused.reason}"
    if entry.kernel == REFERENCE and not found.reference:
        return f"{found.explicit} was asked for (use or KPT_USE)"
    if tuned is not None and tuned.kernel == runs:
        return f"tuning differs: a table of {getattr(tuned, 'date', 'unknown date')} puts it first"
    if entry.tuned:
        return "tuning differs: a table put the locked one first, and none does now"
    return "it comes first now; it was not there then, or was ruled out (KPT_DISABLE, KPT_USE, use)"


def _told(config: dict[str, Any] | None) -> str:
    return "its default configuration" if config is None else f"configuration {json.dumps(config, sort_keys=True)}"
