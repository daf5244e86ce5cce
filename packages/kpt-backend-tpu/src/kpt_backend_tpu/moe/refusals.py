"""Which calls the kernels refuse, beside those that their rows in the table rule out: a sentence, or None."""

import torch

from kpt_backend_tpu.tiles import most_rows
from kpt_core import Call, Refusal


def too_many_rows(rows: int, itemsize: int) -> Refusal | None:
    """Return why so many rows are not for JAX's grouped kernels, or None."""
    most = most_rows(itemsize)
    if rows <= most:
        return None
    return Refusal("{rows} rows; JAX's grouped kernels count the tiles of {most} at most rightly", rows=rows, most=most)


def grouped(call: Call) -> Refusal | None:
    """Return why a call of `moe.grouped_mm` or `moe.grouped_mm_wgrad` is not for its kernel, or None."""
    return too_many_rows(call.x.shape[0], call.x.element_size())


def experts(call: Call) -> Refusal | str | None:
    """Return why a call of `moe.experts` is not for its kernel, or None."""
    if call.gate_up_scale is not None or call.down_scale is not None:
        return "weights of 8 bits; needs those of x's dtype"
    if call.top_k_weights.dtype is torch.float64:
        return "routing weights in float64; needs float32, bfloat16 or float16"
    if 0 in (*call.gate_up_proj.shape, *call.down_proj.shape):
        return "matrices without elements; needs some"
    return too_many_rows(call.top_k_index.numel(), call.x.element_size())
