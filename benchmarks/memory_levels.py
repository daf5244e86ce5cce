"""Memory and time of a training step at each level of activation checkpointing, predicted and measured here.

    python benchmarks/memory_levels.py [--rounds 5]

Models are of transformers, with KPT's attention and experts, in float32, with AdamW. Memory is what torch's allocator
has given out at once beside parameters, buffers, inputs and the optimiser's state. The levels run in turn, round by
round; times are medians.
"""

import argparse
import copy
import statistics
import time
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

import kpt_attention.transformers  # noqa: F401  registers it
import kpt_moe.transformers  # noqa: F401  registers its experts
from kpt_conformance.checks.cost import peak_bytes
from kpt_optimize.memory import checkpoint_blocks, compare_levels
from kpt_optimize.tuning.tables import processor

TOKENS = 1024
SIZES: dict[str, Any] = {
    "hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 4, "vocab_size": 4096
}  # fmt: skip


def models() -> dict[str, Any]:
    """Make a dense model and an MoE."""
    options: dict[str, Any] = {"attn_implementation": "kpt", "dtype": torch.float32}
    llama = LlamaForCausalLM._from_config(LlamaConfig(intermediate_size=1536, **SIZES), **options)
    config = MixtralConfig(intermediate_size=1792, num_local_experts=8, num_experts_per_tok=2, **SIZES)
    moe = MixtralForCausalLM._from_config(config, experts_implementation="kpt", **options)
    return {"Llama": llama, "Mixtral": moe}


def main() -> None:
    """Print a table for each model."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    print(f"{processor()}, {torch.get_num_threads()} threads, 2 x {TOKENS} tokens")
    ids = torch.randint(SIZES["vocab_size"], (2, TOKENS))
    inputs = {"input_ids": ids, "labels": ids}
    for name, model in models().items():
        levels = compare_levels(model, inputs)
        made = {each.level: copy.deepcopy(model).train() for each in levels}
        peaks, forward, backward = {}, {level: [] for level in made}, {level: [] for level in made}  # type: ignore[var-annotated]
        for level, own in made.items():
            checkpoint_blocks(own, level)
            optimizer = torch.optim.AdamW(own.parameters())

            def step(own: Any = own, optimizer: Any = optimizer) -> None:
                own(**inputs).loss.backward()
                optimizer.step()
                optimizer.zero_grad()

            step()
            peaks[level] = peak_bytes(torch.device("cpu"), step)
        for _ in range(rounds):
            for level, own in made.items():
                begin = time.perf_counter()
                loss = own(**inputs).loss
                between = time.perf_counter()
                loss.backward()
                backward[level].append(time.perf_counter() - between)
                forward[level].append(between - begin)
                own.zero_grad()
        print(f"\n{name}, {sum(p.numel() for p in model.parameters()) / 1e6:.0f} million parameters")
        print("| level | activations, MB | predicted peak, MB | measured | operations | forward, ms | backward, ms | |")
        print("|---|---|---|---|---|---|---|---|")
        for each in levels:
            memory = each.memory
            beside = memory.parameters + memory.buffers + memory.inputs + memory.optimizer_state
            ahead, behind = (1e3 * statistics.median(found[each.level]) for found in (forward, backward))
            ratio = behind / (1e3 * statistics.median(backward["none"]))
            print(
                f"| `{each.level}` | {memory.activations / 1e6:.0f} | {(memory.peak - beside) / 1e6:.0f} "
                f"| {peaks[each.level] / 1e6:.0f} | {each.flops:.2f} | {ahead:.0f} | {behind:.0f} | {ratio:.2f} |"
            )


if __name__ == "__main__":
    main()
