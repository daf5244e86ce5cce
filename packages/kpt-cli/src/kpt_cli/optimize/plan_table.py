"""A plan for people."""

from typing import TYPE_CHECKING

from rich.text import Text

from kpt_cli.console import heading, out, say, table

if TYPE_CHECKING:
    from kpt_optimize import Plan, PlanEntry


def show_plan(plan: "Plan") -> None:
    """Print what was tried on each module and what came of it, then the whole model before and after."""
    heading(f"Plan for {plan.model}: {plan.level}, {plan.objective}, on {plan.device}")
    made = table("module", "rewrite, op, kernel", "gain", "error", "verdict", right=("gain", "error"))
    for module, entries in _by_module(plan).items():
        for number, entry in enumerate(entries):
            made.add_row("" if number else module, *_cells(entry))
    out().print(made)
    if not plan.kept:
        say(f"\nNone of {len(plan.entries)} rewrites was kept; the model stays as it is.", style="bold")
        return
    heading("The whole model")
    made = table("", "before", "after", "gain", right=("before", "after", "gain"))
    made.add_row("forward", _duration(plan.seconds_before), _duration(plan.seconds_after), _gain(plan.gain, plan.noise))
    smaller = plan.bytes_before / max(plan.bytes_after, 1)
    made.add_row("weights", _mebibytes(plan.bytes_before), _mebibytes(plan.bytes_after), _gain(smaller))
    out().print(made)
    say(
        f"\n{len(plan.kept)} of {len(plan.entries)} rewrites kept; the output's relative error is {plan.error:.1e} "
        f"(budget {plan.max_error:.1e}).",
        style="bold",
    )
    if plan.objective == "latency" and plan.seconds_after > plan.seconds_before:
        say(
            "The modules are faster each by itself, and the whole model was not in this measurement:\n"
            "measure again while the machine does nothing else before you use this plan.",
            style="yellow",
        )


def _by_module(plan: "Plan") -> "dict[str, list[PlanEntry]]":
    found: dict[str, list[PlanEntry]] = {}
    for entry in plan.entries:
        found.setdefault(entry.module, []).append(entry)
    return found


def _cells(entry: "PlanEntry") -> tuple[str, str, str, Text]:
    served = f"{entry.rewrite}\n{entry.op}: {entry.kernel}" if entry.kernel else f"{entry.rewrite}\n{entry.op}"
    style, word = ("green", "kept") if entry.kept else ("yellow", "rolled back")
    verdict = Text.assemble((word, style), f": {entry.reason}")
    return served, _gain(entry.gain, entry.noise), f"{entry.error:.1e}", verdict


def _gain(gain: float, noise: float = 0.0) -> str:
    """A gain, and where it lies but for one time in twenty."""
    return f"{gain:.2f}x" + (f"\n[{max(gain - 2 * noise, 0):.2f}-{gain + 2 * noise:.2f}]" if noise else "")


def _duration(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _mebibytes(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"
