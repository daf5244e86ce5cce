"""The `KPT_*` variables in force, and the slips in their names, which nothing else would tell."""

import difflib
import os

#: What KPT reads.
KNOWN = ("KPT_CPU_BUILD", "KPT_CPU_ISA", "KPT_DEBUG", "KPT_DISABLE", "KPT_STRICT", "KPT_TUNING", "KPT_USE")


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
