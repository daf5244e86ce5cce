"""What environment variables ask of dispatch."""

import os

from .errors import InputError

#: Backend, kernel or "reference" to run; `op=name` pairs limit it to one op. Comma-separated, strict.
KPT_USE = "KPT_USE"
#: Backends or kernels that may not run, comma-separated. A name that nothing has is warned of, once, and no error: what
#: is disabled need not be installed on every machine.
KPT_DISABLE = "KPT_DISABLE"
#: "1" turns quarantine of a failing kernel, and falling back to plain PyTorch on an accelerator, into errors.
KPT_STRICT = "KPT_STRICT"


def _split(value: str) -> list[str]:
    return [part.strip() for part in value.split(",") if part.strip()]


def parse_choices(value: str) -> tuple[tuple[str, str], ...]:
    """`nvidia`, `reference`, `pkg.mod:kernel` or `moe.experts=reference`, comma-separated; pairs win over the rest."""
    choices: dict[str, str] = {}
    for part in _split(value):
        op, separator, name = map(str.strip, part.rpartition("="))
        if separator and not (op and name):
            raise InputError(f"{KPT_USE}={value!r}: {part!r} is not of the form 'name' or 'op=name'")
        if op in choices or (not op and "*" in choices):
            raise InputError(f"{KPT_USE}={value!r}: it asks for two things for {op or 'all ops'}; name one")
        choices[op or "*"] = name
    return tuple(sorted(choices.items(), key=lambda choice: choice[0] != "*"))


def read_environment() -> tuple[tuple[tuple[str, str], ...], frozenset[str], bool]:
    """What `KPT_USE`, `KPT_DISABLE` and `KPT_STRICT` ask for: choices by op, what is disabled, and strictness."""
    strict = os.environ.get(KPT_STRICT, "").strip().lower()
    if strict not in ("", "0", "1", "false", "true"):
        raise InputError(f"{KPT_STRICT}={strict!r}: expected 0 or 1")
    choices, disabled = os.environ.get(KPT_USE, ""), os.environ.get(KPT_DISABLE, "")
    return parse_choices(choices), frozenset(_split(disabled)), strict in ("1", "true")
