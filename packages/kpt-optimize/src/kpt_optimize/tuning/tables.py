"""What tuning tables say of this device, and its effect on dispatch: which kernel comes first, and how configured."""

import os
import platform
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path

import torch

from kpt_core import registry
from kpt_core.errors import InputError, TuningWarning, warn_caller
from kpt_core.policy import Key, Tuned

from .files import TuningEntry, read_table

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
            newcomer = _newcomer(entry, kernels)
            if newcomer is None:
                found[entry.key] = entry
            else:
                reason = f"{newcomer} comes first and was not there then"
                _ignore(f"what was measured for {op} in {wanted}", reason)
    return Tuned(found) if found else None


def device_name(device: torch.device | str) -> str:
    """What tuning tables are named after: an accelerator's name, or a CPU's with its number of threads.

    The number of threads decides which kernel is fast, and a table for another number would mislead.
    """
    device = torch.device(device)
    if device.type == "cpu":
        threads = torch.get_num_threads()
        return f"{_processor()} ({threads} thread{'' if threads == 1 else 's'})"
    return registry.backend_of(device).device_name(device)


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
    """Return the usable entries for a device: the user's, and from backends what the user has not measured."""
    paths = (*_shipped(device), folder / table_name(device))
    return list({entry.calls: entry for path in paths for entry in _usable(path, device)}.values())


def _shipped(device: str) -> Iterator[Path]:
    """The tables for a device that backends brought along."""
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
    package = registry.packages_of(entry.op).get(entry.kernel)
    if package is None:
        return f"kernel {entry.kernel} of {entry.op} is offered by no installed backend"
    if package != (entry.distribution, entry.version):
        measured, installed = (
            " ".join(filter(None, each)) or "this process" for each in ((entry.distribution, entry.version), package)
        )
        return f"kernel {entry.kernel} of {entry.op} was measured as of {measured}, and comes from {installed} now"
    return None


def _newcomer(entry: TuningEntry, kernels: Sequence[str]) -> str | None:
    """A kernel that goes before an entry's default and was not there when it was measured, or None."""
    before = kernels[: kernels.index(entry.default)] if entry.default in kernels else kernels
    return next((kernel for kernel in before if kernel != entry.kernel and kernel not in entry.present), None)


def _ignore(what: str, reason: str) -> None:
    """Say once that something is left out."""
    if (sentence := f"{what}: ignored, because {reason}; `kpt tune` measures anew") not in _ignored:
        _ignored.add(sentence)
        warn_caller(sentence, TuningWarning)
