"""Layers of the literature, each a `MoELayer` with what its paper fixes."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, ClassVar

import torch

from kpt_core import InputError
from kpt_moe._checks import require_known
from kpt_moe.expert_networks import ExpertNetwork
from kpt_moe.routers import Router

from .config import MoEConfig
from .layer import MoELayer


class SparseMoELayer(MoELayer):
    """Experts with a capacity: what exceeds it is dropped, counted, and passed through by the residual.

    Every expert computes at most `capacity_factor` (1.25 unless the configuration says otherwise) times the average
    number of tokens, so that memory and time are bounded whatever the load (GShard, arXiv:2006.16668).
    """

    defaults: ClassVar[Mapping[str, Any]] = {"capacity_factor": 1.25}


class SwitchTransformerMoE(MoELayer):
    """The layer of the Switch Transformer (arXiv:2101.03961).

    One expert per token, weighed by its probability, plain ReLU experts, capacity 1.25 in training and 2 in evaluation,
    jitter of 1%. Its loss is `kpt_moe.losses.switch_loss`.
    """

    fixed: ClassVar[Mapping[str, Any]] = {"router": "switch", "top_k": 1}
    defaults: ClassVar[Mapping[str, Any]] = {
        "activation": "relu",
        "capacity_factor": 1.25,
        "eval_capacity_factor": 2.0,
        "router_options": {"jitter": 1e-2},
    }


class GLaMStyleMoE(MoELayer):
    """The layer of GLaM (arXiv:2112.06905): two experts per token, gated GELU experts, GShard's gating.

    An expert takes twice its share of the tokens; in training the second expert is used as often as its weight says
    (`GShardRouter`). Its loss is `kpt_moe.losses.gshard_loss`.
    """

    fixed: ClassVar[Mapping[str, Any]] = {"router": "gshard", "top_k": 2}
    defaults: ClassVar[Mapping[str, Any]] = {"activation": "geglu", "capacity_factor": 1.0}


class AdaptiveMoELayer(MoELayer):
    """A layer that spends more on inputs that are harder to route.

    The uncertainty of the router sets the capacity of the batch, and how many experts each token gets, at most `top_k`
    (`DynamicCapacityRouter`).
    """

    fixed: ClassVar[Mapping[str, Any]] = {"router": "dynamic_capacity"}
    defaults: ClassVar[Mapping[str, Any]] = {"router_options": {"adaptive_top_k": True}}


#: The layers that `create_moe_layer` makes, by name.
LAYERS: dict[str, type[MoELayer]] = {
    "standard": MoELayer,
    "sparse": SparseMoELayer,
    "switch": SwitchTransformerMoE,
    "glam": GLaMStyleMoE,
    "adaptive": AdaptiveMoELayer,
}


def create_moe_layer(
    kind: str = "standard",
    *,
    router: Router | str | None = None,
    experts: ExpertNetwork | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    **config: Any,
) -> MoELayer:
    """Make a layer by the name of its kind: `standard`, `sparse`, `switch`, `glam` or `adaptive`.

    The rest is as of `MoELayer` and, one by one, of `MoEConfig`. `router` is a router or the name of a kind; `top_k` of
    a layer that fixes it may be left out.

    Raises:
        InputError: a field that `MoEConfig` has not, or that does not fit.
        UnknownNameError: no such kind.
    """
    require_known("kind of layer", kind, LAYERS)
    if isinstance(router, str):
        config, router = {**config, "router": router}, None
    known = [f.name for f in fields(MoEConfig)]
    for name in config:
        require_known("field of MoEConfig", name, known)
    missing = [name for name in ("hidden_size", "num_experts") if name not in config]
    if missing:
        raise InputError(f"create_moe_layer: {' and '.join(missing)} must be given")
    return LAYERS[kind](MoEConfig(**config), router=router, experts=experts, device=device, dtype=dtype)
