"""What tuning tables say of this device, and its effect on dispatch: which kernel comes first, and how configured."""

import os
import platform
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from . import _registry
from ._candidates import GRADIENT, call_key, needs_gradient
from ._errors import InputError, TuningWarning, warn_caller
from ._settings import KPT_TUNING
from ._tracing import traced_candidates
from ._tuning_files import MEASURED, MODELLED, Key, TuningEntry, read_table


@dataclass(frozen=True, slots=True)
class Tuned:
    """What tables say of an op on a device, in a dtype.

    Attributes:
        entries: by the key of a call.
        common: the measured entry of all calls without (False) and with (True) a gradient, where every key has the same
            winner. Compiled code reads these alone: sizes may be symbols there, and to look at them would mean a graph
            of its own for each. Modelled entries are for single sizes, and say nothing of the others.
        reorders: whether dispatch has to look at a call's sizes. Modelled entries alone configure the kernel that comes
            first anyway, and it asks for its configuration itself.
    """

    entries: dict[Key, TuningEntry]
    common: dict[bool, TuningEntry]
    reorders: bool


def tuned_choices(op: str, device: torch.device, dtype: torch.dtype, kernels: Sequence[str]) -> Tuned | None:
    """What the tables of a device's name say of an op and a dtype, None if nothing.

    Args:
        op: name of the op.
        device: of the calls.
        dtype: of the calls' first tensors.
        kernels: that may serve the calls, best first.
    """
    folder = _folder()
    if folder is None or device.type == "meta":
        return None
    try:
        name = device_name(device)
    except Exception:  # fake tensors may be on a device that is not here
        return None
    tables = _registry._state.tuning  # `refresh` puts another in its place while tables are read
    entries = tables.get(name)
    if entries is None:
        entries = tables[name] = _read_tables(name, folder)
    wanted = str(dtype).removeprefix("torch.")
    found = {}
    for entry in entries:
        if entry.op == op and entry.dtype == wanted:
            if entry.method == MODELLED and entry.kernel == kernels[0]:
                found[entry.key] = entry
            elif entry.method == MEASURED:
                newcomer = _newcomer(entry, kernels)
                if newcomer is None:
                    found[entry.key] = entry
                else:
                    reason = f"{newcomer} comes first and was not there then"
                    _ignore(f"what was measured for {op} in {wanted}", reason)
    measured = {key: entry for key, entry in found.items() if entry.method == MEASURED}
    # Of sizes that were measured with or without a gradient, a model says nothing.
    known = {_sizes(key) for key in measured}
    found = {key: entry for key, entry in found.items() if key in measured or _sizes(key) not in known}
    if not found:
        return None
    common = {}
    for gradient in (False, True):
        group = [entry for key, entry in measured.items() if (key[-1:] == (GRADIENT,)) is gradient]
        if group and all((e.kernel, e.config) == (group[0].kernel, group[0].config) for e in group):
            common[gradient] = group[0]
    return Tuned(found, common, reorders=bool(measured))


def _sizes(key: Key) -> Key:
    """A key without the mark of calls that need a gradient."""
    return key[:-1] if key[-1:] == (GRADIENT,) else key


def tuned_config(op: str, kernel: str, /, *args: Any, **kwargs: Any) -> Mapping[str, Any] | None:
    """The configuration that a tuning table has for a kernel and a call; for use inside the kernel.

    `Kernel(..., configs="package.module:name")` names what is tried beside the kernel's default: a sequence of
    dictionaries or frozen dataclasses that JSON gives back as they are, or a function with the op's parameters that
    gives one. What is tuned comes back as a mapping: `Tile(**found)`.

    It is that of the choice which dispatch made, or which `kpt tune` tries, in the thread that does so: a kernel reads
    it in its forward and hands it on to its backward, which may run in another thread.

    Args:
        op: name of the op.
        kernel: the kernel's full name.
        args: what the op was called with.
        kwargs: likewise.

    Returns:
        The configuration as a mapping, or None: use your default. In compiled code it is one that holds for all sizes.
    """
    declared = _registry.get_op(op)
    if torch.compiler.is_compiling():
        tuned = traced_candidates(declared, declared.first_tensor(args, kwargs)).tuned
        if tuned is None:
            return None
        gradient = needs_gradient(args, kwargs)
        entry = tuned.common.get(gradient) or tuned.common.get(not gradient)
        return entry.config if entry is not None and entry.kernel == kernel else None
    if _chosen.of == (op, kernel):
        return _chosen.config
    first = declared.first_tensor(args, kwargs)
    tuned = declared.candidates(first.device, first.dtype).tuned
    if tuned is None:
        return None
    key = call_key(declared.size_key, args, kwargs)
    # Inside an autograd function nothing tells whether a gradient is needed: its forward runs with autograd off.
    other = _sizes(key) if key[-1:] == (GRADIENT,) else (*key, GRADIENT)
    found = (tuned.entries.get(key), tuned.entries.get(other))
    return next((entry.config for entry in found if entry is not None and entry.kernel == kernel), None)


def next_power_of_two(size: int) -> int:
    """The least power of two that is at least `size`, 1 for 0: for dimensions in a `size_key` that vary by the call."""
    return 1 << max(size - 1, 0).bit_length()


