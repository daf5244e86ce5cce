"""The `KPT_*` variables in force, and the slips in their names, which nothing else would tell."""

import difflib
import os
from collections.abc import Iterator
from contextlib import contextmanager

#: What KPT reads.
KNOWN = (
    *("KPT_CPU_BUILD", "KPT_CPU_ISA", "KPT_DEBUG", "KPT_DISABLE", "KPT_STRICT", "KPT_TUNING"),
    "KPT_USE",
)


def variables() -> dict[str, str]:
    """Every variable that starts with `KPT_`."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith("KPT_")}


def slips() -> list[str]:
    """Variables whose name is nearly one of ours."""
    said = []
    for name in variables():
        near = difflib.get_close_matches(name, KNOWN, n=1, cutoff=0.8)
        if name not in KNOWN and near:
            said.append(f"{name} is not read by anything; did you mean {near[0]}?")
    return said


@contextmanager
def readable() -> Iterator[list[str]]:
    """Leave out, while the block runs, the variables that every op would refuse; gives a sentence for each."""
    import kpt_core

    removed: dict[str, str] = {}
    faults: list[str] = []
    try:
        while fault := _fault():
            name = next(name for name in KNOWN if name in fault and name in os.environ)
            removed[name] = os.environ.pop(name)
            faults.append(f"{fault}; every op raises this, and what is shown here leaves {name} out")
            kpt_core.refresh()
        yield faults
    finally:
        if removed:
            os.environ.update(removed)
            kpt_core.refresh()


def _fault() -> str | None:
    """What is wrong with the variables, or None."""
    from kpt_core import InputError, UnknownNameError
    from kpt_core.dispatch.settings import environment
    from kpt_core.registry import known_choices, ops

    try:
        choices = environment().choices
    except InputError as error:
        return str(error)
    for op, name in choices:
        kind, asked, known = ("op", op, {*ops(), "*"}) if name in known_choices() else ("name", name, known_choices())
        if asked not in known:
            near = UnknownNameError(kind, asked, known).nearest
            offer = f"did you mean {' or '.join(near)}?" if near else "`kpt kernels` lists all"
            return f"KPT_USE={os.environ['KPT_USE']}: no {kind} {asked!r} is installed ({offer})"
    return None
