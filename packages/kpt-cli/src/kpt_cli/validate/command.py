"""The commands `kpt validate record`, `kpt validate replay` and `kpt bisect`."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.filesize import decimal

from kpt_cli.console import heading, out, print_json, progress, say, table
from kpt_cli.errors import CliError
from kpt_cli.options import GROUP, Device, Force, Json, TextSeed, WeightDtype, usable_device
from kpt_cli.output_file import check_output_file

from .models import IMPLEMENTATIONS, Arm, check_source, load
from .platform import check, compare, platform
from .trace import check_trace_file

if TYPE_CHECKING:
    from torch import nn

    from kpt_optimize.judging import Verdict

    from .observing import Tell
    from .replaying import Replay

DIFFERS = 1
DEFAULT_TOKENS = 64  #: shorter than the text of `kpt optimize`, since all that every module gives is kept
_ROWS = 20  #: modules that are worse and listed one by one
_USE = f"{', '.join(IMPLEMENTATIONS)}; or a backend, a kernel, reference, or OP=NAME; several with commas."
_MODEL = "A Hugging Face folder, or package.module:function that returns a model and its inputs."


def _arm(text: str) -> Any:
    return typer.Option(help=text, autocompletion=lambda: (*IMPLEMENTATIONS, "reference", "torch"))


Model = Annotated[str, typer.Argument(metavar="MODEL", help=_MODEL)]
Use = Annotated[str | None, _arm(f"What serves the model's experts and ops: {_USE}")]
Tokens = Annotated[int, typer.Option(min=1, help="Length of the text that a folder's model runs on.")]

app = typer.Typer(help="Judge a machine: by a model's recorded numbers, or by a sealed report of all checks.", **GROUP)
for function in (platform, check, compare):
    app.command()(function)


@app.command()
def record(
    model: Model,
    output: Annotated[Path, typer.Option("--output", "-o", help="The trace, a safetensors file.", show_default=False)],
    dtype: WeightDtype = "auto",
    device: Device = None,
    use: Use = None,
    tokens: Tokens = DEFAULT_TOKENS,
    seed: TextSeed = 0,
    layers: Annotated[
        str, typer.Option(help="Keep only modules whose path matches, for instance 'model.layers.1*'.")
    ] = "*",
    backward: Annotated[bool, typer.Option("--backward", help="Keep gradients too.")] = False,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Run a model, and the same weights in float64, and keep what every module gave in one file."""
    arm = Arm.parse(use)
    check_source(model)
    check_output_file(output, "--output", force=force)
    with _working() as tell:
        from .replaying import record as record_trace

        loaded, inputs, said = _load(model, dtype, device, tell, tokens, seed)
        name = str(Path(model).absolute()) if Path(model).exists() else model
        about = {"model": name, "load_dtype": dtype, "said": said}
        trace = record_trace(loaded, inputs, arm=arm, layers=layers, gradients=backward, tell=tell, about=about)
        tell(0, None, f"writing {output}")
        trace.save(output)
    size, calls, gradients = output.stat().st_size, len(trace.layers), len(trace.gradients)
    if as_json:
        counts = {"bytes": size, "layers": calls, "gradients": gradients}
        print_json({"trace": str(output), **counts, "about": trace.about})
        return
    _show_about(trace.about)
    say(f"Wrote {output} ({decimal(size)}) from {said}. Calls of modules: {calls}; gradients: {gradients}.")
    say(f"`kpt validate replay {output}` judges another machine, backend or version by it.")


