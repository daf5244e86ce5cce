"""What the demo shows while it runs, on stderr, and at its end, on stdout."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from kpt_cli.console import err, heading, out, say, table

from .comparison import NOISE, Comparison
from .kernels import pattern

if TYPE_CHECKING:
    from .result import Result

_BARS = "▁▂▃▄▅▆▇█"
_TITLE_WIDTH = 32


@dataclass(slots=True)
class Phase:
    """A phase that runs.

    Attributes:
        outcome: what to say of it when it is over.
    """

    _bar: Progress
    _task: Any
    outcome: str = ""

    def tell(self, done: float, total: float | None, detail: str = "") -> None:
        """Move the bar."""
        self._bar.update(self._task, completed=done, total=total, detail=detail)

    def note(self, text: str) -> None:
        """Print a line that stays."""
        self._bar.console.print(f"    {text}", style="dim", soft_wrap=True)


class Screen:
    """Shows one phase after the other and keeps their durations."""

    def __init__(self) -> None:
        self.durations: dict[str, float] = {}
        self._console = err()

    @contextmanager
    def phase(self, name: str, title: str) -> Iterator[Phase]:
        """Show a bar while the block runs, and a line with its outcome afterwards."""
        columns = (
            SpinnerColumn(),
            TextColumn(title),
            BarColumn(bar_width=24),
            TaskProgressColumn(),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[detail]}", style="dim"),
        )
        start = time.perf_counter()
        silent = not self._console.is_terminal
        with Progress(*columns, console=self._console, transient=True, disable=silent) as bar:
            phase = Phase(bar, bar.add_task("", total=None, detail=""))
            yield phase
        seconds = self.durations[name] = time.perf_counter() - start
        line = Text.assemble(
            ("  ✓ ", "green"), f"{title:<{_TITLE_WIDTH}}", (f"{seconds:6.1f} s  ", "dim"), phase.outcome
        )
        self._console.print(line, soft_wrap=True)


def sparkline(values: Sequence[float], width: int = 24) -> str:
    """The course of some values as a line of small bars."""
    if not values:
        return ""
    step = max(1, -(-len(values) // width))
    means = [sum(values[i : i + step]) / len(values[i : i + step]) for i in range(0, len(values), step)]
    low, high = min(means), max(means)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((mean - low) * scale)] for mean in means)


def show_result(result: "Result") -> None:
    """Print the tables."""
    _show_comparisons(result)
    _show_plan(result)
    _show_kernels(result)
    _show_over_plain(result)
    _show_samples(result)


def _show_comparisons(result: "Result") -> None:
    heading("Before and after")
    made = table("", "before", "after", "verdict", right=("before", "after"))
    _add_rows(made, result.comparisons)
    weights = (result.plan.bytes_before / 2**20, result.plan.bytes_after / 2**20)
    made.add_row("weights, MiB", *(f"{size:.1f}" for size in weights), f"{weights[0] / weights[1]:.2f}x")
    before, after = result.quality.before.perplexity, result.quality.after.perplexity
    made.add_row("perplexity, held-out", f"{before:.3f}", f"{after:.3f}", f"{after / before - 1:+.3%}")
    out().print(made)
    difference = result.quality.difference
    say(
        f"Largest logit difference {difference.largest:.2e} ({difference.relative:.1e} of the largest logit); the same "
        f"likeliest token at {difference.same_choice:.2%} of the positions. Brackets: first to third quartile."
    )
    if result.beyond_budget:
        say(
            f"That is beyond the error budget of {result.plan.max_error:.0e}, which holds for the inputs that the "
            "plan was made with: where two experts are almost equally likely, the least change sends a token to the "
            "other one."
        )


def _show_over_plain(result: "Result") -> None:
    heading("The optimised model without a vendor's kernels, and with them")
    made = table("", "plain PyTorch", "kernels", "verdict", right=("plain PyTorch", "kernels"))
    _add_rows(made, result.over_plain)
    out().print(made)


def _add_rows(made: Table, comparisons: Sequence[Comparison]) -> None:
    for comparison in comparisons:
        made.add_row(
            f"{comparison.name}, {comparison.unit}",
            *_cells(comparison),
            Text(f"{comparison.verdict}, {comparison.interval}", _style(comparison)),
        )


def _cells(comparison: Comparison) -> tuple[str, str]:
    before, after = (
        f"{spread.median:,.0f} [{spread.low:,.0f} to {spread.high:,.0f}]"
        for spread in (comparison.before, comparison.after)
    )
    return before, after


def _style(comparison: Comparison) -> str:
    if comparison.verdict == NOISE:
        return "dim"
    return "bold green" if comparison.gain > 1 else "yellow"


def _show_plan(result: "Result") -> None:
    plan = result.plan
    heading(f"Plan: {len(plan.kept)} of {len(plan.entries)} rewrites kept ({plan.level}, {plan.objective})")
    made = table("module", "rewrite", "gain", "error", "verdict", right=("gain", "error"))
    for entry in plan.entries:
        verdict = Text.assemble(("kept", "green") if entry.kept else ("rolled back", "yellow"), f": {entry.reason}")
        made.add_row(entry.module, entry.rewrite, f"{entry.gain:.2f}x", f"{entry.error:.1e}", verdict)
    out().print(made)


def _show_kernels(result: "Result") -> None:
    heading("Which kernel ran where")
    if not result.kernels:
        say("No op of KPT ran: nothing was kept, so transformers' own code serves the experts.")
        return
    made = table("module", "op", "kernel", "why")
    for use in result.kernels:
        made.add_row(pattern(use.modules), "  " * use.level + use.op, use.kernel, why(use.kernel, use.reasons))
    out().print(made)


def why(kernel: str, reasons: Sequence[str]) -> str:
    """The reasons of a choice as a sentence."""
    if reasons:
        return "; ".join(reasons)
    return "no installed backend offers a kernel here" if kernel == "reference" else "the first choice"


def _show_samples(result: "Result") -> None:
    same = sum(sample.identical for sample in result.samples)
    heading(f"What the model writes: {same} of {len(result.samples)} texts are identical before and after")
    for sample in result.samples:
        say("")
        out().print(Text.assemble((sample.prompt, "bold"), sample.before), soft_wrap=True)
        if sample.identical:
            say("# after: identical", style="dim")
        else:
            say("# after:", style="dim")
            out().print(Text.assemble((sample.prompt, "bold"), sample.after), soft_wrap=True)
