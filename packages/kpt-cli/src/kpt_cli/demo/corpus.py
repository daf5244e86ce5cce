"""Real text that every machine has: the source code of Python's standard library."""

import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kpt_cli.errors import CliError

#: Other people's packages, tests, tables and generated files: bulk that is not written like the rest.
SKIPPED_FOLDERS = frozenset(
    {
        "__pycache__",
        "dist-packages",
        "encodings",
        "ensurepip",
        "idlelib",
        "lib2to3",
        "pydoc_data",
        "site-packages",
        "test",
        "tests",
        "turtledemo",
    }
)
SKIPPED_PREFIXES = ("config-", "_sysconfigdata", ".")
#: One file in this many is held out.
HELD_OUT_SHARE = 20
#: Less than this teaches nothing.
LEAST_BYTES = 100_000


@dataclass(frozen=True, slots=True)
class Source:
    """One file: its path in the library, and its text."""

    path: str
    text: str


@dataclass(frozen=True, slots=True)
class Corpus:
    """What is trained on and what is held out for evaluation; no file is in both.

    Attributes:
        root: where the files lie.
        training: files to learn from, sorted by path.
        held_out: files to evaluate with, sorted by path.
    """

    root: Path
    training: tuple[Source, ...]
    held_out: tuple[Source, ...]


def read_corpus(root: Path | None = None, limit: int | None = None) -> Corpus:
    """Read the library's modules, always the same ones in the same order.

    Args:
        root: the library; None for that of the running Python.
        limit: stop when this many bytes were read.

    Raises:
        CliError: there is hardly any source code.
    """
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    parts: dict[bool, list[Source]] = {True: [], False: []}
    size = 0
    for source in _sources(root):
        parts[is_held_out(source.path)].append(source)
        size += len(source.text.encode())
        if limit is not None and size >= limit and parts[True]:
            break
    if size < LEAST_BYTES or not parts[True]:
        raise CliError(
            f"{root} holds {size:,} bytes of Python source code; expected the standard library with its .py files, at "
            f"least {LEAST_BYTES:,} bytes: run KPT with a Python that has them"
        )
    return Corpus(root, tuple(parts[False]), tuple(parts[True]))


def is_held_out(path: str) -> bool:
    """Whether a file is kept for evaluation: told by its path alone, so that no order of files matters."""
    return hashlib.sha256(path.encode()).digest()[0] % HELD_OUT_SHARE == 0


def _sources(root: Path) -> Iterator[Source]:
    for path in sorted(_modules(root), key=lambda path: path.relative_to(root).as_posix()):
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        if text.strip():
            yield Source(path.relative_to(root).as_posix(), text)


def _modules(folder: Path) -> Iterator[Path]:
    if not folder.is_dir():
        return
    for path in folder.iterdir():
        if path.name.startswith(SKIPPED_PREFIXES) or path.is_symlink():
            continue
        if path.is_dir():
            if path.name not in SKIPPED_FOLDERS:
                yield from _modules(path)
        elif path.suffix == ".py":
            yield path
