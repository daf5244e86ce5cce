"""Real text that every machine has, the source code of Python's standard library, and a tokenizer trained on it."""

import hashlib
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kpt_cli.errors import CliError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

#: Other people's packages, tests, tables and generated files: bulk that is not written like the rest.
SKIPPED_FOLDERS = {"__pycache__", "dist-packages", "site-packages", "encodings", "ensurepip", "idlelib", "lib2to3"}
SKIPPED_FOLDERS |= {"pydoc_data", "test", "tests", "turtledemo"}
SKIPPED_PREFIXES = ("config-", "_sysconfigdata", ".")
HELD_OUT_SHARE = 20  #: one file in this many is held out
LEAST_BYTES = 100_000  #: less than this teaches nothing
END_OF_FILE = "<|endoftext|>"
#: Files are taken evenly until this many characters: more changes the merges little and costs seconds.
TOKENIZER_CHARACTERS = 4_000_000


@dataclass(frozen=True, slots=True)
class Source:
    """One file: its path in the library, and its text."""

    path: str
    text: str


@dataclass(frozen=True, slots=True)
class Corpus:
    """What is trained on and what is held out for evaluation, each sorted by path; no file is in both."""

    training: tuple[Source, ...]
    held_out: tuple[Source, ...]


def read_corpus(root: Path | None = None, limit: int | None = None) -> Corpus:
    """Read the modules below `root`, the running Python's library, in one order, until `limit` bytes were read."""
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    training: list[Source] = []
    held_out: list[Source] = []
    size = 0
    for source in _sources(root):
        (held_out if is_held_out(source.path) else training).append(source)
        size += bytes_of([source])
        if limit is not None and size >= limit and held_out:
            break
    if size < LEAST_BYTES or not held_out:
        raise CliError(
            f"{root} holds {size:,} bytes of Python source code; expected the standard library with its .py files, at "
            f"least {LEAST_BYTES:,} bytes: run KPT with a Python that has them"
        )
    return Corpus(tuple(training), tuple(held_out))


def is_held_out(path: str) -> bool:
    """Tell by a file's path alone if it is kept for evaluation, so that no order of files matters."""
    return hashlib.sha256(path.encode()).digest()[0] % HELD_OUT_SHARE == 0


def bytes_of(sources: Sequence[Source]) -> int:
    """Return the size of some files."""
    return sum(len(source.text.encode()) for source in sources)


def _sources(root: Path) -> Iterator[Source]:
    paths: list[Path] = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in SKIPPED_FOLDERS and not name.startswith(SKIPPED_PREFIXES)]
        paths += [Path(folder, name) for name in files if name.endswith(".py")]
    for path in sorted(paths, key=lambda path: path.relative_to(root).as_posix()):
        kept = not path.is_symlink() and not path.name.startswith(SKIPPED_PREFIXES)
        text = path.read_text(encoding="utf-8", errors="replace") if kept else ""
        if text.strip():
            yield Source(path.relative_to(root).as_posix(), text)


def train_tokenizer(sources: Sequence[Source], vocabulary: int, context: int) -> "PreTrainedTokenizerFast":
    """Learn the merges of a byte-level BPE with `vocabulary` entries, for inputs of `context` tokens."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    step = max(1, sum(len(source.text) for source in sources) // TOKENIZER_CHARACTERS)
    # Every byte has a token from the beginning, so that nothing is unknown.
    tokenizer: Any = ByteLevelBPETokenizer()
    texts = [source.text for source in sources[::step]]
    options: Any = {"min_frequency": 0, "special_tokens": [END_OF_FILE], "show_progress": False}
    tokenizer.train_from_iterator(texts, vocabulary, **options)
    ends: Any = {"eos_token": END_OF_FILE, "bos_token": END_OF_FILE, "model_max_length": context}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer._tokenizer, **ends)  # type: ignore[no-untyped-call]


def encode(tokenizer: "PreTrainedTokenizerFast", sources: Sequence[Source]) -> Tensor:
    """Return all files as one stream of token ids, an end-of-file token after each."""
    end = tokenizer.convert_tokens_to_ids(END_OF_FILE)
    encodings = tokenizer.backend_tokenizer.encode_batch([source.text for source in sources])
    return torch.cat([torch.tensor([*encoding.ids, end]) for encoding in encodings])
