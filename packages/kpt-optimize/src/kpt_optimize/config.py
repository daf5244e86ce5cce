"""Presets of settings for a phase of a model's life, and their validation."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

from kpt_core import registry
from kpt_core.dispatch.settings import effective, scoped
from kpt_core.errors import InputError, UnknownNameError

from .rewrite import check_level, check_objective


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Settings that belong together; `Config.preset(name)` gives one of three, `with config.active():` applies it.

    Attributes:
        use: backend, kernel or `reference` that must run, None for automatic selection.
        disable: backends and kernels that may not run.
        strict: raise where KPT would otherwise warn and go on.
        level: of `optimize`.
        objective: of `optimize`.
        max_error: of `optimize`; None for the level's own.
    """

    use: str | None = None
    disable: tuple[str, ...] = ()
    strict: bool = False
    level: str = "balanced"
    objective: str = "latency"
    max_error: float | None = None

    def __post_init__(self) -> None:
        check_level(self.level)
        check_objective(self.objective)
        if self.max_error is not None and not self.max_error >= 0:
            raise InputError(f"max_error must be at least 0 or None; got {self.max_error!r}")
        if not isinstance(self.strict, bool):
            raise InputError(f"strict must be True or False; got {self.strict!r}")
        if isinstance(self.disable, str):  # type: ignore[unreachable]  # a slip that types alone don't stop
            raise InputError(f"disable must be a tuple of names; got the string {self.disable!r}")

    @classmethod
    def preset(cls, name: str, **changes: Any) -> "Config":
        """A preset, with changes.

        Args:
            name: `inference` (fastest within the error budget, falls back rather than fails), `training` (nothing that
                changes the numerics class) or `development` (the reference runs, and whatever KPT would only warn of
                is an error).
            **changes: fields to set otherwise.

        Raises:
            UnknownNameError: no such preset or field.
            InputError: a value is not allowed.
        """
        if name not in PRESETS:
            raise UnknownNameError("preset", name, PRESETS)
        known = {field.name for field in fields(cls)}
        for change in changes:
            if change not in known:
                raise UnknownNameError("setting", change, known)
        return replace(PRESETS[name], **changes)

    @contextmanager
    def active(self) -> Iterator["Config"]:
        """Apply `use`, `disable` and `strict` inside the block, in this thread or asyncio task.

        Raises:
            UnknownNameError: `use` or `disable` names nothing that is installed.
        """
        known = registry.known_choices()
        for name in (*((self.use,) if self.use else ()), *self.disable):
            if name not in known:
                raise UnknownNameError("backend or kernel", name, known)
        scope = effective()
        if self.use is not None:
            scope = replace(scope, choices=(*scope.choices, ("*", self.use)))
        scope = replace(scope, disabled=scope.disabled | frozenset(self.disable), strict=scope.strict or self.strict)
        with scoped(scope):
            yield self

    def optimize_arguments(self) -> dict[str, Any]:
        """What to pass to `optimize`: `optimize(model, example_inputs=..., **config.optimize_arguments())`."""
        return {"level": self.level, "objective": self.objective, "max_error": self.max_error}


PRESETS = {
    "inference": Config(level="balanced"),
    "training": Config(level="conservative"),
    "development": Config(use="reference", strict=True, level="conservative"),
}
