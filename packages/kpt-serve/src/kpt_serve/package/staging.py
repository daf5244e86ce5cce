"""A package's folder that appears whole or not at all, also after a full disk or Ctrl-C."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kpt_serve.errors import PackageError

from .manifest import NAME


@contextmanager
def staged(folder: str | os.PathLike[str], *, overwrite: bool = False) -> Iterator[Path]:
    """Make a folder that becomes `folder` at the end of the block, or vanishes if the block raises.

    Args:
        folder: What there is must be an empty folder, or with `overwrite` a package, which gives way.
        overwrite: Replace a package.

    Raises:
        PackageError: The folder is taken, or nothing can be written beside it.
    """
    target = Path(folder).resolve()
    _check_target(target, overwrite)
    part, old = (target.parent / f".{target.name}.{os.urandom(4).hex()}.{state}" for state in ("partial", "old"))
    try:
        with _told(target):
            part.mkdir()
            yield part
            _put(part, target, old)
    finally:
        shutil.rmtree(part, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def _put(part: Path, target: Path, old: Path) -> None:
    if not target.exists() or not any(target.iterdir()):
        part.rename(target)  # over an empty folder too
        return
    target.rename(old)
    try:
        part.rename(target)
    except BaseException:
        old.rename(target)
        raise


def _check_target(target: Path, overwrite: bool) -> None:
    if target.exists():
        if not target.is_dir():
            raise PackageError(f"{target} is a file; expected a new or empty folder: choose another")
        # What is no package may be a user's work.
        if any(target.iterdir()) and not (overwrite and (target / NAME).is_file()):
            hint = "overwrite it (overwrite=True)" if (target / NAME).is_file() else "remove it"
            raise PackageError(f"{target} exists already; expected a new or empty folder: choose another, or {hint}")
    elif not target.parent.is_dir():
        raise PackageError(f"{target}: the folder {target.parent} does not exist: make it first")


@contextmanager
def _told(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = f"{error.strerror or error}{f' ({error.filename})' if error.filename else ''}"
        raise PackageError(f"{path} can't be written: {reason}; make room there, or choose another place") from error
