"""What tuning tables say of this device, and its effect on dispatch: which kernel comes first, and how configured."""

import os
import platform
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from importlib.resources import files
from pathlib import Path

import torch

from kpt_core import registry
from kpt_core.errors import InputError, TuningWarning, warn_caller
from kpt_core.policy import Key, Tuned

from .files import TuningEntry, packages_of, read_table

#: "0" switches tuned choices off; a folder holds the user's tuning tables instead of the one in the user's cache.
KPT_TUNING = "KPT_TUNING"

#: Name of a device to the usable entries of its tables, and what was said of those that are ignored.
_tables: dict[str, list[TuningEntry]] = {}
_ignored: set[str] = set()


def _forget() -> None:
    global _tables
    _tables = {}  # a new one: a thread that reads tables just now puts them into the old one


registry.on_forget(_forget)
registry.on_refresh(_ignored.clear)


def tuned_choices(op: str, device: torch.device, dtype: torch.dtype, kernels: Sequence[str]) -> Tuned | None:
    """Return what the tables of a device's name say of an op and a dtype, None if nothing: a policy for the core.

    Args:
        op: name of the op.
        device: of the calls.
        dtype: of the calls' first tensors.
        kernels: identities of those that may serve the calls, best first.
    """
    folder = _folder()
    if folder is None or device.type == "meta":
        return None
    try:
        name = device_name(device)
    except Exception:  # fake tensors may be on a device that is not here
        return None
    tables = _tables
    entries = tables.get(name)
    if entries is None:
        entries = tables[name] = _read_tables(name, folder)
    wanted = str(dtype).removeprefix("torch.")
    found: dict[Key, TuningEntry] = {}
    for entry in entries:
        if entry.op == op and entry.dtype == wanted:
            if (newcomer := _newcomer(entry, kernels)) is None:
                found[entry.key] = entry
            else:
                _ignore(f"what was measured for {op} in {wanted}", f"{newcomer} comes first and was not there then")
    return Tuned(found) if found else None


def device_name(device: torch.device | str) -> str:
    """Return what tuning tables are named after: an accelerator's name, or a CPU's with its number of threads.

    The number of threads decides which kernel is fast, and a table for another number would mislead.
    """
    device = torch.device(device)
    if device.type == "cpu":
        threads = torch.get_num_threads()
        return f"{processor()} ({threads} thread{'' if threads == 1 else 's'})"
    return registry.backend_of(device).device_name(device)


@cache
def processor() -> str:
    """Return the maker's name of the CPU."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("model name", "Model", "Hardware") and value.strip():
                return value.strip()
    return platform.processor() or platform.machine() or "CPU"


def table_name(device: str) -> str:
    """Return the name of the file of a device's table: `NVIDIA_H200.json`."""
    return f"{re.sub(r'[^A-Za-z0-9.+-]+', '_', device).strip('_.') or 'device'}.json"


def user_table(device: str) -> Path:
    """Return the file into which `kpt tune` writes what it finds on a device.

    Raises:
        InputError: there is no such place.
    """
    folder = _folder() or _cache()
    if folder is None:
        raise InputError(f"there is no home folder for tuning tables; set {KPT_TUNING} to a folder")
    return folder / table_name(device)


def _folder() -> Path | None:
    """Return the user's folder of tables, None where tuned choices are switched off."""
    value = os.environ.get(KPT_TUNING, "").strip()
    if value.lower() in ("0", "false"):
        return None
    if value and value.lower() not in ("1", "true"):
        return Path(value).expanduser()
    return _cache()


def _cache() -> Path | None:
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    with suppress(RuntimeError):  # the specification of the variable wants an absolute folder
        return (base if base.is_absolute() else Path.home() / ".cache") / "kpt" / "tuning"
    return None


def _read_tables(device: str, folder: Path) -> list[TuningEntry]:
    """Return the usable entries for a device: the user's, and from backends what the user has not measured."""
    paths = (*_shipped(device), folder / table_name(device))
    return list({entry.calls: entry for path in paths for entry in _usable(path, device)}.values())


def _shipped(device: str) -> Iterator[Path]:
    """Yield the tables for a device that backends brought along."""
    for name, backend in sorted(registry.backends().items()):
        target = backend.tuning
        if target is None:
            continue
        try:
            package, _, folder = target.partition(":")
            yield Path(str(files(package).joinpath(folder, table_name(device))))
        except Exception as error:  # a plug-in's mistake must not stop a call
            _ignore(f"the tuning tables of backend {name!r} at {target!r}", f"{type(error).__name__}: {error}")


def _usable(path: Path, device: str) -> Iterable[TuningEntry]:
    """Return the entries of one file that hold here, and say one sentence of all others."""
    try:
        entries, faults = read_table(path, device)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except (InputError, OSError) as error:
        reason = f"it can't be read ({error.strerror or error})" if isinstance(error, OSError) else str(error)
        _ignore(f"tuning table {path}", reason)
        return []
    usable, known = [], registry.ops()
    for entry in entries:
        if entry.op not in known:  # of a feature package that is not installed, and nothing calls
            continue
        if (fault := _outdated(entry)) is None:
            usable.append(entry)
        else:
            faults.append(fault)
    if faults:
        more = f", and {len(faults) - 1} more" if len(faults) > 1 else ""
        _ignore(f"{len(faults)} of {len(faults) + len(usable)} entries of tuning table {path}", f"{faults[0]}{more}")
    return usable


def _outdated(entry: TuningEntry) -> str | None:
    """Say why an entry does not hold for what is installed; None if it does."""
    package = packages_of(entry.op).get(entry.kernel)
    if package is None:
        return f"kernel {entry.kernel} of {entry.op} is offered by no installed backend"
    if package != (entry.distribution, entry.version):
        measured, installed = (
            " ".join(filter(None, each)) or "this process" for each in ((entry.distribution, entry.version), package)
        )
        return f"kernel {entry.kernel} of {entry.op} was measured as of {measured}, and comes from {installed} now"
    return None


def _newcomer(entry: TuningEntry, kernels: Sequence[str]) -> str | None:
    """Return a kernel that goes before an entry's default and was not there when it was measured, or None."""
    before = kernels[: kernels.index(entry.default)] if entry.default in kernels else kernels
    return next((kernel for kernel in before if kernel != entry.kernel and kernel not in entry.present), None)


def _ignore(what: str, reason: str) -> None:
    """Say once that something is left out."""
    if (sentence := f"{what}: ignored, because {reason}; `kpt tune` measures anew") not in _ignored:
        _ignored.add(sentence)
        warn_caller(sentence, TuningWarning)
