"""Sequences and padding, for networks that look at a token's neighbours."""

import torch
from torch import Tensor

from kpt_core import InputError


def sequence_of_tokens(owner: str, x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """`[tokens]` int64: a number for the sequence of each token; tokens past the last sequence are one of their own.

    Raises:
        InputError: `cu_seqlens` is no list of positions on x's device.
    """
    if cu_seqlens is None:
        return torch.zeros(x.shape[0], dtype=torch.int64, device=x.device)
    if cu_seqlens.dim() != 1 or cu_seqlens.dtype not in (torch.int32, torch.int64) or cu_seqlens.device != x.device:
        raise InputError(
            f"{owner}: cu_seqlens must be int32 of shape [sequences + 1] on {x.device}; "
            f"got {cu_seqlens.dtype} {list(cu_seqlens.shape)} on {cu_seqlens.device}"
        )
    positions = torch.arange(x.shape[0], dtype=cu_seqlens.dtype, device=x.device)
    return torch.searchsorted(cu_seqlens, positions, right=True)


def without_padding(x: Tensor, mask: Tensor | None) -> Tensor:
    """The tokens `[tokens, hidden_size]`, zero where `mask` `[tokens]` is False, whatever they hold there."""
    return x if mask is None else torch.where(mask.unsqueeze(1), x, 0)


def require_tokens(owner: str, x: Tensor, hidden_size: int) -> None:
    """Raise `InputError` unless x is `[tokens, hidden_size]`."""
    if x.dim() != 2 or x.shape[1] != hidden_size:
        raise InputError(f"{owner}: x must be [tokens, {hidden_size}]; got {list(x.shape)}")
