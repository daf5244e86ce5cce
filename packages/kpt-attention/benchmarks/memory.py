# ruff: noqa: T201  printing is its job
"""Tell what training attention takes at its peak, beside PyTorch's: eager, compiled, and by torch.func.grad.

    python packages/kpt-attention/benchmarks/memory.py --tokens 8192 32768

One causal sequence, forward and backward. Each figure is a process of its own: how much its resident memory grew past
where it stood after the same run at 64 and 128 tokens, so inputs (made before) do not count, results and gradients do.
It needs Linux.
"""

import argparse
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kpt_attention import attention, causal

WAYS = ("eager", "compiled", "func.grad", "SDPA")


def pull(way: str, compiler: str) -> Callable[..., tuple[Tensor, ...]]:
    """Return what gives the gradients of q, k and v in one of the ways."""

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if way == "SDPA":
            return scaled_dot_product_attention(q, k, v, is_causal=True).float().square().sum()
        return attention(q, k, v, mask=causal()).float().square().sum()

    if way == "func.grad":
        return torch.func.grad(loss, (0, 1, 2))
    run = torch.compile(loss, backend=compiler, dynamic=True) if way == "compiled" else loss

    def gradients(*tensors: Tensor) -> tuple[Tensor, ...]:
        leaves = [each.detach().requires_grad_() for each in tensors]
        return torch.autograd.grad(run(*leaves), leaves)

    return gradients


def peak() -> float:
    """Return the most memory that this process had, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(way: str, tokens: int, asked: argparse.Namespace) -> None:
    """Print by how many MiB the peak grew, and the seconds."""
    inputs = torch.randn(3, 1, asked.heads, tokens, asked.dim, dtype=getattr(torch, asked.dtype)).unbind()
    run = pull(way, asked.compiler)
    for small in (64, 128):
        run(*(each[:, :, :small].contiguous() for each in inputs))
    # The compiler's own peak would hide what the run takes: Linux forgets the peak by this.
    Path("/proc/self/clear_refs").write_text("5")
    before, start = peak(), time.perf_counter()
    run(*inputs)
    print(peak() - before, time.perf_counter() - start)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--compiler", default="aot_eager", help="backend of torch.compile")
    parser.add_argument("--one", action="store_true", help="measure in this process: the first way and length")
    asked = parser.parse_args()
    if asked.one:
        measure(asked.ways[0], asked.tokens[0], asked)
        return
    told = f"{asked.dtype}, {asked.heads} heads of {asked.dim}"
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {told}")
    print(f"{'tokens':>8}  {'way':10} {'MiB':>8} {'seconds':>8}")
    for tokens in asked.tokens:
        for way in asked.ways:
            given = ["--dtype", asked.dtype, "--heads", asked.heads, "--dim", asked.dim, "--compiler", asked.compiler]
            own = [sys.executable, __file__, "--one", "--tokens", tokens, "--ways", way, *given]
            done = subprocess.run([str(each) for each in own], capture_output=True, text=True)
            figures = done.stdout.split() if done.returncode == 0 else []
            told = f"{float(figures[0]):8.0f} {float(figures[1]):8.1f}" if figures else done.stderr.strip()[-100:]
            print(f"{tokens:>8}  {way:10} {told}", flush=True)


if __name__ == "__main__":
    main()
