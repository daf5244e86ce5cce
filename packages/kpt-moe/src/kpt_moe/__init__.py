"""Mixture-of-Experts for PyTorch: ops, routers and layers that run on whatever accelerator is there.

What is used now and then lies in modules of its own: `offload`, `parallel`, `conversion`, `transformers`.
"""

from .activations import Activation
from .balancing import BiasBalancer
from .batch_invariant import batch_invariant
from .composed_experts import composed_experts
from .expert_networks import (
    AttentionExpert,
    ConvolutionalExpert,
    ExpertNetwork,
    FeedForwardExpert,
    ParameterEfficientExpert,
    QuantisedFeedForwardExpert,
)
from .experts import experts
from .grouped_mm import grouped_mm, grouped_mm_wgrad
from .layers import (
    AdaptiveMoELayer,
    GLaMStyleMoE,
    MoEConfig,
    MoELayer,
    SharedExperts,
    SparseMoELayer,
    SwitchTransformerMoE,
    create_moe_layer,
)
from .losses import (
    GlobalLoad,
    entropy_loss,
    global_batch_loss,
    gshard_loss,
    sequence_loss,
    switch_loss,
    z_loss,
)
from .permutation import Permutation, sort_by_expert
from .quantised_experts import quantise_weights
from .router_losses import RouterLosses
from .routers import (
    DynamicCapacityRouter,
    ExpertChoiceRouter,
    GShardRouter,
    HashRouter,
    LearnedRouter,
    LinearRouter,
    Router,
    SinkhornRouter,
    SwitchRouter,
    TokenRoundingRouter,
    TopKRouter,
)
from .routing import Routing
from .routing_trace import RoutingTrace, record_routing, replay_routing
from .scaled_grouped_mm import scaled_grouped_mm
from .scheduling import (
    CapacitySchedule,
    ExpertDropout,
    ExpertWarmup,
    UtilisationMonitor,
    revive_dead_experts,
)
from .statistics import RouterStatistics, RouterSummary

__version__ = "0.1.0"

__all__ = [
    "Activation",
    "AdaptiveMoELayer",
    "AttentionExpert",
    "BiasBalancer",
    "CapacitySchedule",
    "ConvolutionalExpert",
    "DynamicCapacityRouter",
    "ExpertChoiceRouter",
    "ExpertDropout",
    "ExpertNetwork",
    "ExpertWarmup",
    "FeedForwardExpert",
    "GLaMStyleMoE",
    "GShardRouter",
    "GlobalLoad",
    "HashRouter",
    "LearnedRouter",
    "LinearRouter",
    "MoEConfig",
    "MoELayer",
    "ParameterEfficientExpert",
    "Permutation",
    "QuantisedFeedForwardExpert",
    "Router",
    "RouterLosses",
    "RouterStatistics",
    "RouterSummary",
    "Routing",
    "RoutingTrace",
    "SharedExperts",
    "SinkhornRouter",
    "SparseMoELayer",
    "SwitchRouter",
    "SwitchTransformerMoE",
    "TokenRoundingRouter",
    "TopKRouter",
    "UtilisationMonitor",
    "batch_invariant",
    "composed_experts",
    "create_moe_layer",
    "entropy_loss",
    "experts",
    "global_batch_loss",
    "grouped_mm",
    "grouped_mm_wgrad",
    "gshard_loss",
    "quantise_weights",
    "record_routing",
    "replay_routing",
    "revive_dead_experts",
    "scaled_grouped_mm",
    "sequence_loss",
    "sort_by_expert",
    "switch_loss",
    "z_loss",
]
