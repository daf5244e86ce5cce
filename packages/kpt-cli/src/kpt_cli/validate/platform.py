"""The commands `kpt validate platform`, `kpt validate check` and `kpt validate compare`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kpt_cli.console import complain, err, heading, out, print_json, say, table
from kpt_cli.errors import CliError
from kpt_cli.options import Json, one_of
from kpt_cli.output_file import check_new_folder

from .reading import DAMAGED, OURS
from .running import SUITES, Run, doctor_step, step_names, steps_for

if TYPE_CHECKING:
    from .comparing import Comparison, Ratio

FAULTY = 1
Report = Annotated[Path, typer.Argument(metavar="FOLDER", help="What `kpt validate platform` wrote.")]


def platform(
    output: Annotated[Path, typer.Option("--output", "-o", help="The report: a new folder.", show_default=False)],
    suite: Annotated[
        str, one_of("suite", SUITES, "How much of the conformance suite and of the benchmarks: quick or full.")
    ] = "quick",
    only: Annotated[list[str] | None, one_of("step", step_names(), "Run this step; may be repeated.")] = None,
    limit: Annotated[
        float | None, typer.Option(min=1, help="Seconds of each step, instead of its own limit.", show_default=False)
    ] = None,
    as_json: Json = False,
) -> None:
    """Run doctor, the conformance suite of each usable backend, benchmarks and the demo, and seal what they found.

    Exit code 0 if every step ended with 0, else 1; the folder is complete in both cases.
    """
    folder = check_new_folder(output, f"--output {output}", "is not empty; choose a new folder")
    only = list(dict.fromkeys(only or ()))
    _require_suite(only)
    console = err()
    run = Run(folder, limit, lambda line: console.print(line, soft_wrap=True), suite=suite, only=only)
    run.run([doctor_step()])
    try:
        doctor = run.read_machine()
    except DAMAGED as error:
        raise CliError(
            f"kpt doctor gave no report ({type(error).__name__}: {error}): see {output / 'logs' / 'doctor.txt'}"
        ) from None
    steps, run.document["left_out"] = steps_for(doctor, suite, only)
    run.run(steps)
    good = run.seal()
    if as_json:
        print_json(run.document)
    else:
        say(f"Wrote {output}. `kpt validate check {output}` checks it on any machine.")
    if not good:
        raise typer.Exit(FAULTY)


def _require_suite(only: list[str]) -> None:
    from importlib.util import find_spec

    missing = [name for name in ("pytest", "kpt_conformance") if find_spec(name) is None]
    if missing and (not only or any(name.startswith("suite-") for name in only)):
        packages = ", ".join(name.replace("_", "-") for name in missing)
        raise CliError(
            f"the conformance suite needs {packages}, not installed here: install it, or name steps by --only"
        )


def check(folder: Report, as_json: Json = False) -> None:
    """Derive a report's summary and figures again from its files, and say what does not agree.

    Exit code 0 if all agrees and every step succeeded, 1 if not, 2 if the folder is no report.
    """
    from .checking import faults

    found = faults(folder)
    if as_json:
        print_json({"report": str(folder), "ok": not found, "faults": found})
    else:
        for fault in found:
            say(fault, style="red")
        count = f"{len(found)} fault{'s' if len(found) > 1 else ''} in {folder}."
        say(count if found else f"{folder} is what its files say; every step succeeded.", style="bold")
    if found:
        raise typer.Exit(FAULTY)


def compare(
    a: Annotated[Path, typer.Argument(metavar="A", help="A report.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another one.")],
    as_json: Json = False,
) -> None:
    """Say how many times better each figure of report B is than that of report A, with its interval."""
    from .checking import faults
    from .comparing import compare_reports

    found = compare_reports(a, b)
    for folder in (a, b):
        if wrong := faults(folder):
            complain("warning", f"`kpt validate check {folder}` finds {len(wrong)} faults: {wrong[0]}")
    if as_json:
        sides = {name: {"machine": side.machine} for name, side in (("a", found.a), ("b", found.b))}
        alone = {"only_a": found.only_a, "only_b": found.only_b}
        print_json(sides | {"ratios": [ratio.as_dict() for ratio in found.ratios]} | alone)
        return
    _show(found)


def _show(found: "Comparison") -> None:
    for name, side in (("A", found.a), ("B", found.b)):
        say(f"{name}: {side.machine}")
        for suite in side.suites:
            counts = f"{suite.passed} passed, {suite.skipped.total()} skipped, {len(suite.failed)} failed"
            say(f"   suite of {suite.backend}: {counts}")
    for file in dict.fromkeys(ratio.file for ratio in found.ratios):
        heading(file.removesuffix(".json"))
        made = table("case", "figure", "A", "B", "B over A", right=("A", "B", "B over A"))
        for ratio in (ratio for ratio in found.ratios if ratio.file == file):
            made.add_row(ratio.case, ratio.name, *(_value(ratio, each) for each in (ratio.a, ratio.b)), _words(ratio))
        out().print(made)
    for name, figures in (("A", found.only_a), ("B", found.only_b)):
        if figures:
            heading(f"Only in {name}")
            for figure in figures:
                say(f"  {figure}")
    say(
        "\nB over A: how many times faster KPT is in B, or how much further ahead of a peer; in brackets 95% by the "
        "ranks of the rounds. ~ means that 1 is inside."
    )


def _value(ratio: "Ratio", value: float | None) -> str:
    if value is None:
        return "too noisy"
    return f"{value * 1e3:.4g} ms" if ratio.name == OURS else f"{value:.3g}x"


def _words(ratio: "Ratio") -> str:
    if ratio.high == float("inf"):
        return f"~ {ratio.ratio:.2f}x [too few rounds]"
    return f"{'' if ratio.told else '~ '}{ratio.ratio:.2f}x [{ratio.low:.2f} to {ratio.high:.2f}]"
