"""Classes made where they are needed: one that a model brings, with something of ours before it."""

from typing import Any

_made: dict[tuple[Any, Any], Any] = {}


class Mixed:
    """Base of what `mixed` mixes in."""

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # Its class is made here: pickle can't find it by name.
        return _blank, type(self).__bases__, vars(self)


def mixed(mixin: type[Mixed], kind: Any) -> Any:
    """The class `kind` with `mixin` before it, under its own name."""
    if issubclass(kind, mixin):
        return kind
    if (mixin, kind) not in _made:
        namespace = {"__doc__": kind.__doc__, "__module__": kind.__module__}
        _made[mixin, kind] = type(kind.__name__, (mixin, kind), namespace)
    return _made[mixin, kind]


def _blank(mixin: type[Mixed], kind: Any) -> Any:
    return object.__new__(mixed(mixin, kind))
