"""The command `kpt bench`."""

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kpt_cli.console import complain, out, print_json, say, table
from kpt_cli.errors import CliError
from kpt_cli.options import GROUP, Json, dtypes_named, one_of
from kpt_cli.output_file import check_output_file

if TYPE_CHECKING:
    from rich.table import Table

    from .contest import Result

_NOISE = """
KPT is so much faster or slower than each peer: medians of interleaved rounds, ± is twice the standard error. Where it
exceeds 20% no figure is shown."""
_LEGEND = f"""{_NOISE} Dense is one dense feed-forward of as many operations."""
_TRAINING_LEGEND = f"""{_NOISE} A line is a forward and backward, with the gradients of tokens, routing weights and
parameters. Peaks are how many times more memory a step of a peer adds. Routing is the share of router and sorting in
the forward of a whole layer."""
_ATTENTION_LEGEND = f"""{_NOISE} The shapes are those of Llama-3.2-1B; SDPA has a dense mask for the window."""
_FP8_LEGEND = f"""{_NOISE} A line is rows x inputs x outputs. Linear, with oneDNN or without, has weights of the
dtype, KPT and _scaled_mm 8-bit ones; the activations of _scaled_mm are quantised beforehand."""

_GATE = "No figures where KPT's results are less accurate than {} against float64: marked, exit code 1."
_MOE = "Experts of a MoE layer: KPT beside transformers' eager and grouped_mm, and a dense product of equal operations."
_TRAINING = "A training step of experts: KPT beside transformers, with all gradients, memory and routing's share."

WRONG = 1  #: exit code where a result is wrong
DTYPES = ("float32", "bfloat16", "float16")

Dtypes = Annotated[list[str] | None, one_of("dtype", DTYPES, f"{', '.join(DTYPES)}; may be repeated.")]
Quick = Annotated[bool, typer.Option(help="Small shapes, a few seconds.")]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads; torch's own choice if not given.")]
Seconds = Annotated[
    float | None, typer.Option(min=0.1, help="About how long the timing of each line takes; 8, or 20 of training.")
]
Seed = Annotated[int, typer.Option(help="Of weights, inputs and routings.")]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="Write the figures as JSON.")]

app = typer.Typer(help="Measure KPT beside its peers, in one run.", **GROUP)


@app.callback()
def bench() -> None:
    """Measure KPT beside its peers, in one run."""


