"""Serve the experts of a Hugging Face model by KPT: same logits, and less memory kept for backward."""

import torch
from transformers import MixtralConfig, MixtralForCausalLM

import kpt_moe.transformers  # noqa: F401  registers "kpt"

torch.manual_seed(0)
config = MixtralConfig(
    vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, num_local_experts=8, num_experts_per_tok=2,
)  # fmt: skip
model = MixtralForCausalLM(config)
ids = torch.randint(256, (2, 64))


def run(implementation: str) -> tuple[torch.Tensor, int]:
    """Logits, and the bytes that autograd keeps for backward beside the parameters."""
    model.set_experts_implementation(implementation)
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        logits = model(ids).logits
    return logits.detach(), sum(saved.values())


expected, peer_bytes = run("grouped_mm")
logits, kpt_bytes = run("kpt")
print(f"largest logit difference: {(logits - expected).abs().max():.1e}")
print(f"kept for backward: {peer_bytes / 2**20:.1f} MiB with grouped_mm, {kpt_bytes / 2**20:.1f} MiB with kpt")
