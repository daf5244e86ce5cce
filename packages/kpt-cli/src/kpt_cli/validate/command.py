"""The commands `kpt validate record` and `kpt validate replay`."""

import shlex
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated

import typer

from kpt_cli.completion import DEVICE_TYPES, one_of
from kpt_cli.console import print_json, progress, say
from kpt_cli.errors import CliError
from kpt_cli.optimize.choices import DTYPES, check_choice, check_device, check_environment
from kpt_cli.output_file import check_output_file

from .arms import IMPLEMENTATIONS, Arm
from .model_source import DEFAULT_TOKENS, check_source, check_trace_file, load

DIFFERS = 1
MODEL_HELP = "A Hugging Face folder, or package.module:function that returns a model and its inputs."
ARMS = (*IMPLEMENTATIONS, "reference", "torch")
USE_HELP = f"{', '.join(IMPLEMENTATIONS)}; or a backend, a kernel, reference, or OP=NAME; several with commas."

#: Options that several commands have.
Model = Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)]
Device = Annotated[
    str | None,
    typer.Option(
        help="Where to run; the first accelerator or the CPU if left out.", autocompletion=one_of(DEVICE_TYPES)
    ),
]
Use = Annotated[
    str | None,
    typer.Option(help=f"What serves the model's experts and ops: {USE_HELP}", autocompletion=one_of(ARMS)),
]
Tokens = Annotated[int, typer.Option(min=1, help="Length of the text that a folder's model runs on.")]
Seed = Annotated[int, typer.Option(min=0, help="Decides which text, or which random token ids.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]

app = typer.Typer(
    help="Record a model's numbers, and judge another machine, backend or version by them.",
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def validate() -> None:
    """Record a model's numbers, and judge another machine, backend or version by them."""


@app.command()
def record(
    model: Model,
    output: Annotated[Path, typer.Option("--output", "-o", help="The trace, a safetensors file.", show_default=False)],
    dtype: Annotated[
        str, typer.Option(help=f"Of the weights: {', '.join(DTYPES)}.", autocompletion=one_of(DTYPES))
    ] = "auto",
    device: Device = None,
    use: Use = None,
    tokens: Tokens = DEFAULT_TOKENS,
    seed: Seed = 0,
    layers: Annotated[
        str | None, typer.Option(help="Keep only modules whose path matches, for instance 'model.layers.1*'.")
    ] = None,
    backward: Annotated[bool, typer.Option("--backward", help="Keep gradients too.")] = False,
    force: Annotated[bool, typer.Option("--force", "--yes", "-y", help="Replace an existing trace.")] = False,
    as_json: Json = False,
) -> None:
    """Run a model, and the same weights in float64, and keep what every module gave in one file."""
    check_choice("dtype", dtype, DTYPES)
    arm = Arm.parse(use)
    check_source(model)
    check_output_file(output, "--output", force=force)

    with redirect_stdout(sys.stderr), progress() as tell:  # stdout is for the result
        from .recording import record as record_trace

        place = check_device(device)
        check_environment(str(place))
        tell(0, None, "loading the model")
        loaded = load(model, dtype, place, tokens=tokens, seed=seed)
        assert loaded.inputs is not None
        trace = record_trace(
            loaded.model,
            loaded.inputs,
            arm=arm,
            layers=layers,
            gradients=backward,
            name=loaded.name,
            said=loaded.said,
            load_dtype=dtype,
            tell=tell,
        )
        tell(0, None, f"writing {output}")
        trace.save(output)
    size = output.stat().st_size
    if as_json:
        from dataclasses import asdict

        print_json(
            {
                "trace": str(output),
                "bytes": size,
                "layers": len(trace.layers),
                "gradients": len(trace.gradients),
                "about": asdict(trace.about),
            }
        )
        return
    from rich.filesize import decimal

    from .tables import show_about

    show_about(trace.about)
    say(
        f"Wrote {output} ({decimal(size)}) from {trace.about.said}. Calls of modules: {len(trace.layers)}; "
        f"gradients: {len(trace.gradients)}."
    )
    say(f"`kpt validate replay {output}` judges another machine, backend or version by it.")


@app.command()
def replay(
    trace_file: Annotated[Path, typer.Argument(metavar="TRACE", help="What `kpt validate record` wrote.")],
    model: Annotated[str | None, typer.Option(help=f"The recorded one if left out. {MODEL_HELP}")] = None,
    device: Device = None,
    use: Use = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Convert the weights to it; the recorded one if left out.", autocompletion=one_of(DTYPES[1:])
        ),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Show every module, not only those that are worse.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Run a trace's inputs through its model, and say where it is worse against float64 than the recorder was.

    Exit code 0 if it is nowhere worse, 1 if it is, 2 if the trace or the model is not what it should be.
    """
    if dtype is not None:
        check_choice("dtype", dtype, DTYPES[1:])
    arm = Arm.parse(use)
    check_trace_file(trace_file)
    if model is not None:
        check_source(model)
    with redirect_stdout(sys.stderr), progress() as tell:
        import torch

        from .replaying import replay as replay_trace
        from .trace import Trace

        tell(0, None, f"reading {trace_file}")
        trace = Trace.load(trace_file)
        source = model if model is not None else _recorded_model(trace_file, trace.about.model)
        check_source(source)
        place = check_device(device)
        check_environment(str(place))
        tell(0, None, "loading the model")
        loaded = load(source, trace.about.load_dtype, place, inputs=False)
        wanted = None if dtype is None else getattr(torch, dtype)
        found = replay_trace(loaded.model, trace, arm=arm, dtype=wanted, tell=tell)
    if as_json:
        from dataclasses import asdict

        print_json({"trace": str(trace_file), "use": arm.name, "recorded": asdict(trace.about), **found.as_dict()})
    else:
        from .tables import show_replay

        show_replay(found, everything=everything)
        if found.culprits and wanted is None:
            how = "" if use is None else f" --use {shlex.quote(use)}"
            names = f"{shlex.quote(source)} --trace {shlex.quote(str(trace_file))}"
            say(f"`kpt bisect {names}{how}` tells more of it.")
    if not found.ok:
        raise typer.Exit(DIFFERS)


def _recorded_model(trace_file: Path, recorded: str) -> str:
    if not recorded:
        raise CliError(f"{trace_file} does not say which model it was recorded from; name it with --model")
    if not Path(recorded).is_dir():
        # Not even a function that is here: a file that somebody sent does not decide which code runs.
        what = (
            "whose code runs only if you name it:"
            if ":" in recorded
            else "which is not on this machine: say where it is,"
        )
        raise CliError(f"{trace_file} was recorded from {recorded}, {what} with --model")
    return recorded
