"""A TPU through torch-xla: configuration, compilation cache, experts and attention beside the CPU's, memory, models.

With `PJRT_DEVICE=CPU KPT_TPU_INTERPRET=1` beside torch-xla the same program shows it on XLA's CPU, its kernels
interpreted; without torch-xla the parts that need it say so in a sentence.
"""

import copy
import sys
import tempfile

import torch
from torch import nn

import kpt_core
from kpt_attention import attention, causal, document
from kpt_backend_tpu import (
    BACKEND,
    CHIPS,
    TPUBackend,
    TPUConfig,
    TPUOptimizer,
    compilations,
    environment,
    keep_compilations,
    memory_stats,
)
from kpt_core import InputError
from kpt_moe import MoEConfig, MoELayer

torch.manual_seed(0)
reason = BACKEND.unavailable()

print("1. what is here")
found = environment()
print(f"torch {found.torch}, torch-xla {found.torch_xla}, jax {found.jax}, libtpu {found.libtpu}")
print(f"chips on this machine: {', '.join(found.chips) or 'none'}; kernels are compiled for {', '.join(CHIPS)}")
config = TPUConfig(dtype="bfloat16")
print(f"configuration: {config}")
if reason:
    print("\nnot shown: the compilation cache, experts and attention beside the CPU's, what is refused, memory,")
    print(f"and models optimised for inference and training: {reason}")
    sys.exit()
folder = keep_compilations(tempfile.mkdtemp())  # before anything is computed
device = BACKEND.device()
print(f"kernels run on {device}" + ("" if found.chips else ", interpreted on XLA's CPU: values, no speed"))


def show(selections: list[kpt_core.Selection]) -> None:
    """Print what ran, and why the TPU's kernels did not."""
    for op, backend, kernel in sorted({(each.op, each.backend, each.kernel) for each in selections}):
        print(f"  {op}: {kernel} of {backend}")
    for refusal in {str(each) for of in selections for each in of.refusals if each.backend == BACKEND.name}:
        print(f"  not {refusal}")


def difference(there: torch.Tensor, here: torch.Tensor) -> str:
    """Return the largest difference, relative to the largest value."""
    return f"{((there.cpu() - here).abs().max() / here.abs().max()).item():.1e}"


print("\n2. a layer of experts, one step of training")
layer = MoELayer(MoEConfig(hidden_size=64, num_experts=8, top_k=2, intermediate_size=96))
x, there = torch.randn(48, 64), copy.deepcopy(layer).to(device)
layer(x).square().mean().backward()
with kpt_core.record() as selections:
    there(x.to(device)).square().mean().backward()
show(list(selections))
for (name, one), other in zip(there.named_parameters(), layer.parameters(), strict=True):
    assert one.grad is not None
    assert other.grad is not None
    print(f"  gradient of {name}: differs by {difference(one.grad, other.grad)}")

print("\n3. attention of packed documents: the mask is lowered once, on the host, and its plan is data")
q, k, v = torch.randn(1, 4, 300, 64), torch.randn(1, 2, 300, 64), torch.randn(1, 2, 300, 64)
plan = (causal() & document(cu_seqlens=torch.tensor([0, 120, 300]))).plan(300)
leaves = [each.clone().to(device).requires_grad_() for each in (q, k, v)]
with kpt_core.record() as selections:
    out = attention(*leaves, plan.to(device))
    out.square().mean().backward()
show(list(selections))
with kpt_core.use("reference"):
    here = [each.clone().requires_grad_() for each in (q, k, v)]
    expected = attention(*here, plan)
    expected.square().mean().backward()
print(f"  output differs by {difference(out.detach(), expected.detach())}")
for name, one, other in zip("qkv", leaves, here, strict=True):
    assert one.grad is not None
    assert other.grad is not None
    print(f"  gradient of {name}: differs by {difference(one.grad, other.grad)}")

print("\n4. what is refused, and what serves instead")
with kpt_core.record() as selections:
    attention(*leaves, plan.to(device), dropout=0.1, seed=0)
show(list(selections))

print("\n5. what XLA compiled, and keeps for processes to come")
print(f"  {compilations()}")
print(f"  {len([*folder.iterdir()])} files in {folder}")

print("\n6. memory of the device")
try:
    print(f"  {memory_stats()}")
except InputError as error:  # XLA's CPU tells nothing
    print(f"  not shown: {error}")

print("\n7. a model prepared by the configuration, and optimised for inference and training by measurement")
model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
print(TPUBackend(config).prepare_model(copy.deepcopy(model)))
optimizer = TPUOptimizer("balanced", device=device)
rows = torch.randn(32, 64)
print(optimizer.optimize_for_inference(copy.deepcopy(model), rows).report)
adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
print(optimizer.optimize_for_training(model, rows, loss=lambda out, *_: out.square().mean(), optimizer=adam).report)
