"""The command `kpt bench`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kpt_cli.completion import one_of
from kpt_cli.console import complain, out, print_json, say, table
from kpt_cli.optimize.choices import check_choice
from kpt_cli.output_file import check_output_file

from .names import DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch
    from rich.table import Table

    from .moe import Line, Refused, Result, Shape
    from .training import Line as TrainingLine
    from .training import Result as TrainingResult

_LEGEND = """
How many times faster KPT is than transformers' eager and grouped_mm, and than one dense feed-forward of as many
operations: medians of interleaved rounds; ~ means within two standard errors of 1."""
_TRAINING_LEGEND = """
A forward and backward, with the gradients of tokens, routing weights and parameters. How many times longer than KPT
transformers' eager and grouped_mm take, and how many times more memory a step of theirs adds; ~ means within two
standard errors of 1. Routing is the share of router and sorting in the forward of a whole layer."""

#: Exit code where a result is wrong.
WRONG = 1

app = typer.Typer(
    help="Measure KPT beside its peers, in one run.",
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def bench() -> None:
    """Measure KPT beside its peers, in one run."""


@app.command()
def moe(
    quick: Annotated[bool, typer.Option(help="Two small shapes, a few seconds.")] = False,
    dtype: Annotated[
        list[str] | None, typer.Option(help=f"{', '.join(DTYPES)}; may be repeated.", autocompletion=one_of(DTYPES))
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; torch's own choice if not given.")] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="About how long each line takes.")] = 8.0,
    seed: Annotated[int, typer.Option(help="Of weights, inputs and routings.")] = 0,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the figures as JSON.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the table.")] = False,
) -> None:
    """Experts of a MoE layer: KPT beside transformers' eager and grouped_mm, and a dense product of equal operations.

    No figures where KPT's result is less accurate than eager's against float64: that line is marked, exit code 1.
    """
    check_output_file(output, "--output")
    dtypes = _dtypes(dtype, threads)
    from . import moe as benchmark

    shapes = benchmark.QUICK_SHAPES if quick else benchmark.SHAPES
    running = benchmark.run(shapes, dtypes, min(seconds, 1.0) if quick else seconds, seed)
    _report("moe", running, _table, _LEGEND, output, as_json)


@app.command()
def moe_training(
    quick: Annotated[bool, typer.Option(help="One small shape, a few seconds.")] = False,
    dtype: Annotated[
        list[str] | None, typer.Option(help=f"{', '.join(DTYPES)}; may be repeated.", autocompletion=one_of(DTYPES))
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; torch's own choice if not given.")] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="About how long the timing of each line takes.")] = 20.0,
    seed: Annotated[int, typer.Option(help="Of weights, inputs and routings.")] = 0,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the figures as JSON.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the table.")] = False,
) -> None:
    """A training step of experts: KPT beside transformers' eager and grouped_mm, with peak memory and routing's share.

    No figures where an output or a gradient of KPT is less accurate than eager's against float64: that line is marked,
    exit code 1.
    """
    check_output_file(output, "--output")
    dtypes = _dtypes(dtype, threads)
    from . import training as benchmark

    shapes = benchmark.QUICK_SHAPES if quick else benchmark.SHAPES
    running = benchmark.run(shapes, dtypes, min(seconds, 1.0) if quick else seconds, seed)
    _report("moe-training", running, _training_table, _TRAINING_LEGEND, output, as_json)


def _dtypes(names: list[str] | None, threads: int | None) -> "tuple[torch.dtype, ...]":
    names = names or ["float32", "bfloat16"]
    for name in names:
        check_choice("dtype", name, DTYPES)
    import torch

    if threads is not None:
        torch.set_num_threads(threads)
    return tuple(getattr(torch, name) for name in names)


def _report(
    name: str,
    running: "Iterable[Any]",
    make_table: "Callable[[list[Any]], Table]",
    legend: str,
    output: Path | None,
    as_json: bool,
) -> None:
    """Show lines as they come, and write them.

    Args:
        name: of the benchmark.
        running: gives the lines.
        make_table: of the lines so far.
        legend: printed below the table.
        output: where JSON is written.
        as_json: print JSON instead.
    """
    from rich.live import Live

    from kpt_core.files import write_whole

    from .machine import machine
    from .moe import Refused

    lines: list[Any] = []
    if as_json:
        lines.extend(running)
    else:
        with Live("", console=out()) as live:
            for line in running:
                lines.append(line)
                live.update(make_table(lines))
        say(legend)
    refused = [line for line in lines if isinstance(line, Refused)]
    for line in refused:
        complain("error", line.reason)
    dicts = [line.as_dict() for line in lines]
    report = {"benchmark": name, "machine": machine(), "lines": dicts}
    if as_json:
        print_json(report)
    if output is not None:
        write_whole(output, json.dumps(report, indent=2) + "\n")
    if refused:
        raise typer.Exit(WRONG)


def _table(lines: "list[Line | Refused]") -> "Table":
    from .moe import PEERS, Refused

    left = ("tokens", "experts", "hidden", "width", "dtype")
    right = ("ms", "tokens/s", "GFLOP/s", *PEERS, "dense")
    made = table(*left, *right, right=right)
    for line in lines:
        if isinstance(line, Refused):
            _add_refused(made, line)
            continue
        kpt, *others = line.results
        made.add_row(
            *_sizes(line.shape, line.dtype),
            f"{kpt.seconds * 1e3:.2f}",
            f"{kpt.tokens_per_second:,.0f}",
            f"{kpt.gflops:.0f}",
            *(_times(other) for other in others),
        )
    return made


def _training_table(lines: "list[TrainingLine | Refused]") -> "Table":
    from .moe import Refused
    from .training import IMPLEMENTATIONS

    left = ("tokens", "experts", "hidden", "width", "dtype")
    peers = [f"{name} {what}" for name in IMPLEMENTATIONS[1:] for what in ("time", "peak")]
    right = ("ms", "GFLOP/s", "peak MiB", *peers, "routing")
    made = table(*left, *right, right=right)
    for line in lines:
        if isinstance(line, Refused):
            _add_refused(made, line)
            continue
        kpt, *others = line.results
        made.add_row(
            *_sizes(line.shape, line.dtype),
            f"{kpt.seconds * 1e3:.1f}",
            f"{kpt.gflops:.0f}",
            f"{kpt.peak / 2**20:.0f}",
            *(cell for o in others for cell in (_times(o), f"{o.peak / max(kpt.peak, 1):.2f}x")),
            f"{line.routing_share:.1%}",
        )
    return made


def _add_refused(made: "Table", line: "Refused") -> None:
    assert line.shape is not None
    made.add_row(*_sizes(line.shape, line.dtype), "wrong")


def _sizes(shape: "Shape", dtype: str) -> tuple[str, ...]:
    gated = "SwiGLU" if shape.gated else "GELU"
    return (
        f"{shape.tokens:,}",
        f"{shape.top_k} of {shape.num_experts}, {gated}",
        str(shape.hidden_size),
        str(shape.intermediate_size),
        {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}[dtype],
    )


def _times(other: "Result | TrainingResult") -> str:
    return f"{'~' if abs(other.gain - 1) < 2 * other.noise else ''}{other.gain:.2f}x"
