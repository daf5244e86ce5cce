"""Find plug-ins: load entry points, check what they offer, and say in a sentence what goes wrong."""

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from .errors import PluginWarning, RegistrationError, describe_error, warn_caller

Check = Callable[[EntryPoint, Any], Iterable[tuple[str, Any]]]


@dataclass(frozen=True, slots=True)
class Problem:
    """A plug-in that could not be used, and why."""

    plugin: str
    reason: str

    def __str__(self) -> str:
        return f"{self.plugin}: {self.reason}"


#: What could not be used so far, and what entry points offer, by their group.
problems: dict[Problem, None] = {}
_found: dict[str, dict[str, Any]] = {}


class _Importing(threading.local):
    """The groups whose plug-ins this thread imports."""

    def __init__(self) -> None:
        self.groups: set[str] = set()


_importing = _Importing()


def report(plugin: str, reason: str) -> None:
    """Note a problem, and warn of a new one."""
    problem = Problem(plugin, reason)
    if problem not in problems:
        problems[problem] = None
        warn_caller(f"KPT goes on without {problem}", PluginWarning)


def forget() -> None:
    """Look for plug-ins anew at the next question."""
    global _found
    _found = {}  # a thread that is discovering puts what it finds into the old one
    problems.clear()


def origin_of(entry: EntryPoint) -> str:
    """Return distribution and version of an entry point."""
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else entry.value


def discovered(group: str, check: Check, then: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Return by name what installed packages offer in a group of entry points.

    A broken entry point, or two of one name, is one problem. Threads may ask at the same time and find the same. No
    lock is held: another thread may be importing the plug-in, and wait for one. A plug-in that asks while this thread
    imports it is told of what was found before it.

    Args:
        group: its name.
        check: takes an entry point and its value and gives names with what they name; raises if the value is not what
            the group promises.
        then: called once the group is known.
    """
    state = _found
    if group in state:
        return state[group]
    found: dict[str, Any] = {}
    if group in _importing.groups:
        return found
    _importing.groups.add(group)
    try:
        by_name: dict[str, list[EntryPoint]] = {}
        for entry in entry_points(group=group):
            by_name.setdefault(entry.name, []).append(entry)
        for name, entries in sorted(by_name.items()):
            origins = sorted({origin_of(entry) for entry in entries})
            if len({entry.value for entry in entries}) > 1:
                report(f"{group} {name!r}", f"claimed by {' and by '.join(origins)}; uninstall one of them")
                continue
            try:
                offered: dict[str, Any] = {}
                for each, value in check(entries[0], entries[0].load()):
                    if each in found or each in offered:
                        raise RegistrationError(f"{each!r} exists already")
                    offered[each] = value
                found.update(offered)
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # a plug-in that calls sys.exit() must not end the process
                report(f"{group} {name!r} of {origins[0]}", describe_error(error))
    finally:
        _importing.groups.remove(group)
    if state.setdefault(group, found) is found:
        then()
    return state[group]
