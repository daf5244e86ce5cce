"""List what is there: ops, backends and policies, of installed packages and of this process."""

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import EntryPoint, PackageNotFoundError, distribution, packages_distributions
from typing import Any

import torch

from .contract import TORCH, Backend, Kernel, Op, TorchBackend, identity
from .discovery import (
    BACKENDS_GROUP,
    OPS_GROUP,
    POLICIES_GROUP,
    Problem,
    Problems,
    check_backend,
    checked_kernels,
    load_group,
    origin_of,
    said,
)
from .errors import RegistrationError, UnknownNameError
from .policy import Policy
from .selection import REFERENCE

__all__ = ["Problem", "add_backend", "backends", "get_op", "ops", "problems"]


@dataclass
class _Found:
    """What discovery found; None where it has not looked yet."""

    backends: dict[str, Backend] | None = None
    torch_kernels: list[Kernel] | None = None
    policies: list[Policy] | None = None
    origins: dict[str, str] = field(default_factory=dict)


_lock = threading.RLock()
_found = _Found()
_problems = Problems()
report = _problems.report
_ops: dict[str, Op[..., Any]] = {}
_added: dict[str, Backend] = {}
_forgetting: list[Callable[[], None]] = []
_refreshing: list[Callable[[], None]] = []
_discovering: list[Callable[[], object]] = []


def _after_fork() -> None:
    global _lock
    _lock = threading.RLock()  # another thread may have held it


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def define(op: Op[..., Any], prepare: Callable[[Op[..., Any]], None]) -> None:
    """Enter an op into the table, after it was prepared; called by `@op`."""
    with _lock:
        existing = _ops.get(op.name)
        if existing is not None and existing.defined_in != op.defined_in:
            raise RegistrationError(f"op {op.name!r} is defined in {existing.defined_in} and in {op.defined_in}")
        prepare(op)
        _ops[op.name] = op


def _discover_ops() -> list[Kernel]:
    """Import what defines ops; gives the kernels that are listed beside them."""
    if _found.torch_kernels is None:
        kernels: list[Kernel] = []

        def accept(entry: EntryPoint, value: Any) -> None:
            for each in value:
                if isinstance(each, Kernel):
                    kernels.append(each)
                elif getattr(each, "name", None) not in _ops:
                    raise RegistrationError(f"{entry.value} lists {each!r}, which is neither an op nor a Kernel")

        if load_group(OPS_GROUP, accept, _problems):
            _found.torch_kernels = kernels
        return kernels
    return _found.torch_kernels


def ops() -> dict[str, Op[..., Any]]:
    """Every op by name, those of installed feature packages included."""
    _discover_ops()
    with _lock:
        return dict(_ops)


def get_op(name: str) -> Op[..., Any]:
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


def backends() -> dict[str, Backend]:
    """Installed and added backends by name, and the one that is built in, `torch`, last."""
    state = _found
    if state.backends is None:
        found: dict[str, Backend] = {}

        def accept(entry: EntryPoint, value: Any) -> None:
            backend = check_backend(value)
            if backend.name != entry.name:
                raise RegistrationError(f"its backend calls itself {backend.name!r}; make the two names equal")
            found[entry.name] = backend
            state.origins[entry.name] = origin_of(entry)

        if load_group(BACKENDS_GROUP, accept, _problems):
            with _lock:
                if state.backends is None:
                    state.backends = found
                    forget_selections()  # of ops that a plug-in called while it was imported
    return {**(state.backends or {}), **_added, TORCH: TorchBackend(_discover_ops())}


def backend_serves(backend: Backend, device_type: str) -> bool:
    """Return whether a backend is for devices of a type; one that can't tell is for none."""
    try:
        return bool(backend.serves(device_type))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a plug-in that calls sys.exit() must not end the process
        report(f"backend {backend.name!r}", f"serves() raised {said(error)}")
        return False


def backend_of(device: torch.device) -> Backend:
    """Return who describes a device: the first vendor's backend that is for its type, or else the defaults."""
    vendors = (backend for name, backend in backends().items() if name != TORCH)
    return next((backend for backend in vendors if backend_serves(backend, device.type)), Backend())


def serves(device_type: str) -> bool:
    """Return whether a vendor's backend is for devices of this type."""
    return any(backend_serves(backend, device_type) for name, backend in backends().items() if name != TORCH)


