"""Experts over many ranks: expert, tensor and data parallelism on torch.distributed."""

from .checkpoint import contiguous_shards, restore_shards
from .data_parallel import average_gradients, clip_grad_norm, fully_shard_experts
from .dispatch import dispatch, experts_per_rank
from .expert_parallel import parallelize_experts

__all__ = [
    "average_gradients",
    "clip_grad_norm",
    "contiguous_shards",
    "dispatch",
    "experts_per_rank",
    "fully_shard_experts",
    "parallelize_experts",
    "restore_shards",
]
