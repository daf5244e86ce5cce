# ruff: noqa: T201  printing is its job
"""Time attention on a CPU beside PyTorch's: causal, and a window of 256, forward and both directions.

    python packages/kpt-attention/benchmarks/cpu.py --tokens 2048 8192

A line for each length, dtype, mask and pass, with the milliseconds of each contestant, the best of a few rounds in
which they take turns. SDPA has a dense mask for the window; FlexAttention, with `--flex`, is compiled and has no
backward here.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import kpt_core
from kpt_attention import causal, sliding_window
from kpt_attention.dense import dense

KERNELS = {
    "native": "kpt_backend_cpu.attention.dense:forward",
    "tiles": "kpt_attention.torch_kernels.tiles:forward",
}
WINDOW = 256
#: Attends to queries, keys and values.
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def by_kernel(kernel: str, plan: dict[str, Any], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return the output of one of KPT's kernels."""
    with kpt_core.use(kernel):
        return dense(q, k, v, return_lse=False, **plan)[0]


def contestants(mask_name: str, tokens: int, flex: bool) -> dict[str, Attention]:
    """Return what is timed under a mask."""
    mask = causal() if mask_name == "causal" else sliding_window(WINDOW)
    plan = mask.plan(tokens)
    given = plan.arguments(tokens, tokens)
    found: dict[str, Attention] = {name: partial(by_kernel, each, given) for name, each in KERNELS.items()}
    if mask_name == "causal":
        return {**found, "SDPA": partial(scaled_dot_product_attention, is_causal=True)}
    found["SDPA"] = partial(scaled_dot_product_attention, attn_mask=mask.dense(tokens, tokens))
    if flex:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        def seen(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (query >= key) & (query - key < WINDOW)

        blocks = create_block_mask(seen, None, None, tokens, tokens, device="cpu")
        found["FlexAttention"] = partial(torch.compile(flex_attention, dynamic=False), block_mask=blocks)
    return found


def attend(attention: Attention, tensors: list[Tensor], pull: Tensor, both: bool) -> None:
    """Run one contestant once."""
    out = attention(*tensors)
    if both:
        torch.autograd.grad(out, tensors, pull)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--flex", action="store_true")
    asked = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    for tokens in asked.tokens:
        for name in asked.dtypes:
            shape = (1, asked.heads, tokens, asked.dim)
            q, k, v, pull = (torch.randn(shape).to(getattr(torch, name)) for _ in range(4))
            for mask in ("causal", "window"):
                for both in (False, True):
                    tensors = [each.detach().requires_grad_(both) for each in (q, k, v)]
                    runs = contestants(mask, tokens, asked.flex and not both)
                    best = dict.fromkeys(runs, float("inf"))
                    for _ in range(asked.rounds + 1):  # the first compiles
                        for each, attention in runs.items():
                            start = time.perf_counter()
                            attend(attention, tensors, pull, both)
                            best[each] = min(best[each], (time.perf_counter() - start) * 1e3)
                    told = ", ".join(f"{each} {ms:.1f}" for each, ms in best.items())
                    print(f"{tokens} {name} {mask} {'both' if both else 'forward'}: {told}", flush=True)


if __name__ == "__main__":
    main()
