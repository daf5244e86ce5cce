"""Routers, one family in each file."""

from .base import LinearRouter, Router
from .dynamic_capacity import DynamicCapacityRouter
from .expert_choice import ExpertChoiceRouter
from .gshard import GShardRouter
from .hash import HashRouter
from .learned import LearnedRouter
from .switch import SwitchRouter
from .top_k import SCORES, TopKRouter

#: Kinds of routers, by the name that `MoEConfig` gives them.
ROUTERS: dict[str, type[Router]] = {
    "dynamic_capacity": DynamicCapacityRouter,
    "expert_choice": ExpertChoiceRouter,
    "gshard": GShardRouter,
    "hash": HashRouter,
    "learned": LearnedRouter,
    "switch": SwitchRouter,
    "top_k": TopKRouter,
}

__all__ = [
    "ROUTERS",
    "SCORES",
    "DynamicCapacityRouter",
    "ExpertChoiceRouter",
    "GShardRouter",
    "HashRouter",
    "LearnedRouter",
    "LinearRouter",
    "Router",
    "SwitchRouter",
    "TopKRouter",
]
