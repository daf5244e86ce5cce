"""The native library: which one this machine runs, loading it once, and calling its kernels."""

import ctypes
import json
import os
import threading
from pathlib import Path
from typing import NamedTuple

import torch

from kpt_core import InputError, KptError

from .structures import INTERFACE, KERNELS, packed

#: The instruction set to use instead of the best one that this machine has.
KPT_CPU_ISA = "KPT_CPU_ISA"

#: Best first.
INSTRUCTION_SETS = ("amx_bf16", "avx512_bf16", "avx512", "avx2", "baseline")

#: Where the build leaves `kpt_cpu_<instruction set>.so`, or `missing.txt` with the reason why there is none.
LIBRARIES = Path(__file__).parent / "libraries"


class LibraryError(KptError):
    """There is no native library that can be used here; the message says why and what to do."""


class Library(NamedTuple):
    """A library that is loaded.

    Attributes:
        instruction_set: what it was compiled for.
        there: all that this machine could use, best first.
        functions: of the library.
    """

    instruction_set: str
    there: tuple[str, ...]
    functions: ctypes.CDLL


_PACKED = {name: packed(structure) for name, structure in KERNELS.items()}
_lock = threading.Lock()
_library: Library | None = None
#: A pool of threads does not survive a fork: waiting for its threads, a child would wait for ever.
_forked = False


def asked_instruction_set() -> str:
    """What `KPT_CPU_ISA` names, "" where it is unset or empty."""
    return os.environ.get(KPT_CPU_ISA, "").strip()


def library() -> Library:
    """The library, loaded by the first call.

    Raises:
        LibraryError: there is none, or none that fits this package.
        InputError: `KPT_CPU_ISA` names no library that is here and runs on this machine.
    """
    global _library
    if _library is None:
        with _lock:
            if _library is None:
                _library = _load()
    return _library


def provenance() -> dict[str, str]:
    """Return the compiler of the libraries and the instruction set that is used; nothing where there are none.

    Raises:
        InputError: see `library`.
    """
    if not library_path("baseline").exists():
        return {}
    found = {"isa": library().instruction_set}
    try:
        found["compiler"] = str(json.loads((LIBRARIES / "manifest.json").read_text())["compiler"])
    except (OSError, ValueError, KeyError, TypeError):
        found["compiler"] = "unknown"
    return found


def run(kernel: str, *arguments: float) -> None:
    """Call a kernel; other Python threads run meanwhile.

    Args:
        kernel: its name, one of `structures.KERNELS`.
        arguments: the numbers of the structure that it takes. The tensors that they point to must live until this
            returns.

    Raises:
        MemoryError: the kernel found no room for its intermediate results.
        LibraryError, InputError: see `library`.
    """
    found = _library or library()
    if getattr(found.functions, kernel)(_PACKED[kernel].pack(*arguments)) != 0:
        raise MemoryError(f"{kernel} found no memory for its intermediate results; give it fewer rows at a time")


def _load() -> Library:
    asked = asked_instruction_set()
    baseline = _open("baseline")
    baseline.kpt_cpu_instruction_sets.restype = ctypes.c_char_p
    told = baseline.kpt_cpu_instruction_sets().decode().split()
    there = tuple(name for name in INSTRUCTION_SETS if name in told and library_path(name).exists())
    if asked and asked not in there:
        raise InputError(
            f"{KPT_CPU_ISA} must name an instruction set that this machine has and a library was compiled for, one of "
            f"{', '.join(there)}; got {asked!r}: set it to one of these, or unset it for the best"
        )
    chosen = asked or there[0]
    functions = baseline if chosen == "baseline" else _open(chosen)
    functions.kpt_cpu_use_openmp.argtypes = [ctypes.c_void_p] * 2
    functions.kpt_cpu_use_openmp.restype = None
    functions.kpt_cpu_use_openmp(*(None,) * 2 if _forked else _openmp_of_torch())
    return Library(chosen, there, functions)


def library_path(instruction_set: str) -> Path:
    """Where the library for an instruction set is, if there is one."""
    return LIBRARIES / f"kpt_cpu_{instruction_set}.so"


def _open(instruction_set: str) -> ctypes.CDLL:
    path = library_path(instruction_set)
    if not path.exists():
        raise LibraryError(_why_missing())
    try:
        functions = ctypes.CDLL(str(path))
        interface = functions.kpt_cpu_interface()
        absent = [name for name in KERNELS if not hasattr(functions, name)]
    except (OSError, AttributeError) as error:
        raise LibraryError(f"{path} can't be used ({error}): install kpt-backend-cpu again") from None
    if interface != INTERFACE or absent:
        what = f"lacks {', '.join(absent)}" if absent else f"has interface {interface}, and this package {INTERFACE}"
        raise LibraryError(f"{path} {what}: it is of another version; install kpt-backend-cpu again")
    return functions


def _why_missing() -> str:
    try:
        return f"it has no native libraries: {(LIBRARIES / 'missing.txt').read_text().strip()}"
    except OSError:
        return (
            f"it has no native libraries, which installing compiles: there are none in {LIBRARIES}; "
            "install kpt-backend-cpu with pip"
        )


def _openmp_of_torch() -> tuple[int | None, ...]:
    """Addresses of what `kpt_cpu_use_openmp` takes, in the OpenMP that PyTorch computes with, so that one pool serves.

    All None where PyTorch has none, or one without these: the library then starts threads of its own.
    """
    folder = Path(torch.__file__).parent / "lib"
    # As PyTorch's own calls are resolved. macOS binds them to what PyTorch links to. Linux looks through the process
    # first: what was preloaded or made global before PyTorch comes before PyTorch's own, what came later after it.
    # Nothing is loaded that is not there already.
    for place in (str(folder / "libtorch_cpu.dylib"), None, str(folder / "libtorch_cpu.so")):
        try:
            seen = ctypes.CDLL(place, mode=os.RTLD_NOLOAD | os.RTLD_NOW) if place else ctypes.CDLL(None)
            return tuple(
                ctypes.cast(getattr(seen, function), ctypes.c_void_p).value
                for function in ("GOMP_parallel", "omp_get_thread_num")
            )
        except (OSError, AttributeError):
            continue
    return None, None


def _after_fork() -> None:
    global _lock, _forked
    _lock = threading.Lock()  # another thread may have held it
    _forked = True
    if _library is not None:
        _library.functions.kpt_cpu_use_openmp(None, None)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
