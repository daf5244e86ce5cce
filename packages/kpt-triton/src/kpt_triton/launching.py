"""How many programs a launch has, and how operands are handed to a kernel."""

from collections.abc import Callable
from functools import cache, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from kpt_triton.chips import chip_of, converts_codes
from kpt_triton.numeric import INTERPRETED
from kpt_triton.tile import Tile

_P = ParamSpec("_P")
_R = TypeVar("_R")

#: Bytes to which addresses and strides must be aligned where descriptors are used.
_ALIGNMENT = 16
#: As what 8-bit numbers are handed to kernels that widen them by integers: the type says of which format they are.
_AS_INTEGERS = {torch.float8_e4m3fn: torch.uint8, torch.float8_e5m2: torch.int8}


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


def precision(x: Tensor) -> str:
    """Return how float32 is multiplied: on NVIDIA's chips as torch's own setting for products says, else in full."""
    if x.dtype is not torch.float32 or x.is_xpu or torch.version.hip is not None:
        return "ieee"
    matmul = torch.backends.cuda.matmul
    if hasattr(matmul, "fp32_precision"):
        return "tf32" if matmul.fp32_precision == "tf32" else "ieee"
    return "tf32" if matmul.allow_tf32 else "ieee"


def as_read(x: Tensor) -> Tensor:
    """Return 8-bit numbers as integers where the chip does not convert them; all else as it is."""
    kind = _AS_INTEGERS.get(x.dtype)
    return x if kind is None or converts_codes(chip_of(x.device)) else x.view(kind)


def inner_contiguous(x: Tensor) -> Tensor:
    """x, or a copy if its last dimension is not contiguous."""
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def rows_descriptor(x: Tensor, tile: Tile) -> Any | None:
    """A descriptor of x `[rows, K]` with blocks `[m, k]`; None where x is not aligned."""
    if not tile.descriptors or x.shape[0] == 0 or x.shape[1] == 0:
        return None
    return descriptor(x, x.shape[0], x.shape[1], x.stride(0), (tile.m, tile.k))


def descriptor(tensor: Tensor, rows: int, columns: int, stride: int, block: tuple[int, int]) -> Any | None:
    """Return a descriptor of rows that are `stride` numbers apart; None where they are not aligned or overlap."""
    places = (tensor.data_ptr(), stride * tensor.element_size())
    # Rows that overlap (an expanded tensor's) are nothing that hardware promises to load.
    if any(place % _ALIGNMENT for place in places) or rows >= 2**31 or stride < columns:
        return None
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(tensor, [rows, columns], [stride, 1], list(block))
