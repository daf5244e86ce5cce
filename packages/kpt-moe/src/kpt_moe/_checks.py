"""Checks of arguments that several modules share."""

from kpt_core import InputError


def require_size(owner: str, name: str, size: object, most: int | None = None, of: str = "") -> None:
    """Raise `InputError` unless a size is a positive integer, and at most `most`, which is called `of`."""
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise InputError(f"{owner}: {name} must be a positive integer; got {size!r}")
    if most is not None and size > most:
        raise InputError(f"{owner}: {name} ({size}) must not exceed {of} ({most})")
