"""`linear.dense` natively for few rows: the grouped product of one group, which reads each weight once."""

import torch
from torch import Tensor

from kpt_core import Call, Kernel, Refusal

from . import native
from .amx import refusal_for_amx
from .tensors import matrices, readable_call, rows

NAME = "linear.dense"
_MOST_ROWS = 16
#: The end of the only group, by the number of rows.
_ENDS = {count: torch.tensor([count], dtype=torch.int32) for count in range(1, _MOST_ROWS + 1)}


def unsupported(call: Call) -> Refusal | str | None:
    """Return why a call is not for the kernel, or None."""
    count = call.x.shape[0]
    if not 0 < count <= _MOST_ROWS or 0 in call.weight.shape:
        return Refusal("x has {count} rows; this kernel takes 1 to 16 of them, of a weight with numbers", count=count)
    return refusal_for_amx(call.x.dtype)


def forward(call: Call) -> Tensor:
    """Return the product, summed in float32 and rounded once."""
    call = readable_call(NAME, call)
    x, weight, bias = call.x, call.weight, call.bias
    (count, inner), columns = x.shape, weight.shape[0]
    out: Tensor = x.new_empty((count, columns), dtype=x.dtype if bias is None else torch.float32)
    native.run(
        "kpt_grouped_mm",
        *rows(x),
        *rows(out),
        *matrices(weight[None], by_output=True),
        0,
        0,
        _ENDS[count].data_ptr(),
        count,
        inner,
        columns,
        1,
        torch.get_num_threads(),
    )
    return out if bias is None else (out + bias).to(x.dtype)


KERNELS = (
    Kernel(
        NAME,
        forward=f"{__name__}:forward",
        unsupported=f"{__name__}:unsupported",
        dtypes=frozenset({"float32", "bfloat16", "float16"}),
        priority=20,
        deterministic=True,
    ),
)
