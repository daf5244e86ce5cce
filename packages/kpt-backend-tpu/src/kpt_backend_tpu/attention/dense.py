"""`attention.dense` over the live blocks of its plan, and the calls that it refuses."""

import math
from typing import Any

import torch
from torch import Tensor

from kpt_backend_tpu.bridge import call as jax
from kpt_backend_tpu.layouts import Scores
from kpt_backend_tpu.tiles import attention_tile
from kpt_core import Call, Refusal

#: Rows of keys and values that a tile holds at once must fit in VMEM, and the table of live tiles in SMEM.
MOST_DIMS = 512
MOST_TILES = 1 << 16


def unsupported(call: Call) -> Refusal | str | None:
    """Return why a call is not for the kernel, or None."""
    for name in ("bias", "alibi_slopes", "relative_bias"):
        if getattr(call, name) is not None:
            return Refusal("{name} is given; this kernel adds nothing to scores", name=name)
    if call.dropout:
        return Refusal("dropout={rate}; this kernel drops nothing", rate=call.dropout)
    if 0 in (*call.q.shape, *call.k.shape, *call.v.shape):
        return "tensors without elements; needs some"
    for name, dims in (("head_dim", call.q.shape[3]), ("the values' head_dim", call.v.shape[3])):
        if dims > MOST_DIMS:
            return Refusal("{name} is {dims}; this kernel is for {most} at most", name=name, dims=dims, most=MOST_DIMS)
    tiles = _tiles(call)
    if tiles <= MOST_TILES:
        return None
    told = "a table of {tiles} tiles of queries by keys; the {most} that a core's SMEM holds are the most"
    return Refusal(told, tiles=tiles, most=MOST_TILES)


def _tiles(call: Call) -> int:
    """Return the entries of the table of live tiles."""
    queries, keys = call.q.shape[2], call.k.shape[2]
    height, width = attention_tile(queries, keys, call.q.element_size(), call.blocks is not None)
    masks = [mask for mask in (call.intervals, call.blocks) if mask is not None]
    alike = [max((int(mask.shape[dim]) for mask in masks), default=1) for dim in (0, 1)]
    return int(math.prod(alike) * -(-queries // height) * -(-keys // width))


def forward(call: Call) -> Any:
    """Return the output and the log-sum-exp; save the output, the largest scores and the sums of exponentials."""
    out, lse, highest, sums = jax("attention:forward", *_given(call), scores=_scores(call))
    return (out, lse if call.return_lse else None), (out, highest, sums) if call.needs else ()


def backward(
    call: Call, saved: tuple[Tensor, ...], grad_out: Tensor | None, grad_lse: Tensor | None
) -> dict[str, Tensor]:
    """Return the gradients that are needed."""
    needs = tuple(call.needs)
    grads = (grad_out, grad_lse)
    found = jax("attention:backward", *_given(call), *saved, *grads, needs=needs, scores=_scores(call))
    return {name: grad.to(getattr(call, name).dtype) for name, grad in zip(needs, found, strict=True)}


def _given(call: Call) -> tuple[Tensor | None, ...]:
    # A number in a tensor, so that each step of decoding is the same program.
    position = torch.tensor([call.position], dtype=torch.int32).to(call.q.device)
    sinks = None if call.sinks is None else call.sinks.float()
    blocks = call.blocks
    if blocks is not None:  # there may be more than needed, of 128 by 128
        blocks = blocks[:, :, : -(-call.q.shape[2] // 128), : -(-call.k.shape[2] // 128)]
    return call.q, call.k, call.v, call.intervals, blocks, call.block_bits, sinks, position


def _scores(call: Call) -> Scores:
    scale = 1 / math.sqrt(call.q.shape[3]) if call.scale is None else float(call.scale)
    return Scores(call.causal, scale, float(call.softcap))
