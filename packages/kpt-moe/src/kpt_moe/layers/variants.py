"""Layers of the literature, each a `MoELayer` with what its paper fixes."""

from collections.abc import Collection
from dataclasses import fields, replace
from typing import Any, ClassVar

import torch

from kpt_core import InputError, UnknownNameError
from kpt_moe.expert_networks import ExpertNetwork
from kpt_moe.routers import Router

from .config import MoEConfig
from .layer import MoELayer


class _Variant(MoELayer):
    """A layer that fixes some choices and has defaults of its own for others.

    A choice that the configuration leaves at `MoEConfig`'s default takes the variant's default, unless it is
    `explicit`: a configuration doesn't tell a default that was written down from one that was not.
    """

    fixed: ClassVar[dict[str, Any]] = {}
    defaults: ClassVar[dict[str, Any]] = {}

    def __init__(
        self,
        config: MoEConfig,
        *,
        router: Router | None = None,
        experts: ExpertNetwork | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        explicit: Collection[str] = (),
    ) -> None:
        super().__init__(self.complete(config, explicit), router=router, experts=experts, device=device, dtype=dtype)

    @classmethod
    def complete(cls, config: MoEConfig, explicit: Collection[str] = ()) -> MoEConfig:
        """The configuration with what this layer fixes, and its defaults.

        Args:
            config: is not changed.
            explicit: fields to take as they are, though they be at `MoEConfig`'s default.

        Raises:
            InputError: the configuration asks for something else than what is fixed.
        """
        usual = {f.name: f.default for f in fields(MoEConfig)}
        untouched = {name for name, default in usual.items() if getattr(config, name) == default} - set(explicit)
        for name, value in cls.fixed.items():
            if name not in untouched and getattr(config, name) != value:
                raise InputError(f"{cls.__name__}: {name} is always {value!r}; got {getattr(config, name)!r}")
        own = {name: value for name, value in cls.defaults.items() if name in untouched}
        if "router_options" in cls.defaults:
            own["router_options"] = {**cls.defaults["router_options"], **config.router_options}
        return replace(config, **own, **cls.fixed)


class SparseMoELayer(_Variant):
    """Experts with a capacity: what exceeds it is dropped, counted, and passed through by the residual.

    Every expert computes at most `capacity_factor` (1.25 unless the configuration says otherwise) times the average
    number of tokens, so that memory and time are bounded whatever the load (GShard, arXiv:2006.16668).
    """

    defaults: ClassVar[dict[str, Any]] = {"capacity_factor": 1.25}


class SwitchTransformerMoE(_Variant):
    """The layer of the Switch Transformer (arXiv:2101.03961).

    One expert per token, weighed by its probability, plain ReLU experts, capacity 1.25 in training and 2 in evaluation,
    jitter of 1%. Its loss is `kpt_moe.losses.switch_loss`.
    """

    fixed: ClassVar[dict[str, Any]] = {"router": "switch", "top_k": 1}
    defaults: ClassVar[dict[str, Any]] = {
        "activation": "relu",
        "capacity_factor": 1.25,
        "eval_capacity_factor": 2.0,
        "router_options": {"jitter": 1e-2},
    }


class GLaMStyleMoE(_Variant):
    """The layer of GLaM (arXiv:2112.06905): two experts per token, gated GELU experts, GShard's gating.

    An expert takes twice its share of the tokens; in training the second expert is used as often as its weight says
    (`GShardRouter`). Its loss is `kpt_moe.losses.gshard_loss`.
    """

    fixed: ClassVar[dict[str, Any]] = {"router": "gshard", "top_k": 2}
    defaults: ClassVar[dict[str, Any]] = {"activation": "geglu", "capacity_factor": 1.0}


class AdaptiveMoELayer(_Variant):
    """A layer that spends more on inputs that are harder to route.

    The uncertainty of the router sets the capacity of the batch, and how many experts each token gets, at most `top_k`
    (`DynamicCapacityRouter`).
    """

    fixed: ClassVar[dict[str, Any]] = {"router": "dynamic_capacity"}
    defaults: ClassVar[dict[str, Any]] = {"router_options": {"adaptive_top_k": True}}


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
    """Make a layer by the name of its kind.

    Args:
        kind: `standard`, `sparse`, `switch`, `glam` or `adaptive`.
        router: as of `MoELayer`, or the name of a kind for `MoEConfig`.
        experts: as of `MoELayer`.
        device: as of `MoELayer`.
        dtype: as of `MoELayer`.
        config: the fields of `MoEConfig`. `top_k` of a kind that fixes it may be left out.

    Raises:
        InputError: a field that `MoEConfig` has not, or that does not fit.
        UnknownNameError: no such kind.
    """
    if kind not in LAYERS:
        raise UnknownNameError("kind of layer", kind, LAYERS)
    if isinstance(router, str):
        config, router = {**config, "router": router}, None
    known = [f.name for f in fields(MoEConfig)]
    for name in config:
        if name not in known:
            raise UnknownNameError("field of MoEConfig", name, known)
    missing = [name for name in ("hidden_size", "num_experts") if name not in config]
    if missing:
        raise InputError(f"create_moe_layer: {' and '.join(missing)} must be given")
    made = LAYERS[kind]
    if not issubclass(made, _Variant):
        return made(MoEConfig(**config), router=router, experts=experts, device=device, dtype=dtype)
    complete = MoEConfig(**{**made.fixed, **config})
    return made(complete, router=router, experts=experts, device=device, dtype=dtype, explicit=config)
