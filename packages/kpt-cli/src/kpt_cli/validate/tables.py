"""Traces, replays and bisections for people."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kpt_cli.console import heading, out, say, table

if TYPE_CHECKING:
    from .bisecting import Bisection
    from .bounds import Errors
    from .judging import Verdict
    from .replaying import Replay
    from .trace import About

#: How many modules that are worse, and how many flips, are listed one by one.
_ROWS, _LISTED = 20, 10


def show_about(about: "About") -> None:
    """Print what a trace was recorded from."""
    versions = [f"{name} {about.versions[name]}" for name in ("torch", "transformers") if name in about.versions]
    say(f"Recorded on {about.date[:10]}: {about.model_class} in {about.dtype} by {about.arm},")
    say(f"on {about.device}, with {' and '.join(versions)}.")


def show_replay(replay: "Replay", *, everything: bool) -> None:
    """Print offending modules, or all, then flips, then the conclusion."""
    show_about(replay.about)
    heading_of_all = "Errors against float64, of the whole run"
    _show_verdicts(heading_of_all, replay.verdicts if everything else replay.failed, everything=everything)
    alone = [culprit.verdict for culprit in replay.culprits]
    _show_verdicts("Worse by themselves, fed the recorder's inputs", alone, everything=everything)
    _show_flips(replay)
    if replay.gradients_left_out:
        say(f"Gradients were not judged: {replay.gradients_left_out}.", style="yellow")
    if replay.ok:
        closest = max(replay.verdicts, key=lambda verdict: verdict.used)
        say(
            f"\nNo worse than the recorder at any of {len(replay.verdicts)} places; closest to its bound, with "
            f"{closest.used:.0%} of it, is {_name(closest)}.",
            style="bold green",
        )
        return
    first = next(iter((*alone, *replay.failed)), None)
    if first is None:
        say("\nThe routing differs by more than rounding explains.", style="bold red")
        return
    ran, recorded = (", ".join(kernels) or "none of KPT's" for kernels in (first.kernels, first.recorded_kernels))
    say(f"\n{_name(first)}: {_said(first)}. Kernels: {ran}; the recorder's: {recorded}.")
    say(
        f"Worse than the recorder at {len(replay.failed)} of {len(replay.verdicts)} places of the whole run, and "
        f"{len(alone)} by themselves; look at {_name(first)} first.",
        style="bold red",
    )


def _show_verdicts(title: str, verdicts: "Sequence[Verdict]", *, everything: bool) -> None:
    if not verdicts:
        return
    heading(title)
    # Whole names in 100 columns: of the mean and the largest error, the one that is nearer to its bound.
    made = table("module", "error", "recorder", "this run", "bound", "verdict")
    shown = verdicts if everything else verdicts[:_ROWS]
    for verdict in shown:
        largest = verdict.run.max * verdict.bound.mean > verdict.run.mean * verdict.bound.max
        errors = (verdict.recorder, verdict.run, verdict.bound)
        shown_errors = (f"{error.max if largest else error.mean:.1e}" for error in errors)
        made.add_row(_name(verdict), "largest" if largest else "mean", *shown_errors, _short(verdict))
    out().print(made)
    if len(verdicts) > len(shown):
        say(f"... and {len(verdicts) - len(shown)} more; --all shows every module.")


def _show_flips(replay: "Replay") -> None:
    if not replay.flipped:
        return
    heading("Routing that flipped")
    say(
        f"{replay.flipped} of {sum(verdict.routed for verdict in replay.verdicts)} routed tokens went to other experts "
        f"than the recorder's; chance explains {replay.flips_allowed}, and {replay.unexplained} are not explained by "
        "rounding. They were given the recorder's experts, so that what follows could be compared."
    )
    made = table("router", "token", "gap of scores", "rounding explains", "verdict")
    flips = [(verdict.key, flip) for verdict in replay.verdicts for flip in verdict.flips]
    for key, flip in sorted(flips, key=lambda item: item[1].explained)[:_LISTED]:
        gap = "not seen" if flip.gap is None else f"{flip.gap:.1e}"
        made.add_row(key, str(flip.token), gap, f"{flip.limit:.1e}", "rounding" if flip.explained else "not rounding")
    out().print(made)


def show_bisection(bisection: "Bisection", *, arm: str, against: str) -> None:
    """Print the first module that differs, with all that is known of it, and the names of the others."""
    if not bisection.culprits:
        say(
            f"No module differs: {bisection.compared} calls by {arm} are no worse than by {against}.",
            style="bold green",
        )
        return
    first, *others = bisection.culprits
    verdict = first.verdict
    say(f"The first module that differs by {arm} from {against}, fed the same inputs:", style="bold")
    made = table("", "")
    made.show_header = False
    made.add_row("module", " > ".join(first.path))
    made.add_row("type", verdict.type)
    made.add_row("inputs", "\n".join(first.inputs))
    made.add_row("kernels", "\n".join(verdict.kernels) or "none of KPT's")
    made.add_row("trusted", "\n".join(verdict.recorded_kernels) or "none of KPT's")
    made.add_row("error", f"{_pair(verdict.run)} (mean / largest, against float64)")
    made.add_row("bound", f"{_pair(verdict.bound)}; trusted: {_pair(verdict.recorder)}")
    made.add_row("verdict", _said(verdict))
    out().print(made)
    if others:
        names = ", ".join(culprit.verdict.key or "(model)" for culprit in others[:_LISTED])
        more = f" and {len(others) - _LISTED} more" if len(others) > _LISTED else ""
        say(f"\n{len(others)} more calls differ by themselves: {names}{more}.")


def _name(verdict: "Verdict") -> str:
    key = verdict.key or "(model)"
    return f"gradient of {key}" if verdict.type == "gradient" else key


def _short(verdict: "Verdict") -> str:
    if verdict.ok:
        return _said(verdict)
    return f"{verdict.used:.3g}x bound" if 1 < verdict.used < float("inf") else verdict.reason


def _said(verdict: "Verdict") -> str:
    if verdict.reason:
        return verdict.reason
    unexplained = [flip for flip in verdict.flips if not flip.explained]
    return f"{len(unexplained)} tokens flipped, not by rounding" if unexplained else "ok"


def _pair(errors: "Errors") -> str:
    return f"{errors.mean:.1e} / {errors.max:.1e}"
