"""The `KPT_*` variables in force, and the slips in them that nothing else would tell."""

import difflib
import os

#: What KPT reads.
KNOWN = ("KPT_DEBUG", "KPT_DISABLE", "KPT_STRICT", "KPT_USE")


def variables() -> dict[str, str]:
    """Every variable that starts with `KPT_`."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith("KPT_")}


def slips() -> list[str]:
    """Variables whose name is nearly one of ours, and names in `KPT_DISABLE` that nothing has."""
    said = []
    for name in variables():
        near = difflib.get_close_matches(name, KNOWN, n=1, cutoff=0.8)
        if name not in KNOWN and near:
            said.append(f"{name} is not read by anything; did you mean {near[0]}?")
    known = _names()
    for name in os.environ.get("KPT_DISABLE", "").split(","):
        if name.strip() and name.strip() not in known:
            near = difflib.get_close_matches(name.strip(), known, n=2, cutoff=0.5)
            offer = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(known) or 'none installed'}"
            said.append(f"KPT_DISABLE names {name.strip()!r}, which no backend or kernel is called; {offer}")
    return said


def _names() -> list[str]:
    import kpt_core

    names = list(kpt_core.backends())
    for backend in kpt_core.backends().values():
        try:
            names += [kernel.target for kernel in backend.kernels()]
        except Exception:  # told by kpt_core.problems()
            continue
    return names
