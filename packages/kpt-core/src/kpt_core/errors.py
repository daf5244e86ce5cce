"""Every error and warning that KPT raises, in one hierarchy."""

import difflib
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

_PACKAGE = __name__.partition(".")[0]
#: How the files begin whose frames lie between a caller and a warning: torch's, its graphs', what binds an op's call.
_BETWEEN = (str(Path(torch.__file__).parent), "<eval_with_key>", "<op ")


class KptError(Exception):
    """Base of every error that KPT raises on purpose."""


class InputError(KptError, ValueError):
    """An argument's shape, dtype, device or value is wrong; the message says what was expected."""


MOST_NAMES = 12  #: that a message lists


class UnknownNameError(KptError, LookupError):
    """A name (op, kernel, backend, preset, level) does not exist; the message offers the nearest ones."""

    def __init__(self, kind: str, name: str, known: Iterable[str], hint: str = "") -> None:
        known = sorted(known, key=lambda name: (name.count("/") + name.count(":"), name))
        near = difflib.get_close_matches(str(name), known, n=3, cutoff=0.5)  # users give None, too
        if near:
            offer = f"did you mean {' or '.join(repr(n) for n in near)}?"
        elif known:
            offer = f"known: {', '.join(known[:MOST_NAMES])}"
            offer += f" and {len(known) - MOST_NAMES} more" if len(known) > MOST_NAMES else ""
        else:
            offer = f"no {kind} is installed"
        super().__init__(f"unknown {kind} {name!r}: {offer}{' ' + hint if hint else ''}")
        self.name = name
        self.nearest = near

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (type(self), self.args, self.__dict__)  # the message is made of other arguments


def _unpickled(kind: type[KptError], args: tuple[Any, ...], state: dict[str, Any]) -> KptError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error


class NoKernelError(KptError, RuntimeError):
    """What was asked for explicitly (`use`, `KPT_USE`, strict mode) cannot run; the message has every refusal."""


class RegistrationError(KptError):
    """Two things claim one name, or something registered is not what its group promises."""


class KptWarning(UserWarning):
    """Base of KPT's warnings."""


class PluginWarning(KptWarning):
    """A plug-in could not be used; the rest goes on without it."""


class KernelFailedWarning(KptWarning):
    """A kernel raised and the next one ran; after three failures it is off."""


class TuningWarning(KptWarning):
    """A tuning table, or part of one, is ignored; dispatch goes on without it."""


class FallbackWarning(KptWarning):
    """An accelerator runs plain PyTorch because no kernel of a vendor accepted the call."""


def describe_error(error: BaseException) -> str:
    """Return an error's type and text, as a clause."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def warn_caller(message: str, category: type[Warning]) -> None:
    """Warn at the line outside this package, and torch, that called it, however deep the call lies."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and _lies_between(frame):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


def _lies_between(frame: FrameType) -> bool:
    package = str(frame.f_globals.get("__name__")).partition(".")[0]
    return package == _PACKAGE or frame.f_code.co_filename.startswith(_BETWEEN)
