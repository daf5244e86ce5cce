"""Through the real torch-xla, on XLA's CPU where there is no TPU: `nox -s tpu` runs this, elsewhere it is skipped."""

import copy
import os

import pytest
import torch

import kpt_core
from kpt_attention import Attention, attention, causal, document
from kpt_attention.paged import paged
from kpt_backend_tpu import BACKEND, Bucketed, TPUOptimizer, compilations, memory_stats, powers_of_two
from kpt_core import InputError
from kpt_fp8 import NativeFP8Linear
from kpt_moe import MoEConfig, MoELayer

pytest.importorskip("torch_xla")
if BACKEND.unavailable() is not None:
    pytest.skip(str(BACKEND.unavailable()), allow_module_level=True)


def step(layer, x):
    """Return the output and the gradients of one step, and train by it."""
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    out = layer(x)
    out.square().mean().backward()
    grads = [parameter.grad for parameter in layer.parameters()]
    optimizer.step()
    return out, grads


def experts_layer():
    return MoELayer(MoEConfig(hidden_size=64, num_experts=8, top_k=2, intermediate_size=96))


def fp8_layer():
    frozen = NativeFP8Linear.from_linear(torch.nn.Linear(64, 96))
    return torch.nn.Sequential(torch.nn.Linear(64, 64), frozen, torch.nn.Linear(96, 64))


def attention_layer():
    return Attention(64, 4, num_kv_heads=2, causal=True)


LAYERS = {"moe.experts": experts_layer, "fp8.linear": fp8_layer, "attention.dense": attention_layer}


@pytest.mark.parametrize("op", LAYERS)
def test_a_layer_trains_a_step_as_it_does_on_the_cpu(op):
    torch.manual_seed(0)
    layer, x = LAYERS[op](), torch.randn(1, 33, 64)
    there, before = copy.deepcopy(layer).to("xla"), copy.deepcopy(layer.state_dict())
    out, grads = step(layer, x)
    with kpt_core.record() as selections:
        found, found_grads = step(there, x.to("xla"))
    BACKEND.synchronize(found.device)
    assert (op, "tpu") in {(each.op, each.backend) for each in selections}
    torch.testing.assert_close(found.cpu(), out, rtol=1e-4, atol=1e-5)
    assert [one is None for one in found_grads] == [other is None for other in grads]
    for one, other in zip(found_grads, grads, strict=True):
        if one is not None:
            torch.testing.assert_close(one.cpu(), other, rtol=1e-4, atol=1e-6)
    trained = {name for name, value in layer.state_dict().items() if not torch.equal(before[name], value)}
    assert trained
    for name in trained:
        torch.testing.assert_close(there.state_dict()[name].cpu(), layer.state_dict()[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("op", LAYERS)
def test_what_a_layer_refuses_on_the_cpu_it_refuses_on_xla(op):
    for device in ("cpu", "xla"):
        layer = LAYERS[op]().to(device)
        part = layer[1] if op == "fp8.linear" else layer  # the linear layers beside it are torch's own
        with pytest.raises(InputError, match="63"):
            part(torch.randn(1, 33, 63, device=device))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_of_packed_documents_is_what_it_is_on_the_cpu(dtype):
    torch.manual_seed(0)
    here = [torch.randn(1, heads, 150, 32).to(dtype).requires_grad_() for heads in (4, 2, 2)]
    there = [each.detach().to("xla").requires_grad_() for each in here]
    plan = (causal() & document(cu_seqlens=torch.tensor([0, 40, 150]))).plan(150)
    out, lse = attention(*here, plan, return_lse=True, softcap=2.0)
    (out.float().square().sum() + lse.sum()).backward()
    with kpt_core.record() as selections:
        found, found_lse = attention(*there, plan.to("xla"), return_lse=True, softcap=2.0)
        (found.float().square().sum() + found_lse.sum()).backward()
    assert {each.backend for each in selections} == {"tpu"}
    coarse = 2e-2 if dtype is torch.bfloat16 else 1e-4
    pairs = ((found, out), (found_lse, lse), *((one.grad, other.grad) for one, other in zip(there, here, strict=True)))
    for one, other in pairs:
        largest = other.detach().abs().max().item()
        torch.testing.assert_close(one.detach().cpu(), other.detach(), rtol=coarse, atol=coarse * largest)


@pytest.mark.skipif(os.environ.get("PJRT_DEVICE") != "CPU", reason="a TPU tells its memory")
def test_a_platform_that_does_not_tell_its_memory_is_named():
    with pytest.raises(InputError, match="xla:0 does not tell its memory"):
        memory_stats()


def test_sizes_of_a_few_buckets_are_compiled_once_each():
    torch.manual_seed(0)
    here = torch.nn.Sequential(torch.nn.Linear(24, 40), torch.nn.GELU(), torch.nn.Linear(40, 24))
    there = Bucketed(copy.deepcopy(here).to("xla"), powers_of_two(8, 32))
    counts = {}
    with torch.no_grad():
        for rows in (3, 8, 5, 17, 30, 9, 1, 32, 12):
            x, before = torch.randn(rows, 24), compilations()
            torch.testing.assert_close(there(x), here(x), rtol=1e-4, atol=1e-5)
            counts[rows] = (compilations() - before).compiled
        torch.testing.assert_close(there(x.to("xla")).cpu(), here(x), rtol=1e-4, atol=1e-5)
    assert min(counts[rows] for rows in (3, 17, 9)) > 0  # the first of each size
    assert not any(counts[rows] for rows in (8, 5, 30, 1, 32, 12))


def test_an_optimiser_keeps_what_pays_and_the_model_gives_the_same():
    torch.manual_seed(0)
    model, x = (
        torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.ReLU(), torch.nn.Linear(96, 64)),
        torch.randn(32, 64),
    )
    found = TPUOptimizer("balanced", device="xla").optimize_for_inference(model, x)
    assert next(found.model.module.parameters()).device.type == "xla"
    outcomes = {outcome.step: outcome for outcome in found.report.outcomes}
    assert {"mixed_precision", "compile"} <= outcomes.keys()
    torch.testing.assert_close(found.model(x.to("xla")).cpu().float(), model(x), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("cache", [torch.float32, torch.float8_e4m3fn])
def test_a_step_of_decoding_over_pages_is_what_it_is_on_the_cpu(cache):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 4, 32), *(torch.randn(9, 8, 2, 32).to(cache) for _ in range(2))
    table, lengths = torch.randperm(9).view(3, 3).int(), torch.tensor([24, 1, 13]).int()
    given = (q, k, v, table, lengths)
    want, want_lse = paged(*given, window=9, return_lse=True)
    with kpt_core.record() as selections:
        found, found_lse = paged(*(each.to("xla") for each in given), window=9, return_lse=True)
    assert selections[0].backend == "tpu"
    torch.testing.assert_close(found.cpu(), want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found_lse.cpu(), want_lse, rtol=1e-4, atol=1e-5)
