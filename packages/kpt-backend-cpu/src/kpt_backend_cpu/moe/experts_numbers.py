"""A call of `moe.experts` as the native kernels take it: tensors that they can read, and the numbers of a structure."""

import torch
from torch import Tensor

from kpt_backend_cpu.structures import ACTIVATIONS
from kpt_backend_cpu.tensors import in_float32, matrices, readable_call, rows
from kpt_core import Call

NAME = "moe.experts"
#: Why routing weights can't be read.
WIDE_WEIGHTS = "routing weights in float64; needs float32, bfloat16 or float16"
#: What `rows` gives for nothing, here without a call.
_NONE = (0, 0, 0)


def prepared(call: Call) -> Call:
    """`call` with tensors that kernels can read. Keep it until they have run: copies live as long as it does."""
    call = readable_call(NAME, call, whole=("top_k_index", "top_k_weights"))
    quantised = call.gate_up_scale is not None or call.down_scale is not None
    return in_float32(call, "gate_up_scale", "down_scale") if quantised else call


def has_pairs(call: Call) -> bool:
    """Whether there is anything to compute: else the results and all gradients are zero."""
    return 0 not in (call.x.numel(), call.top_k_index.numel())


def numbers(
    call: Call,
    out: Tensor | None,
    order: Tensor | None = None,
    offsets: Tensor | None = None,
    h: Tensor | None = None,
) -> tuple[float, ...]:
    """The numbers of `structures.Experts`, of a call that is `prepared`."""
    index, up, down, limit = call.top_k_index, call.gate_up_proj, call.down_proj, call.limit
    (num_experts, hidden, width), intermediate = up.shape, down.shape[1]
    if by_output := not call.transposed:
        hidden, width, intermediate = width, hidden, down.shape[2]
    return (
        *rows(call.x),
        *(_NONE if out is None else rows(out)),
        index.data_ptr(),
        index.dtype is torch.int64,
        *rows(call.top_k_weights),
        *matrices(up, call.gate_up_scale, by_output=by_output),
        *matrices(down, call.down_scale, by_output=by_output),
        *(_NONE if call.gate_up_proj_bias is None else rows(call.gate_up_proj_bias)),
        *(_NONE if call.down_proj_bias is None else rows(call.down_proj_bias)),
        *(ACTIVATIONS[call.activation], call.interleaved, limit is not None, call.alpha, call.beta, limit or 0.0),
        0 if order is None else order.data_ptr(),
        0 if offsets is None else offsets.data_ptr(),
        *(_NONE if h is None else rows(h)),
        *index.shape,
        num_experts,
        hidden,
        width,
        intermediate,
        torch.get_num_threads(),
    )
