"""What is installed: backends, ops and rewrites, found through entry points when first asked for."""

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any

from . import _settings
from ._cases import CaseTable, LayerCase
from ._errors import KptWarning, PluginWarning, RegistrationError, UnknownNameError, warn_caller
from ._kernel import Backend, Kernel
from ._rewrite import check_rewrite
from ._selection import REFERENCE

if TYPE_CHECKING:
    from ._op import Op
    from ._rewrite import Rewrite
    from ._tuning_files import TuningEntry

BACKENDS_GROUP = "kpt.backends"
OPS_GROUP = "kpt.ops"
REWRITES_GROUP = "kpt.rewrites"
CASES_GROUP = "kpt.cases"


@dataclass(frozen=True, slots=True)
class Problem:
    """A plug-in that could not be used, and why."""

    plugin: str
    reason: str

    def __str__(self) -> str:
        return f"{self.plugin}: {self.reason}"


@dataclass
class _State:
    backends: dict[str, Backend] | None = None
    origins: dict[str, str] = field(default_factory=dict)
    #: Distribution and version that a backend or an op came from, where an entry point named it.
    packages: dict[str, tuple[str, str]] = field(default_factory=dict)
    rewrites: dict[str, "Rewrite"] | None = None
    cases: dict[str, CaseTable | LayerCase] | None = None
    ops_discovered: bool = False
    problems: list[Problem] = field(default_factory=list)
    #: Names in `KPT_DISABLE` that nothing has and that were warned of.
    unknown: set[str] = field(default_factory=set)
    #: Name of a device to the usable entries of its tuning tables.
    tuning: dict[str, list["TuningEntry"]] = field(default_factory=dict)
    #: What was said of tuning tables that are ignored.
    ignored: set[str] = field(default_factory=set)


class _Discovering(threading.local):
    def __init__(self) -> None:
        self.groups: set[str] = set()


#: Never held while a plug-in is imported: another thread may be importing it, and wait for this lock in `define`.
_lock = threading.RLock()
_discovering = _Discovering()
_state = _State()
_ops: dict[str, "Op[..., Any]"] = {}
_added: dict[str, Backend] = {}


def report(plugin: str, reason: str) -> None:
    """Warn, the first time, that a plug-in can't be used; `problems` lists it from then on."""
    problem = Problem(plugin, reason)
    with _lock:
        new = problem not in _state.problems
        if new:
            _state.problems.append(problem)
    if new:
        warn_caller(f"KPT goes on without {problem}", PluginWarning)


def _origin(entry: EntryPoint) -> str:
    dist = entry.dist
    return f"{dist.name} {dist.version}" if dist is not None else entry.value


def _discover(group: str, accept: Callable[[EntryPoint, Any], None]) -> bool:
    """Load every entry point of a group; a broken one, or two of one name, cost a warning each.

    Threads may do so at the same time and find the same.

    Returns:
        False if nothing was done because a plug-in of the group asks while this thread imports it.
    """
    if group in _discovering.groups:
        return False
    _discovering.groups.add(group)
    try:
        _load_all(group, accept)
    finally:
        _discovering.groups.remove(group)
    return True


def _load_all(group: str, accept: Callable[[EntryPoint, Any], None]) -> None:
    by_name: dict[str, list[EntryPoint]] = {}
    for entry in entry_points(group=group):
        by_name.setdefault(entry.name, []).append(entry)
    for name, entries in sorted(by_name.items()):
        origins = sorted({_origin(entry) for entry in entries})
        if len({entry.value for entry in entries}) > 1:
            report(
                f"{group} {name!r}",
                f"claimed by {' and by '.join(origins)}; uninstall one of them",
            )
            continue
        try:
            accept(entries[0], entries[0].load())
        except Exception as error:
            report(f"{group} {name!r} of {origins[0]}", f"{type(error).__name__}: {error}")


def _note_package(state: _State, entry: EntryPoint, name: str) -> None:
    if entry.dist is not None:
        state.packages[name] = (entry.dist.name, entry.dist.version)


