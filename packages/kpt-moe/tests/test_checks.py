"""What every setting and argument is held to: type, range and shape, in one sentence that names it."""

import re
from collections.abc import Callable

import numpy as np
import pytest
import torch

from kpt_core import InputError, KptError
from kpt_moe import BiasBalancer, FeedForwardExpert, MoEConfig, MoELayer, RouterLosses, TopKRouter, create_moe_layer
from kpt_moe.activations import Activation
from kpt_moe.capacity import expert_capacity
from kpt_moe.conversion import upcycle
from kpt_moe.expert_networks import AttentionExpert, ConvolutionalExpert, ParameterEfficientExpert
from kpt_moe.losses import entropy_loss, gshard_loss, sequence_loss, switch_loss, z_loss
from kpt_moe.routers import DynamicCapacityRouter, ExpertChoiceRouter, GShardRouter, HashRouter, LearnedRouter
from kpt_moe.routers import SwitchRouter as Switch
from kpt_moe.scheduling import CapacitySchedule, ExpertDropout, UtilisationMonitor, revive_dead_experts
from kpt_moe.top_k_gating import top_k_gating

SIZES = {"hidden_size": 8, "num_experts": 4}
NAN, INF = float("nan"), float("inf")
NO_NUMBERS = (NAN, INF, -INF, "x", None, True, [1.0], torch.tensor(1.0))
NO_FACTORS = (NAN, INF, 0, -1.0, "x", True, torch.tensor(1.0))
NO_SHARES = (NAN, INF, -0.1, 1.5, "x", None, False)
NO_BOOLS = ("no", 1, 0.0, torch.tensor(True))
NO_SIZES = (0, -1, 1.0, "2", True)

LAYER = create_moe_layer(**SIZES, router="top_k", router_options={"correction_bias": True}, capacity_factor=2.0)
HASHED = {"vocab_size": 5, "learned_weights": True}

