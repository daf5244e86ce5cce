"""What `kpt tune` found, for people and for programs."""

import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kpt_cli.console import heading, out, say, table
from kpt_cli.offers import function_of

if TYPE_CHECKING:
    from kpt_optimize.tuning import TuningEntry
    from kpt_optimize.tuning.run import Tuning
    from kpt_optimize.tuning.trials import TuningResult


def document(found: "Tuning") -> dict[str, Any]:
    """For JSON."""
    return {
        "device": found.device,
        "path": None if found.path is None else str(found.path),
        "aside": None if found.aside is None else str(found.aside),
        "results": [result.as_dict() for result in found.results],
        "entries": [asdict(entry) for entry in found.entries],
        "skipped": found.skipped,
    }


def show(found: "Tuning", *, own_file: bool) -> None:
    """Print the results, what was left out and why, and where they were written."""
    heading(f"Tuned for {found.device}")
    kept = {entry.calls: entry for entry in found.entries}
    timed = [(result, result.entry) for result in found.results if result.entry is not None]
    if timed:
        made = table("op", "case", "dtype", "default", "winner", "gain", right=("gain",))
        for result, entry in timed:
            default = function_of(entry.default)
            made.add_row(result.op, result.case, result.dtype, default, *_outcome(entry, kept[entry.calls]))
        out().print(made)
    _show_sentences("Left out", [text for result in found.results for text in _left_out(result)])
    _show_sentences("Nothing to tune", _untuned(found))
    out().print()
    if not found.results:
        say("Nothing was measured, and nothing was written.")
    elif not found.entries and any(refused.of_call for result in found.results for refused in result.left_out):
        say("Nothing is to be tuned: no kernel but the reference computes the cases rightly. Nothing was written.")
    elif not found.entries:
        say("Nothing is to be tuned: no kernel but the reference takes the cases. Nothing was written.")
    elif found.path is None:
        say("Nothing was written (--dry-run).")
    else:
        say(f"Wrote {found.path}.{'' if own_file else ' It takes effect with the next call.'}")
    if found.aside is not None:
        say(f"The old table could not be used as it was; it is kept as {found.aside}.", style="yellow")
    if found.path is not None and os.environ.get("KPT_TUNING", "").lower() in ("0", "false"):
        say("Tuned choices are switched off by KPT_TUNING.", style="yellow")


def _outcome(entry: "TuningEntry", kept: "TuningEntry") -> tuple[str, str]:
    """The winner and its gain, in a row of the table."""
    if (entry.kernel, entry.config) == (entry.default, None):
        return "the default stays", "1.00x"
    config = "".join(f"\n{name}={value}" for name, value in (entry.config or {}).items())
    gain = f"{entry.gain:.2f}x ± {entry.noise:.2f}"
    winner = f"{function_of(entry.kernel)}{config}"
    if (entry.kernel, entry.config) != (kept.kernel, kept.config):
        return f"{winner}\nbut another case of this key differs: the default stays", gain
    return winner, gain


def _left_out(result: "TuningResult") -> list[str]:
    # A kernel for another kind of device needs no explanation, and `kpt doctor` names the backends that are missing.
    return [
        f"{result.op}, {result.dtype}{f', {result.case}' if refused.of_call else ''}: "
        f"{refused.kernel or refused.backend}: {refused.reason}"
        for refused in result.left_out
        if refused.kernel is not None and not refused.reason.startswith("runs on ")
    ]


def _untuned(found: "Tuning") -> list[str]:
    alike: dict[tuple[str, str], list[str]] = {}
    for result in found.results:
        if result.entry is None:
            alike.setdefault((result.op, result.case), []).append(result.dtype)
    return [
        *(f"{op}: {reason}" for op, reason in found.skipped.items()),
        *(f"{op}, {', '.join(dtypes)}: only the reference takes {case}" for (op, case), dtypes in alike.items()),
    ]


def _show_sentences(title: str, sentences: list[str]) -> None:
    if sentences:
        heading(title)
    for sentence in dict.fromkeys(sentences):
        say(f"  {sentence}")
