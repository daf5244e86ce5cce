"""`linear.dense` natively for few rows: the grouped product of one group, which reads each weight once."""

import math
from collections.abc import Callable
from ctypes import addressof, c_int32, sizeof

import torch
from torch import Tensor

from kpt_backend_cpu import native
from kpt_backend_cpu.amx import LEFT_TO_PYTORCH, refusal_for_amx
from kpt_backend_cpu.structures import NO_BIAS
from kpt_backend_cpu.tensors import DTYPES, LOW, in_memory, matrices, readable_call, rows
from kpt_core import Call, Refusal

NAME = "linear.dense"
_MOST_ROWS = 16
#: By AMX in bfloat16, of shorter lines and of longer ones: the native kernel's `turned.h`.
_MOST_TURNED, _MOST_LONG, _LONG = 32, 64, 1024
#: The end of the only group, by the number of rows; no tensor, since a module may be imported under a mode of torch's.
_COUNTS = (c_int32 * (_MOST_LONG + 1))(*range(_MOST_LONG + 1))
_ENDS = [addressof(_COUNTS) + sizeof(c_int32) * count for count in range(_MOST_LONG + 1)]


def unsupported(call: Call) -> Refusal | str | None:
    """Return why a call is not for the kernel, or None."""
    count, most = call.x.shape[:-1].numel(), _MOST_ROWS
    turned = count > most and call.x.dtype is torch.bfloat16 and call.weight.is_contiguous()
    if turned and native.library().instruction_set == "amx_bf16":
        most = _MOST_LONG if call.x.shape[-1] >= _LONG else _MOST_TURNED
    if not 0 < count <= most or 0 in call.weight.shape:
        return Refusal(
            "x has {count} rows; this kernel takes 1 to {most}, of a weight with numbers", count=count, most=most
        )
    return refusal_for_amx(call.x.dtype)


def forward(call: Call) -> Tensor:
    """Return the product, summed in float32 and rounded once."""
    call = readable_call(NAME, call)
    shape, weight, bias = call.x.shape, call.weight, call.bias
    x = call.x.flatten(0, -2)
    (count, inner), columns = x.shape, weight.shape[0]
    out: Tensor = x.new_empty((count, columns))
    native.run(
        "kpt_grouped_mm",
        *rows(x),
        *rows(out),
        *matrices(weight[None], by_output=True),
        0,
        0,
        _ENDS[count],
        count,
        inner,
        columns,
        1,
        torch.get_num_threads(),
        *(0, *_bias_of(bias)),
    )
    return out.view(*shape[:-1], columns)


def _bias_of(bias: Tensor | None) -> tuple[int, int, int]:
    """Return the numbers of `GroupedMM.bias`."""
    return NO_BIAS if bias is None else (bias.data_ptr(), 0, DTYPES[bias.dtype])


def prepare(call: Call) -> Callable[..., Tensor] | None:
    """Return what computes all calls that look like this one, or None where `forward` is as quick."""
    if LEFT_TO_PYTORCH and call.x.dtype is torch.bfloat16:
        return None  # the environment decides
    if not (call.x.is_contiguous() and call.weight.is_contiguous()):
        return None
    (*lead, inner), columns, dtype, make = call.x.shape, call.weight.shape[0], call.x.dtype, type(call)
    count = math.prod(lead)
    of_x, of_out = (inner, DTYPES[dtype]), (columns, DTYPES[dtype])
    of_weight = (*matrices(call.weight[None], by_output=True)[1:], 0, 0)
    sizes = (_ENDS[count], count, inner, columns, 1)
    shape, threads = (*lead, columns), torch.get_num_threads

    def computed(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        place, own = x.data_ptr(), weight.data_ptr()
        if place < LOW or own < LOW or x.is_neg() or weight.is_neg():
            return forward(make(x, weight, bias, (), None))
        if bias is not None and not (bias.is_contiguous() and in_memory(bias)):
            return forward(make(x, weight, bias, (), None))
        out = x.new_empty(shape)
        of_bias = NO_BIAS if bias is None else (bias.data_ptr(), 0, of_x[1])
        native.run(
            "kpt_grouped_mm", place, *of_x, out.data_ptr(), *of_out, own, *of_weight, *sizes, threads(), 0, *of_bias
        )
        return out

    return computed