@app.command()
def replay(
    trace_file: Annotated[Path, typer.Argument(metavar="TRACE", help="What `kpt validate record` wrote.")],
    model: Annotated[str | None, typer.Option(help=f"The recorded one if left out. {_MODEL}")] = None,
    device: Device = None,
    use: Use = None,
    as_json: Json = False,
) -> None:
    """Run a trace's inputs through its model, and say where it is worse against float64 than the recorder was.

    Exit code 0 if it is nowhere worse, 1 if it is, 2 if the trace or the model is not what it should be.
    """
    arm = Arm.parse(use)
    check_trace_file(trace_file)
    if model is not None:
        check_source(model)
    with _working() as tell:
        from .replaying import replay as replay_trace
        from .trace import Trace

        tell(0, None, f"reading {trace_file}")
        trace = Trace.load(trace_file)
        source = model if model is not None else _recorded_model(trace_file, trace.about.get("model", ""))
        check_source(source)
        loaded, *_ = _load(source, trace.about["load_dtype"], device, tell)
        found = replay_trace(loaded, trace, arm=arm, tell=tell)
    if as_json:
        verdicts, culprits = ([verdict.as_dict() for verdict in x] for x in (found.verdicts, found.culprits))
        document = {"trace": str(trace_file), "use": arm.name, "recorded": trace.about, "ok": found.ok}
        document |= {"layers": verdicts, "culprits": culprits, "flipped": found.flipped}
        print_json(document | {"flips_allowed": found.flips_allowed, "gradients_left_out": found.gradients_left_out})
    else:
        _show_about(trace.about)
        _show_replay(found)
    if not found.ok:
        raise typer.Exit(DIFFERS)


def bisect(
    model: Model,
    use: Annotated[str | None, _arm(f"What is suspected: {_USE}")] = None,
    against: Annotated[str | None, _arm("What is trusted, likewise; reference if left out.")] = None,
    trace_file: Annotated[
        Path | None, typer.Option("--trace", help="Compare with this trace instead of with another arm.")
    ] = None,
    dtype: WeightDtype = "auto",
    device: Device = None,
    tokens: Tokens = DEFAULT_TOKENS,
    seed: TextSeed = 0,
    as_json: Json = False,
) -> None:
    """Find the first module that differs beyond its bound when each is fed the same inputs.

    Exit code 0 if none does, 1 if one does.
    """
    if trace_file is not None and (against is not None or dtype != "auto"):
        raise CliError("--trace says what is compared with, and in which dtype; leave --against and --dtype out")
    arm, trusted = Arm.parse(use), Arm.parse(against or "reference")
    check_source(model)
    if trace_file is not None:
        check_trace_file(trace_file)
    with _working() as tell:
        from .replaying import bisect as bisect_model
        from .replaying import record as record_trace
        from .trace import Trace

        if trace_file is not None:
            trace = Trace.load(trace_file)
            loaded, *_ = _load(model, trace.about["load_dtype"], device, tell)
        else:
            loaded, inputs, _ = _load(model, dtype, device, tell, tokens, seed)
            trace = record_trace(loaded, inputs, arm=trusted, tell=tell)
        culprits = bisect_model(loaded, trace, arm=arm, tell=tell)
    compared_with = trusted.name if trace_file is None else str(trace_file)
    if as_json:
        found = {"culprits": [culprit.as_dict() for culprit in culprits], "compared": len(trace.layers)}
        print_json({"model": model, "use": arm.name, "against": compared_with, **found})
    elif culprits:
        say(f"The first module that differs by {arm.name} from {compared_with}, fed the same inputs:", style="bold")
        _show_culprits(culprits)
    else:
        compared = f"{len(trace.layers)} calls by {arm.name} are no worse than by {compared_with}"
        say(f"No module differs: {compared}.", style="bold green")
    if culprits:
        raise typer.Exit(DIFFERS)


@contextmanager
def _working() -> "Iterator[Tell]":
    """Keep stdout for the result, and show progress."""
    with redirect_stdout(sys.stderr), progress() as tell:
        yield tell


def _load(
    model: str, dtype: str, device: str | None, tell: "Tell", tokens: int | None = None, seed: int = 0
) -> "tuple[nn.Module, Any, str]":
    place = usable_device(device)
    tell(0, None, "loading the model")
    return load(model, dtype, place, tokens=tokens, seed=seed)