def check_backend(backend: object) -> Backend:
    """Raise `RegistrationError` unless `backend` satisfies the protocol."""
    if isinstance(backend, type):
        raise RegistrationError(f"{backend!r} is a class; give an instance of it")
    if not isinstance(backend, Backend):
        missing = [
            name
            for name in ("name", "device_type", "unavailable", "capabilities", "kernels")
            if not hasattr(backend, name)
        ]
        raise RegistrationError(
            f"{backend!r} is not a Backend: it lacks {', '.join(missing)}; see kpt_core.Backend for what is needed"
        )
    if backend.name == "reference" or not backend.name.isidentifier():
        raise RegistrationError(f"backend name {backend.name!r} is reserved or not an identifier")
    return backend


def backends() -> dict[str, Backend]:
    """Installed and added backends by name."""
    state = _state
    if state.backends is None:
        found: dict[str, Backend] = {}

        def accept(entry: EntryPoint, value: Any) -> None:
            backend = check_backend(value)
            if backend.name != entry.name:
                raise RegistrationError(f"its backend calls itself {backend.name!r}; make the two names equal")
            found[entry.name] = backend
            state.origins[entry.name] = _origin(entry)
            _note_package(state, entry, backend.name)

        if _discover(BACKENDS_GROUP, accept):
            with _lock:
                if state.backends is None:
                    state.backends = found
                    forget_selections()  # of ops that a plug-in called while it was imported
    return {**(state.backends or {}), **_added}


def serves(device_type: str) -> bool:
    """Whether some backend is for devices of this type."""
    return any(backend.device_type == device_type for backend in backends().values())


def origin(backend: str) -> str:
    """Distribution and version that a backend came from."""
    return _state.origins.get(backend, "added by this process")


def packages_of(op: str) -> dict[str, tuple[str | None, str | None]]:
    """Distribution and version that each kernel of an op, its `reference` included, comes from.

    Both are None for what the process added itself.
    """
    ops()  # the reference's package is known once its entry point was read
    found: dict[str, tuple[str | None, str | None]] = {REFERENCE: _state.packages.get(op, (None, None))}
    for backend, kernel in kernels(op):
        found.setdefault(kernel.target, _state.packages.get(backend.name, (None, None)))
    return found


def add_backend(backend: Backend) -> None:
    """Offer a backend's kernels in this process without installing a package (notebooks, tests).

    Raises:
        RegistrationError: the object is no backend, or its name is taken.
    """
    check_backend(backend)
    if backend.name in backends():
        raise RegistrationError(f"backend {backend.name!r} exists already ({origin(backend.name)}); remove it first")
    _added[backend.name] = backend
    forget_selections()


def remove_backend(name: str) -> None:
    """Take back what `add_backend` added.

    Raises:
        UnknownNameError: no backend of that name was added.
    """
    if name not in _added:
        raise UnknownNameError("added backend", name, _added)
    del _added[name]
    forget_selections()


def define(op: "Op[..., Any]") -> None:
    """Enter an op into the table; called by `@op`."""
    with _lock:
        existing = _ops.get(op.name)
        if existing is not None and existing.defined_in != op.defined_in:
            raise RegistrationError(f"op {op.name!r} is defined in {existing.defined_in} and in {op.defined_in}")
        _ops[op.name] = op


def ops() -> dict[str, "Op[..., Any]"]:
    """Every op by name, those of installed feature packages included."""
    state = _state
    if not state.ops_discovered:

        def accept(entry: EntryPoint, value: Any) -> None:
            for op in value:
                if getattr(op, "name", None) not in _ops:
                    raise RegistrationError(f"{entry.value} lists {op!r}, which was not made by @kpt_core.op")
                _note_package(state, entry, op.name)

        if _discover(OPS_GROUP, accept):
            state.ops_discovered = True
    with _lock:
        return dict(_ops)


def get_op(name: str) -> "Op[..., Any]":
    """The op of that name.

    Raises:
        UnknownNameError: there is none; the message offers the nearest names.
    """
    found = _ops.get(name)
    if found is None:
        known = ops()
        if name not in known:
            raise UnknownNameError("op", name, known, "(`kpt kernels` lists all)")
        found = known[name]
    return found


