"""What calls leave behind outside Python: native memory, open files, threads."""

import ctypes
import gc
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from kpt_conformance.extent import over
from kpt_conformance.tensors import require_addresses
from kpt_conformance.trial import Trial

from .citizen import MODES, held_after
from .process import descriptors, tasks

#: Calls in a round, of each mode, so that what happens in every tenth call happens twice.
_CALLS = 20
#: Rounds in a row in each of which more must have been left behind: allocators keep a little of what was freed, and
#: caches fill, but not for ever.
_ROUNDS = 4
#: Bytes of native memory that a round may leave: a thread's cache of freed memory takes up to five thousand.
_BYTES = 6_000


_FIELDS = (
    "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
)  # fmt: skip


class _Mallinfo(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_size_t) for name in _FIELDS)


@cache
def _allocator() -> Callable[[], _Mallinfo] | None:
    """Return glibc's count of what is allocated, from 2.33 on; None where there is none."""
    try:
        function = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError, TypeError):
        return None
    function.restype, function.argtypes = _Mallinfo, ()
    counted: Callable[[], _Mallinfo] = function
    return counted


def native_bytes() -> int:
    """Return what the process has taken of its allocator and not given back; without glibc zero."""
    count = _allocator()
    if count is None:
        return 0
    found = count()
    return int(found.uordblks) + int(found.hblkhd)


def mapped_bytes() -> int:
    """Return how much is mapped into the process; zero where the system does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * 4096
    except OSError:
        return 0


#: What is counted, how it is called, and how much of it a round of calls may leave.
_COUNTED: tuple[tuple[str, Callable[[], int], int], ...] = (
    ("bytes of native memory", native_bytes, _BYTES),
    ("bytes of mapped memory", mapped_bytes, _CALLS * 2048),
    ("open files", descriptors, 1),
    ("threads", tasks, 1),
)


@over(first_case=True, references=False)
def leaks_nothing(trial: Trial) -> None:
    """Calls, in every mode, leave no more native memory, open files and threads each time."""
    require_addresses(trial.subject.device)
    if trial.subject.direct:
        pytest.skip("an interpreter takes seconds, and memory of its own")
    arguments = trial.arguments()
    for mode in MODES:
        held_after(trial, arguments, mode)

    def counts() -> dict[str, int]:
        gc.collect()
        return {name: count() for name, count, _ in _COUNTED}

    gc.freeze()  # what is there already is not looked at, which would take seconds
    try:
        first = before = counts()
        growing = set(before)
        for _ in range(_ROUNDS):
            for _ in range(_CALLS):
                for mode in MODES:
                    held_after(trial, arguments, mode)
            after = counts()
            growing = {name for name, _, few in _COUNTED if name in growing and after[name] - before[name] > few}
            if not growing:
                return
            before = after
    finally:
        gc.unfreeze()
    told = [f"{(before[name] - first[name]) / (_ROUNDS * _CALLS):.1f} {name}" for name in sorted(growing)]
    raise AssertionError(f"calls leave more behind each time: {' and '.join(told)} a call of each mode")
