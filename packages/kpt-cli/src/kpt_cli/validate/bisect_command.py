"""The command `kpt bisect`."""

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated

import typer

from kpt_cli.completion import one_of
from kpt_cli.console import print_json, progress
from kpt_cli.errors import CliError
from kpt_cli.optimize.choices import DTYPES, check_choice, check_device, check_environment

from .arms import Arm
from .command import ARMS, DIFFERS, USE_HELP, Device, Json, Model, Seed, Tokens
from .model_source import DEFAULT_TOKENS, check_source, check_trace_file, load


def bisect(
    model: Model,
    use: Annotated[str | None, typer.Option(help=f"What is suspected: {USE_HELP}", autocompletion=one_of(ARMS))] = None,
    against: Annotated[
        str | None, typer.Option(help="What is trusted, likewise; reference if left out.", autocompletion=one_of(ARMS))
    ] = None,
    trace_file: Annotated[
        Path | None, typer.Option("--trace", help="Compare with this trace instead of with another arm.")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help=f"Of the weights: {', '.join(DTYPES)}. That of the trace if there is one.",
            autocompletion=one_of(DTYPES),
        ),
    ] = None,
    device: Device = None,
    tokens: Tokens = DEFAULT_TOKENS,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Find the first module that differs beyond its bound when each is fed the same inputs.

    Exit code 0 if none does, 1 if one does.
    """
    if trace_file is not None and (against is not None or dtype is not None):
        raise CliError("--trace says what is compared with, and in which dtype; leave --against and --dtype out")
    check_choice("dtype", dtype or "auto", DTYPES)
    arm, trusted = Arm.parse(use), Arm.parse(against or "reference")
    check_source(model)
    if trace_file is not None:
        check_trace_file(trace_file)
    with redirect_stdout(sys.stderr), progress() as tell:
        from .bisecting import bisect as bisect_model
        from .recording import record
        from .trace import Trace

        trace = None if trace_file is None else Trace.load(trace_file)
        place = check_device(device)
        check_environment(str(place))
        tell(0, None, "loading the model")
        loaded = load(
            model,
            dtype or ("auto" if trace is None else trace.about.load_dtype),
            place,
            tokens=tokens,
            seed=seed,
            inputs=trace is None,
        )
        if trace is None:
            assert loaded.inputs is not None
            trace = record(loaded.model, loaded.inputs, arm=trusted, name=loaded.name, said=loaded.said, tell=tell)
        found = bisect_model(loaded.model, trace, arm=arm, tell=tell)
    compared_with = trusted.name if trace_file is None else str(trace_file)
    if as_json:
        print_json({"model": model, "use": arm.name, "against": compared_with, **found.as_dict()})
    else:
        from .tables import show_bisection

        show_bisection(found, arm=arm.name, against=compared_with)
    if found.culprits:
        raise typer.Exit(DIFFERS)