#: What takes a setting, the setting, and values that it has no use for.
SETTINGS: list[tuple[Callable[..., object], str, tuple[object, ...]]] = [
    (lambda **o: TopKRouter(**SIZES, top_k=2, **o), "scale", NO_NUMBERS),
    (lambda **o: LearnedRouter(**SIZES, top_k=2, **o), "scale", NO_NUMBERS),
    (lambda **o: HashRouter(**SIZES, **HASHED, **o), "scale", NO_NUMBERS),
    (lambda **o: top_k_gating(torch.randn(3, 4), top_k=2, **o), "scale", (NAN, INF, "x", None)),
    *((lambda kind=kind, **o: kind(**SIZES, top_k=2, **o), "jitter", NO_SHARES) for kind in (TopKRouter, GShardRouter)),
    (lambda **o: TopKRouter(**SIZES, top_k=2, **o), "capacity_factor", NO_FACTORS),
    (lambda **o: Switch(**SIZES, **o), "eval_capacity_factor", NO_FACTORS),
    (lambda **o: ExpertChoiceRouter(**SIZES, top_k=2, **o), "capacity_factor", NO_FACTORS),
    (lambda **o: DynamicCapacityRouter(**SIZES, **o), "min_capacity_factor", (*NO_FACTORS, None)),
    (lambda **o: DynamicCapacityRouter(**SIZES, **o), "max_capacity_factor", (*NO_FACTORS, None)),
    (lambda **o: DynamicCapacityRouter(**SIZES, adaptive_top_k=True, **o), "threshold", (NAN, 0, 1.5, "x", True)),
    (lambda **o: expert_capacity(5, top_k=2, num_experts=4, **o), "factor", (*NO_FACTORS, None)),
    (lambda **o: TopKRouter(**SIZES, top_k=2, **o), "renormalize", NO_BOOLS),
    (lambda **o: HashRouter(**SIZES, **HASHED, **o), "renormalize", NO_BOOLS),
    (lambda **o: DynamicCapacityRouter(**SIZES, **o), "renormalize", NO_BOOLS),
    (lambda **o: top_k_gating(torch.randn(3, 4), top_k=2, **o), "renormalize", ("no", 1, None)),
    (lambda **o: TopKRouter(**SIZES, top_k=2, **o), "bias", NO_BOOLS),
    (lambda **o: TopKRouter(**SIZES, top_k=2, **o), "correction_bias", NO_BOOLS),
    (lambda **o: HashRouter(**SIZES, vocab_size=5, **o), "learned_weights", NO_BOOLS),
    (lambda **o: HashRouter(**SIZES, vocab_size=5, **o), "seed", (-1, 1.5, "x", None)),
    (lambda **o: DynamicCapacityRouter(**SIZES, **o), "adaptive_top_k", NO_BOOLS),
    (lambda **o: TopKRouter(**SIZES, top_k=2, **o), "num_groups", NO_SIZES),
    (lambda **o: TopKRouter(**SIZES, top_k=2, **o), "top_groups", NO_SIZES),
    (lambda **o: top_k_gating(torch.randn(3, 4), top_k=2, **o), "num_groups", NO_SIZES),
    *(
        (lambda name=name, **o: TopKRouter(**SIZES, top_k=2, **o), name, (None, 1, []))
        for name in ("score", "priority")
    ),
    (lambda **o: MoEConfig(**SIZES, **o), "bias", NO_BOOLS),
    (lambda **o: MoEConfig(**SIZES, num_shared_experts=1, **o), "shared_gate", NO_BOOLS),
    (lambda **o: MoEConfig(**SIZES, **o), "num_shared_experts", (-1, 1.0, "x", None, True)),
    (lambda **o: MoEConfig(**SIZES, **o), "activation", (None, 1, [])),
    (lambda **o: Activation("swiglu", **o), "alpha", NO_NUMBERS),
    (lambda **o: Activation("swiglu", **o), "beta", NO_NUMBERS),
    (lambda **o: Activation("swiglu", **o), "limit", NO_FACTORS),
    (lambda **o: FeedForwardExpert(**SIZES, **o), "bias", NO_BOOLS),
    (lambda **o: AttentionExpert(**SIZES, **o), "bias", NO_BOOLS),
    (lambda **o: AttentionExpert(**SIZES, **o), "causal", NO_BOOLS),
    (lambda **o: ConvolutionalExpert(**SIZES, **o), "causal", NO_BOOLS),
    (lambda **o: ParameterEfficientExpert(**SIZES, **o), "alpha", (NAN, INF, "x", True)),
    (lambda **o: ParameterEfficientExpert(**SIZES, **o), "dropout", NO_SHARES),
    (lambda **o: ParameterEfficientExpert(**SIZES, **o), "freeze_base", NO_BOOLS),
    (lambda **o: BiasBalancer(LAYER, **o), "rate", (*NO_FACTORS, None)),
    (lambda **o: RouterLosses(LAYER, **o), "switch", NO_NUMBERS),
    (lambda start: CapacitySchedule(LAYER, start, 1.0, 3), "start", (*NO_FACTORS, None)),
    (lambda probability: ExpertDropout(LAYER, probability), "probability", NO_SHARES),
    (lambda **o: ExpertDropout(LAYER, 0.5, **o), "seed", (-1, 1.5, None)),
    (lambda **o: UtilisationMonitor(LAYER, **o), "dead_below", NO_SHARES),
    (lambda **o: revive_dead_experts(LAYER, {}, **o), "noise", (NAN, INF, -1, "x", None, True)),
    (lambda **o: upcycle(LAYER, 4, 2, **o), "reinit_fraction", (*NO_SHARES,)),
    (lambda **o: upcycle(LAYER, 4, 2, **o), "noise", (NAN, INF, -1, "x", None, True)),
]


@pytest.mark.parametrize(
    ("make", "name", "value"),
    [
        pytest.param(make, name, value, id=f"{place}-{name}-{value}")
        for place, (make, name, values) in enumerate(SETTINGS)
        for value in values
    ],
)
def test_a_setting_of_another_type_or_range_is_named(make, name, value):
    with pytest.raises(KptError, match=rf"{name}.* (must be|must divide)|unknown {name}|groups must divide"):
        make(**{name: value})


def test_numbers_of_numpy_are_numbers():
    assert TopKRouter(**SIZES, top_k=2, scale=np.float32(0.5)).scale == 0.5


