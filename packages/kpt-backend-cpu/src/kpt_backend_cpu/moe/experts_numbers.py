"""A call of `moe.experts` as the native kernels take it: tensors that they can read, and the numbers of a structure."""

import torch
from torch import Tensor

from kpt_backend_cpu.structures import ACTIVATIONS
from kpt_core import Call

from .tensors import address, in_float32, matrices, readable_call, rows

NAME = "moe.experts"


def prepared(call: Call) -> Call:
    """`call` with tensors that kernels can read. Keep it until they have run: copies live as long as it does."""
    call = readable_call(NAME, call, whole=("top_k_index", "top_k_weights"))
    return in_float32(call, "gate_up_scale", "down_scale")


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
        *rows(out),
        index.data_ptr(),
        index.dtype is torch.int64,
        *rows(call.top_k_weights),
        *matrices(up, call.gate_up_scale, by_output=by_output),
        *matrices(down, call.down_scale, by_output=by_output),
        *rows(call.gate_up_proj_bias),
        *rows(call.down_proj_bias),
        *(ACTIVATIONS[call.activation], call.interleaved, limit is not None, call.alpha, call.beta, limit or 0.0),
        address(order),
        address(offsets),
        *rows(h),
        *index.shape,
        num_experts,
        hidden,
        width,
        intermediate,
        torch.get_num_threads(),
    )
