"""What the user asked for: the environment variables, and the scopes opened by `use` and `record`."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch

from ._errors import InputError
from ._selection import REFERENCE, Selection

#: Backend, kernel or "reference" to run; `op=name` pairs limit it to one op. Comma-separated, strict.
KPT_USE = "KPT_USE"
#: Backends or kernels that may not run, comma-separated. A name that nothing has is warned of, once, and no error: what
#: is disabled need not be installed on every machine.
KPT_DISABLE = "KPT_DISABLE"
#: "1" turns quarantine of a failing kernel, and falling back to the reference on an accelerator, into errors.
KPT_STRICT = "KPT_STRICT"
#: "0" switches tuned choices off; a folder holds the user's tuning tables instead of the one in the user's cache.
KPT_TUNING = "KPT_TUNING"


@dataclass(frozen=True, slots=True)
class Scope:
    """The settings in force in one thread.

    Attributes:
        choices: op name (or "*" for all) to the backend, kernel or "reference" that must serve it.
        disabled: backends and kernels that may not run.
        strict: raise where KPT would otherwise warn and go on.
        log: where `record` collects the selections of calls, None if nobody listens.
        dry: kernels are chosen, but references run in their place (on fake tensors, for `explain`).
    """

    choices: tuple[tuple[str, str], ...] = ()
    disabled: frozenset[str] = frozenset()
    strict: bool = False
    log: list[Selection] | None = field(default=None, compare=False)
    dry: bool = field(default=False, compare=False)

    @property
    def key(self) -> str:
        """What tells two scopes apart."""
        return f"{self.choices} {sorted(self.disabled)} {self.strict}"

    def choice(self, op: str) -> tuple[str, str | None]:
        """Of which op ("*" for all) the innermost choice for `op` was asked, and what must serve it."""
        return next((choice for choice in reversed(self.choices) if choice[0] in ("*", op)), ("*", None))


def _split(value: str) -> list[str]:
    return [part.strip() for part in value.split(",") if part.strip()]


def parse_choices(value: str) -> tuple[tuple[str, str], ...]:
    """`nvidia`, `reference`, `pkg.mod:kernel` or `moe.experts=reference`, comma-separated; pairs win over the rest."""
    choices = []
    for part in _split(value):
        op, separator, name = map(str.strip, part.rpartition("="))
        if separator and not (op and name):
            raise InputError(f"{KPT_USE}={value!r}: {part!r} is not of the form 'name' or 'op=name'")
        choices.append((op or "*", name))
    return tuple(sorted(choices, key=lambda choice: choice[0] != "*"))


def read_environment() -> Scope:
    """The scope that `KPT_USE`, `KPT_DISABLE` and `KPT_STRICT` ask for."""
    strict = os.environ.get(KPT_STRICT, "").strip().lower()
    if strict not in ("", "0", "1", "false", "true"):
        raise InputError(f"{KPT_STRICT}={strict!r}: expected 0 or 1")
    return Scope(
        choices=parse_choices(os.environ.get(KPT_USE, "")),
        disabled=frozenset(_split(os.environ.get(KPT_DISABLE, ""))),
        strict=strict in ("1", "true"),
    )


class _Current(threading.local):
    def __init__(self) -> None:
        # Not a class attribute: Dynamo's guard on one of a thread-local misses that a thread sets its own later.
        #: None when nothing but the environment applies: dispatch then takes its short path.
        self.scope: Scope | None = None


current = _Current()
_environment: Scope | None = None


def environment() -> Scope:
    """The scope of the environment variables, read once (`kpt_core.refresh` reads them again)."""
    global _environment
    if _environment is None:
        _environment = read_environment()
    return _environment


def forget_environment() -> None:
    """Read the environment variables again at the next call."""
    global _environment
    _environment = None


def effective() -> Scope:
    """The scope in force in this thread."""
    return current.scope if current.scope is not None else environment()


@contextmanager
def scoped(scope: Scope) -> Iterator[Scope]:
    """Put `scope` in force in this thread."""
    before = current.scope
    current.scope = scope
    try:
        yield scope
    finally:
        current.scope = before


@contextmanager
def record() -> Iterator[list[Selection]]:
    """Collect the selection of every op called by this thread inside the block, in call order.

    Composite references nest: the ops that they call are the `children` of their selection. Calls in compiled code are
    not recorded: what they run was chosen when they were compiled.

    Raises:
        InputError: opened inside a compiled function.
    """
    if torch.compiler.is_compiling():
        raise InputError("record() can't be opened inside a compiled function: open it around eager calls")
    log: list[Selection] = []
    with scoped(replace(effective(), log=log)):
        yield log


__all__ = ["REFERENCE", "Scope", "current", "effective", "environment", "record", "scoped"]
