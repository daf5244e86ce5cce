"""Count what XLA compiled, and keep it for processes to come."""

import os
from dataclasses import dataclass
from pathlib import Path

from kpt_core import InputError

from .backend import BACKEND


@dataclass(frozen=True, slots=True)
class Compilations:
    """Count what torch_xla did since the process began.

    Attributes:
        compiled: graphs that XLA compiled.
        cached: graphs that it had compiled before.
        seconds: that compiling took.
        loaded: graphs that came from the folder of `keep_compilations`.
        unreadable: graphs that were there and could not be read, as none can on XLA's CPU; they were compiled.
    """

    compiled: int
    cached: int
    seconds: float
    loaded: int = 0
    unreadable: int = 0

    def __sub__(self, before: "Compilations") -> "Compilations":
        """Return what was done in between."""
        return Compilations(
            self.compiled - before.compiled,
            self.cached - before.cached,
            self.seconds - before.seconds,
            self.loaded - before.loaded,
            self.unreadable - before.unreadable,
        )


def compilations() -> Compilations:
    """Return how many graphs were compiled so far; look before and after a step to see if it compiles anew.

    Raises:
        InputError: torch_xla is not there.
    """
    _require_torch_xla("compilations are counted by torch_xla")
    from torch_xla.debug import metrics

    compiled = metrics.metric_data("CompileTime")  # how often, the sum in nanoseconds, and the last samples
    count, total = (compiled[0], compiled[1]) if compiled else (0, 0)
    names = ("CachedCompile", "PersistentCacheHit", "PersistentCacheDeserializeFailure")
    cached, loaded, unreadable = (int(metrics.counter_value(name) or 0) for name in names)
    return Compilations(int(count), cached, total / 1e9, loaded, unreadable)


def keep_compilations(folder: str | os.PathLike[str], *, read_only: bool = False) -> Path:
    """Keep what XLA compiles in a folder, and take from it what an earlier process left there.

    To be called before anything is computed on `xla`. A graph is told by its operations, shapes and XLA's settings.
    XLA's CPU writes graphs and can't read them back: `compilations().unreadable` counts these.

    Args:
        folder: made if it is not there; several processes may share it, one of which writes.
        read_only: only read, for all the others.

    Returns:
        The folder, absolute.

    Raises:
        InputError: torch_xla is not there, something was computed already, or the folder can't be written.
    """
    _require_torch_xla("compilations are kept by torch_xla")
    path = Path(folder).expanduser().absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"keep_compilations: {str(path)!r} can't be a folder: {error.strerror}") from None
    if not os.access(path, os.R_OK if read_only else os.W_OK):
        raise InputError(f"keep_compilations: {str(path)!r} can't be {'read' if read_only else 'written'}")
    from torch_xla import runtime

    try:
        runtime.initialize_cache(str(path), readonly=read_only)
    except AssertionError:
        raise InputError(
            "keep_compilations: torch_xla has compiled already; call it before anything is computed on xla"
        ) from None
    return path


def _require_torch_xla(what: str) -> None:
    reason = BACKEND.why_no_device()
    if reason is not None:
        raise InputError(f"{what}: {reason}")
