from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kpt_core import InputError
from kpt_moe import create_moe_layer
from kpt_moe.expert_networks import QuantizedFeedForwardExpert
from kpt_moe.warming import warm_up


def seen_by(layer: nn.Module) -> list[tuple[int, torch.dtype, bool, bool]]:
    """Note each call of a layer: tokens, their dtype, whether it trains and whether gradients are kept."""
    seen: list[tuple[int, torch.dtype, bool, bool]] = []

    def note(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        seen.append((args[0].shape[0], args[0].dtype, module.training, torch.is_grad_enabled()))

    layer.register_forward_pre_hook(note)
    return seen


@pytest.mark.parametrize(
    "kind",
    [
        {},
        {"router": "hash", "router_options": {"vocab_size": 10}},
        {"experts": QuantizedFeedForwardExpert(16, num_experts=4, intermediate_size=32)},
    ],
    ids=["plain", "router that needs ids", "experts of 8 bits"],
)
def test_layers_run_as_they_serve_and_are_left_as_they_were(kind: dict[str, Any]) -> None:
    layers = [
        create_moe_layer(hidden_size=16, num_experts=4, intermediate_size=32, **kind).bfloat16() for _ in range(2)
    ]
    model = nn.Sequential(*layers)
    layers[1].eval()
    seen = [seen_by(layer) for layer in layers]
    warm_up(model, [4, 1, 4])
    assert seen == [[(tokens, torch.bfloat16, False, False) for tokens in (1, 4)]] * 2
    assert [module.training for module in (model, *layers)] == [True, True, False]


@pytest.mark.parametrize(
    ("model", "counts", "message"),
    [
        (lambda: create_moe_layer(hidden_size=16, num_experts=4), [], "positive"),
        (lambda: create_moe_layer(hidden_size=16, num_experts=4), [0, 2], "positive"),
        (lambda: nn.Linear(2, 2), [1], "no MoELayer"),
    ],
)
def test_what_can_not_be_warmed_up_is_refused(model: Callable[[], nn.Module], counts: list[int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        warm_up(model(), counts)