class _Chosen(threading.local):
    def __init__(self) -> None:
        self.of: tuple[str, str] | None = None
        self.config: Mapping[str, Any] | None = None


_chosen = _Chosen()


@contextmanager
def configured(op: str, kernel: str, config: Mapping[str, Any] | None) -> Iterator[None]:
    """Decide what `tuned_config` gives a kernel in this thread."""
    before = _chosen.of, _chosen.config
    _chosen.of, _chosen.config = (op, kernel), config
    try:
        yield
    finally:
        _chosen.of, _chosen.config = before


def device_name(device: torch.device | str) -> str:
    """What tuning tables are named after: an accelerator's name, or a CPU's with its number of threads.

    The number of threads decides which kernel is fast, and a table for another number would mislead.
    """
    device = torch.device(device)
    if device.type == "cpu":
        threads = torch.get_num_threads()
        return f"{_processor()} ({threads} thread{'' if threads == 1 else 's'})"
    tell = getattr(getattr(torch, device.type, None), "get_device_name", None)
    return str(tell(device)) if tell is not None else device.type


@cache
def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    names = {key.strip(): value.strip() for key, value in fields.items()}
    return names.get("model name") or platform.processor() or platform.machine() or "CPU"


def table_name(device: str) -> str:
    """The file of a device's table: `NVIDIA_H200.json`."""
    return f"{re.sub(r'[^A-Za-z0-9.+-]+', '_', device).strip('_.') or 'device'}.json"


def user_table(device: str) -> Path:
    """Where `kpt tune` writes what it finds on a device.

    Raises:
        InputError: there is no such place.
    """
    folder = _folder() or _cache()
    if folder is None:
        raise InputError(f"there is no home folder for tuning tables; set {KPT_TUNING} to a folder")
    return folder / table_name(device)


def _folder() -> Path | None:
    """The user's folder of tables, None where tuned choices are switched off."""
    value = os.environ.get(KPT_TUNING, "").strip()
    if value.lower() in ("0", "false"):
        return None
    if value and value.lower() not in ("1", "true"):
        return Path(value).expanduser()
    return _cache()


def _cache() -> Path | None:
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():  # as the specification of the variable has it
        try:
            base = Path.home() / ".cache"
        except RuntimeError:
            return None
    return base / "kpt" / "tuning"


def _read_tables(device: str, folder: Path) -> list[TuningEntry]:
    """The usable entries for a device: the user's, and from backends what the user has not measured.

    A modelled entry gives way to a measured one, whosever they are.
    """
    found: dict[tuple[str, str, Key], TuningEntry] = {}
    for path in (*_shipped(device), folder / table_name(device)):
        for entry in _usable(path, device):
            before = found.get(entry.calls)
            if before is None or entry.method == MEASURED or before.method == MODELLED:
                found[entry.calls] = entry
    return list(found.values())


def _shipped(device: str) -> Iterator[Path]:
    """The tables for a device that backends brought along."""
    for name, backend in sorted(_registry.backends().items()):
        target = getattr(backend, "tuning", None)
        if target is None:
            continue
        try:
            package, _, folder = target.partition(":")
            yield Path(str(files(package).joinpath(folder, table_name(device))))
        except Exception as error:  # a plug-in's mistake must not stop a call
            _ignore(f"the tuning tables of backend {name!r} at {target!r}", f"{type(error).__name__}: {error}")


def _usable(path: Path, device: str) -> Iterable[TuningEntry]:
    """The entries of one file that hold here; one sentence is said of all others."""
    try:
        entries, faults = read_table(path, device)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except InputError as error:
        _ignore(f"tuning table {path}", str(error))
        return []
    except OSError as error:
        _ignore(f"tuning table {path}", f"it can't be read ({error.strerror or error})")
        return []
    usable = []
    for entry in entries:
        fault = _outdated(entry)
        if fault is None:
            usable.append(entry)
        else:
            faults.append(fault)
    if faults:
        more = f", and {len(faults) - 1} more" if len(faults) > 1 else ""
        _ignore(f"{len(faults)} of {len(faults) + len(usable)} entries of tuning table {path}", f"{faults[0]}{more}")
    return usable


def _outdated(entry: TuningEntry) -> str | None:
    """Why an entry does not hold for what is installed, or None."""
    package = _registry.packages_of(entry.op).get(entry.kernel)
    if package is None:
        return f"kernel {entry.kernel} of {entry.op} is offered by no installed backend"
    if package != (entry.distribution, entry.version):
        measured, installed = (
            " ".join(filter(None, each)) or "this process" for each in ((entry.distribution, entry.version), package)
        )
        return (
            f"kernel {entry.kernel} of {entry.op} was {entry.method} as of {measured}, and comes from {installed} now"
        )
    return None


def _newcomer(entry: TuningEntry, kernels: Sequence[str]) -> str | None:
    """A kernel that goes before an entry's default and was not there when it was measured, or None."""
    before = kernels[: kernels.index(entry.default)] if entry.default in kernels else kernels
    return next((kernel for kernel in before if kernel != entry.kernel and kernel not in entry.present), None)


def _ignore(what: str, reason: str) -> None:
    """Say once that something is left out."""
    if (sentence := f"{what}: ignored, because {reason}; `kpt tune` measures anew") not in _registry._state.ignored:
        _registry._state.ignored.add(sentence)
        warn_caller(sentence, TuningWarning)
