"""Finding plug-ins: entry points are loaded, what they offer is checked, and whatever goes wrong is one sentence."""

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from .contract import TORCH, Backend, Kernel
from .errors import PluginWarning, RegistrationError, warn_caller
from .selection import REFERENCE

BACKENDS_GROUP = "kpt.backends"
OPS_GROUP = "kpt.ops"
POLICIES_GROUP = "kpt.policies"


@dataclass(frozen=True, slots=True)
class Problem:
    """A plug-in that could not be used, and why."""

    plugin: str
    reason: str

    def __str__(self) -> str:
        return f"{self.plugin}: {self.reason}"


class Problems:
    """What could not be used so far; each is warned of once."""

    def __init__(self) -> None:
        self._found: dict[Problem, None] = {}

    def report(self, plugin: str, reason: str) -> None:
        """Note a problem, and warn of a new one."""
        problem = Problem(plugin, reason)
        if problem not in self._found:
            self._found[problem] = None
            warn_caller(f"KPT goes on without {problem}", PluginWarning)

    def forget(self) -> None:
        """Begin anew."""
        self._found.clear()

    def __iter__(self) -> Iterator[Problem]:
        return iter(tuple(self._found))


class _Discovering(threading.local):
    def __init__(self) -> None:
        self.groups: set[str] = set()


_discovering = _Discovering()


def said(error: BaseException) -> str:
    """An error's type and text, as a clause."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def origin_of(entry: EntryPoint) -> str:
    """Distribution and version of an entry point."""
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else entry.value


def load_group(group: str, accept: Callable[[EntryPoint, Any], None], problems: Problems) -> bool:
    """Load every entry point of a group; a broken one, or two of one name, is one problem.

    Threads may do so at the same time and find the same. No lock is held: another thread may be importing the plug-in,
    and wait for one.

    Args:
        group: its name.
        accept: takes an entry point and its value, and raises if that is not what the group promises.
        problems: where failures are reported.

    Returns:
        False if nothing was done because a plug-in of the group asks while this thread imports it.
    """
    if group in _discovering.groups:
        return False
    _discovering.groups.add(group)
    try:
        by_name: dict[str, list[EntryPoint]] = {}
        for entry in entry_points(group=group):
            by_name.setdefault(entry.name, []).append(entry)
        for name, entries in sorted(by_name.items()):
            origins = sorted({origin_of(entry) for entry in entries})
            if len({entry.value for entry in entries}) > 1:
                problems.report(f"{group} {name!r}", f"claimed by {' and by '.join(origins)}; uninstall one of them")
                continue
            try:
                accept(entries[0], entries[0].load())
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # a plug-in that calls sys.exit() must not end the process
                problems.report(f"{group} {name!r} of {origins[0]}", said(error))
    finally:
        _discovering.groups.remove(group)
    return True


def check_backend(backend: object) -> Backend:
    """Raise `RegistrationError` unless `backend` is one."""
    if isinstance(backend, type):
        raise RegistrationError(f"{backend!r} is a class; give an instance of it")
    if not isinstance(backend, Backend):
        raise RegistrationError(f"{backend!r} is no backend: derive its class from kpt_core.Backend")
    name, types = getattr(backend, "name", None), getattr(backend, "device_types", None)
    if not isinstance(name, str) or not name.isidentifier() or name in (REFERENCE, TORCH):
        raise RegistrationError(f"backend name {name!r} is reserved or no identifier")
    if not isinstance(types, tuple) or not types or not all(isinstance(each, str) for each in types):
        raise RegistrationError(
            f"device_types of backend {name!r} must be a tuple of torch's types, such as ('cuda',); got {types!r}"
        )
    return backend


def checked_kernels(backend: Backend, ops: Iterable[str], problems: Problems) -> list[Kernel]:
    """The kernels of a backend that are what they must be; the others are problems.

    An op of a family that no installed package defines is no problem: backends serve features that are not there.
    """
    plugin, known = f"backend {backend.name!r}", set(ops)
    families = {op.partition(".")[0] for op in known}
    try:
        offered: list[object] = list(backend.kernels())
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        problems.report(plugin, f"kernels() raised {said(error)}")
        return []
    found: dict[tuple[str, str], Kernel] = {}
    for kernel in offered:
        if not isinstance(kernel, Kernel):
            problems.report(plugin, f"kernels() gave {kernel!r:.80}, which is no kpt_core.Kernel")
        elif (kernel.op, kernel.forward) in found:
            problems.report(plugin, f"it offers {kernel.forward} for {kernel.op} twice")
        else:
            unknown = {kernel.op, *kernel.composed_of} - known
            if unknown and min(unknown).partition(".")[0] in families:
                problems.report(plugin, f"{kernel.forward} is for {min(unknown)!r}, which no installed package defines")
            else:
                found[kernel.op, kernel.forward] = kernel
    return list(found.values())
