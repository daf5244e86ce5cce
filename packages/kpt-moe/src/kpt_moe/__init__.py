"""Mixture-of-Experts for PyTorch: ops, routers and layers that run on whatever accelerator is there.

Here are the names that most programs need. Ops lie in modules of their names (`kpt_moe.experts`, `kpt_moe.grouped_mm`),
the rest in `activations`, `expert_networks`, `layers`, `losses`, `routers`, `scheduling`, `routing_trace`, and what is
used now and then in `batch_invariant`, `conversion`, `offload`, `parallel`, `transformers`, `warming`.
"""

import sys
import warnings
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from .balancing import BiasBalancer
from .expert_networks import FeedForwardExpert
from .layers import MoEConfig, MoELayer, create_moe_layer
from .losses import switch_loss
from .router_losses import RouterLosses
from .routers import TopKRouter
from .routing import Routing
from .statistics import RouterStatistics

__version__ = "0.1.0"

__all__ = [
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

#: Names that stood here too, by the module that they are of; until 0.3.
_MOVED = {
    "activations": "Activation",
    "batch_invariant": "batch_invariant",
    "composed_experts": "composed_experts",
    "expert_networks": "AttentionExpert ConvolutionalExpert "
    "ExpertNetwork ParameterEfficientExpert QuantizedFeedForwardExpert",
    "experts": "experts",
    "grouped_mm": "grouped_mm grouped_mm_wgrad",
    "layers": "AdaptiveMoELayer GLaMStyleMoE SharedExperts SparseMoELayer SwitchTransformerMoE",
    "losses": "GlobalLoad entropy_loss global_batch_loss gshard_loss sequence_loss z_loss",
    "permutation": "Permutation sort_by_expert",
    "routers": "DynamicCapacityRouter ExpertChoiceRouter GShardRouter HashRouter "
    "LearnedRouter LinearRouter Router SwitchRouter",
    "routing_trace": "RoutingTrace record_routing replay_routing",
    "scaled_grouped_mm": "scaled_grouped_mm",
    "scheduling": "CapacitySchedule ExpertDropout ExpertWarmup UtilisationMonitor revive_dead_experts",
    "statistics": "RouterSummary",
}


def _moved(name: str, package: ModuleType | None = None) -> Any:
    for module, names in _MOVED.items():
        if name in names.split():
            path = f"{__name__}.{module}"
            message = f"{__name__}.{name} goes in version 0.3; write: from {path} import {name}"
            warnings.warn(message, FutureWarning, stacklevel=2)
            return getattr(import_module(path), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class _Package(ModuleType):
    """Functions that are named like their modules, which hide them from `__getattr__`."""


for _name in _MOVED.keys() & {name for names in _MOVED.values() for name in names.split()}:
    setattr(_Package, _name, property(partial(_moved, _name), lambda package, module: None))
sys.modules[__name__].__class__ = _Package

# Type checkers find each name in its module, and here would take any name for one.
if not TYPE_CHECKING:
    __getattr__ = _moved
