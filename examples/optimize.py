"""Optimise a model within an error budget, read the plan, save it, apply it to a fresh model, and take it back."""

import tempfile
from pathlib import Path

import torch
from transformers import OlmoeConfig, OlmoeForCausalLM

import kpt_optimize

torch.manual_seed(0)
config = OlmoeConfig(
    vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
    num_experts=16, num_experts_per_tok=4,
)  # fmt: skip
model = OlmoeForCausalLM(config).eval()
example = {"input_ids": torch.randint(512, (4, 64))}

result = kpt_optimize.optimize(model, level="balanced", objective="latency", example_inputs=example)
print(result.plan)

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "plan.json"
    result.plan.save(path)
    again = kpt_optimize.apply_plan(model, kpt_optimize.Plan.load(path))

with torch.no_grad():
    assert torch.equal(again.model(**example).logits, result.model(**example).logits)
    again.revert()
    assert torch.equal(again.model(**example).logits, model(**example).logits)
print("the plan was applied to a fresh model and taken back")
