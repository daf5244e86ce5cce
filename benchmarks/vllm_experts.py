"""Tokens a second of vLLM for CPUs with KPT's experts beside vLLM's own, on this machine.

    nox -s vllm -- --collect-only      # installs vLLM beside the workspace, once
    PYTHONPATH=.nox/vllm/site-packages .nox/workspace/bin/python benchmarks/vllm_experts.py

The model is random, in bfloat16: 4 layers, 16 experts of width 512, hidden size 1024, 4 experts a token. Every run is a
process of its own, ours and theirs in turn; a figure is the median of the runs, and of a run the median of its rounds.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "packages/kpt-vllm/tests"))

from kpt_optimize.tuning.tables import processor
from models import save_model

SIZES = {
    "hidden_size": 1024,
    "moe_intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "initializer_range": 0.02,
}
#: The workspace has a library of TPUs, by which vLLM would take this machine for one; counts are of one process.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_TARGET_DEVICE": "cpu",
}
#: Prompts, their tokens, and the tokens that are asked for.
PARTS = {"prefill of 4 x 1,024": (4, 1024, 1), "decode of 1": (1, 16, 64), "decode of 8": (8, 16, 64)}


def measure(folder: str, rounds: int) -> dict[str, object]:
    """Return tokens a second of each part, the kernels that served, and the tokens of the last part."""
    from vllm import LLM, SamplingParams

    import kpt_core

    engine = LLM(folder, max_model_len=2048, enable_prefix_caching=False, max_num_batched_tokens=4096)
    rates, answers = {}, []
    for part, (prompts, length, asked) in PARTS.items():
        params = SamplingParams(max_tokens=asked, temperature=0, ignore_eos=True)
        found = []
        for round_ in range(rounds + 1):  # the first one warms up
            texts = [
                {"prompt_token_ids": [(i * 7 + j * (round_ + 3)) % 90 for j in range(length)]} for i in range(prompts)
            ]
            begin = time.perf_counter()
            answers = [list(each.outputs[0].token_ids) for each in engine.generate(texts, params, use_tqdm=False)]
            found.append(prompts * (length if asked == 1 else asked) / (time.perf_counter() - begin))
        rates[part] = statistics.median(found[1:])
    kernels = {each.identity: each.calls for each in kpt_core.counts() if each.op == "moe.experts"}
    return {"rates": rates, "kernels": kernels, "tokens": answers}


def main() -> None:
    """Print a line for each part."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3, help="of each part in a run")
    parser.add_argument("--measure", metavar="FOLDER", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.measure:
        print(json.dumps(measure(asked.measure, asked.rounds)))
        return
    runs: dict[str, list[dict[str, dict[str, float]]]] = {"1": [], "0": []}
    with tempfile.TemporaryDirectory() as made:
        folder = save_model(Path(made) / "model", "Qwen3Moe", torch.bfloat16, **SIZES)
        for turn in range(asked.runs * 2):
            ours = "01"[turn % 2]
            env = os.environ | ENVIRONMENT | {"KPT_VLLM": ours}
            command = [sys.executable, __file__, "--measure", str(folder), "--rounds", str(asked.rounds)]
            told = subprocess.run(command, env=env, stdout=subprocess.PIPE, check=True).stdout
            runs[ours].append(json.loads(told.splitlines()[-1]))
    print(f"{processor()}, {torch.get_num_threads()} threads, tokens a second: KPT's experts, vLLM's")
    for part in PARTS:
        mine, theirs = ([run["rates"][part] for run in runs[ours]] for ours in "10")
        ratios = sorted(a / b for a, b in zip(mine, theirs, strict=True))
        print(f"{part}: {statistics.median(mine):.0f}, {statistics.median(theirs):.0f}", end="; ")
        print(f"{statistics.median(ratios):.2f}x, runs {ratios[0]:.2f}x to {ratios[-1]:.2f}x")
    same = all(run["tokens"] == runs["0"][0]["tokens"] for run in runs["1"])
    print(f"kernels: {runs['1'][0]['kernels']} and {runs['0'][0]['kernels']}; the same tokens: {same}")
    print(json.dumps(runs))


if __name__ == "__main__":
    main()
