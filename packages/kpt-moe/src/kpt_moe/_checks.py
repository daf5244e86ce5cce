"""Checks of arguments that several modules share."""

from collections.abc import Collection

from torch import Tensor

from kpt_core import InputError, UnknownNameError


def require_size(owner: str, name: str, size: object, most: int | None = None, of: str = "") -> None:
    """Raise `InputError` unless a size is a positive integer, and at most `most`, which is called `of`."""
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise InputError(f"{owner}: {name} must be a positive integer; got {size!r}")
    if most is not None and size > most:
        raise InputError(f"{owner}: {name} ({size}) must not exceed {of} ({most})")


def require_known(what: str, name: str, known: Collection[str]) -> None:
    """Raise `UnknownNameError` unless a name is among the known ones of its kind."""
    if name not in known:
        raise UnknownNameError(what, name, known)


def require_tokens(owner: str, x: Tensor, hidden_size: int) -> None:
    """Raise `InputError` unless x is `[tokens, hidden_size]`."""
    if x.dim() != 2 or x.shape[1] != hidden_size:
        raise InputError(f"{owner}: x must be [tokens, {hidden_size}]; got {list(x.shape)}")
