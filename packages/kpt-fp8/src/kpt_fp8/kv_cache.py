"""Keys and values of attention in 8 bits: half the memory of a cache in bfloat16."""

from typing import NamedTuple

import torch
from torch import Tensor

from kpt_core import InputError

from .dequantize import dequantize
from .quantize import quantize

#: One scale for each token and head, or one for all, as checkpoints give it (`k_scale`, `v_scale`).
GRANULARITIES = ("row", "tensor")


class QuantizedKV(NamedTuple):
    """Codes and scales of keys and values.

    Attributes:
        keys, values: `[..., head_dim]` of an 8-bit format.
        key_scale, value_scale: float32 `[...]` for granularity `row`, `[]` for `tensor`.
    """

    keys: Tensor
    values: Tensor
    key_scale: Tensor
    value_scale: Tensor


def quantize_kv(
    keys: Tensor,
    values: Tensor,
    *,
    granularity: str = "row",
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    dtype: torch.dtype = torch.float8_e4m3fn,
) -> QuantizedKV:
    """Quantise keys and values by op `fp8.quantize`.

    Args:
        keys: `[..., head_dim]`, as in `[batch, heads, tokens, head_dim]`; float32, bfloat16 or float16.
        values: likewise.
        granularity: `row`, a scale for each token and head, which needs no calibration; or `tensor`, one for all.
        key_scale: static, what to divide keys by, `[]` for `tensor`; None: what they ask for. A cache that grows needs
            it with `tensor`, since all its tokens share a scale.
        value_scale: likewise.
        dtype: of the codes.

    Raises:
        InputError: no such granularity, or a shape or dtype does not fit.
    """
    if granularity not in GRANULARITIES:
        raise InputError(f"quantize_kv: granularity must be 'row' or 'tensor'; got {granularity!r}")
    codes, scale = quantize(keys.detach(), key_scale, dtype=dtype, granularity=granularity)
    others, other = quantize(values.detach(), value_scale, dtype=dtype, granularity=granularity)
    return QuantizedKV(codes, others, scale, other)


def dequantize_kv(cache: QuantizedKV, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    """Return the keys and values that a cache stands for, in `dtype`."""
    pairs = (cache.keys, cache.key_scale), (cache.values, cache.value_scale)
    keys, values = (
        dequantize(codes, scale, granularity="row" if scale.dim() else "tensor", dtype=dtype) for codes, scale in pairs
    )
    return keys, values
