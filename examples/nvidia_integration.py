"""From a model to its service and training on an NVIDIA GPU: prepared, optimised by measurement, guarded, trained.

Without CUDA the same program runs on the CPU: what needs a device is listed as not tried, with the reason.
"""

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

import kpt_core
import kpt_moe.transformers  # noqa: F401  registers "kpt"
from kpt_backend_nvidia import (
    FP8Compiler,
    NVIDIABackend,
    NVIDIAConfig,
    NVIDIAMemoryManager,
    NVIDIAOptimizer,
    OptimizerConfig,
)
from kpt_optimize.memory import format_bytes

torch.manual_seed(0)
sizes = Qwen3MoeConfig(
    vocab_size=509, hidden_size=128, intermediate_size=256, moe_intermediate_size=128, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=32, num_experts=16, num_experts_per_tok=4,
    use_cache=False,
)  # fmt: skip
model = AutoModelForCausalLM.from_config(sizes, experts_implementation="kpt")
ids = torch.randint(509, (2, 96))

print("1. prepare")
prepared = NVIDIABackend(NVIDIAConfig(allow_tf32=False)).prepare_model(model)
print(prepared)
device = prepared.device or torch.device("cpu")
ids = ids.to(device)

print("\n2. optimise for inference: a step is kept if it is within the error budget and measured faster")
# Inductor is left out to save the minutes that it compiles: without this option its gain is measured too.
config = OptimizerConfig(compile_backend="aot_eager", seconds=0.1)
optimizer = NVIDIAOptimizer("balanced", config=config)
served = optimizer.optimize_for_inference(model, {"input_ids": ids})
print(served.report)

print("\n3. serve under the memory guard: out of memory, it frees what it can and runs once more")
memory = NVIDIAMemoryManager(device, safety_margin=0.1)
cache: list[Tensor] = [memory.allocate((1 << 20,)) for _ in range(8)]
memory.add_releaser(cache.clear)
short = [True]


@memory.protect
def serve(batch: Tensor) -> Tensor:
    """The likeliest next token of each; the first call is made to fail as one does that finds no memory."""
    if short:
        short.clear()
        raise torch.OutOfMemoryError("simulated: no memory for the activations")
    return served.model(input_ids=batch).logits.argmax(-1)


print(f"tensors of the manager hold {format_bytes(memory.memory().allocated)}")
with kpt_core.record() as selections:
    found = serve(ids)
with torch.no_grad():
    agreement = (found == model(input_ids=ids).logits.argmax(-1)).float().mean()
print(f"served after {memory.statistics().recoveries} recovery; {format_bytes(memory.memory().allocated)} held now")
print(f"{agreement:.1%} of the tokens are the original model's")
print(f"experts by: {', '.join(sorted({s.kernel for s in selections if s.op == 'moe.experts'})) or 'compiled code'}")

print("\n4. optimise and train: outputs, gradients and the update are compared too")
adam = torch.optim.AdamW(model.parameters(), lr=3e-3)
batch = {"input_ids": ids, "labels": ids}  # the model gives its loss itself
training = optimizer.optimize_for_training(model, batch, optimizer=adam)
print(training.report)
estimate = memory.estimate(model, batch)
print(f"a step in float32 is estimated at {format_bytes(estimate.peak)}, {format_bytes(memory.available())} available")
step = memory.protect(training.step)
losses = [step(batch).item() for _ in range(20)]
print(f"loss {losses[0]:.3f} at the first step, {losses[-1]:.3f} at step {len(losses)}")
assert losses[-1] < losses[0]

print(
    "\n5. mixed precision alone: within its budget it is kept where it is measured faster; of a smaller one it is not"
)
mlp = nn.Sequential(nn.Linear(1024, 2048), nn.GELU(), nn.Linear(2048, 1024)).to(device)
x = torch.randn(64, 1024, device=device)
others = frozenset({"rewrites", "channels_last", "tf32", "padding", "compile", "cuda_graph", "fused_optimizer"})
for budget in (3e-2, 1e-4):
    alone = OptimizerConfig(max_error=budget, skip=others, seconds=0.1)
    rows = str(NVIDIAOptimizer("balanced", config=alone).optimize_for_inference(mlp, x).report).splitlines()
    print(f"budget {budget:.0e}: {next(row for row in rows if row.startswith('mixed_precision'))}")

print("\n6. FP8 for an H100, which need not be here")
compiler = FP8Compiler(target="H100")
halved = mlp.bfloat16()  # what GPUs multiply in 8 bits beside weights is activations of 16
engine = compiler.prepare_for_inference(halved)
print(compiler.statistics(engine))
print(compiler.estimate_speedup(halved, 4096))
with torch.no_grad():
    wanted = halved(x.bfloat16())
error = (engine(x.bfloat16()) - wanted).abs().max() / wanted.abs().max()
print(f"its results on {device} are off by {error.item():.1e} of the largest")
