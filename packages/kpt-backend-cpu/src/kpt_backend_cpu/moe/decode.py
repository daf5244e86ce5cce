"""`moe.experts` of a few tokens natively: the weights are read once, in one parallel region, and nothing is sorted."""

import torch
from torch import Tensor

from kpt_backend_cpu import amx, native
from kpt_core import Call, Refusal

from .experts_numbers import WIDE_WEIGHTS, has_pairs, numbers, prepared

#: From more tokens on the products of `experts` are faster.
MAX_TOKENS = 64
#: So many rows that share an expert, on average, are better multiplied as a matrix.
MAX_ROWS_OF_EXPERT = 8
#: The same where tiles multiply weights of 8 bits.
MAX_ROWS_OF_EXPERT_BY_TILES = 5


def unsupported(call: Call) -> Refusal | str | None:
    """Why a call is not for this kernel, or None."""
    tokens, top_k = call.top_k_index.shape
    if tokens > MAX_TOKENS:
        return Refusal("{tokens} tokens; this kernel is for {most} at most", tokens=tokens, most=MAX_TOKENS)
    weight = call.gate_up_proj
    # Tiles gain from 8 bits alone, and where a column's numbers are neighbours.
    by_tiles = amx.TILES and weight.itemsize == 1 and call.x.dtype is torch.bfloat16
    along = by_tiles and weight.stride(-2 if call.transposed else -1) == 1
    most = MAX_ROWS_OF_EXPERT_BY_TILES if along else MAX_ROWS_OF_EXPERT
    pairs, num_experts = tokens * top_k, weight.shape[0]
    if pairs > most * num_experts:
        reason = "{rows} rows for {experts} experts; needs {most} each at most"
        return Refusal(reason, rows=pairs, experts=num_experts, most=most)
    return WIDE_WEIGHTS if call.top_k_weights.dtype is torch.float64 else None


def forward(call: Call) -> Tensor:
    """`moe.experts`, summed in float32, without gradients."""
    call = prepared(call)
    out = torch.empty_like(call.x, memory_format=torch.contiguous_format)
    if not has_pairs(call):
        return out.zero_()
    native.run("kpt_experts_decode", *numbers(call, out))
    return out