def _recorded_model(trace_file: Path, recorded: str) -> str:
    if recorded and Path(recorded).is_dir():
        return recorded
    # Not even a function that is here: a file that somebody sent does not decide which code runs.
    what = "whose code runs only if you name it" if ":" in recorded else "which is not on this machine"
    source = recorded or "a model without a name"
    raise CliError(f"{trace_file} was recorded from {source}, {what}; say where it is with --model")


def _show_about(about: dict[str, Any]) -> None:
    versions = " and ".join(f"{name} {about['versions'][name]}" for name in ("torch", "transformers"))
    say(f"Recorded on {about['date'][:10]}: {about['model_class']} in {about['dtype']} by {about['arm']},")
    say(f"on {about['device']}, with {versions}.")


def _show_replay(found: "Replay") -> None:
    """Print modules that are worse, then the first that goes wrong by itself, flips, and the conclusion."""
    if found.failed:
        _show_verdicts(found.failed)
    if found.culprits:
        say("\nThe first module that is worse by itself, fed the recorder's inputs:", style="bold")
        _show_culprits(found.culprits)
    if found.flipped:
        say(
            f"\n{found.flipped} of {sum(verdict.routed for verdict in found.verdicts)} routed tokens went to other "
            f"experts than the recorder's; chance explains {found.flips_allowed}. They were given the recorder's, so "
            "that what follows could be compared."
        )
    if found.gradients_left_out:
        say(f"Gradients were not judged: {found.gradients_left_out}.", style="yellow")
    if found.ok:
        closest = max(found.verdicts, key=lambda verdict: verdict.used)
        say(
            f"\nNo worse than the recorder at any of {len(found.verdicts)} places; closest to its bound, with "
            f"{closest.used:.0%} of it, is {closest.name}.",
            style="bold green",
        )
    elif wrong := (*found.culprits, *found.failed):
        say(
            f"\nWorse than the recorder at {len(found.failed)} of {len(found.verdicts)} places of the whole run, and "
            f"{len(found.culprits)} by themselves; look at {wrong[0].name} first: {wrong[0].reason}.",
            style="bold red",
        )
    else:
        say("\nMore tokens were routed otherwise than chance explains.", style="bold red")


def _show_verdicts(verdicts: "Sequence[Verdict]") -> None:
    heading("Errors against float64, of the whole run")
    # Whole names in 100 columns: of the mean and the largest error, the one that is nearer to its bound.
    made = table("module", "error", "recorder", "this run", "bound", "verdict")
    for verdict in verdicts[:_ROWS]:
        largest = verdict.run.max * verdict.bound.mean > verdict.run.mean * verdict.bound.max
        errors = (verdict.recorder, verdict.run, verdict.bound)
        said = f"{verdict.used:.3g}x bound" if 1 < verdict.used < float("inf") else verdict.reason or "ok"
        numbers = (f"{error.max if largest else error.mean:.1e}" for error in errors)
        made.add_row(verdict.name, "largest" if largest else "mean", *numbers, said)
    out().print(made)
    if len(verdicts) > _ROWS:
        say(f"... and {len(verdicts) - _ROWS} more; --json has every module.")


def _show_culprits(culprits: "Sequence[Verdict]") -> None:
    """Print the first module that differs, with all that is known of it, and the names of the others."""
    first, *others = culprits
    made = table("", "")
    made.show_header = False
    run, bound, trusted = (f"{each.mean:.1e} / {each.max:.1e}" for each in (first.run, first.bound, first.recorder))
    made.add_row("module", first.name)
    made.add_row("type", first.type)
    made.add_row("inputs", "\n".join(first.inputs))
    made.add_row("kernels", "\n".join(first.kernels) or "none of KPT's")
    made.add_row("trusted", "\n".join(first.recorded_kernels) or "none of KPT's")
    made.add_row("error", f"{run} (mean / largest, against float64)")
    made.add_row("bound", f"{bound}; trusted: {trusted}")
    made.add_row("verdict", first.reason)
    out().print(made)
    if others:
        say(f"\n{len(others)} more calls differ by themselves: {', '.join(other.name for other in others)}.")