def rewrites() -> dict[str, "Rewrite"]:
    """Rewrites of installed feature packages by name."""
    state = _state
    if state.rewrites is None:
        found: dict[str, Rewrite] = {}

        def accept(entry: EntryPoint, value: Any) -> None:
            offered: dict[str, Rewrite] = {}
            for rewrite in map(check_rewrite, value):
                if rewrite.name in found or rewrite.name in offered:
                    raise RegistrationError(f"rewrite {rewrite.name!r} exists already")
                offered[rewrite.name] = rewrite
            found.update(offered)

        if _discover(REWRITES_GROUP, accept):
            state.rewrites = found
    return dict(state.rewrites or {})


def _cases() -> dict[str, CaseTable | LayerCase]:
    state = _state
    if state.cases is None:
        found: dict[str, CaseTable | LayerCase] = {}

        def accept(entry: EntryPoint, value: Any) -> None:
            offered: dict[str, CaseTable | LayerCase] = {}
            for table in value:
                if not isinstance(table, CaseTable | LayerCase):
                    raise RegistrationError(f"{entry.value} lists {table!r}; expected CaseTables and LayerCases")
                name = table.op if isinstance(table, CaseTable) else table.name
                if name in found or name in offered:
                    raise RegistrationError(f"cases of {name!r} exist already")
                offered[name] = table
            found.update(offered)

        if _discover(CASES_GROUP, accept):
            state.cases = found
    return state.cases or {}


def case_tables() -> dict[str, CaseTable]:
    """Case tables of installed packages by the name of their op (entry points of the group `kpt.cases`)."""
    return {name: table for name, table in _cases().items() if isinstance(table, CaseTable)}


def layer_cases() -> dict[str, LayerCase]:
    """Layers of installed packages by name (entry points of the group `kpt.cases`)."""
    return {name: layer for name, layer in _cases().items() if isinstance(layer, LayerCase)}


def kernels(op: str) -> list[tuple[Backend, Kernel]]:
    """Every kernel that any backend offers for an op, best first."""
    offers: list[tuple[Backend, Kernel]] = []
    for backend in backends().values():
        offers += [(backend, kernel) for kernel in _kernels_of(backend) if kernel.op == op]
    return sorted(offers, key=lambda offer: (-offer[1].priority, offer[0].name, offer[1].target))


def problems() -> tuple[Problem, ...]:
    """Every plug-in that could not be used so far; discovers everything first."""
    backends(), ops(), rewrites()
    return tuple(_state.problems)


def known_choices() -> set[str]:
    """What `use` and `KPT_USE` accept: backends, kernels' full names, `reference`."""
    names: set[str] = {"reference"}
    for backend in backends().values():
        names.add(backend.name)
        names.update(kernel.target for kernel in _kernels_of(backend))
    return names


def warn_of_unknown(disabled: Iterable[str]) -> None:
    """Warn, the first time, of each name in `KPT_DISABLE` that nothing has: it may be a slip of the pen."""
    for name in sorted(set(disabled) - _state.unknown):
        known = known_choices()
        if name not in known:
            _state.unknown.add(name)
            error = UnknownNameError(
                "backend or kernel", name, known - {"reference"}, "(in KPT_DISABLE, where it has no effect)"
            )
            warn_caller(str(error), KptWarning)


def _kernels_of(backend: Backend) -> Iterable[Kernel]:
    try:
        return list(backend.kernels())
    except Exception as error:
        report(f"backend {backend.name!r}", f"kernels() raised {type(error).__name__}: {error}")
        return []


def forget_selections() -> None:
    """Choose anew at the next call, with tuning tables that are read again; quarantine ends."""
    with _lock:
        _state.tuning = {}  # as in `Op.forget`
        for op in _ops.values():
            op.forget()


def refresh() -> None:
    """Forget what was discovered, selected and quarantined; read environment variables and tuning tables again."""
    global _state
    with _lock:
        _state = _State()
        _settings.forget_environment()
        forget_selections()
