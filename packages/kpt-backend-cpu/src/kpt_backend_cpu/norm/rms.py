"""`norm.rms` natively: each row is read for its mean square, and once more from the cache."""

from collections.abc import Callable

import torch
from torch import Tensor

from kpt_backend_cpu import native
from kpt_backend_cpu.tensors import DTYPES, in_memory, readable
from kpt_core import Call, Refusal

NAME = "norm.rms"


def unsupported(call: Call) -> Refusal | str | None:
    """Return why a call is not for the kernel, or None."""
    return "x has no numbers" if call.x.numel() == 0 else None


def forward(call: Call) -> Tensor:
    """Return the rows, rounded once."""
    x = readable(NAME, "x", call.x.detach(), whole=True).contiguous()
    weight = readable(NAME, "weight", call.weight.detach(), whole=True)
    out, columns, dtype = torch.empty_like(x), x.shape[-1], DTYPES[x.dtype]
    native.run(
        "kpt_rms_norm",
        *(x.data_ptr(), columns, dtype, out.data_ptr(), columns, dtype, weight.data_ptr()),
        *(x.numel() // columns, columns, call.eps, torch.get_num_threads()),
    )
    return out


def prepare(call: Call) -> Callable[..., Tensor] | None:
    """Return what computes all calls that look like this one, or None where `forward` is as quick."""
    if not (call.x.is_contiguous() and call.weight.is_contiguous()):
        return None
    columns, dtype, threads = call.x.shape[-1], DTYPES[call.x.dtype], torch.get_num_threads
    of_rows, sizes, make = (columns, dtype), (call.x.numel() // columns, columns, call.eps), type(call)
    shape = tuple(call.x.shape)

    def computed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if not in_memory(x, weight):
            return forward(make(x, weight, eps, (), None))
        out = x.new_empty(shape)
        native.run(
            "kpt_rms_norm", x.data_ptr(), *of_rows, out.data_ptr(), *of_rows, weight.data_ptr(), *sizes, threads()
        )
        return out

    return computed
