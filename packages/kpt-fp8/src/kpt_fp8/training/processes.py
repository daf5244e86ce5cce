"""Processes that train together: what each holds, and what all have seen."""

import torch
import torch.distributed as dist
from torch import Tensor


def local(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor that FSDP2 shards, in the same memory; others as they are."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def seen_by_all(*found: Tensor) -> None:
    """Make numbers the largest of all processes, in place; NaN and infinity become infinity. One communication.

    Every process calls it with tensors of the same shapes.
    """
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return
    together = torch.cat([each.reshape(-1) for each in found])
    # Reductions differ in what the larger of NaN and a number is.
    together.nan_to_num_(nan=torch.inf, posinf=torch.inf)
    dist.all_reduce(together, dist.ReduceOp.MAX)
    for each, part in zip(found, together.split([each.numel() for each in found]), strict=True):
        each.copy_(part.view_as(each))
