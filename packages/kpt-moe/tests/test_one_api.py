"""Arguments have one order and names, what has no effect is refused, and old names lead to the new ones."""

import importlib
import inspect
import pickle
import subprocess
import sys
import warnings

import pytest
import torch

import kpt_moe
from kpt_core import InputError
from kpt_moe.capacity import expert_capacity, limit_capacity
from kpt_moe.expert_networks import (
    EXPERTS,
    FeedForwardExpert,
    ParameterEfficientExpert,
    QuantizedFeedForwardExpert,
)
from kpt_moe.layers import UNSET, MoEConfig, MoELayer, SharedExperts, SwitchTransformerMoE, create_moe_layer
from kpt_moe.losses import GlobalLoad, global_batch_loss
from kpt_moe.routers import ROUTERS, DynamicCapacityRouter, HashRouter, LearnedRouter, TopKRouter
from routings import routing_from_logits

SIZES = {"hidden_size": 16, "num_experts": 4}
PARTS = {**ROUTERS, **EXPERTS, "quantised": QuantizedFeedForwardExpert}


@pytest.mark.parametrize("kind", PARTS)
def test_sizes_have_one_order_and_a_swap_can_not_pass(kind):
    parameters = list(inspect.signature(PARTS[kind]).parameters.values())
    assert [parameter.name for parameter in parameters[:2]] == ["hidden_size", "num_experts"]
    assert {parameter.kind for parameter in parameters[1:]} <= {
        inspect.Parameter.KEYWORD_ONLY,
        inspect.Parameter.VAR_KEYWORD,
    }
    with pytest.raises(TypeError, match="positional argument"):
        PARTS[kind](16, 4, 2)


@pytest.mark.parametrize(
    ("function", "free"),
    [
        (SharedExperts, 1),
        (expert_capacity, 1),
        (limit_capacity, 2),
        (global_batch_loss, 1),
        (QuantizedFeedForwardExpert.from_feed_forward, 1),
        (ParameterEfficientExpert.from_feed_forward, 1),
        (create_moe_layer, 1),
        (MoELayer, 1),
        (MoEConfig, 0),
    ],
)
def test_all_but_the_first_arguments_are_named(function, free):
    parameters = list(inspect.signature(function).parameters.values())
    by_place = [p.name for p in parameters if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    assert len(by_place) == free


def test_a_mask_in_the_place_of_a_routing_is_refused():
    layer, mask = MoELayer(MoEConfig(**SIZES)), torch.ones(3, dtype=torch.bool)
    with pytest.raises(InputError, match=r"the second argument is a Routing.*; got a Tensor: give a mask as mask="):
        layer(torch.randn(3, 16), mask)


@pytest.mark.parametrize("router", ["top_k", "learned", "hash", "dynamic_capacity"])
def test_the_gate_learns_with_one_expert_for_each_token(router):
    options = {"hash": {"vocab_size": 9, "learned_weights": True}}.get(router, {})
    layer = MoELayer(MoEConfig(**SIZES, top_k=1, router=router, router_options=options))
    layer(torch.randn(20, 16), token_ids=torch.arange(20)).square().sum().backward()
    assert layer.router.weight.grad.abs().sum() > 0
    assert ROUTERS[router](**SIZES, top_k=2, **options).renormalize
    assert ROUTERS[router](**SIZES, top_k=1, renormalize=True, **options).renormalize


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"expert": "attention", "intermediate_size": 999},
            "intermediate_size=999 has no effect: .*'attention' have no",
        ),
        (
            {"expert": "attention", "activation": "relu"},
            "activation='relu' has no effect: .*feed_forward.* leave it out",
        ),
        (
            {"expert": "attention", "num_shared_experts": 1, "shared_intermediate_size": 8, "intermediate_size": 9},
            "intermediate_size=9 has no effect",
        ),
        ({"score": "sigmoid", "router_options": {"score": "softmax"}}, "score='sigmoid' has no effect: router_options"),
        ({"router": "hash", "score": "sigmoid", "router_options": {"vocab_size": 9}}, "score='sigmoid' has no effect"),
        ({"router": "gshard", "score": "sigmoid"}, "GShardRouter does not take these router_options.*score"),
    ],
)
def test_a_choice_without_effect_is_named(config, message):
    with pytest.raises(InputError, match=message):
        MoELayer(MoEConfig(**SIZES, **config))


def test_what_shared_experts_use_has_an_effect():
    config = MoEConfig(**SIZES, expert="attention", intermediate_size=9, activation="relu", num_shared_experts=1)
    assert MoELayer(config).shared_experts.down_proj.in_features == 9


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"top_k": 3}, "top_k=3 has no effect: the router given, a TopKRouter, has 2; leave it out"),
        ({"score": "sigmoid"}, "score='sigmoid' has no effect: the router given, a TopKRouter, has 'softmax'"),
        ({"capacity_factor": 1.5}, "capacity_factor=1.5 has no effect: the router given, a TopKRouter, has None"),
        ({"router": "switch"}, "router='switch' has no effect: the router given is a TopKRouter"),
        ({"router_options": {"scale": 2.0}}, "scale=2.0 has no effect: the router given, a TopKRouter, has 1.0"),
        ({"intermediate_size": 7}, "intermediate_size=7 has no effect: the experts given, a FeedForwardExpert, has 5"),
        ({"activation": "relu"}, "activation='relu' has no effect: the experts given"),
        (
            {"expert": "convolutional"},
            "expert='convolutional' has no effect: the experts given are a FeedForwardExpert",
        ),
    ],
)
def test_a_given_part_is_not_contradicted(config, message):
    router = TopKRouter(16, num_experts=4, top_k=2)
    experts = FeedForwardExpert(16, num_experts=4, intermediate_size=5)
    with pytest.raises(InputError, match=message):
        MoELayer(MoEConfig(**SIZES, **config), router=router, experts=experts)
    same = {"top_k": 2, "score": "softmax", "intermediate_size": 5, "activation": "swiglu", "capacity_factor": None}
    layer = MoELayer(MoEConfig(**SIZES, **same), router=router, experts=experts)
    assert layer.router is router
    assert MoELayer(layer.config, router=router, experts=experts).config == layer.config


