"""What a reading depends on, as hashes: the source of a kernel, and everything together."""

import hashlib
import json
import os
from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import kpt_core
from kpt_core import InputError

from .declared import Job, PallasProgram, TritonProgram

#: Set by this package for its compilers, or without influence on what they make.
_NOT_COUNTED = ("TRITON_CACHE_DIR", "TRITON_ALWAYS_COMPILE", "TRITON_DUMP_PTXAS_LOG", "TRITON_HOME")


def source_hash(program: TritonProgram | PallasProgram) -> str:
    """The hash of what is compiled, everything it calls included.

    Of a Triton function it is Triton's own, which also changes when the function moves within its file. Of a Pallas
    program it is that of every Python file of the package that it lies in: JAX can't tell what a function calls.

    Raises:
        InputError: Triton's interpreter is on.
    """
    if isinstance(program, PallasProgram):
        return _package_hash((type(program).__module__, getattr(program.lower, "__module__", "")))
    if not hasattr(program.function, "cache_key"):
        raise InputError(f"{program.name!r} is not a compiled Triton function: unset TRITON_INTERPRET, use @triton.jit")
    return hashlib.sha256(str(program.function.cache_key).encode()).hexdigest()


def versions(program: TritonProgram | PallasProgram) -> dict[str, str]:
    """The compilers and their versions."""
    return {
        name: version(name)
        for name in (("triton",) if isinstance(program, TritonProgram) else ("jax", "jaxlib", "libtpu"))
    }


def reading_key(job: Job, program: TritonProgram | PallasProgram, configuration: Mapping[str, Any], source: str) -> str:
    """The hash of everything that a reading depends on, the contract excepted."""
    parts = {
        "reader": _reader_hash(),
        # Programs of one package have one source hash.
        "program": [job.source.target, job.source.index, program.name],
        "source": source,
        "versions": versions(program),
        "chip": repr(job.chip),
        "signature": dict(program.signature) if isinstance(program, TritonProgram) else None,
        "configuration": {name: getattr(value, "cache_key", repr(value)) for name, value in configuration.items()},
        "environment": {
            name: value
            for name, value in os.environ.items()
            if name.startswith(("TRITON_", "LIBTPU_", "XLA_")) and name not in _NOT_COUNTED
        },
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


@cache
def _reader_hash() -> str:
    return _hash_of(Path(__file__).parent)


def _package_hash(modules: tuple[str, ...]) -> str:
    tops = sorted({module.partition(".")[0] for module in modules if module} - {"functools", kpt_core.__name__})
    return hashlib.sha256("".join(_top_hash(top) for top in tops).encode()).hexdigest()


@cache
def _top_hash(top: str) -> str:
    spec = find_spec(top)
    if spec is None or spec.origin is None:
        raise InputError(
            f"the source of {top!r} can't be found, so no change of it would be seen; install it from files"
        )
    return _hash_of(Path(spec.origin).parent if spec.submodule_search_locations else Path(spec.origin))


def _hash_of(path: Path) -> str:
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
    digest = hashlib.sha256()
    for file in files:
        content = hashlib.sha256(file.read_bytes()).hexdigest()
        digest.update(f"{file.relative_to(path.parent).as_posix()} {content}\n".encode())
    return digest.hexdigest()
