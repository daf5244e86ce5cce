"""`fp8.quantize` natively: each number is read once for its scale and once for its code, both bit for bit."""

import torch
from torch import Tensor

from kpt_backend_cpu import native
from kpt_backend_cpu.structures import ROUNDINGS
from kpt_backend_cpu.tensors import DTYPES, readable
from kpt_core import Call, Refusal

from .products import FORMATS

NAME = "fp8.quantize"
#: Rows and columns that share a scale; none for all of them.
_BLOCKS = {"row": (1, 0), "1x128": (1, 128), "128x128": (128, 128), "1x32": (1, 32)}


def unsupported(call: Call) -> Refusal | str | None:
    """Return why a call is not for this kernel, or None."""
    if call.dtype not in FORMATS:
        return Refusal("codes of {dtype}; this kernel gives float8_e4m3fn and float8_e5m2", dtype=call.dtype)
    if call.stochastic:
        return "stochastic rounding; this kernel rounds to nearest even"
    return None


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """Return the codes and their scale."""
    x, given = readable(NAME, "x", call.x.detach(), whole=True).contiguous(), call.scale
    codes = torch.empty(x.shape, dtype=call.dtype, device=x.device)
    columns = x.shape[-1] if x.dim() else 1
    rows, matrix_rows = x.numel() // max(columns, 1), x.shape[-2] if x.dim() > 1 else 1
    block_rows, block_columns = _BLOCKS.get(call.granularity, (0, 0))
    if given is None:
        scale = x.new_ones(_scale_shape(x, block_rows, block_columns), dtype=torch.float32)
    else:
        scale = readable(NAME, "scale", given.detach().to(torch.float32), whole=True).contiguous()
    if x.numel():
        native.run(
            "kpt_quantize",
            *(x.data_ptr(), columns, DTYPES[x.dtype], codes.data_ptr(), scale.data_ptr()),
            *(rows, columns, matrix_rows, block_rows, block_columns or columns, DTYPES[call.dtype]),
            *(given is not None, ROUNDINGS[call.scale_rounding], torch.get_num_threads()),
        )
    if given is not None:
        return codes, given.detach().clone(memory_format=torch.contiguous_format)
    return codes, scale.to(call.scale_dtype)


def _scale_shape(x: Tensor, rows: int, columns: int) -> list[int]:
    if rows == 0:
        return []
    others, last = list(x.shape[:-1]), x.shape[-1]
    if columns == 0:
        return others
    if rows > 1:
        others[-1] = -(-others[-1] // rows)
    return [*others, -(-last // columns)]