@pytest.mark.parametrize(
    "choices",
    [{"score": "sigmoid"}, {"renormalize": True}, {"scale": 2.0}, {"jitter": 0.1}],
)
def test_a_table_has_no_gate_to_set(choices):
    with pytest.raises(InputError, match=f"{next(iter(choices))}=.* has no effect without a gate: set learned_weights"):
        HashRouter(16, num_experts=4, vocab_size=9, **choices)
    assert HashRouter(16, num_experts=4, vocab_size=9, learned_weights=True, **choices).learned_weights


def test_a_threshold_without_adaptive_top_k_is_refused():
    with pytest.raises(InputError, match=r"threshold=0.4 has no effect without adaptive_top_k"):
        DynamicCapacityRouter(16, num_experts=4, threshold=0.4)


def test_none_is_a_choice_and_unset_is_none():
    layers = {
        "unset": MoELayer(MoEConfig(**SIZES)),
        "none": create_moe_layer("sparse", **SIZES, capacity_factor=None),
        "sparse": create_moe_layer("sparse", **SIZES),
        "direct": type(create_moe_layer("sparse", **SIZES))(MoEConfig(**SIZES, capacity_factor=None)),
    }
    assert {name: layer.router.capacity_factor for name, layer in layers.items()} == {
        "unset": None,
        "none": None,
        "sparse": 1.25,
        "direct": None,
    }
    switch = MoELayer(MoEConfig(**SIZES, router="switch", top_k=1))
    assert (switch.router.capacity_factor, switch.router.eval_capacity_factor) == (1.25, 2.0)
    unlimited = MoELayer(MoEConfig(**SIZES, router="switch", top_k=1, capacity_factor=None))
    assert not unlimited.router.limited


def test_what_a_layer_fixes_can_not_be_asked_for_otherwise_in_any_way():
    with pytest.raises(InputError, match="SwitchTransformerMoE: top_k is always 1; got 2"):
        SwitchTransformerMoE(MoEConfig(**SIZES, top_k=2))
    assert SwitchTransformerMoE(MoEConfig(**SIZES)).config.top_k == 1
    with pytest.raises(InputError, match="router='switch' has no effect: the router given is a TopKRouter"):
        SwitchTransformerMoE(MoEConfig(**SIZES), router=TopKRouter(16, num_experts=4, top_k=1))


def test_an_unset_configuration_is_kept_by_files():
    import dataclasses
    import json

    config = MoEConfig(**SIZES, router_options={"jitter": 0.1})
    read = MoEConfig(**json.loads(json.dumps(dataclasses.asdict(config))))
    assert read == config == pickle.loads(pickle.dumps(config))
    assert read.capacity_factor == UNSET
    assert MoELayer(read).config.top_k == 2


def test_a_learned_router_takes_all_that_a_linear_one_does():
    router = LearnedRouter(
        16, num_experts=4, top_k=2, bias=True, correction_bias=True, dtype=torch.float64, device="meta"
    )
    assert {p.dtype for p in router.parameters()} == {torch.float64}
    assert all(t.is_meta for t in (*router.parameters(), *router.buffers()))
    assert router.inner_bias is not None


NAMES = [
    "BiasBalancer",
    "FeedForwardExpert",
    "MoEConfig",
    "MoELayer",
    "RouterLosses",
    "RouterStatistics",
    "Routing",
    "TopKRouter",
    "create_moe_layer",
    "switch_loss",
]


def test_ten_names_are_at_the_top_without_a_warning():
    assert kpt_moe.__all__ == NAMES
    program = f"from kpt_moe import {', '.join(NAMES)}\nimport kpt_moe.grouped_mm, kpt_moe.experts"
    result = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(("module", "name"), [(m, n) for m, names in kpt_moe._MOVED.items() for n in names.split()])
def test_old_names_lead_to_the_new_ones(module, name):
    path = f"kpt_moe.{module}"
    # Its own module is loaded, which would hide a function of its name.
    want = getattr(importlib.import_module(path), name)
    with pytest.warns(
        FutureWarning, match=rf"kpt_moe\.{name} goes in version 0\.3; write: from {path} import {name}"
    ) as told:
        assert getattr(kpt_moe, name) is want
    assert told[0].filename == __file__
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        exec(f"from kpt_moe import {name}")
    assert {warning.category for warning in told} == {FutureWarning}


def test_a_name_that_never_was_is_no_attribute():
    assert not hasattr(kpt_moe, "MoeLayer")
    with pytest.raises(ImportError, match="cannot import name 'MoeLayer' from 'kpt_moe'"):
        exec("from kpt_moe import MoeLayer")


def test_load_is_named_in_a_global_loss():
    routing = routing_from_logits(torch.randn(6, 4), top_k=2)
    with pytest.raises(TypeError, match="positional argument"):
        global_batch_loss(*(routing, GlobalLoad()))
