"""The command `kpt bench`."""

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kpt_cli.console import complain, out, print_json, say, table
from kpt_cli.options import GROUP, Json, dtypes_named, one_of
from kpt_cli.output_file import check_output_file

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.table import Table

    from .moe import Line, Refused, Result

_LEGEND = """
How many times faster KPT is than transformers' eager and grouped_mm, and than one dense feed-forward of as many
operations: medians of interleaved rounds; ~ means within two standard errors of 1."""
_TRAINING_LEGEND = """
A forward and backward, with the gradients of tokens, routing weights and parameters. How many times longer than KPT
transformers' eager and grouped_mm take, and how many times more memory a step of theirs adds; ~ means within two
standard errors of 1. Routing is the share of router and sorting in the forward of a whole layer."""

_GATE = "No figures where KPT's results are less accurate than eager's against float64: marked, exit code 1."
_MOE = "Experts of a MoE layer: KPT beside transformers' eager and grouped_mm, and a dense product of equal operations."
_TRAINING = "A training step of experts: KPT beside transformers, with all gradients, memory and routing's share."

WRONG = 1  #: exit code where a result is wrong
DTYPES = ("float32", "bfloat16", "float16")

Dtypes = Annotated[list[str] | None, one_of("dtype", DTYPES, f"{', '.join(DTYPES)}; may be repeated.")]

app = typer.Typer(help="Measure KPT beside its peers, in one run.", **GROUP)


@app.callback()
def bench() -> None:
    """Measure KPT beside its peers, in one run."""


@app.command("moe-training", help=f"{_TRAINING}\n\n{_GATE}")
@app.command(help=f"{_MOE}\n\n{_GATE}")
def moe(
    ctx: typer.Context,
    quick: Annotated[bool, typer.Option(help="Small shapes, a few seconds.")] = False,
    dtype: Dtypes = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; torch's own choice if not given.")] = None,
    seconds: Annotated[
        float | None,
        typer.Option(min=0.1, help="About how long the timing of each line takes; 8, or 20 of training."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of weights, inputs and routings.")] = 0,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the figures as JSON.")] = None,
    as_json: Json = False,
) -> None:
    """Run a benchmark, show its lines as they come, and write them."""
    check_output_file(output, "--output")
    import torch
    from rich.live import Live

    from kpt_core.files import write_whole
    from kpt_optimize import Load

    from . import moe as of
    from .machine import machine

    name, training = str(ctx.info_name), ctx.info_name == "moe-training"
    if threads is not None:
        torch.set_num_threads(threads)
    shapes = (of.QUICK_SHAPES, of.QUICK_TRAINING_SHAPES) if quick else (of.SHAPES, of.TRAINING_SHAPES)
    seconds = min(seconds or (20.0 if training else 8.0), 1.0 if quick else math.inf)
    running = of.run(shapes[training], dtypes_named(dtype or DTYPES[:2]), seconds, seed, training=training)
    lines: list[Line | Refused] = []
    load = Load()
    if as_json:
        lines += running
    else:
        with Live("", console=out()) as live:
            for line in running:
                lines.append(line)
                live.update(_table(lines, training=training))
        say(_TRAINING_LEGEND if training else _LEGEND)
    refused = [line for line in lines if isinstance(line, of.Refused)]
    for line in refused:
        complain("error", line.reason)
    dicts = [line.as_dict() if isinstance(line, of.Line) else asdict(line) for line in lines]
    if busy := load.note():
        complain("warning", busy)
    report = {"benchmark": name, "machine": machine() | {"others": load.others()}, "lines": dicts}
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
        shape, short = line.shape, {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}[line.dtype]
        experts = f"{shape.top_k} of {shape.num_experts}, {'SwiGLU' if shape.gated else 'GELU'}"
        sizes = (f"{shape.tokens:,}", experts, str(shape.hidden_size), str(shape.intermediate_size))
        made.add_row(*sizes, short, *cells)
    return made


def _times(other: "Result") -> str:
    return f"{'~' if abs(other.gain - 1) < 2 * other.noise else ''}{other.gain:.2f}x"
