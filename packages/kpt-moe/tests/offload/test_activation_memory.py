"""Experts that save less for backward have the same gradients, to the bit."""

import copy
import pickle

import pytest
import torch
from torch import nn

import kpt_core
import kpt_moe.transformers
from families import FAMILIES, experts_of
from kpt_core import InputError, UnknownNameError
from kpt_moe import FeedForwardExpert, MoEConfig, MoELayer, Routing
from kpt_moe.batch_invariant import MODE, batch_invariant
from kpt_moe.expert_networks.attention import AttentionExpert
from kpt_moe.offload import checkpoint_experts, offload_experts
from served_by import served_by

MODES = ("recompute", "offload")
TOKENS, HIDDEN, INNER, TOP_K = 32, 16, 64, 2


def make(**choices) -> nn.Sequential:
    torch.manual_seed(0)
    values = {"hidden_size": HIDDEN, "num_experts": 4, "top_k": TOP_K, "intermediate_size": INNER, **choices}
    return nn.Sequential(*(MoELayer(MoEConfig(**values)) for _ in range(2)))


def gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    model(x).square().sum().backward()
    grads = [x.grad, *(p.grad for p in model.parameters())]
    model.zero_grad()
    return grads


def saved_bytes(model: nn.Module, x: torch.Tensor) -> int:
    """Bytes that autograd keeps on the device for backward, parameters left out, each storage once."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            saved[storage.data_ptr()] = storage  # held, so that no other gets its address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(x).sum()
    return sum(storage.nbytes() for storage in saved.values())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("choices", [{}, {"activation": "gelu", "bias": True}])
def test_gradients_are_the_same_to_the_bit(choices, mode):
    model = make(**choices)
    x = torch.randn(TOKENS, HIDDEN)
    want = gradients(model, x)
    handle = checkpoint_experts(model, mode)
    assert (handle.mode, handle.paths) == (mode, ("0.experts", "1.experts"))
    assert all(torch.equal(a, b) for a, b in zip(gradients(model, x), want, strict=True))
    for _ in range(2):
        handle.restore()
        assert type(model[0].experts) is FeedForwardExpert
    assert all(torch.equal(a, b) for a, b in zip(gradients(model, x), want, strict=True))


@pytest.mark.parametrize("mode", MODES)
def test_fewer_bytes_are_saved_on_the_device(mode):
    model = make()[:1]
    x = torch.randn(TOKENS, HIDDEN, requires_grad=True)
    with kpt_core.use("reference"), served_by("experts_loop:forward"):
        plain = saved_bytes(model, x)
        checkpoint_experts(model, mode)
        less = saved_bytes(model, x)
    # Of every choice the pre-activation and the weight, float32, and the order, int32; the end of every expert, int32.
    of_experts = TOKENS * TOP_K * (2 * INNER * 4 + 4 + 4) + 4 * 4
    assert plain - less == of_experts
    # What is left is the router's, x among it; to recompute, the weights stay besides, as an argument.
    assert (plain, less) == (36752, 3456)


def test_what_is_offloaded_is_a_copy():
    # So that a change of the input before backward cannot spoil the gradients.
    experts = make()[0].experts
    holder = nn.ModuleList([experts])
    x, index = torch.randn(TOKENS, HIDDEN), torch.rand(TOKENS, 4).topk(TOP_K).indices
    routing = Routing(index, torch.rand(TOKENS, TOP_K), torch.zeros(TOKENS, 4))
    (want,) = torch.autograd.grad(experts(x, routing).sum(), experts.gate_up_proj)
    checkpoint_experts(holder, "offload")
    out = experts(x, routing)
    x.zero_()
    (have,) = torch.autograd.grad(out.sum(), experts.gate_up_proj)
    assert torch.equal(have, want)


@pytest.mark.parametrize("name", ["gate_up_proj", "down_proj"])
def test_weights_that_change_before_backward_are_named(name):
    experts = make()[0].experts
    checkpoint_experts(nn.ModuleList([experts]), "offload")
    index = torch.rand(TOKENS, 4).topk(TOP_K).indices
    out = experts(torch.randn(TOKENS, HIDDEN), Routing(index, torch.rand(TOKENS, TOP_K), torch.zeros(TOKENS, 4)))
    with torch.no_grad():
        experts.get_parameter(name).mul_(2)
    with pytest.raises(InputError, match="was changed in place between forward and backward"):
        out.sum().backward()


@pytest.mark.parametrize("mode", MODES)
def test_the_router_runs_once(mode):
    model = make()[:1]
    model[0].router.jitter = 0.5
    calls = []
    model[0].router.register_forward_hook(lambda *_: calls.append(1))
    runs = []
    kept = FeedForwardExpert.rows
    model[0].experts.rows = lambda *args: runs.append(1) or kept(model[0].experts, *args)
    checkpoint_experts(model, mode)
    model.train()
    gradients(model, torch.randn(TOKENS, HIDDEN))
    assert len(calls) == 1
    assert len(runs) == (2 if mode == "recompute" else 1)


@pytest.mark.parametrize("mode", MODES)
def test_without_gradients_nothing_is_different(mode):
    model = make()
    x = torch.randn(TOKENS, HIDDEN)
    with torch.no_grad():
        want = model(x)
        checkpoint_experts(model, mode)
        assert torch.equal(model(x), want)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_are_checkpointed_and_independent(duplicate, mode):
    model = make()
    x = torch.randn(TOKENS, HIDDEN)
    want, names = gradients(model, x), list(model.state_dict())
    checkpoint_experts(model, mode)
    twin = duplicate(model)
    assert list(model.state_dict()) == list(twin.state_dict()) == names
    assert isinstance(twin[0].experts, FeedForwardExpert)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert all(torch.equal(a, b) for a, b in zip(gradients(twin, x), want, strict=True))
    assert saved_bytes(twin, x) < saved_bytes(make(), x)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
@pytest.mark.usefixtures("quiet")
def test_models_of_transformers(name, mode):
    model = FAMILIES[name].build()
    model.set_experts_implementation(kpt_moe.transformers.NAME)
    x = torch.randn(2, 9, 32)

    def run() -> list[torch.Tensor]:
        model.zero_grad()
        model(inputs_embeds=x).logits.square().sum().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    want = run()
    assert len(checkpoint_experts(model, mode).paths) == len(experts_of(model)) == 2
    assert all(torch.equal(a, b) for a, b in zip(run(), want, strict=True))


@pytest.mark.parametrize("mode", MODES)
def test_networks_that_autograd_composes(mode):
    model = nn.ModuleList([AttentionExpert(HIDDEN, num_experts=4, head_dim=8)])
    router = MoELayer(MoEConfig(hidden_size=HIDDEN, num_experts=4)).router
    x = torch.randn(TOKENS, HIDDEN)
    routing = router(x)

    def run() -> list[torch.Tensor]:
        return list(torch.autograd.grad(model[0](x, routing).sum(), list(model.parameters()), retain_graph=True))

    want = run()
    checkpoint_experts(model, mode)
    assert all(torch.equal(a, b) for a, b in zip(run(), want, strict=True))


@pytest.mark.parametrize("mode", MODES)
def test_backward_may_be_outside_of_the_batch_invariant_block(mode):
    model = make()
    x = torch.randn(TOKENS, HIDDEN)

    def run() -> list[torch.Tensor]:
        with batch_invariant():
            out = model(x)
        return list(torch.autograd.grad(out.square().sum(), list(model.parameters())))

    want = run()
    checkpoint_experts(model, mode)
    assert all(torch.equal(a, b) for a, b in zip(run(), want, strict=True))
    assert not MODE.on


def test_recomputation_compiles_without_a_break():
    model = make()
    x = torch.randn(TOKENS, HIDDEN)
    want = gradients(model, x)
    checkpoint_experts(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for a, b in zip(gradients(compiled, x), want, strict=True):
        torch.testing.assert_close(a, b)


def test_wrong_use_is_named():
    model = make()
    with pytest.raises(UnknownNameError, match="unknown mode 'recompile': did you mean 'recompute'"):
        checkpoint_experts(model, "recompile")
    with pytest.raises(InputError, match="Linear has no experts"):
        checkpoint_experts(nn.Linear(2, 2))
    checkpoint_experts(model)
    with pytest.raises(InputError, match=r"0.experts is checkpointed already: restore\(\) it first"):
        checkpoint_experts(model, "offload")
    model = make()
    with offload_experts(model, "50%"), pytest.raises(InputError, match=r"0.experts is offloaded already"):
        checkpoint_experts(model)
