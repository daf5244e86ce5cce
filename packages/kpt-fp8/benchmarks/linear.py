# ruff: noqa: T201  printing is its job
"""FP8-resident linear layers beside PyTorch's own paths, all in one run, in turn, on one thread of this CPU.

    python packages/kpt-fp8/benchmarks/linear.py --json linear.json

Peers: `torch._scaled_mm` with a scale for each row, whose activations are quantised beforehand (which flatters it),
codes that each call converts to bfloat16 (`.to` and a product), and `nn.Linear` in bfloat16 and float32. The kernel is
the one that KPT chooses: `KPT_USE=torch` asks for plain PyTorch's where kpt-backend-cpu is installed. Seconds are those
that the process had the CPU, which other work on the machine changes little. A ratio is the peer's seconds over ours in
the same round; beside its median stand two standard errors. Before anything is timed each result is compared with
float64; where one is wrong, nothing is reported.
"""

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn

import kpt_core
import kpt_fp8
from kpt_fp8 import NativeFP8Linear
from kpt_optimize import gain_of

SIZES, ROWS = (2048, 4096), (1, 8, 512)
#: Of the exact result's norm: what the sum's order explains in float32, and the rounding of a result to bfloat16.
ALLOWED = {torch.float32: 1e-5, torch.bfloat16: 4e-3}
#: What a converted layer may take of one with a bias in that dtype.
MOST_BYTES = {torch.float32: 0.26, torch.bfloat16: 0.52}
OURS, PEERS = "kpt-fp8", ("torch._scaled_mm", "nn.Linear", ".to(bfloat16)")


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison."""

    size: int
    rows: int
    activations: str
    peer: str
    milliseconds: float
    peer_milliseconds: float
    ratio: float
    noise: float

    def __str__(self) -> str:
        return (
            f"K=N={self.size} M={self.rows:<3} {self.activations:8} {self.milliseconds:9.2f} ms  "
            f"{self.peer:16} {self.peer_milliseconds:9.2f} ms  {self.ratio:6.2f}x +- {2 * self.noise:.2f}"
        )


def main() -> None:
    """Compare and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each comparison, about")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    found = []
    with torch.inference_mode():
        for size in arguments.sizes:
            for rows in ROWS:
                for dtype in (torch.float32, torch.bfloat16):
                    for row in compare(size, rows, dtype, arguments.seconds):
                        found.append(row)
                        print(row, flush=True)
    kernel = kpt_core.explain(
        "fp8.linear", torch.ones(1, 128), *kpt_fp8.quantize(torch.ones(128, 128), granularity="row")
    )
    print(kernel)
    if arguments.json:
        facts = {
            "cpu": platform.processor() or platform.machine(),
            "torch": torch.__version__,
            "threads": 1,
            "kernel": str(kernel),
        }
        document = facts | {"kpt-fp8": kpt_fp8.__version__, "rows": [asdict(row) for row in found]}
        arguments.json.write_text(json.dumps(document, indent=2) + "\n")


def compare(size: int, rows: int, dtype: torch.dtype, seconds: float) -> list[Row]:
    """The figures of one shape, after its gate."""
    exact = nn.Linear(size, size)
    ours, theirs = NativeFP8Linear.from_linear(exact), exact.to(dtype)
    ours.bias = nn.Parameter(theirs.bias.detach().clone())
    check_bytes(ours, theirs)
    x = torch.randn(rows, size).to(dtype)
    functions = {OURS: lambda: ours(x), PEERS[1]: lambda: theirs(x)}
    check(f"{OURS} {size} {rows}", functions[OURS](), x.double() @ ours.dequantize().double().t() + ours.bias)
    check(f"{PEERS[1]} {size} {rows}", functions[PEERS[1]](), x.double() @ theirs.weight.double().t() + theirs.bias)
    if dtype is torch.bfloat16:
        functions |= {PEERS[0]: scaled_mm(ours, x), PEERS[2]: widened(ours, x)}
    by_name = timed(functions, seconds)
    found = []
    for peer in (name for name in PEERS if name in by_name):
        ratio, noise = gain_of(by_name[peer], by_name[OURS])
        own, other = (median(by_name[name]) * 1e3 for name in (OURS, peer))
        found.append(Row(size, rows, str(dtype).removeprefix("torch."), peer, own, other, ratio, noise))
    return found


def timed(functions: dict[str, Callable[[], Tensor]], seconds: float) -> dict[str, list[float]]:
    """CPU seconds of rounds, in each of which the functions follow one another, each one first in its turn."""
    names, spent, turn = list(functions), 0.0, 0
    times: dict[str, list[float]] = {name: [] for name in names}
    while turn < 5 or (spent < seconds and turn < 200):
        for place in range(len(names)):
            name = names[(turn + place) % len(names)]
            start = time.process_time()
            functions[name]()
            taken = time.process_time() - start
            if turn > 1:  # the first rounds warm up
                times[name].append(taken)
                spent += taken
        turn += 1
    return times


def scaled_mm(layer: NativeFP8Linear, x: Tensor) -> Callable[[], Tensor]:
    """PyTorch's own product of 8-bit operands, checked."""
    codes, scale = kpt_fp8.quantize(x, granularity="row")
    weight, weight_scale, bias = layer.weight.codes.t(), layer.weight.scale[None], layer.bias

    def run() -> Tensor:
        return torch._scaled_mm(
            codes, weight, scale_a=scale[:, None], scale_b=weight_scale, bias=bias, out_dtype=torch.bfloat16
        )

    known = kpt_fp8.dequantize(codes, scale, granularity="row").double()
    check(f"{PEERS[0]} {list(x.shape)}", run(), known @ layer.dequantize().double().t() + layer.bias)
    return run


def widened(layer: NativeFP8Linear, x: Tensor) -> Callable[[], Tensor]:
    """What one writes without a library; it rounds twice, so its result is not compared."""
    codes, scale, bias = layer.weight.codes, layer.weight.scale.to(x.dtype), layer.bias
    return lambda: torch.addcmul(bias, x @ codes.to(x.dtype).t(), scale)


def check(what: str, got: Tensor, wanted: Tensor) -> None:
    """End without figures where a result is wrong."""
    error = float((got.double() - wanted).norm() / wanted.norm())
    if not error <= ALLOWED[got.dtype]:
        sys.exit(f"{what}: wrong by {error:.1e} of the result; expected {ALLOWED[got.dtype]:.0e} at most: no figures")


def check_bytes(ours: nn.Module, theirs: nn.Linear) -> None:
    """End without figures where a converted layer is too large."""
    sizes = [sum(each.nbytes for each in layer.parameters()) for layer in (ours, theirs)]
    most = MOST_BYTES[theirs.weight.dtype]
    if not sizes[0] <= most * sizes[1]:
        sys.exit(f"a converted layer takes {sizes[0]} bytes of {sizes[1]}; expected {most} of them at most: no figures")


if __name__ == "__main__":
    main()
