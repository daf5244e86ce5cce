"""Right kernels of 8-bit numbers as other hands would write them."""

from typing import Any

import torch
from torch import Tensor

from kpt_fp8.dequantize import dequantize
from kpt_fp8.quantize import quantize
from kpt_fp8.scales import BLOCKS


def wide_of(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


def spread(scale: Tensor, shape: torch.Size, granularity: str) -> Tensor:
    """The scale of each number, looked up by its row and column."""
    rows, columns = BLOCKS[granularity]
    if rows is None:
        return scale.expand(shape)
    if columns is None:
        return scale.unsqueeze(-1).expand(shape)
    wide = scale.index_select(-1, torch.arange(shape[-1], device=scale.device) // columns)
    return wide if rows == 1 else wide.index_select(-2, torch.arange(shape[-2], device=scale.device) // rows)


def by_table(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers of codes, read from a table of all 256."""
    table = torch.arange(256, dtype=torch.uint8).view(codes.dtype).to(dtype)
    return table[codes.view(torch.uint8).long()]


def dequantize_by_table(call: Any) -> Tensor:
    """A kernel of `fp8.dequantize`."""
    wide = wide_of(call.dtype)
    numbers = by_table(call.codes, wide) * spread(call.scale.to(wide), call.codes.shape, call.granularity)
    return numbers.to(call.dtype).contiguous()


def rows_of(call: Any, wide: torch.dtype) -> Tensor:
    """Activations of `fp8.linear`, quantised and back where that is asked for."""
    if call.activations == "none":
        return call.x.detach().to(wide)
    codes, scale = quantize.reference(
        call.x,
        call.input_scale,
        dtype=call.activation_dtype,
        granularity=call.activations,
        scale_rounding=call.activation_rounding,
    )
    return dequantize.reference(codes, scale, granularity=call.activations, dtype=wide)


def _weight(call: Any) -> Tensor:
    scale = spread(call.scale.double(), call.weight.shape, call.granularity)
    return by_table(call.weight, torch.float64) * scale


def linear_in_float64(call: Any) -> Tensor:
    """A kernel of `fp8.linear` that computes in float64."""
    out = rows_of(call, wide_of(call.x.dtype)).double() @ _weight(call).t()
    return (out if call.bias is None else out + call.bias).to(call.x.dtype)


def linear_in_float64_backward(call: Any, saved: tuple[Tensor, ...], grad: Tensor) -> dict[str, Tensor]:
    """Its gradients."""
    made = {"x": lambda: grad.double() @ _weight(call), "bias": lambda: grad.double().sum(0)}
    return {name: made[name]().to(grad.dtype) for name in call.needs}


def scaled_mm_by_blocks(call: Any) -> Tensor:
    """A kernel of `fp8.scaled_mm` that sums codes of 32 columns at a time, then scales: as DeepGEMM promotes sums."""
    wide = wide_of(call.out_dtype)
    a, b = call.a.to(wide), call.b.t().to(wide)
    scale_b = call.scale_b.t() if call.scale_b.dim() == 2 else call.scale_b
    left = spread(call.scale_a.to(wide), a.shape, call.granularity_a)
    right = spread(scale_b.to(wide), b.shape, call.granularity_b)
    out = torch.zeros(a.shape[0], b.shape[0], dtype=wide, device=a.device)
    for k in range(0, a.shape[1], 32):
        # All of these columns have one scale in each row.
        own = left[:, k : k + 1] * right[:, k : k + 1].t()
        out += (a[:, k : k + 32] @ b[:, k : k + 32].t()) * own
    return (out if call.bias is None else out + call.bias).to(call.out_dtype)
