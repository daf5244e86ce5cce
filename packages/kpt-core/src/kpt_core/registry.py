"""List what is there: ops, backends and policies, of installed packages and of this process."""

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import EntryPoint
from typing import Any

import torch

from . import discovery
from .contract import TORCH, Backend, Kernel, Op, TorchBackend, identity
from .discovery import Problem, discovered, origin_of, report
from .errors import RegistrationError, UnknownNameError, describe_error
from .policy import Policy
from .selection import REFERENCE

__all__ = ["Problem", "add_backend", "backends", "get_op", "ops", "problems", "report"]


_lock = threading.RLock()
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


def _torch_kernels() -> list[Kernel]:
    """Import what defines ops; return the kernels that are listed beside them."""

    def check(entry: EntryPoint, value: Any) -> Iterator[tuple[str, Kernel]]:
        for each in value:
            if isinstance(each, Kernel):
                yield identity(TORCH, each), each
            elif getattr(each, "name", None) not in _ops:
                raise RegistrationError(f"{entry.value} lists {each!r}, which is neither an op nor a Kernel")

    return list(discovered("kpt.ops", check).values())


def ops() -> dict[str, Op[..., Any]]:
    """Return every op by name, those of installed feature packages included."""
    _torch_kernels()
    with _lock:
        return dict(_ops)


def defined_ops() -> list[Op[..., Any]]:
    """Return the ops that are defined so far; imports nothing."""
    return list(_ops.values())


def get_op(name: str) -> Op[..., Any]:
    """Return the op of that name.

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


def _check_backend(entry: EntryPoint, value: Any) -> Iterator[tuple[str, tuple[Backend, str]]]:
    backend = check_backend(value)
    if backend.name != entry.name:
        raise RegistrationError(f"its backend calls itself {backend.name!r}; make the two names equal")
    yield entry.name, (backend, origin_of(entry))


def _installed() -> dict[str, tuple[Backend, str]]:
    # At the end selections are forgotten: of ops that a plug-in called while it was imported.
    return discovered("kpt.backends", _check_backend, forget_selections)


def backends() -> dict[str, Backend]:
    """Return installed and added backends by name, and the one that is built in, `torch`, last."""
    installed = {name: backend for name, (backend, _) in _installed().items()}
    return {**installed, **_added, TORCH: TorchBackend(_torch_kernels())}


def _answer(backend: Backend, question: str, asked: object, otherwise: bool) -> bool:
    """Ask a backend; whatever it raises is a problem, and `otherwise` its answer."""
    try:
        return bool(getattr(backend, question)(asked))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a plug-in that calls sys.exit() must not end the process
        report(f"backend {backend.name!r}", f"{question}() raised {describe_error(error)}")
        return otherwise


def backend_serves(backend: Backend, device_type: str) -> bool:
    """Return whether a backend is for devices of a type; one that can't tell is for none."""
    return _answer(backend, "serves", device_type, False)


def _vendor_of(device_type: str) -> Backend | None:
    vendors = (backend for name, backend in backends().items() if name != TORCH)
    return next((backend for backend in vendors if backend_serves(backend, device_type)), None)


def backend_of(device: torch.device) -> Backend:
    """Return who describes a device: the first vendor's backend that is for its type, or else the defaults."""
    return _vendor_of(device.type) or Backend()


def serves(device_type: str) -> bool:
    """Return whether a vendor's backend is for devices of this type."""
    return _vendor_of(device_type) is not None


def reference_is_slow(device: torch.device) -> bool:
    """Return whether users want to know that no kernel serves a call on a device, as its backend says."""
    return _answer(backend_of(device), "reference_is_slow", device, True)


def origin(backend: str) -> str:
    """Return distribution and version that a backend came from."""
    if backend == TORCH:
        return "kpt-core"
    return _installed().get(backend, (None, "added by this process"))[1]


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


def checked_kernels(backend: Backend, ops: Iterable[str]) -> list[Kernel]:
    """Return the kernels of a backend that are what they must be; the others are problems.

    An op of a family that no installed package defines is no problem: backends serve features that are not there.
    """
    plugin, known = f"backend {backend.name!r}", set(ops)
    families = {op.partition(".")[0] for op in known}
    try:
        offered: list[object] = list(backend.kernels())
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        report(plugin, f"kernels() raised {describe_error(error)}")
        return []
    found: dict[tuple[str, str], Kernel] = {}
    for kernel in offered:
        if not isinstance(kernel, Kernel):
            report(plugin, f"kernels() gave {kernel!r:.80}, which is no kpt_core.Kernel")
        elif (kernel.op, kernel.forward) in found:
            report(plugin, f"it offers {kernel.forward} for {kernel.op} twice")
        else:
            unknown = {kernel.op, *kernel.composed_of} - known
            if unknown and min(unknown).partition(".")[0] in families:
                report(plugin, f"{kernel.forward} is for {min(unknown)!r}, which no installed package defines")
            else:
                found[kernel.op, kernel.forward] = kernel
    return list(found.values())


def kernels(op: str) -> list[tuple[Backend, Kernel]]:
    """Return every kernel that any backend offers for an op, best first; those of backend `torch` after all others."""
    known = ops()
    offers: list[tuple[Backend, Kernel]] = []
    for backend in backends().values():
        offers += [(backend, k) for k in checked_kernels(backend, known) if k.op == op]
    return sorted(offers, key=lambda o: (o[0].name == TORCH, -o[1].priority, o[0].name, o[1].forward))


def known_choices() -> set[str]:
    """Return what `use` and `KPT_USE` accept: backends, kernels' functions and identities, `reference`."""
    names, known = {REFERENCE}, ops()
    for backend in backends().values():
        names.add(backend.name)
        for kernel in checked_kernels(backend, known):
            names |= {kernel.forward, identity(backend.name, kernel)}
    return names


def policies() -> list[Policy]:
    """Return what may put another kernel first than priorities do (entry points of the group `kpt.policies`)."""

    def check(entry: EntryPoint, value: Any) -> Iterator[tuple[str, Policy]]:
        if not callable(value):
            raise RegistrationError(f"{entry.value} is {value!r}, which can't be called")
        yield entry.name, value

    return list(discovered("kpt.policies", check).values())


def problems() -> tuple[Problem, ...]:
    """Return every plug-in that could not be used so far; discovers everything first."""
    for name in ops():
        kernels(name)
    policies()
    for discover in _discovering:
        discover()
    return tuple(discovery.problems)


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
    with _lock:
        discovery.forget()
        for forget in _refreshing:
            forget()
        forget_selections()