@app.command("moe-training", help=f"{_TRAINING}\n\n{_GATE.format('eager')}")
@app.command(help=f"{_MOE}\n\n{_GATE.format('eager')}")
def moe(
    ctx: typer.Context,
    quick: Quick = False,
    dtype: Dtypes = None,
    threads: Threads = None,
    seconds: Seconds = None,
    seed: Seed = 0,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Run a benchmark of experts."""
    check_output_file(output, "--output")
    from . import moe as of

    _set_threads(threads)
    name, training = str(ctx.info_name), ctx.info_name == "moe-training"
    shapes = (of.QUICK_SHAPES, of.QUICK_TRAINING_SHAPES) if quick else (of.SHAPES, of.TRAINING_SHAPES)
    each = _seconds(seconds, quick=quick, training=training)
    lines = of.run(shapes[training], dtypes_named(dtype or DTYPES[:2]), each, seed, training=training)
    legend = _TRAINING_LEGEND if training else _LEGEND
    _report(name, lines, lambda found: _experts_table(found, training=training), legend, output, as_json=as_json)


@app.command(help=f"Attention: KPT beside torch's SDPA, causal, in a window, decoding.\n\n{_GATE.format('SDPA')}")
def attention(
    quick: Quick = False,
    train: Annotated[bool, typer.Option("--train", help="Forward and backward, with all gradients.")] = False,
    flex: Annotated[bool, typer.Option("--flex", help="FlexAttention too; it needs a C++ compiler.")] = False,
    dtype: Dtypes = None,
    threads: Threads = None,
    seconds: Seconds = None,
    seed: Seed = 0,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Run the benchmark of attention."""
    check_output_file(output, "--output")
    if train and flex:
        raise CliError(
            "--flex is for the forward alone, --train is not: FlexAttention has no backward on a CPU; leave one out"
        )
    _require("kpt-attention", "attention")
    from . import attention as of
    from .contest import measure

    _set_threads(threads)
    dtypes = dtypes_named(dtype or DTYPES[:2])
    contests = of.contests(dtypes, seed, quick=quick, training=train, flex=flex)
    lines = measure(contests, _seconds(seconds, quick=quick, training=train))
    peers = (of.SDPA, of.FLEX) if flex else (of.SDPA,)
    name = "attention-training" if train else "attention"
    _report(name, lines, lambda found: _op_table(found, peers), _ATTENTION_LEGEND, output, as_json=as_json)


@app.command(help=f"8-bit weights: fp8.linear beside torch's linear layers.\n\n{_GATE.format('torch')}")
def fp8(
    quick: Quick = False,
    dtype: Dtypes = None,
    threads: Threads = None,
    seconds: Seconds = None,
    seed: Seed = 0,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Run the benchmark of 8-bit linear layers, with activations in bfloat16 unless said otherwise."""
    check_output_file(output, "--output")
    _require("kpt-fp8", "fp8")
    from . import fp8 as of
    from .contest import measure

    _set_threads(threads)
    contests = of.contests(dtypes_named(dtype or ["bfloat16"]), seed, quick=quick)
    lines = measure(contests, _seconds(seconds, quick=quick))
    peers = (of.LINEAR, of.GEMV, of.SCALED_MM)
    _report("fp8", lines, lambda found: _op_table(found, peers), _FP8_LEGEND, output, as_json=as_json)


def _require(package: str, command: str) -> None:
    if find_spec(package.replace("-", "_")) is None:
        raise CliError(f"kpt bench {command} needs {package}, which is not installed: pip install ./packages/{package}")


def _set_threads(threads: int | None) -> None:
    import torch

    if threads is not None:
        torch.set_num_threads(threads)


def _seconds(asked: float | None, *, quick: bool, training: bool = False) -> float:
    return min(asked or (20.0 if training else 8.0), 1.0 if quick else math.inf)


def _report(
    name: str,
    running: "Iterable[Any]",
    make_table: "Callable[[list[Any]], Table]",
    legend: str,
    output: Path | None,
    *,
    as_json: bool,
) -> None:
    """Run a benchmark, show its lines as they come below one note about a busy machine, and write them."""
    from rich.console import Group
    from rich.live import Live

    from kpt_core.files import write_whole
    from kpt_optimize import Load

    from .contest import Refused
    from .machine import machine

    lines: list[Any] = []
    load = Load()
    if as_json:
        lines += running
        if busy := _note(load, lines):
            complain("warning", busy)
    else:
        with Live("", console=out()) as live:
            for line in running:
                lines.append(line)
                busy = _note(load, lines)
                live.update(Group(*([f"Note: {busy}"] if busy else []), make_table(lines)))
        say(legend)
    refused = [line for line in lines if isinstance(line, Refused)]
    for line in refused:
        complain("error", line.reason)
    dicts = [asdict(line) if isinstance(line, Refused) else line.as_dict() for line in lines]
    report = {"benchmark": name, "machine": machine() | {"others": load.others()}, "lines": dicts}
    if as_json:
        print_json(report)
    if output is not None:
        write_whole(output, json.dumps(report, indent=2) + "\n")
    if refused:
        raise typer.Exit(WRONG)


def _note(load: Any, lines: "list[Any]") -> str:
    """Return what to say of a busy machine, above the table."""
    from .contest import Refused

    results = [result for line in lines if not isinstance(line, Refused) for result in line.results]
    text: str = load.note(noisy=any(None in (result.seconds, result.gain) for result in results))
    return text


def _op_table(lines: "Iterable[Any]", peers: tuple[str, ...]) -> "Table":
    from .contest import Refused

    made = table("case", "dtype", "ms", *peers, right=("ms", *peers))
    for line in lines:
        cells = ["wrong"]
        if not isinstance(line, Refused):
            found = {result.implementation: result for result in line.results}
            cells = [_ms(line.results[0]), *(_words(found[peer]) if peer in found else "-" for peer in peers)]
        made.add_row(line.title, _SHORT[line.dtype], *cells)
    return made


def _experts_table(lines: "Iterable[Any]", *, training: bool) -> "Table":
    from .moe import PEERS, Line

    right: tuple[str, ...] = ("ms", "tokens/s", "GFLOP/s", *PEERS, "dense")
    if training:
        right = ("ms", "GFLOP/s", "peak MiB", *(f"{x} {y}" for x in PEERS for y in ("time", "peak")), "routing")
    made = table("tokens", "experts", "hidden", "width", "dtype", *right, right=right)
    for line in lines:
        cells = ["wrong"]
        if isinstance(line, Line):
            kpt, *others = line.results
            cells = [_ms(kpt)]
            if training:
                cells += [_count(kpt.gflops), f"{kpt.peak / 2**20:.0f}"]
                cells += [cell for o in others for cell in (_words(o), f"{o.peak / max(kpt.peak, 1):.2f}x")]
                share = getattr(line, "routing_share", None)
                cells.append("too noisy" if share is None else f"{share:.1%}")
            else:
                cells += [_count(kpt.tokens_per_second), _count(kpt.gflops), *map(_words, others)]
        shape, short = line.shape, _SHORT[line.dtype]
        experts = f"{shape.top_k} of {shape.num_experts}, {'SwiGLU' if shape.gated else 'GELU'}"
        sizes = (f"{shape.tokens:,}", experts, str(shape.hidden_size), str(shape.intermediate_size))
        made.add_row(*sizes, short, *cells)
    return made


_SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def _ms(result: "Result") -> str:
    seconds = result.seconds
    return "too noisy" if seconds is None else f"{seconds * 1e3:.{2 if seconds < 1 else 0}f}"


def _count(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _words(result: "Result") -> str:
    from kpt_optimize.measure import describe_gain

    return describe_gain(result.gain, result.noise)
