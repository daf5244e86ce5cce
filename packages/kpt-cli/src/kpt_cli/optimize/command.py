"""The command `kpt optimize`."""

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kpt_cli.console import print_json, progress, say
from kpt_cli.errors import CliError
from kpt_cli.output_file import check_output_file
from kpt_cli.plugins import REWRITES, packages

from .choices import DTYPES, LEVELS, OBJECTIVES, check_choice, check_device, check_environment, check_max_error
from .model_directory import ModelDirectory, read_model_directory
from .output_directory import PLAN, check_output, copy_model, staged

if TYPE_CHECKING:
    from kpt_core import Plan


def optimize(
    model_dir: Annotated[
        Path, typer.Argument(metavar="MODEL_DIR", help="A Hugging Face model with safetensors weights.")
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="New folder for the model and its plan.", show_default=False)
    ] = None,
    plan_file: Annotated[
        Path | None, typer.Option("--plan", help="Write the plan alone to this file.", show_default=False)
    ] = None,
    level: Annotated[str, typer.Option(help=f"What may change: {', '.join(LEVELS)}.")] = "balanced",
    objective: Annotated[str, typer.Option(help=f"What to gain: {' or '.join(OBJECTIVES)}.")] = "latency",
    max_error: Annotated[
        float | None,
        typer.Option(help="Largest relative error of a module's output; the level's own if left out."),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Where to measure; the first accelerator or the CPU if left out.")
    ] = None,
    dtype: Annotated[str, typer.Option(help=f"Of the weights in memory: {', '.join(DTYPES)}.")] = "auto",
    tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Length of the text that is measured with; 512, or what the model can read."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Decides which text, or which random token ids.")] = 0,
    force: Annotated[bool, typer.Option("--force", "--yes", "-y", help="Replace an existing output.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Try every rewrite on a model, keep what is within the error budget and measured to gain, and say so.

    Without --output or --plan nothing is written. The model's folder is never changed.
    """
    check_choice("level", level, LEVELS)
    check_choice("objective", objective, OBJECTIVES)
    check_choice("dtype", dtype, DTYPES)
    check_max_error(max_error)
    directory = read_model_directory(model_dir)
    real_output = None if output is None else check_output(output, directory, force=force)
    if plan_file is not None:
        check_output_file(plan_file, "--plan", force=force)

    with redirect_stdout(sys.stderr):  # stdout is for the result
        plan, inputs = _measure(directory, level, objective, max_error, device, dtype, tokens, seed)
    if not as_json:
        from .plan_table import show_plan

        say(f"Measured with {inputs}.")
        show_plan(plan)
    if real_output is not None:
        _write_model(directory, plan, dtype, real_output, plan_file, replace=force)
    elif plan_file is not None:
        plan.save(plan_file)
    if as_json:
        print_json(
            {
                "model_dir": str(model_dir),
                "inputs": inputs,
                "plan": plan.as_dict(),
                "output": None if output is None else str(output),
                "plan_file": None if plan_file is None else str(plan_file),
            }
        )
    else:
        _say_what_next(output, plan_file)


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

    import kpt_core

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
            plan = kpt_core.optimize(
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
        return f"nothing can be rewritten in {directory.path}: no rewrites are installed; kpt-moe brings some"
    return (
        f"{directory.path} ({model}) has nothing that the rewrites of {', '.join(offering)} apply to: it has no "
        "Mixture-of-Experts layer; expected a model with some, for instance Mixtral, Qwen3-MoE, DeepSeek-V3 or gpt-oss"
    )


def _write_model(
    directory: ModelDirectory, plan: "Plan", dtype: str, output: Path, plan_file: Path | None, *, replace: bool
) -> None:
    """Write all that was asked for, or nothing."""
    with progress() as tell, staged(output, replace=replace) as staging:
        tell(0, None, f"writing {output}")
        copy_model(directory, staging, dtype)
        plan.save(staging / PLAN)
        if plan_file is not None:
            plan.save(plan_file)


def _say_what_next(output: Path | None, plan_file: Path | None) -> None:
    if output is None and plan_file is None:
        say("Nothing was written; `--output FOLDER` keeps the model with its plan, `--plan FILE` the plan alone.")
        return
    if plan_file is not None:
        say(f"Wrote the plan to {plan_file}.")
    if output is not None:
        say(f"Wrote the model and its plan to {output}. To run it:")
        say(
            "\n"
            "    import kpt_core\n"
            "    from transformers import AutoModelForCausalLM\n\n"
            f'    model = AutoModelForCausalLM.from_pretrained("{output}")\n'
            f'    model = kpt_core.apply_plan(model, kpt_core.Plan.load("{output / PLAN}"), inplace=True).model\n'
        )
