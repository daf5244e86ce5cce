"""Writing files so that nobody ever reads half of one."""

import os
from pathlib import Path


def write_whole(path: str | os.PathLike[str], text: str) -> None:
    """Write a text file that appears whole or not at all, with the mode that the umask gives.

    Args:
        path: replaced if it exists; its folder must exist.
        text: written as UTF-8.
    """
    path = Path(path)
    # Not `tempfile.mkstemp`: its files are for their owner only, and the mode would stay.
    temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}")
    try:
        with temporary.open("x", encoding="utf-8") as file:
            file.write(text)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
