"""A file that a command writes when its work is done: whether it can be is asked before."""

import tempfile
from pathlib import Path

from .errors import CliError


def check_output_file(file: Path | None, option: str, *, force: bool = True) -> None:
    """Check before any work that a file can be written.

    Args:
        file: the place; None if no file is wanted.
        option: what the user named it with.
        force: whether a file that is there may be replaced.

    Raises:
        CliError: it is taken or in a wrong place.
    """
    if file is None:
        return
    if file.is_dir():
        raise CliError(f"{option} {file} is a folder; expected a file name")
    if file.exists() and not force:
        raise CliError(f"{option} {file} exists; choose another name, or replace it with --force")
    parent = file.absolute().parent
    if not parent.is_dir():
        raise CliError(f"{option} {file}: the folder {parent} does not exist; make it first")
    check_writable(parent, f"{option} {file}")


def check_writable(folder: Path, what: str) -> None:
    """Raise `CliError`, which begins with `what`, if nothing may be written in a folder."""
    try:
        # Asking for permission alone is not enough: a superuser has it where nothing can be written, in /proc say.
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise CliError(f"{what}: nothing can be written in {folder} ({error.strerror}); choose another place") from None
