"""Safetensors files that appear whole or not at all, and errors that name the file."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kpt_core import InputError


@contextmanager
def appearing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A new file beside `path` to write to, which takes its place when the block ends and goes if it raises."""
    path = Path(path)
    if not path.parent.is_dir():
        raise InputError(f"{path}: {path.parent} is no folder: make it, or name one that exists")
    temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}")
    try:
        yield temporary
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def open_tensors(path: str | os.PathLike[str]) -> Any:
    """A safetensors file, open for reading; a context manager."""
    from safetensors import SafetensorError, safe_open

    if not Path(path).is_file():
        raise InputError(f"{path} is no file: name one that exists")
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path} is no whole safetensors file ({error}): write it again") from error