@pytest.mark.parametrize("experts", [FeedForwardExpert(**SIZES), AttentionExpert(**SIZES)], ids=["feed", "attention"])
def test_a_bias_beside_experts_without_one_is_refused(experts):
    with pytest.raises(InputError, match="bias=True has no effect"):
        MoELayer(MoEConfig(**SIZES, bias=True), experts=experts)


def cu(*values: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


X = torch.randn(10, 8)
NO_SEQUENCES = {
    "empty": cu(),
    "no end": cu(0),
    "descending": cu(0, 7, 5, 10),
    "past the end": cu(0, 5, 99),
    "not from zero": cu(3, 10),
    "floats": cu(0, 10, dtype=torch.float32),
    "two dimensions": cu(0, 10).unsqueeze(0),
    "a list": [0, 5, 10],
    "a word": "nonsense",
}
LAYERS = {kind: create_moe_layer(**SIZES, expert=kind) for kind in ("feed_forward", "convolutional", "attention")}


@pytest.mark.parametrize("sequences", NO_SEQUENCES.values(), ids=list(NO_SEQUENCES))
@pytest.mark.parametrize("taker", [*LAYERS, "sequence_loss"])
def test_sequences_that_are_none_are_refused(taker, sequences):
    x = LAYER.route(X) if taker == "sequence_loss" else X
    with pytest.raises(InputError, match="cu_seqlens must be"):
        LAYERS.get(taker, sequence_loss)(x, cu_seqlens=sequences)


@pytest.mark.parametrize("taker", LAYERS)
def test_sequences_of_no_tokens_and_tokens_after_the_last_are_fine(taker):
    assert LAYERS[taker](X[:0], cu_seqlens=cu(0)).shape == (0, 8)
    assert LAYERS[taker](X, cu_seqlens=cu(0, 4, 4, 8)).shape == (10, 8)


BATCH, MASK, IDS = torch.randn(2, 5, 8), torch.arange(10).view(2, 5) % 5 < 3, torch.arange(10).view(2, 5)
BY_IDS = create_moe_layer(**SIZES, top_k=1, router="hash", router_options={"vocab_size": 10})
#: Masks and ids that do not say which token they are of, or are of another type.
WRONG: dict[str, Callable[[torch.Tensor], object]] = {
    "transposed": torch.t,
    "flat": torch.flatten,
    "one more dimension": lambda t: t.unsqueeze(1),
    "one row": lambda t: t[:1],
    "floats": torch.Tensor.float,
    "a list": torch.Tensor.tolist,
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=list(WRONG))
@pytest.mark.parametrize("name", ["mask", "token_ids"])
def test_masks_and_ids_have_the_shape_of_the_tokens(name, wrong):
    inputs = {"mask": MASK, "token_ids": IDS}
    assert BY_IDS(BATCH, **inputs).shape == BATCH.shape
    sentence = re.compile(rf"MoELayer: {name} must be (bool|integers) \[2, 5\]; got ")
    for call in (BY_IDS, BY_IDS.route):
        with pytest.raises(InputError, match=sentence):
            call(BATCH, **inputs | {name: wrong(inputs[name])})


@pytest.mark.parametrize("loss", [switch_loss, gshard_loss, entropy_loss, z_loss])
@pytest.mark.parametrize("given", [torch.zeros(2, 2), None, [], [None], "x", 1.0], ids=str)
def test_losses_are_of_routings(loss, given):
    with pytest.raises(InputError, match=r"a loss (is of a Routing|needs routings)"):
        loss(given)


@pytest.mark.parametrize("x", [None, "x", [[1.0] * 8], torch.zeros(3, 7), torch.tensor(1.0)], ids=str)
@pytest.mark.parametrize("call", [LAYER, LAYER.route, LAYER.router], ids=["layer", "route", "router"])
def test_tokens_are_a_tensor_of_hidden_size(call, x):
    with pytest.raises(InputError, match=r"x must be .*; got (None|a |\[)"):
        call(x)


def test_a_batch_size_is_a_number_of_sequences():
    for size in (2.0, "2", True, 0, 3):
        with pytest.raises(InputError, match=r"batch_size must be|are not 3 sequences"):
            sequence_loss(LAYER.route(X), batch_size=size)
