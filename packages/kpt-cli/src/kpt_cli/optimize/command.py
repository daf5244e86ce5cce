"""The command `kpt optimize`."""

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kpt_cli.completion import DEVICE_TYPES, one_of
from kpt_cli.console import print_json, progress, say
from kpt_cli.errors import CliError
from kpt_cli.output_file import check_output_file
from kpt_cli.plugins import REWRITES, packages

from .choices import DTYPES, LEVELS, OBJECTIVES, check_choice, check_device, check_environment, check_max_error
from .model_directory import ModelDirectory, read_model_directory
from .output_directory import PLAN, check_output, copy_model, staged

if TYPE_CHECKING:
    from kpt_optimize import Plan


def optimize(
    model_dir: Annotated[
        Path, typer.Argument(metavar="MODEL_DIR", help="A Hugging Face model with safetensors weights.")
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the plan to this file.", show_default=False)
    ] = None,
    copy: Annotated[
        Path | None,
        typer.Option(help="New folder for a copy of the model and its plan, if anything pays.", show_default=False),
    ] = None,
    level: Annotated[
        str, typer.Option(help=f"What may change: {', '.join(LEVELS)}.", autocompletion=one_of(LEVELS))
    ] = "balanced",
    objective: Annotated[
        str, typer.Option(help=f"What to gain: {' or '.join(OBJECTIVES)}.", autocompletion=one_of(OBJECTIVES))
    ] = "latency",
    max_error: Annotated[
        float | None,
        typer.Option(help="Largest relative error of a module's output; the level's own if left out."),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            help="Where to measure; the first accelerator or the CPU if left out.", autocompletion=one_of(DEVICE_TYPES)
        ),
    ] = None,
    dtype: Annotated[
        str, typer.Option(help=f"Of the weights in memory: {', '.join(DTYPES)}.", autocompletion=one_of(DTYPES))
    ] = "auto",
    tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Length of the text that is measured with; 512, or what the model can read."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Decides which text, or which random token ids.")] = 0,
    force: Annotated[bool, typer.Option("--force", "--yes", "-y", help="Replace an existing output.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Try every rewrite on a model, keep what is within the error budget and measured to gain, and say so.

    Without --output or --copy nothing is written. The model's folder is never changed.
    """
    check_choice("level", level, LEVELS)
    check_choice("objective", objective, OBJECTIVES)
    check_choice("dtype", dtype, DTYPES)
    check_max_error(max_error)
    directory = read_model_directory(model_dir)
    real_copy = None if copy is None else check_output(copy, directory, force=force)
    check_output_file(output, "--output", force=force)

    with redirect_stdout(sys.stderr):  # stdout is for the result
        plan, inputs = _measure(directory, level, objective, max_error, device, dtype, tokens, seed)
    if not as_json:
        from .plan_table import show_plan

        say(f"Measured with {inputs}.")
        show_plan(plan)
    copied = real_copy is not None and bool(plan.kept)
    if real_copy is not None and copied:
        with progress() as tell, staged(real_copy, replace=force) as staging:
            tell(0, None, f"writing {copy}")
            copy_model(directory, staging, dtype)
            plan.save(staging / PLAN)
            if output is not None:
                plan.save(output)  # before the copy is in its place: all that was asked for is written, or nothing
    elif output is not None:
        plan.save(output)
    if as_json:
        print_json(
            {
                "model_dir": str(model_dir),
                "inputs": inputs,
                "plan": plan.as_dict(),
                "output": None if output is None else str(output),
                "copy": str(copy) if copied else None,
            }
        )
    else:
        _say_what_next(plan, model_dir, dtype, output, copy)


def _measure(
    directory: ModelDirectory,
    level: str,
    objective: str,
    max_error: float | None,
    device: str | None,
    dtype: str,
    tokens: int | None,
    seed: int,
) -> "tuple[Plan, str]":
    """Load the model and optimise it; return the plan and what it was measured with."""
    import torch

    import kpt_optimize

    from .example_inputs import example_inputs
    from .model_loading import load_model

    place = check_device(device)
    check_environment(str(place))
    with progress() as tell:
        tell(0, None, "loading the model")
        model = load_model(directory, dtype, place)
        inputs = example_inputs(directory, model.config, tokens, place, seed)
        with torch.no_grad():
            # In place: the weights on disk are what is kept, and a second copy may not fit.
            plan = kpt_optimize.optimize(
                model,
                level=level,
                objective=objective,
                example_inputs=inputs.kwargs,
                max_error=max_error,
                inplace=True,
                on_progress=tell,
            ).plan
    if not plan.entries:
        raise CliError(_nothing_to_rewrite(directory, plan.model))
    return plan, inputs.said


def _nothing_to_rewrite(directory: ModelDirectory, model: str) -> str:
    offering = [package.name for package in packages() if any(o.startswith(REWRITES) for o in package.offers)]
    if not offering:
        return f"nothing can be rewritten in {directory.path}: no rewrites are installed; kpt-fp8 and kpt-moe have some"
    return (
        f"{directory.path} ({model}) has nothing that the rewrites of {', '.join(offering)} apply to; expected "
        "Mixture-of-Experts layers for kpt-moe, as in Mixtral, Qwen3-MoE, DeepSeek-V3 or gpt-oss, or linear layers of "
        "64 features and more for kpt-fp8"
    )


def _say_what_next(plan: "Plan", model: Path, dtype: str, output: Path | None, copy: Path | None) -> None:
    if output is None and copy is None:
        say("Nothing was written; `--output FILE` keeps the plan.")
    if output is not None:
        say(f"Wrote the plan to {output}.")
    if copy is not None:
        kept = "Wrote the model and its plan to" if plan.kept else "Nothing pays, so the model was not copied to"
        say(f"{kept} {copy}.")
    if plan.kept and (output is not None or copy is not None):
        folder, file = (model, output) if copy is None else (copy, copy / PLAN)
        how = "" if dtype == "auto" or copy is not None else f', dtype="{dtype}"'
        say(
            "To run it:\n\n"
            "    import kpt_optimize\n"
            "    from transformers import AutoModelForCausalLM\n\n"
            f'    model = AutoModelForCausalLM.from_pretrained("{folder}"{how})\n'
            f'    kpt_optimize.apply_plan(model, "{file}", inplace=True)\n'
        )
