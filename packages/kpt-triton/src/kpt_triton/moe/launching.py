"""How many programs a launch has, and how operands are handed to a kernel."""

from collections.abc import Callable
from functools import cache, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
import triton
from torch import Tensor

from kpt_triton.numeric import INTERPRETED
from kpt_triton.tile import Tile

from .mainloop import SCALE_BLOCK

_P = ParamSpec("_P")
_R = TypeVar("_R")

#: Bytes to which addresses and strides must be aligned where descriptors are used.
_ALIGNMENT = 16


def on_its_device(serve: Callable[Concatenate[Any, _P], _R]) -> Callable[Concatenate[Any, _P], _R]:
    """Let `serve` run with the device of its call's first tensor as the current one: Triton launches there."""

    @wraps(serve)
    def serve_there(call: Any, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        with (torch.xpu if call[0].is_xpu else torch.cuda).device_of(call[0]):
            return serve(call, *args, **kwargs)

    return serve_there


@cache
def _processors(device: torch.device) -> int:
    if device.type not in ("cuda", "xpu") or INTERPRETED.value:
        return 1
    properties = torch.get_device_module(device).get_device_properties(device)
    return int(properties.gpu_subslice_count if device.type == "xpu" else properties.multi_processor_count)


def programs(device: torch.device, tiles: int, warps: int) -> int:
    """How many programs share `tiles` tiles: no more than are on the chip at the same time, about."""
    return max(1, min(tiles, _processors(device) * max(1, 16 // warps)))


def most_tiles(rows: int, experts: int, height: int) -> int:
    """The most tiles of `height` rows that `rows` rows of any load have; rows of no expert are an expert more."""
    return rows // height + min(experts + 1, rows)


def padded(experts: int) -> int:
    """A power of two above the number of experts."""
    return triton.next_power_of_2(experts + 1)  # type: ignore[no-any-return]


def precision(x: Tensor) -> str:
    """Return how float32 is multiplied: on NVIDIA's chips as torch's own setting for products says, else in full."""
    if x.dtype is not torch.float32 or x.is_xpu or torch.version.hip is not None:
        return "ieee"
    matmul = torch.backends.cuda.matmul
    if hasattr(matmul, "fp32_precision"):
        return "tf32" if matmul.fp32_precision == "tf32" else "ieee"
    return "tf32" if matmul.allow_tf32 else "ieee"


def scales_of(scale: Tensor | None, weight: Tensor) -> str:
    """What the scales `[experts, a, b]` of `weight` `[experts, K, N]` are of: "n", "k", "block", or "" for none."""
    if scale is None:
        return ""
    _, inner, columns = weight.shape
    sizes = tuple(scale.shape[1:])
    # Blocks first: one block is one scale too, and for some shapes also one for each column or of K.
    if sizes == (-(-inner // SCALE_BLOCK.value), -(-columns // SCALE_BLOCK.value)):
        return "block"
    return "n" if sizes == (1, columns) else "k"


def check_scales(kind: str, tile: Tile) -> None:
    """Raise `ValueError` where a step of the tile would go past one block of scales."""
    if kind == "block" and tile.k > SCALE_BLOCK.value:
        raise ValueError(f"tile {tile}: k must be at most {SCALE_BLOCK.value} with scales of blocks; got {tile.k}")


def inner_contiguous(x: Tensor) -> Tensor:
    """x, or a copy if its last dimension is not contiguous."""
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def rows_descriptor(x: Tensor, tile: Tile) -> Any | None:
    """A descriptor of x `[rows, K]` with blocks `[m, k]`; None where x is not aligned."""
    if not tile.descriptors or x.shape[0] == 0 or x.shape[1] == 0:
        return None
    return _descriptor(x, x.shape[0], x.shape[1], x.stride(0), (tile.m, tile.k))


def weight_descriptor(weight: Tensor, tile: Tile, width: int) -> tuple[Any, str]:
    """A descriptor of all experts' matrices and its layout; the tensor itself and "" where it can't be had.

    Args:
        weight: `[experts, K, N]`.
        tile: of the product.
        width: columns of a block.
    """
    experts, inner, columns = weight.shape
    found: Any | None = None
    layout = ""
    if tile.descriptors and weight.numel() > 0:
        stride_e, stride_k, stride_n = weight.stride()
        if stride_k == 1 and stride_e == columns * stride_n and stride_n >= inner:
            layout = "NK"
            found = _descriptor(weight, experts * columns, inner, stride_n, (width, tile.k))
        elif stride_n == 1 and stride_e == inner * stride_k and stride_k >= columns and inner % tile.k == 0:
            # Past K begins the next expert, whose numbers a zero in x would not stop if they are no numbers.
            layout = "KN"
            found = _descriptor(weight, experts * inner, columns, stride_k, (tile.k, width))
    return (weight, "") if found is None else (found, layout)


def _descriptor(tensor: Tensor, rows: int, columns: int, stride: int, block: tuple[int, int]) -> Any | None:
    places = (tensor.data_ptr(), stride * tensor.element_size())
    # Rows that overlap (an expanded tensor's) are nothing that hardware promises to load.
    if any(place % _ALIGNMENT for place in places) or rows >= 2**31 or stride < columns:
        return None
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(tensor, [rows, columns], [stride, 1], list(block))
