"""Run a Mixture-of-Experts model whose experts lie in a file, with memory for all, half or a quarter of them."""

import tempfile
from pathlib import Path

import torch
from transformers import MixtralConfig, MixtralForCausalLM

from kpt_moe.offload import offload_experts

torch.manual_seed(0)
config = MixtralConfig(
    vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, num_local_experts=8, num_experts_per_tok=2, eos_token_id=None,
)  # fmt: skip
model = MixtralForCausalLM(config).eval()
prompt = torch.randint(512, (1, 16))


@torch.no_grad()
def generate() -> torch.Tensor:
    """The logits of a greedy continuation."""
    out = model.generate(prompt, max_new_tokens=16, do_sample=False, return_dict_in_generate=True, output_logits=True)
    return torch.stack(out.logits)


expected = generate()
first = None
with tempfile.TemporaryDirectory() as folder:
    for budget in ("100%", "50%", "25%"):
        with offload_experts(model, budget, store=Path(folder) / f"experts-{budget}.safetensors") as offloading:
            logits = generate()
            total = offloading.total()
        first = logits if first is None else first
        assert torch.equal(logits, first), "the budget never changes a result"
        print(
            f"budget {offloading.budget / 2**20:4.1f} MiB of {offloading.expert_bytes / 2**20:.1f}: "
            f"hit rate {total.hit_rate:4.0%}, {total.bytes_moved / 2**20:5.0f} MiB moved, {total.evictions} evictions, "
            f"{total.predicted_right} of {total.predicted} predictions right"
        )
print(f"largest difference from the model in memory: {(first - expected).abs().max():.1e}")
