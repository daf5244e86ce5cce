"""The layers and routers that must be at home on every device."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from kpt_moe.activations import Activation
from kpt_moe.conversion import VariantFeedForwardExpert
from kpt_moe.expert_networks import FeedForwardExpert, QuantizedFeedForwardExpert
from kpt_moe.layers import LAYERS as KINDS
from kpt_moe.layers import MoEConfig, MoELayer, create_moe_layer
from kpt_moe.routers import ROUTERS as ROUTER_KINDS
from kpt_moe.routers import Router
from kpt_moe.routing import Routing
from kpt_optimize.cases import LayerCase

from .common import quantised

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


def _router(kind: str, *, inputs: Callable[..., tuple[Any, ...]] = _tokens, **options: Any) -> LayerCase:
    router: Any = ROUTER_KINDS[kind]
    sizes = {"hidden_size": HIDDEN, "num_experts": EXPERTS, **options}
    # One draws no random numbers in evaluation; one goes by ids.
    special: dict[str, Callable[[Any], nn.Module]] = {"gshard": nn.Module.eval, "hash": _ByToken}
    finish: Callable[[Any], nn.Module] = special.get(kind, lambda made: made)
    return LayerCase(
        name=f"moe.{router.__name__}",
        make=lambda device, dtype: finish(router(**sizes, device=device, dtype=dtype)),
        inputs=inputs,
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
    return _layer(name, lambda: MoEConfig(**{**_SIZES, **options}))


def _routed(generator: torch.Generator) -> tuple[Any, ...]:
    weights, logits = torch.rand(7, TOP_K, generator=generator), torch.randn(7, EXPERTS, generator=generator)
    return *_tokens(generator), Routing(torch.tensor([[0, 1]] * 7), weights, logits)


def _ids(generator: torch.Generator) -> tuple[Any, ...]:
    return *_tokens(generator), torch.randint(0, 11, (7,), generator=generator)


def _quantised(**options: Any) -> QuantizedFeedForwardExpert:
    made = QuantizedFeedForwardExpert(**options)
    state = FeedForwardExpert(**options).state_dict()
    for name in ("gate_up_proj", "down_proj"):
        state[name], state[f"{name}_scale_inv"] = quantised(state[name], made.scheme, torch.float8_e4m3fn)
    made.load_state_dict(state, assign=True)
    return made


def _experts(make: Callable[..., nn.Module], name: str, **options: Any) -> LayerCase:
    sizes = {**_SIZES, **options}
    return LayerCase(name=name, make=lambda device, dtype: make(**sizes, device=device, dtype=dtype), inputs=_routed)


ROUTERS = (
    _router("top_k", top_k=TOP_K, score="sigmoid", bias=True, correction_bias=True, num_groups=2),
    _router("switch", jitter=0.0),
    _router("learned", top_k=TOP_K, activation="swiglu", bias=True),
    _router("dynamic_capacity", top_k=TOP_K, adaptive_top_k=True, threshold=0.7),
    _router("expert_choice", top_k=TOP_K),
    _router("gshard"),
    _router("hash", top_k=TOP_K, vocab_size=11, learned_weights=True, inputs=_ids),
)

LAYERS = (
    _layer("MoELayer", lambda: MoEConfig(**_SIZES)),
    _layer("MoELayer with shared experts", lambda: MoEConfig(**_SIZES, num_shared_experts=2, shared_gate=True)),
    *(_variant(kind) for kind in ("sparse", "switch", "glam", "adaptive")),
    _network("ConvolutionalExpert", expert="convolutional", expert_options={"kernel_size": 3}),
    _network(
        "AttentionExpert", expert="attention", intermediate_size=None, expert_options={"head_dim": 8, "num_heads": 2}
    ),
    _network("ParameterEfficientExpert", expert="parameter_efficient", expert_options={"rank": 4}),
    _network("ParameterEfficientExpert adapter", expert="parameter_efficient", expert_options={"mode": "adapter"}),
    _experts(_quantised, "moe.QuantizedFeedForwardExpert"),
    _experts(VariantFeedForwardExpert, "moe.VariantFeedForwardExpert", activation=_GPT_OSS, transposed=True),
    *ROUTERS,
)
