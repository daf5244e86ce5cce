"""The command `kpt bench`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kpt_cli.console import out, print_json, say, table
from kpt_cli.errors import CliError
from kpt_cli.output_file import check_output_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch
    from rich.table import Table

    from .cpu.contest import Row
    from .moe import Line, Result, Shape
    from .training import Line as TrainingLine
    from .training import Result as TrainingResult

_LEGEND = """
How many times faster KPT is than transformers' eager and grouped_mm, and than one dense feed-forward of as many
operations: medians of interleaved rounds; ~ means within two standard errors of 1."""
_TRAINING_LEGEND = """
A forward and backward, with the gradients of tokens, routing weights and parameters. How many times longer than KPT
transformers' eager and grouped_mm take, and how many times more memory a step of theirs adds; ~ means within two
standard errors of 1. Routing is the share of router and sorting in the forward of a whole layer."""

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
    dtype: Annotated[list[str] | None, typer.Option(help="float32, bfloat16 or float16; may be repeated.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; torch's own choice if not given.")] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="About how long each line takes.")] = 8.0,
    seed: Annotated[int, typer.Option(help="Of weights, inputs and routings.")] = 0,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the figures as JSON.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the table.")] = False,
) -> None:
    """Experts of a MoE layer: KPT beside transformers' eager and grouped_mm, and a dense product of equal operations.

    Refuses to report if KPT's result is less accurate than eager's against float64.
    """
    check_output_file(output, "--output")
    from . import moe as benchmark

    dtypes = _dtypes(dtype, threads)
    shapes = benchmark.QUICK_SHAPES if quick else benchmark.SHAPES
    running = benchmark.run(shapes, dtypes, min(seconds, 1.0) if quick else seconds, seed)
    _report("moe", running, _table, _LEGEND, output, as_json)


@app.command()
def moe_training(
    quick: Annotated[bool, typer.Option(help="One small shape, a few seconds.")] = False,
    dtype: Annotated[list[str] | None, typer.Option(help="float32, bfloat16 or float16; may be repeated.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; torch's own choice if not given.")] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="About how long the timing of each line takes.")] = 20.0,
    seed: Annotated[int, typer.Option(help="Of weights, inputs and routings.")] = 0,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the figures as JSON.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the table.")] = False,
) -> None:
    """A training step of experts: KPT beside transformers' eager and grouped_mm, with peak memory and routing's share.

    Refuses to report if an output or a gradient of KPT is less accurate than eager's against float64.
    """
    check_output_file(output, "--output")
    from . import training as benchmark

    dtypes = _dtypes(dtype, threads)
    shapes = benchmark.QUICK_SHAPES if quick else benchmark.SHAPES
    running = benchmark.run(shapes, dtypes, min(seconds, 1.0) if quick else seconds, seed)
    _report("moe-training", running, _training_table, _TRAINING_LEGEND, output, as_json)


@app.command()
def cpu(
    quick: Annotated[bool, typer.Option(help="Small sizes and few rounds, some seconds.")] = False,
    group: Annotated[
        list[str] | None,
        typer.Option(help="decode, product, prefill, step, gating or sorting; may be repeated. All if not given."),
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; torch's own choice if not given.")] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="About how long the timing of each row takes.")] = 3.0,
    seed: Annotated[int, typer.Option(help="Of weights, inputs and routings.")] = 0,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the figures as JSON, and a plot beside it (.svg).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the table.")] = False,
) -> None:
    """The CPU's kernels beside KPT without them, transformers and PyTorch, and beside what the machine can do at best.

    Every result is compared with float64 before it is timed: nothing is reported if one is wrong.
    """
    check_output_file(output, "--output")
    if output is not None and output.suffix == ".svg":
        raise CliError(f"--output {output} is for the figures, beside which the plot is an .svg; name it .json")
    import torch

    from kpt_core import UnknownNameError

    from .cpu import rows as benchmark
    from .cpu.ceilings import last_cache, measure_ceilings
    from .cpu.plot import as_svg, speed_figure
    from .cpu.report import LEGEND, native_kernels, table_of
    from .machine import machine

    for name in group or ():
        if name not in benchmark.GROUPS:
            raise UnknownNameError("group", name, benchmark.GROUPS)
    if threads is not None:
        torch.set_num_threads(threads)
    ceilings = measure_ceilings(quick=quick)
    natives = native_kernels()
    if not as_json:
        say(f"{natives}. {torch.get_num_threads()} threads.")
        say(f"This machine at best: {ceilings.summary()}.\n")
    plan = benchmark.QUICK if quick else benchmark.FULL
    running = benchmark.rows(plan, ceilings, group or benchmark.GROUPS, min(seconds, 0.2) if quick else seconds, seed)
    facts = {"native_kernels": natives, "ceilings": ceilings.as_dict(), "last_cache_bytes": last_cache()}

    def plot(measured: "list[Row]") -> str:
        where = machine()
        title = f"{where['processor']}, {where['threads']} threads, torch {where['torch']}"
        return as_svg(speed_figure(measured, title))

    _report("cpu", running, table_of, LEGEND, output, as_json, facts, plot)


def _dtypes(names: list[str] | None, threads: int | None) -> "tuple[torch.dtype, ...]":
    import torch

    from kpt_core import UnknownNameError

    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    names = names or ["float32", "bfloat16"]
    for name in names:
        if name not in known:
            raise UnknownNameError("dtype", name, known)
    if threads is not None:
        torch.set_num_threads(threads)
    return tuple(known[name] for name in names)


def _report(
    name: str,
    running: "Iterable[Any]",
    make_table: "Callable[[list[Any]], Table]",
    legend: str,
    output: Path | None,
    as_json: bool,
    facts: dict[str, Any] | None = None,
    plot: "Callable[[list[Any]], str] | None" = None,
) -> None:
    """Show lines as they come, and write them.

    Args:
        name: of the benchmark.
        running: gives the lines.
        make_table: of the lines so far.
        legend: printed below the table.
        output: where JSON is written; a plot stands beside it.
        as_json: print JSON instead.
        facts: what the report says beside the machine and the lines.
        plot: gives the text of an SVG file.
    """
    from rich.live import Live

    from kpt_core.files import write_whole

    from .machine import machine

    lines: list[Any] = []
    if as_json:
        lines.extend(running)
    else:
        with Live(make_table(lines), console=out()) as live:
            for line in running:
                lines.append(line)
                live.update(make_table(lines))
        say(legend)
    dicts = [line.as_dict() for line in lines]
    report = {"benchmark": name, "machine": machine(), **(facts or {}), "lines": dicts}
    if as_json:
        print_json(report)
    if output is not None:
        write_whole(output, json.dumps(report, indent=2) + "\n")
        if plot is not None:
            write_whole(output.with_suffix(".svg"), plot(lines))


def _table(lines: "list[Line]") -> "Table":
    from .moe import PEERS

    left = ("tokens", "experts", "hidden", "width", "dtype")
    right = ("ms", "tokens/s", "GFLOP/s", *PEERS, "dense")
    made = table(*left, *right, right=right)
    for line in lines:
        kpt, *others = line.results
        made.add_row(
            *_sizes(line.shape, line.dtype),
            f"{kpt.seconds * 1e3:.2f}",
            f"{kpt.tokens_per_second:,.0f}",
            f"{kpt.gflops:.0f}",
            *(_times(other) for other in others),
        )
    return made


def _training_table(lines: "list[TrainingLine]") -> "Table":
    from .training import IMPLEMENTATIONS

    left = ("tokens", "experts", "hidden", "width", "dtype")
    peers = [f"{name} {what}" for name in IMPLEMENTATIONS[1:] for what in ("time", "peak")]
    right = ("ms", "GFLOP/s", "peak MiB", *peers, "routing")
    made = table(*left, *right, right=right)
    for line in lines:
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
