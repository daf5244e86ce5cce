# ruff: noqa: T201  printing is its job
"""Time a step of decoding on a CPU beside PyTorch's: contiguous keys, and pages of 16.

    python packages/kpt-attention/benchmarks/decode.py --batch 8 --keys 4096

A line for each dtype and contestant: milliseconds, the best of a few rounds in which they take turns, and the share of
what this machine reads from memory at best.
"""

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import kpt_core
from kpt_attention import PagedCache
from kpt_attention.dense import dense

HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 16


def filled(batch: int, keys: int, dtype: torch.dtype) -> tuple[PagedCache, list[int]]:
    """Return a cache with sequences of so many keys less one, whose pages lie in any order."""
    pages = batch * -(-keys // PAGE)
    scale = torch.full((1, KV_HEADS), 0.01) if dtype.itemsize == 1 else None
    cache = PagedCache(
        layers=1, pages=pages, kv_heads=KV_HEADS, head_dim=DIM, page_size=PAGE, dtype=dtype, k_scale=scale,
        v_scale=scale,
    )  # fmt: skip
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(0)).tolist()
    cache._free[:] = order
    sequences = [cache.add() for _ in range(batch)]
    with cache.step(dict.fromkeys(sequences, keys - 1)):
        for part in (cache.k, cache.v):
            part.view(torch.uint8).random_(0, 60)
    return cache, sequences


def contestants(batch: int, keys: int, dtype: torch.dtype) -> dict[str, tuple[Callable[[], object], int]]:
    """Return what is timed, and the bytes that it has to read."""
    q = torch.randn(batch, HEADS, 1, DIM).to(dtype)
    k, v = (torch.randn(batch, KV_HEADS, keys, DIM).to(dtype) for _ in "kv")
    size = 2 * k.numel() * k.element_size()

    def kpt(backend: str) -> Tensor:
        with kpt_core.use(backend):
            return dense(q, k, v, return_lse=False)[0]

    cache, sequences = filled(batch, keys, dtype)
    small, small_sequences = filled(batch, keys, torch.float8_e4m3fn)
    with cache.step(dict.fromkeys(sequences, 1)) as step, small.step(dict.fromkeys(small_sequences, 1)) as small_step:
        pass

    def paged(backend: str, of: object = step) -> object:
        with kpt_core.use(backend):
            return of.attend(0, q[:, :, 0])  # type: ignore[attr-defined]

    def gathered() -> Tensor:
        rows = [part[0][step.block_table.long()].flatten(1, 2).transpose(1, 2) for part in (cache.k, cache.v)]
        return scaled_dot_product_attention(q.view(batch, KV_HEADS, -1, DIM), *rows)

    return {
        "KPT native": (lambda: kpt("cpu"), size),
        "KPT in plain PyTorch": (lambda: kpt("torch"), size),
        "SDPA, grouped view": (lambda: scaled_dot_product_attention(q.view(batch, KV_HEADS, -1, DIM), k, v), size),
        "SDPA, enable_gqa": (lambda: scaled_dot_product_attention(q, k, v, enable_gqa=True), size),
        "paged, KPT native": (lambda: paged("cpu"), size),
        "paged, KPT in plain PyTorch": (lambda: paged("torch"), size),
        "paged, gathered for SDPA": (gathered, size),
        "paged, 8 bits, KPT native": (lambda: paged("cpu", small_step), size // dtype.itemsize),
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--keys", type=int, default=4096)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    for name in asked.dtypes:
        runs = contestants(asked.batch, asked.keys, getattr(torch, name))
        large = torch.randn(1 << 26)
        runs["reading alone"] = (large.sum, large.numel() * 4)
        best = dict.fromkeys(runs, float("inf"))
        for _ in range(asked.rounds + 1):
            for each, (run, _) in runs.items():
                start = time.perf_counter()
                run()
                best[each] = min(best[each], (time.perf_counter() - start) * 1e3)
        rate = {each: size / best[each] for each, (_, size) in runs.items()}
        for each, ms in best.items():
            print(f"{name} {each}: {ms:.2f} ms, {100 * rate[each] / rate['reading alone']:.0f}%", flush=True)


if __name__ == "__main__":
    main()
