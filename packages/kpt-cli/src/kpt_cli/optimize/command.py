"""The command `kpt optimize`."""

import json
import shutil
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from kpt_cli.console import heading, out, print_json, progress, say, table
from kpt_cli.errors import CliError
from kpt_cli.options import Device, Force, Json, Level, MaxError, Objective, TextSeed, WeightDtype, usable_device
from kpt_cli.output_file import check_new_folder, check_output_file, staged
from kpt_cli.plugins import REWRITES, packages

from .model_directory import CONFIG, INDEX, WEIGHTS, ModelDirectory, read_model_directory

if TYPE_CHECKING:
    from kpt_optimize import Plan, PlanEntry

PLAN = "kpt_plan.json"
#: What belongs to a model beside its weights: configs, tokenizers, chat templates, licence.
COPIED = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "*.md", "LICENSE*", "NOTICE*", "USE_POLICY*")


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
    level: Level = "balanced",
    objective: Objective = "latency",
    max_error: MaxError = None,
    device: Device = None,
    dtype: WeightDtype = "auto",
    tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Length of the text that is measured with; 512, or what the model can read."),
    ] = None,
    seed: TextSeed = 0,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Try every rewrite on a model, keep what is within the error budget and measured to gain, and say so.

    Without --output or --copy nothing is written. The model's folder is never changed.
    """
    directory = read_model_directory(model_dir)
    real_copy = None if copy is None else check_copy(copy, directory, force=force)
    check_output_file(output, "--output", force=force)
    if real_copy is not None and output is not None and output.resolve().is_relative_to(real_copy):
        # It would be lost with what the copy takes the place of.
        raise CliError(f"--output {output} lies in --copy {copy}, which has the plan as {PLAN}: leave --output out")
    wanted = {"level": level, "objective": objective, "max_error": max_error}
    with redirect_stdout(sys.stderr):  # stdout is for the result
        plan, inputs = _measure(directory, device, dtype, tokens, seed, **wanted)
    if not as_json:
        say(f"Measured with {inputs}.")
        _show_plan(plan)
        if larger := plan.outlook("--max-error "):
            say(larger)
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
        paths = {"output": None if output is None else str(output), "copy": str(copy) if copied else None}
        print_json({"model_dir": str(model_dir), "inputs": inputs, "note": plan.note, "plan": plan.as_dict(), **paths})
    else:
        _say_what_next(plan, model_dir, dtype, output, copy)


def _measure(
    directory: ModelDirectory, device: str | None, dtype: str, tokens: int | None, seed: int, **wanted: Any
) -> "tuple[Plan, str]":
    """Load the model and optimise it; return the plan and what it was measured with."""
    import torch

    import kpt_optimize

    from .model import example_inputs, load_model

    place = usable_device(device)
    with progress() as tell:
        tell(0, None, "loading the model")
        model = load_model(directory, dtype, place)
        inputs, said = example_inputs(directory, model.config, tokens, place, seed)
        with torch.no_grad():
            # In place: the weights on disk are what is kept, and a second copy may not fit.
            found = kpt_optimize.optimize(model, example_inputs=inputs, inplace=True, on_progress=tell, **wanted)
    plan = found.plan
    if plan.entries:
        return plan, said
    offering = [package.name for package in packages() if any(o.startswith(REWRITES) for o in package.offers)]
    if not offering:
        raise CliError(
            f"nothing can be rewritten in {directory.path}: no rewrites are installed; kpt-fp8 and kpt-moe have some"
        )
    raise CliError(
        f"{directory.path} ({plan.model}) has nothing that the rewrites of {', '.join(offering)} apply to; expected "
        "Mixture-of-Experts layers for kpt-moe, as in Mixtral, Qwen3-MoE, DeepSeek-V3 or gpt-oss, or linear layers of "
        "64 features and more for kpt-fp8"
    )


def check_copy(to: Path, directory: ModelDirectory, *, force: bool) -> Path:
    """Return the real path of a folder; `CliError` if it is taken, in a wrong place, or the disk has no room."""
    real, model = to.resolve(), directory.path.resolve()
    if real == model:
        raise CliError(f"--copy {to} is the model's own folder; choose another one")
    if model in real.parents:
        raise CliError(f"--copy {to} lies inside the model's folder {directory.path}; choose a place outside of it")
    if real in model.parents:
        raise CliError(f"--copy {to} contains the model's folder {directory.path}; choose another place")
    otherwise = "exists and is not empty; choose another folder, or replace it with --force"
    if force:
        otherwise = (
            "" if (real / CONFIG).is_file() else "is not empty and holds no model, so --force does not replace it"
        )
    size = sum(file.stat().st_size for file in _files(directory))
    return check_new_folder(to, f"--copy {to}", otherwise, size)


def copy_model(directory: ModelDirectory, to: Path, dtype: str) -> None:
    """Copy the model's files to an empty folder; its weights are not changed by a byte.

    The dtype, in which the plan was measured, is written to the config unless it is `auto`.
    """
    for file in _files(directory):
        there = to / file.relative_to(directory.path)
        there.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, there)
    if dtype != "auto":
        config = {key: value for key, value in directory.config.items() if key != "torch_dtype"} | {"dtype": dtype}
        (to / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _files(directory: ModelDirectory) -> list[Path]:
    found = {file for pattern in COPIED for file in directory.path.rglob(pattern)}
    for folder in _modules(directory.path):
        found.update(folder.rglob("*"))
    found = {
        file for file in found
        if file.is_file() and not any(part.startswith(".") for part in file.relative_to(directory.path).parts)
    }  # fmt: skip
    whole = all(file.name == WEIGHTS for file in directory.weights)
    left = {directory.path / PLAN} | ({directory.path / INDEX} if whole else set())
    return sorted(found - left | set(directory.weights))


def _modules(path: Path) -> list[Path]:
    """Return the folders of the modules beside the model that sentence-transformers' `modules.json` names."""
    try:
        named = [str(each.get("path") or "") for each in json.loads((path / "modules.json").read_text("utf-8"))]
    except (OSError, ValueError, AttributeError, TypeError):
        return []  # there is none, or it is something else by that name
    root = path.resolve()
    return [path / name for name in named if name and root in (path / name).resolve().parents]


