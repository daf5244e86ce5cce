"""Optimise three ordinary models, dense, MoE and FP8: see what was kept, what was rolled back and why, and the proof.

    python examples/auto_optimization.py

`kpt_optimize.optimize` tries every rewrite at every layer, compares its output with the original's, and keeps what is
within the error budget and better. This program then checks the result itself; its exit code is 1 if a check fails.
"""

import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, OlmoeConfig, OlmoeForCausalLM

from kpt_fp8 import convert_model_to_fp8
from kpt_optimize import Optimized, PlanEntry, optimize, parameter_bytes, relative_error

torch.manual_seed(0)
SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "eos_token_id": None,
}
EXAMPLE = {"input_ids": torch.randint(512, (2, 64)), "use_cache": False}


def models() -> Iterator[tuple[str, torch.nn.Module, str, str]]:
    """Yield a title, a model, and the level and objective that it is optimised for."""
    dense = LlamaForCausalLM(LlamaConfig(**SIZES, intermediate_size=512)).train(False)
    yield "dense, for less memory", dense, "balanced", "memory"
    experts = OlmoeConfig(**SIZES, intermediate_size=256, num_experts=16, num_experts_per_tok=4)
    yield "MoE, for speed", OlmoeForCausalLM(experts).train(False), "balanced", "latency"
    yield "already FP8, for speed", convert_model_to_fp8(dense), "aggressive", "latency"


def show(result: Optimized) -> None:
    """Print what was kept, what was rolled back and the first reason for each rewrite, and the model's figures."""
    plan = result.plan
    for rewrite, count in Counter(entry.rewrite for entry in plan.kept).items():
        print(f"  kept {count} x {rewrite}")
    back: dict[str, list[PlanEntry]] = {}
    for entry in plan.entries:
        if not entry.kept:
            back.setdefault(entry.rewrite, []).append(entry)
    for rewrite, entries in back.items():
        first = entries[0]
        print(f"  rolled back {len(entries)} x {rewrite}; at {first.module}: {first.reason}")
    print(" ", next(line for line in str(plan).splitlines() if line.startswith(f"{plan.model} on ")))


def failures(model: torch.nn.Module, result: Optimized, level: str, objective: str) -> Iterator[str]:
    """Yield what was promised and did not happen."""
    plan = result.plan

    def logits(of: Any) -> torch.Tensor:
        with torch.no_grad():
            return of(**EXAMPLE).logits  # type: ignore[no-any-return]

    expected, got = logits(model), logits(result.model)
    error = relative_error(got, expected)
    if error > plan.max_error:
        yield f"the output is {error:.1e} off, more than the budget of {plan.max_error:.1e}"
    if len(plan.kept) == len(plan.entries):
        yield f"{len(plan.entries)} rewrites were tried, and none was rolled back"
    if not plan.kept and level == "balanced":
        yield "nothing was kept"
    if plan.kept and torch.equal(got, expected):
        yield "rewrites were kept, and the output is the same to the bit: they do not run"
    if objective == "memory" and parameter_bytes(result.model) >= parameter_bytes(model):
        yield "the model is not smaller"
    if any(not entry.reason for entry in plan.entries):
        yield "an entry of the plan has no reason"
    result.revert()
    if not torch.equal(logits(result.model), expected):
        yield "the original did not come back"


def main() -> None:
    """Optimise each model, print its plan, and check it."""
    wrong = []
    for title, model, level, objective in models():
        print(f"{title} ({type(model).__name__}, level {level})")
        result = optimize(model, level, objective, example_inputs=EXAMPLE)
        show(result)
        wrong += [f"{title}: {failure}" for failure in failures(model, result, level, objective)]
    if wrong:
        sys.exit("\n".join(wrong))
    print("each plan was checked against its original, and taken back")


if __name__ == "__main__":
    main()
