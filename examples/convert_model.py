"""Give a Hugging Face model KPT's layers, train it with them, and turn it back to be saved; upcycle a dense one."""

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from kpt_moe import MoELayer, RouterStatistics
from kpt_moe.conversion import to_kpt_layers, to_transformers, upcycle

torch.manual_seed(0)
sizes = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
original = MixtralForCausalLM(MixtralConfig(**sizes, num_local_experts=8, num_experts_per_tok=2))
ids = torch.randint(256, (4, 64))


def logits(model: torch.nn.Module) -> torch.Tensor:
    """The logits of the ids, without a graph."""
    with torch.no_grad():
        return model(ids).logits


model = to_kpt_layers(original)
layer = next(module for module in model.modules() if isinstance(module, MoELayer))
print(f"one of the layers: {layer}")
print(f"largest logit difference: {(logits(model) - logits(original)).abs().max():.1e}")

# From here on the layers are KPT's: routers can be counted, balanced and replayed, experts spread and offloaded.
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
with RouterStatistics(model) as statistics:
    output = model(ids, labels=ids, output_router_logits=True)
    output.loss.backward()
    optimizer.step()
    imbalance = [f"{summary.imbalance:.2f}" for summary in statistics.snapshot().values()]
print(f"one step: loss {output.loss.item():.3f}, imbalance of the layers {', '.join(imbalance)}")

trained = logits(model)
with tempfile.TemporaryDirectory() as folder:
    to_transformers(model, inplace=True).save_pretrained(folder)
    loaded = MixtralForCausalLM.from_pretrained(folder)
print(f"{type(loaded.model.layers[0].mlp).__name__} again; difference {(logits(loaded) - trained).abs().max():.1e}")

dense = LlamaForCausalLM(LlamaConfig(**sizes))
sparse = upcycle(dense, num_experts=8, top_k=2, layers="every-other")
before, after = (sum(p.numel() for p in each.parameters()) for each in (dense, sparse))
difference = (logits(sparse) - logits(dense)).abs().max()
print(f"a dense model upcycled: {before} parameters became {after}; largest logit difference {difference:.1e}")
