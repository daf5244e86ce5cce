"""Experts and attention over a mesh of four of XLA's CPU devices: `nox -s tpu` runs this, elsewhere it is skipped."""

import copy
import os

import pytest
import torch

import kpt_core
from kpt_attention import attention, causal, document
from kpt_backend_tpu import BACKEND, shard_attention, shard_experts
from kpt_core import InputError, NoKernelError
from kpt_moe import MoEConfig, MoELayer

pytest.importorskip("torch_xla")
if BACKEND.unavailable() is not None or os.environ.get("CPU_NUM_DEVICES") != "4":
    pytest.skip("needs torch-xla and CPU_NUM_DEVICES=4", allow_module_level=True)

DEVICES = 4


@pytest.fixture(scope="module")
def mesh():
    from torch_xla import runtime
    from torch_xla.distributed.spmd import Mesh

    runtime.use_spmd()
    return Mesh(list(range(DEVICES)), (DEVICES,), ("model",))


def sharding(tensor):
    import torch_xla

    return torch_xla._XLAC._get_xla_sharding_spec(tensor)


def layer_of(experts=8):
    torch.manual_seed(0)
    return MoELayer(MoEConfig(hidden_size=64, num_experts=experts, top_k=2, intermediate_size=96))


def test_experts_over_a_mesh_train_as_on_one_device(mesh):
    layer, x = layer_of(), torch.randn(32, 64)
    there = shard_experts(copy.deepcopy(layer).to("xla"), mesh)
    out = layer(x)
    out.square().mean().backward()
    with kpt_core.record() as selections:
        found = there(x.to("xla"))
        found.square().mean().backward()
    assert ("moe.experts", "tpu") in {(each.op, each.backend) for each in selections}
    torch.testing.assert_close(found.detach().cpu(), out.detach(), rtol=1e-4, atol=1e-5)
    for (name, one), other in zip(there.named_parameters(), layer.parameters(), strict=True):
        assert sharding(one) == ("{devices=[4,1,1]0,1,2,3}" if name.startswith("experts.") else "")
        if name.startswith("experts."):
            assert sharding(one.grad) == "{devices=[4,1,1]0,1,2,3}"
        torch.testing.assert_close(one.grad.cpu(), other.grad, rtol=1e-4, atol=1e-6)


def test_gradients_reach_the_tokens_from_every_device(mesh):
    layer = layer_of()
    there, here = shard_experts(copy.deepcopy(layer).to("xla"), mesh), torch.randn(16, 64).requires_grad_()
    x = here.detach().to("xla").requires_grad_()
    layer(here).square().sum().backward()
    there(x).square().sum().backward()
    torch.testing.assert_close(x.grad.cpu(), here.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("with_lse", [False, True])
def test_attention_by_heads_is_what_it_is_on_one_device(mesh, with_lse):
    torch.manual_seed(0)
    here = [torch.randn(1, heads, 150, 32).requires_grad_() for heads in (8, 4, 4)]
    there = [each.detach().to("xla").requires_grad_() for each in here]
    plan = (causal() & document(cu_seqlens=torch.tensor([0, 40, 150]))).plan(150)
    of = shard_attention(attention, mesh)
    out, found = (
        each if with_lse else (each,)
        for each in (
            attention(*here, plan, return_lse=with_lse),
            of(*there, plan.to("xla"), return_lse=with_lse),
        )
    )
    sum(each.square().sum() for each in out).backward()
    sum(each.square().sum() for each in found).backward()
    for one, other in zip(found, out, strict=True):
        torch.testing.assert_close(one.detach().cpu(), other.detach(), rtol=1e-4, atol=1e-4)
    for one, other in zip(there, here, strict=True):
        assert sharding(one.grad) == "{devices=[1,4,1,1]0,1,2,3}"
        torch.testing.assert_close(one.grad.cpu(), other.grad, rtol=1e-4, atol=1e-4)


def test_what_can_not_be_divided_is_refused(mesh):
    from torch_xla.distributed.spmd import Mesh

    q, k = torch.zeros(1, 8, 16, 32, device="xla"), torch.zeros(1, 2, 16, 32, device="xla")
    of, layer = shard_attention(attention, mesh), layer_of().to("xla")
    cases = (
        (lambda: shard_experts(layer_of(6).to("xla"), mesh), "6 experts do not divide by 4 devices"),
        (lambda: shard_experts(layer_of(), mesh), "experts must be on xla; got cpu"),
        (lambda: shard_experts(torch.nn.Linear(2, 2), mesh), r"Linear have no rows\("),
        (lambda: shard_experts(shard_experts(layer, mesh), mesh), "are sharded already"),
        (lambda: shard_experts(layer, mesh, "data"), "of one axis, 'data'; got"),
        (lambda: shard_attention(attention, Mesh(range(4), (2, 2), ("data", "model"))), "of one axis, 'model'; got"),
        (lambda: shard_attention(attention, None), "of one axis, 'model'; got None"),
        (lambda: of(q, k, k), r"k must be \[batch, heads, rows, head_dim\] on xla, its heads divisible by 4"),
        (lambda: of(q, q, q, causal()), "must be planned once"),
        (lambda: of(q, q, q, bias=q), "bias can't be divided by heads"),
        (lambda: of(q, q, q, sinks=q[0, :, 0, 0]), "sinks can't be divided by heads"),
    )
    for action, message in cases:
        with pytest.raises(InputError, match=message):
            action()
    with pytest.raises(NoKernelError, match="dropout"):
        of(q, q, q, dropout=0.5)
