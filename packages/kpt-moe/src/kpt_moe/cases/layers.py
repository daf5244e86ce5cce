"""The layers and routers that must be at home on every device."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from kpt_core.cases import LayerCase
from kpt_moe.activations import Activation
from kpt_moe.conversion import VariantFeedForwardExpert
from kpt_moe.expert_networks import FeedForwardExpert, QuantisedFeedForwardExpert
from kpt_moe.layers import LAYERS as KINDS
from kpt_moe.layers import MoEConfig, MoELayer, create_moe_layer
from kpt_moe.routers import (
    DynamicCapacityRouter,
    ExpertChoiceRouter,
    GShardRouter,
    HashRouter,
    LearnedRouter,
    Router,
    SinkhornRouter,
    SwitchRouter,
    TokenRoundingRouter,
    TopKRouter,
)
from kpt_moe.routing import Routing

HIDDEN, EXPERTS, TOP_K = 16, 4, 2
_SIZES: dict[str, Any] = {"hidden_size": HIDDEN, "num_experts": EXPERTS, "intermediate_size": 24, "bias": True}

_GPT_OSS = Activation("swiglu", alpha=1.702, beta=1.0, limit=7.0, interleaved=True)


class _ByToken(nn.Module):
    """A router that goes by token ids, called with positions alone."""

    def __init__(self, router: Router) -> None:
        super().__init__()
        self.router = router

    def forward(self, x: Tensor, token_ids: Tensor) -> Routing:
        return self.router(x, token_ids=token_ids)  # type: ignore[no-any-return]


def _tokens(generator: torch.Generator) -> tuple[Any, ...]:
    return (torch.randn(7, HIDDEN, generator=generator),)


def _sequences(generator: torch.Generator) -> tuple[Any, ...]:
    return (torch.randn(2, 5, HIDDEN, generator=generator),)


def _router(kind: Callable[..., Router], *sizes: int, **options: Any) -> LayerCase:
    return LayerCase(
        name=f"moe.{getattr(kind, '__name__', kind)}",
        make=lambda device, dtype: kind(HIDDEN, EXPERTS, *sizes, device=device, dtype=dtype, **options),
        inputs=_tokens,
    )


def _layer(name: str, config: Callable[[], MoEConfig], kind: type[MoELayer] = MoELayer) -> LayerCase:
    return LayerCase(
        name=f"moe.{name}",
        make=lambda device, dtype: kind(config(), device=device, dtype=dtype),
        inputs=_sequences,
        config=config,
    )


def _variant(kind: str) -> LayerCase:
    config: dict[str, Any] = {**_SIZES, "router_options": {"jitter": 0.0} if kind == "switch" else {}}
    return LayerCase(
        name=f"moe.{KINDS[kind].__name__}",
        # In evaluation, where no router draws random numbers.
        make=lambda device, dtype: create_moe_layer(kind, device=device, dtype=dtype, **config).eval(),
        inputs=_sequences,
        config=lambda: create_moe_layer(kind, device="meta", **config).config,
    )


def _network(name: str, **options: Any) -> LayerCase:
    return _layer(name, lambda: MoEConfig(**_SIZES, **options))


def _routed(generator: torch.Generator) -> tuple[Any, ...]:
    weights, logits = torch.rand(7, TOP_K, generator=generator), torch.randn(7, EXPERTS, generator=generator)
    return *_tokens(generator), Routing(torch.tensor([[0, 1]] * 7), weights, logits)


ROUTERS = (
    _router(TopKRouter, TOP_K, score="sigmoid", bias=True, correction_bias=True, num_groups=2),
    _router(SwitchRouter, jitter=0.0),
    _router(LearnedRouter, TOP_K, activation="swiglu", normalize=True, bias=True),
    _router(DynamicCapacityRouter, TOP_K, complexity="learned", adaptive_top_k=True, threshold=0.7),
    _router(ExpertChoiceRouter, TOP_K),
    _router(SinkhornRouter, TOP_K),
    _router(TokenRoundingRouter, TOP_K, tile=4),
    LayerCase(
        name="moe.GShardRouter",
        make=lambda device, dtype: GShardRouter(HIDDEN, EXPERTS, device=device, dtype=dtype).eval(),
        inputs=_tokens,
    ),
    LayerCase(
        name="moe.HashRouter",
        make=lambda device, dtype: _ByToken(
            HashRouter(HIDDEN, EXPERTS, TOP_K, vocab_size=11, learned_weights=True, device=device, dtype=dtype)
        ),
        inputs=lambda generator: (*_tokens(generator), torch.randint(0, 11, (7,), generator=generator)),
    ),
)

LAYERS = (
    _layer("MoELayer", lambda: MoEConfig(**_SIZES)),
    _layer("MoELayer with shared experts", lambda: MoEConfig(**_SIZES, num_shared_experts=2, shared_gate=True)),
    *(_variant(kind) for kind in ("sparse", "switch", "glam", "adaptive")),
    _network("ConvolutionalExpert", expert="convolutional", expert_options={"kernel_size": 3}),
    _network("AttentionExpert", expert="attention", expert_options={"head_dim": 8, "num_heads": 2}),
    _network("ParameterEfficientExpert", expert="parameter_efficient", expert_options={"rank": 4}),
    _network("ParameterEfficientExpert adapter", expert="parameter_efficient", expert_options={"mode": "adapter"}),
    LayerCase(
        name="moe.QuantisedFeedForwardExpert",
        make=lambda device, dtype: QuantisedFeedForwardExpert.from_feed_forward(
            FeedForwardExpert(EXPERTS, HIDDEN, 24, bias=True, device=device, dtype=dtype)
        ),
        inputs=_routed,
    ),
    LayerCase(
        name="moe.VariantFeedForwardExpert",
        make=lambda device, dtype: VariantFeedForwardExpert(
            EXPERTS, HIDDEN, 24, activation=_GPT_OSS, transposed=True, bias=True, device=device, dtype=dtype
        ),
        inputs=_routed,
    ),
    *ROUTERS,
)
