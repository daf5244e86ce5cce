"""A file that a command writes when its work is done."""

from pathlib import Path

from .errors import CliError


def require_folder(option: str, path: Path | None) -> None:
    """Raise before the work, not after it, if the file could not be written for want of a folder.

    Args:
        option: that gave the path, as in `--output`.
        path: of the file; None if none is wanted.

    Raises:
        CliError: the path is a folder, or the one that it is in does not exist.
    """
    if path is None:
        return
    if not path.parent.is_dir():
        raise CliError(f"{option} {path}: there is no folder {path.parent}; make it first")
    if path.is_dir():
        raise CliError(f"{option} {path}: expected a file, and this is a folder; name a file in it")
