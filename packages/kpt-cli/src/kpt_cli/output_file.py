"""Places that a command writes to when its work is done: checked before, and written whole or not at all."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import CliError


def check_output_file(file: Path | None, option: str, *, force: bool = True) -> None:
    """Raise `CliError`, which names the option, if a file is taken and not to be replaced, or can't be written."""
    if file is None:
        return
    if file.is_dir():
        raise CliError(f"{option} {file} is a folder; expected a file name")
    if file.exists() and not force:
        raise CliError(f"{option} {file} exists; choose another name, or replace it with --force")
    check_folder(file.absolute().parent, f"{option} {file}")


def check_folder(folder: Path, what: str, size: int = 0) -> None:
    """Raise `CliError`, which begins with `what`, if `size` bytes can't be written in a folder."""
    if not folder.is_dir():
        if folder.exists():
            raise CliError(f"{what}: {folder} is no folder; choose another place")
        raise CliError(f"{what}: the folder {folder} does not exist; make it first")
    try:
        # Asking for permission alone is not enough: a superuser has it where nothing can be written, in /proc say.
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise CliError(f"{what}: nothing can be written in {folder} ({error.strerror}); choose another place") from None
    free = shutil.disk_usage(folder).free
    if size > free:
        from rich.filesize import decimal

        room = f"needs {decimal(size)} and the disk has {decimal(free)} free"
        raise CliError(f"{what} {room}; make room or choose another disk")


def check_new_folder(folder: Path, what: str, otherwise: str, size: int = 0) -> Path:
    """Return the real path of a folder that `size` bytes can be written to; `CliError` if it is a file, or has no room.

    Where it is not empty, the error says `otherwise`, if that is not empty.
    """
    real = folder.resolve()
    if real.exists() and not real.is_dir():
        raise CliError(f"{what} is a file; expected a folder that does not exist yet")
    if otherwise and real.is_dir() and any(real.iterdir()):
        raise CliError(f"{what} {otherwise}")
    check_folder(real.parent, what, size)
    return real


@contextmanager
def staged(out: Path, *, replace: bool = False) -> Iterator[Path]:
    """Make a folder that becomes `out`, a real path, at the end of the block, or vanishes if the block raises.

    What is there by then gives way if `replace`; otherwise the block ends in an `OSError` if it is not empty.
    """
    staging, old = (out.parent / f".{out.name}.{os.getpid()}.{state}" for state in ("partial", "old"))
    staging.mkdir()
    try:
        yield staging
        if not (replace and out.exists()):
            staging.rename(out)
            return
        out.rename(old)
        try:
            staging.rename(out)
        except BaseException:
            old.rename(out)
            raise
        shutil.rmtree(old)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
