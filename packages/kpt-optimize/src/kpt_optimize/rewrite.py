"""Rewrites: the changes of a model that `optimize` may try."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import Any, Protocol, runtime_checkable

from torch import nn

from kpt_core import registry
from kpt_core.discovery import discovered
from kpt_core.errors import InputError, RegistrationError, UnknownNameError

#: From what changes no number class, over what costs accuracy within a budget, to what costs more of it.
LEVELS = ("conservative", "balanced", "aggressive")
OBJECTIVES = ("latency", "memory")


@dataclass(frozen=True, slots=True)
class Site:
    """A place in a model where a rewrite applies.

    Attributes:
        module: dotted path of the sub-module, as in `model.named_modules()`.
        op: the op that will serve it afterwards.
    """

    module: str
    op: str


@runtime_checkable
class Rewrite(Protocol):
    """A change of a model, offered by a feature package through the entry-point group `kpt.rewrites`.

    Attributes:
        name: unique, `family.what`.
        lossless: the result has the numerics class of the original (same dtype, another order of sums).
        level: the lowest level that may apply it.
        max_errors: optional: by level, the error allowed where the user sets no budget, for a format whose rounding
            alone exceeds the level's.
    """

    name: str
    lossless: bool
    level: str

    def sites(self, model: nn.Module) -> Iterable[Site]:
        """Every place of `model` where this rewrite applies."""

    def replacement(self, module: nn.Module) -> nn.Module:
        """A module that takes the place of `module`, which must stay as it is. Lossless ones share its parameters."""


def own_budgets(rewrite: Rewrite) -> Mapping[str, float]:
    """Return `max_errors` of a rewrite; empty where it has none."""
    found: Mapping[str, float] = getattr(rewrite, "max_errors", {})
    return found


def check_rewrite(rewrite: object) -> Rewrite:
    """Raise `RegistrationError` unless `rewrite` satisfies the protocol."""
    if isinstance(rewrite, type):
        raise RegistrationError(f"{rewrite!r} is a class; give an instance of it")
    if not isinstance(rewrite, Rewrite):
        missing = [name for name in ("name", "lossless", "level", "sites", "replacement") if not hasattr(rewrite, name)]
        raise RegistrationError(
            f"{rewrite!r} is not a Rewrite: it lacks {', '.join(missing)}; see kpt_optimize.Rewrite for what is needed"
        )
    name: object = rewrite.name
    if not isinstance(name, str) or not name:
        raise RegistrationError(f"the name of a rewrite must be a string that is not empty; got {name!r}")
    if rewrite.lossless not in (False, True):
        raise RegistrationError(f"lossless of rewrite {name!r} must be True or False; got {rewrite.lossless!r}")
    if rewrite.level not in LEVELS:
        raise RegistrationError(f"level of rewrite {name!r} must be one of {LEVELS}; got {rewrite.level!r}")
    return rewrite


def check_model(model: object) -> None:
    """Raise `InputError` unless `model` is a module."""
    if not isinstance(model, nn.Module):
        raise InputError(f"model must be a torch.nn.Module; got {model!r}: pass the loaded model")


def check_level(level: str) -> str:
    """Raise `UnknownNameError` unless `level` is one."""
    if level not in LEVELS:
        raise UnknownNameError("level", level, LEVELS)
    return level


def check_objective(objective: str) -> str:
    """Raise `UnknownNameError` unless `objective` is one."""
    if objective not in OBJECTIVES:
        raise UnknownNameError("objective", objective, OBJECTIVES)
    return objective


def check_max_error(max_error: float | None) -> float | None:
    """Raise `InputError` unless it is a budget, or None."""
    if max_error is not None and not max_error >= 0:
        raise InputError(f"max_error must be at least 0; got {max_error!r}")
    return max_error


def rewrites() -> dict[str, Rewrite]:
    """Return the rewrites of installed feature packages by name (entry points of the group `kpt.rewrites`)."""

    def check(entry: EntryPoint, value: Any) -> Iterator[tuple[str, Rewrite]]:
        return ((rewrite.name, rewrite) for rewrite in map(check_rewrite, value))

    return dict(discovered("kpt.rewrites", check))


registry.on_problems(rewrites)
