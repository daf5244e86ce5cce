"""The layers and routers that must be at home on every device."""

import torch

from kpt_core import LayerCase
from kpt_moe.layers import MoEConfig, MoELayer
from kpt_moe.routers import TopKRouter


def _layer_config() -> MoEConfig:
    return MoEConfig(hidden_size=16, num_experts=4, top_k=2, intermediate_size=24, bias=True)


LAYERS = (
    LayerCase(
        name="moe.MoELayer",
        make=lambda device, dtype: MoELayer(_layer_config(), device=device, dtype=dtype),
        inputs=lambda generator: (torch.randn(2, 5, 16, generator=generator),),
        config=_layer_config,
    ),
    LayerCase(
        name="moe.TopKRouter",
        make=lambda device, dtype: TopKRouter(16, 4, 2, score="sigmoid", bias=True, device=device, dtype=dtype),
        inputs=lambda generator: (torch.randn(7, 16, generator=generator),),
    ),
)