def plan_table(plan: "Plan") -> Table:
    """Return a table of what was tried on each module and what came of it."""
    by_module: dict[str, list[PlanEntry]] = {}
    for entry in plan.entries:
        by_module.setdefault(entry.module, []).append(entry)
    made = table("module", "rewrite, op, kernel", "gain", "error", "verdict", right=("gain", "error"))
    for module, entries in by_module.items():
        for number, entry in enumerate(entries):
            served = f"{entry.rewrite}\n{entry.op}" + (f": {entry.kernel}" if entry.kernel else "")
            verdict = Text.assemble(("kept", "green") if entry.kept else ("rolled back", "yellow"), f": {entry.reason}")
            gain = "-" if not entry.measured else "too noisy" if entry.noisy else f"{entry.gain:.2f}x"
            made.add_row("" if number else module, served, gain, f"{entry.error:.1e}", verdict)
    return made


def _show_plan(plan: "Plan") -> None:
    """Print what was tried on each module and what came of it, then the whole model before and after."""
    heading(f"Plan for {plan.model}: {plan.level}, {plan.objective}, on {plan.device}")
    if plan.note:
        say(f"Note: {plan.note}", style="yellow")
    out().print(plan_table(plan))
    if not plan.kept:
        say(f"\nNone of {len(plan.entries)} rewrites was kept; the model stays as it is.", style="bold")
        return
    heading("The whole model")
    made = table("", "before", "after", "gain", right=("before", "after", "gain"))
    seconds = (f"{s * 1e3:.2f} ms" if s < 1 else f"{s:.2f} s" for s in (plan.seconds_before, plan.seconds_after))
    made.add_row("forward", *seconds, _gain(plan.gain, plan.noise))
    sizes = (f"{size / 2**20:.1f} MiB" for size in (plan.bytes_before, plan.bytes_after))
    made.add_row("weights", *sizes, _gain(plan.bytes_before / max(plan.bytes_after, 1), what="smaller"))
    out().print(made)
    say(
        f"\n{len(plan.kept)} of {len(plan.entries)} rewrites kept; the output's relative error is {plan.error:.1e} "
        f"(budget {plan.max_error:.1e}).",
        style="bold",
    )


def _gain(gain: float, noise: float = 0.0, what: str = "faster") -> str:
    """Return a gain in words, with twice its standard error."""
    from kpt_optimize.measure import describe_gain, noise_share

    return describe_gain(gain, noise_share(gain, noise), what)


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
