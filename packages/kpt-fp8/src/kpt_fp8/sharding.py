"""What FSDP2 gathers of an `FP8Tensor`: codes and scales, in 8 bits."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kpt_core import InputError

if TYPE_CHECKING:
    from .fp8_tensor import FP8Tensor

#: Dtypes of codes and scale.
Dtypes = tuple[torch.dtype, torch.dtype]


def gather_inputs(shard: "FP8Tensor", outer_size: Sequence[int], processes: int) -> tuple[tuple[Tensor, ...], Dtypes]:
    """What each process sends: codes as bytes, and their scales.

    Collectives of some backends know no 8-bit floating-point dtype, so those go as bytes.

    Raises:
        InputError: the processes would not have equally many rows.
    """
    if outer_size[0] % processes:
        raise InputError(
            f"FP8Tensor: FSDP2 shards codes together with their scales, in equal parts; got {outer_size[0]} rows for "
            f"{processes} processes: leave this layer as it is (exclude), or pass its weight to fully_shard in "
            "ignored_params"
        )
    if processes == 1:
        # Of a process alone torch 2.13 takes the first input and no other.
        return (as_bytes(shard.codes),), (shard.codes.dtype, shard.scale.dtype)
    scale = shard.scale.reshape(1) if shard.scale.dim() == 0 else shard.scale
    return (as_bytes(shard.codes), as_bytes(scale)), (shard.codes.dtype, scale.dtype)


def gathered(
    shard: "FP8Tensor", outputs: Sequence[Tensor], dtypes: Dtypes, dtype: torch.dtype, before: "FP8Tensor | None"
) -> "FP8Tensor":
    """The whole weight, in the memory that was gathered into.

    Args:
        shard: this process's part.
        outputs: what came of `gather_inputs`, of all processes.
        dtypes: likewise.
        dtype: what it stands for; FSDP2's mixed precision chooses another one than the shard's.
        before: what this gave the first time. It looks at the memory that is gathered into again.
    """
    if len(outputs) == 1:
        scale = shard.scale
    else:
        scale = outputs[1].view(dtypes[1])
        # All processes have the same scale where all numbers share one.
        scale = scale if shard.scale.dim() else scale[0]
    if before is None:
        return type(shard)(outputs[0].view(dtypes[0]), scale, shard.granularity, dtype)
    before.scale = scale
    return before


def as_bytes(tensor: Tensor) -> Tensor:
    """A tensor of an 8-bit dtype as one of bytes, in the same memory; others as they are."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
