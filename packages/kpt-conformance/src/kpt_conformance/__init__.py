"""The conformance suite: what every kernel of every backend must do before it may be chosen."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .suite import Suite

__version__ = "0.1.0"

__all__ = ["Suite"]


def __getattr__(name: str) -> Any:
    # pytest imports this package at every start, also for tests that have nothing to do with KPT: torch comes later.
    if name == "Suite":
        from .suite import Suite

        return Suite
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
