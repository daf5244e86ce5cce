"""Layers of vLLM by KPT's experts and by its own, in this process."""

import logging

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import (
    FusedMoEConfig,
    FusedMoEParallelConfig,
    FusedMoEQuantConfig,
    RoutingMethodType,
)
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

import kpt_core
import kpt_vllm
from kpt_vllm.support import ACTIVATIONS

pytestmark = pytest.mark.filterwarnings("ignore")  # of what vLLM imports
EXPERTS, WIDTH, HIDDEN, TOP_K = 4, 32, 64, 2


@pytest.fixture(scope="module", autouse=True)
def registered():
    kpt_vllm.register()
    kpt_vllm.register()  # a process may load a plug-in twice
    with set_current_vllm_config(VllmConfig()):
        yield


def config(activation=MoEActivation.SILU, dtype=torch.float32, **changed):
    return FusedMoEConfig(
        num_experts=EXPERTS,
        experts_per_token=TOP_K,
        hidden_dim=HIDDEN,
        intermediate_size=WIDTH,
        num_local_experts=EXPERTS,
        num_logical_experts=EXPERTS,
        activation=activation,
        device="cpu",
        routing_method=RoutingMethodType.Renormalize,
        moe_parallel_config=FusedMoEParallelConfig.make_no_parallel(),
        in_dtype=dtype,
        **changed,
    )


def run(kind, moe, weights, tokens, routing, on_input):
    """Give the result of experts of a kind, each with a copy of the weights: vLLM packs its own."""
    layer = torch.nn.Module()
    for name, weight in zip(("w13_weight", "w2_weight"), weights, strict=True):
        layer.register_parameter(name, torch.nn.Parameter(weight.clone(), requires_grad=False))
    experts = kind(moe, FusedMoEQuantConfig.make())
    experts.process_weights_after_loading(layer)
    out = torch.full_like(tokens, torch.nan)
    places = dict.fromkeys(("expert_map", "a1q_scale", "a2_scale", "workspace13", "workspace2", "expert_tokens_meta"))
    experts.apply(
        output=out,
        hidden_states=tokens,
        w1=layer.w13_weight,
        w2=layer.w2_weight,
        topk_weights=routing[0],
        topk_ids=routing[1],
        activation=moe.activation,
        global_num_experts=EXPERTS,
        apply_router_weight_on_input=on_input,
        **places,
    )
    return out


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("on_input", [False, True])
def test_results_are_those_of_vllm(activation, dtype, on_input):
    from kpt_vllm.experts import KptExperts

    torch.manual_seed(0)
    moe = config(MoEActivation(activation), dtype)
    weights = torch.randn(EXPERTS, 2 * WIDTH, HIDDEN, dtype=dtype) / 8, torch.randn(EXPERTS, HIDDEN, WIDTH, dtype=dtype)
    tokens = torch.randn(19, HIDDEN, dtype=dtype)
    top = 1 if on_input else TOP_K  # more is multiplied by no one
    routing = torch.rand(19, top), torch.rand(19, EXPERTS).topk(top).indices.int()
    before = sum(each.calls for each in kpt_core.counts() if each.backend == "cpu")
    ours = run(KptExperts, moe, weights, tokens, routing, on_input)
    assert sum(each.calls for each in kpt_core.counts() if each.backend == "cpu") > before
    theirs = run(CPUUnquantizedExperts, moe, weights, tokens, routing, on_input)
    bound = {"rtol": 1e-4, "atol": 1e-4} if dtype is torch.float32 else {"rtol": 2e-2, "atol": 4e-2}
    torch.testing.assert_close(ours, theirs, **bound)


def test_a_usual_layer_is_given_to_kpt():
    from kpt_vllm.experts import KptExperts, KptMoEMethod

    method = UnquantizedFusedMoEMethod(config())
    assert type(method) is KptMoEMethod
    assert method.experts_cls is KptExperts


def test_another_layer_stays_vllms_and_one_warning_says_why(monkeypatch):
    from kpt_vllm import experts

    told = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    experts.logger.addHandler(handler)
    try:
        methods = [UnquantizedFusedMoEMethod(config(has_bias=True)) for _ in range(3)]
    finally:
        experts.logger.removeHandler(handler)
    assert all(method.experts_cls is not experts.KptExperts for method in methods)
    assert all(issubclass(method.experts_cls, CPUUnquantizedExperts) for method in methods)
    assert told == ["vLLM's own kernels run experts, and not KPT's: the experts have biases."]
