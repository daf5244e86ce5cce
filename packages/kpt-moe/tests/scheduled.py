"""The layer that tests of schedules and of watching train."""

import torch

from kpt_moe import MoEConfig, MoELayer, TopKRouter
from kpt_moe.routers import Router

HIDDEN, EXPERTS, TOP_K = 8, 6, 2


def make(router: Router | None = None, bias: bool = False, **options) -> MoELayer:
    torch.manual_seed(0)
    config = MoEConfig(hidden_size=HIDDEN, num_experts=EXPERTS, top_k=TOP_K, intermediate_size=4, bias=bias)
    return MoELayer(config, router=router or TopKRouter(HIDDEN, num_experts=EXPERTS, top_k=TOP_K, bias=bias, **options))


def used(layer: MoELayer, tokens: int = 200) -> set[int]:
    """Experts that serve some token."""
    return set(layer.route(torch.randn(tokens, HIDDEN)).tokens_per_expert().nonzero().flatten().tolist())