def reference_is_slow(device: torch.device) -> bool:
    """Return whether users want to know that no kernel serves a call on a device, as its backend says."""
    backend = backend_of(device)
    try:
        return bool(backend.reference_is_slow(device))
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        report(f"backend {backend.name!r}", f"reference_is_slow() raised {said(error)}")
        return True


def origin(backend: str) -> str:
    """Distribution and version that a backend came from."""
    return _found.origins.get(backend, "kpt-core" if backend == TORCH else "added by this process")


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


def kernels(op: str) -> list[tuple[Backend, Kernel]]:
    """Every kernel that any backend offers for an op, best first; those of backend `torch` after all others."""
    known = ops()
    offers: list[tuple[Backend, Kernel]] = []
    for backend in backends().values():
        offers += [(backend, k) for k in checked_kernels(backend, known, _problems) if k.op == op]
    return sorted(offers, key=lambda o: (o[0].name == TORCH, -o[1].priority, o[0].name, o[1].forward))


def known_choices() -> set[str]:
    """What `use` and `KPT_USE` accept: backends, kernels' functions and identities, `reference`."""
    names, known = {REFERENCE}, ops()
    for backend in backends().values():
        names.add(backend.name)
        for kernel in checked_kernels(backend, known, _problems):
            names |= {kernel.forward, identity(backend.name, kernel)}
    return names


def packages_of(op: str) -> dict[str, tuple[str | None, str | None]]:
    """Distribution and version of the code of each kernel of an op, by identity; that of the reference as well.

    Both are None for what no installed distribution has.
    """
    found = {REFERENCE: _distribution_of(get_op(op).defined_in)}
    for backend, kernel in kernels(op):
        found[identity(backend.name, kernel)] = _distribution_of(kernel.forward)
    return found


def package_of(target: str) -> str:
    """What to upgrade for another version of some code."""
    return _distribution_of(target)[0] or target.partition(":")[0].partition(".")[0]


def _distribution_of(target: str) -> tuple[str | None, str | None]:
    return _distribution(target.partition(":")[0].partition(".")[0])


@cache
def _distribution(package: str) -> tuple[str | None, str | None]:
    # By the package's own name first: to ask which distribution has which package reads the files of all.
    with suppress(PackageNotFoundError):
        found = distribution(package)
        return found.name, found.version
    for name in packages_distributions().get(package, ()):
        return name, distribution(name).version
    return None, None


def load(group: str, accept: Callable[[EntryPoint, Any], None]) -> bool:
    """Load a group of entry points for who knows what it must hold; see `discovery.load_group`."""
    return load_group(group, accept, _problems)


def policies() -> list[Policy]:
    """Return what may put another kernel first than priorities do (entry points of the group `kpt.policies`)."""
    state = _found
    if state.policies is None:
        found: list[Policy] = []

        def accept(entry: EntryPoint, value: Any) -> None:
            if not callable(value):
                raise RegistrationError(f"{entry.value} is {value!r}, which can't be called")
            found.append(value)

        if load(POLICIES_GROUP, accept):
            state.policies = found
    return state.policies or []


def problems() -> tuple[Problem, ...]:
    """Every plug-in that could not be used so far; discovers everything first."""
    for name in ops():
        kernels(name)
    policies()
    for discover in _discovering:
        discover()
    return tuple(_problems)


def on_problems(discover: Callable[[], object]) -> None:
    """Have a function called that discovers plug-ins of a group that the core does not know."""
    _discovering.append(discover)


def on_forget(forget: Callable[[], None]) -> None:
    """Have a function called whenever what was chosen is forgotten."""
    _forgetting.append(forget)


def on_refresh(forget: Callable[[], None]) -> None:
    """Have a function called whenever everything is forgotten: what was read of the environment, what was said."""
    _refreshing.append(forget)


def forget_selections() -> None:
    """Choose anew at the next call, with tuning tables that are read again; quarantine ends."""
    with _lock:
        for forget in (*_forgetting, *(op.forget for op in _ops.values())):
            forget()


def refresh() -> None:
    """Forget what was discovered, selected and quarantined; read environment variables and tuning tables again."""
    global _found
    with _lock:
        _found = _Found()
        _problems.forget()
        _distribution.cache_clear()
        for forget in _refreshing:
            forget()
        forget_selections()
