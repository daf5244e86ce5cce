"""The command `kpt bench`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kpt_cli.console import complain, out, print_json, say, table
from kpt_cli.options import GROUP, Json, dtypes_named, one_of
from kpt_cli.output_file import check_output_file

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch
    from rich.table import Table

    from .moe import Line, Refused, Result, Shape

_LEGEND = """
How many times faster KPT is than transformers' eager and grouped_mm, and than one dense feed-forward of as many
operations: medians of interleaved rounds; ~ means within two standard errors of 1."""
_TRAINING_LEGEND = """
A forward and backward, with the gradients of tokens, routing weights and parameters. How many times longer than KPT
transformers' eager and grouped_mm take, and how many times more memory a step of theirs adds; ~ means within two
standard errors of 1. Routing is the share of router and sorting in the forward of a whole layer."""

#: Exit code where a result is wrong.
WRONG = 1
DTYPES = ("float32", "bfloat16", "float16")

Dtypes = Annotated[list[str] | None, one_of("dtype", DTYPES, f"{', '.join(DTYPES)}; may be repeated.")]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads; torch's own choice if not given.")]
Seconds = Annotated[float, typer.Option(min=0.1, help="About how long the timing of each line takes.")]
Seed = Annotated[int, typer.Option(help="Of weights, inputs and routings.")]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="Write the figures as JSON.")]

app = typer.Typer(help="Measure KPT beside its peers, in one run.", **GROUP)


@app.callback()
def bench() -> None:
    """Measure KPT beside its peers, in one run."""


@app.command()
def moe(
    quick: Annotated[bool, typer.Option(help="Two small shapes, a few seconds.")] = False,
    dtype: Dtypes = None,
    threads: Threads = None,
    seconds: Seconds = 8.0,
    seed: Seed = 0,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Experts of a MoE layer: KPT beside transformers' eager and grouped_mm, and a dense product of equal operations.

    No figures where KPT's result is less accurate than eager's against float64: that line is marked, exit code 1.
    """
    check_output_file(output, "--output")
    from . import moe as of

    shapes = of.QUICK_SHAPES if quick else of.SHAPES
    _report("moe", of.run(shapes, *_settings(quick, dtype, threads, seconds), seed), output, as_json)


@app.command()
def moe_training(
    quick: Annotated[bool, typer.Option(help="One small shape, a few seconds.")] = False,
    dtype: Dtypes = None,
    threads: Threads = None,
    seconds: Seconds = 20.0,
    seed: Seed = 0,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """A training step of experts: KPT beside transformers' eager and grouped_mm, with peak memory and routing's share.

    No figures where an output or a gradient of KPT is less accurate than eager's against float64: that line is marked,
    exit code 1.
    """
    check_output_file(output, "--output")
    from . import moe as of

    shapes = of.QUICK_TRAINING_SHAPES if quick else of.TRAINING_SHAPES
    _report("moe-training", of.run_training(shapes, *_settings(quick, dtype, threads, seconds), seed), output, as_json)


def _settings(
    quick: bool, dtypes: list[str] | None, threads: int | None, seconds: float
) -> "tuple[list[torch.dtype], float]":
    import torch

    if threads is not None:
        torch.set_num_threads(threads)
    return dtypes_named(dtypes or DTYPES[:2]), min(seconds, 1.0) if quick else seconds


def _report(name: str, running: "Iterable[Line | Refused]", output: Path | None, as_json: bool) -> None:
    """Show the lines of a benchmark as they come, and write them."""
    from rich.live import Live

    from kpt_core.files import write_whole

    from .machine import machine
    from .moe import Refused

    training = name == "moe-training"
    lines: list[Line | Refused] = []
    if as_json:
        lines += running
    else:
        with Live("", console=out()) as live:
            for line in running:
                lines.append(line)
                live.update(_table(lines, training=training))
        say(_TRAINING_LEGEND if training else _LEGEND)
    refused = [line for line in lines if isinstance(line, Refused)]
    for line in refused:
        complain("error", line.reason)
    report = {"benchmark": name, "machine": machine(), "lines": [line.as_dict() for line in lines]}
    if as_json:
        print_json(report)
    if output is not None:
        write_whole(output, json.dumps(report, indent=2) + "\n")
    if refused:
        raise typer.Exit(WRONG)


def _table(lines: "Iterable[Line | Refused]", *, training: bool) -> "Table":
    from .moe import PEERS, Line

    right: tuple[str, ...] = ("ms", "tokens/s", "GFLOP/s", *PEERS, "dense")
    if training:
        right = ("ms", "GFLOP/s", "peak MiB", *(f"{x} {y}" for x in PEERS for y in ("time", "peak")), "routing")
    made = table("tokens", "experts", "hidden", "width", "dtype", *right, right=right)
    for line in lines:
        cells = ["wrong"]
        if isinstance(line, Line):
            kpt, *others = line.results
            ms, gflops = f"{kpt.seconds * 1e3:.{1 if training else 2}f}", f"{kpt.gflops:.0f}"
            if training:
                cells = [ms, gflops, f"{kpt.peak / 2**20:.0f}"]
                cells += [cell for o in others for cell in (_times(o), f"{o.peak / max(kpt.peak, 1):.2f}x")]
                cells.append(f"{getattr(line, 'routing_share', 0):.1%}")
            else:
                cells = [ms, f"{kpt.tokens_per_second:,.0f}", gflops, *map(_times, others)]
        made.add_row(*_sizes(line.shape, line.dtype), *cells)
    return made


def _sizes(shape: "Shape", dtype: str) -> tuple[str, ...]:
    experts = f"{shape.top_k} of {shape.num_experts}, {'SwiGLU' if shape.gated else 'GELU'}"
    short = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}[dtype]
    return f"{shape.tokens:,}", experts, str(shape.hidden_size), str(shape.intermediate_size), short


def _times(other: "Result") -> str:
    return f"{'~' if abs(other.gain - 1) < 2 * other.noise else ''}{other.gain:.2f}x"
