"""The peak memory of a model's phases, each in a fresh process: `python -m kpt_cli.demo.memory_probe MODEL PLAN`.

Prints a JSON object for each, on a line of its own. This process imports the libraries once and never uses them; each
measurement is a fork of it, which loads the model for itself. The peak is that of resident memory while the phase runs,
the model being loaded already.
"""

import argparse
import gc
import json
import os
from pathlib import Path
from typing import Any

import psutil
import torch

from kpt_cli.peak_memory import forget_peak, peak

from .model import load_model, quiet_transformers
from .speed import generate_timed

PHASES = ("prefill", "decode", "training")
#: Tokens of the prompt where decoding is measured.
SHORT_PROMPT = 16


def measure(model_folder: Path, plan: Path | None, phase: str, given: argparse.Namespace) -> dict[str, Any]:
    """Load a model, apply a plan to it if there is one, run a phase and read the peak."""
    libraries = psutil.Process().memory_info().rss
    model = load_model(model_folder)
    if phase == "training":
        if plan is not None:
            model.set_experts_implementation("kpt")
        added = _of_a_step(model, given.batch, given.context)
        return {"phase": phase, "optimised": plan is not None, "libraries": libraries, "peak": added}
    if plan is not None:
        import kpt_optimize

        model = kpt_optimize.apply_plan(model, kpt_optimize.Plan.load(plan), inplace=True).model
    gc.collect()
    forget_peak()
    tokens = given.prompt_tokens if phase == "prefill" else SHORT_PROMPT
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(1, model.config.vocab_size, (1, tokens), generator=generator)
    generate_timed(model, prompt, 2 if phase == "prefill" else given.new_tokens)
    return {"phase": phase, "optimised": plan is not None, "libraries": libraries, "peak": peak()}


def _of_a_step(model: Any, batch: int, context: int) -> int:
    """By how many bytes a forward and backward raises resident memory, gradients included."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(1, model.config.vocab_size, (batch, context), generator=generator)
    model.train()
    # What libraries keep after their first use is not the step's.
    for ids in (rows[:1, :8], rows):
        model.zero_grad()
        gc.collect()
        forget_peak()
        before = psutil.Process().memory_info().rss
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return peak() - before


def main() -> None:
    """Run the probe."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("plan", type=Path)
    parser.add_argument("--runs", type=int, required=True)
    parser.add_argument("--prompt-tokens", type=int, required=True)
    parser.add_argument("--new-tokens", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--context", type=int, required=True)
    given = parser.parse_args()
    quiet_transformers()
    import transformers.models.qwen3_moe.modeling_qwen3_moe  # noqa: F401  counted as library, not as model

    import kpt_moe.transformers  # noqa: F401

    for _ in range(given.runs):
        for phase in PHASES:
            for plan in (None, given.plan):
                _in_a_fork(given.model, plan, phase, given)


def _in_a_fork(model: Path, plan: Path | None, phase: str, given: argparse.Namespace) -> None:
    child = os.fork()
    if child == 0:
        # Threads are started here and not before: they do not survive a fork.
        torch.set_num_threads(given.threads)
        result = measure(model, plan, phase, given)
        print(json.dumps(result), flush=True)  # noqa: T201
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if status:
        raise SystemExit(f"the {phase} phase ended with {os.waitstatus_to_exitcode(status)}")


if __name__ == "__main__":
    main()
