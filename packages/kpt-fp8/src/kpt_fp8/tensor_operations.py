"""Run torch's own operations on an `FP8Tensor`: each handler works on codes and scale; sums alone dequantise."""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Self, cast

import torch
from torch import Tensor

from kpt_core import InputError

from .dequantize import check_quantized, dequantize
from .formats import require_floating
from .quantize import quantize
from .scales import BLOCKS, scale_shape

_aten = torch.ops.aten


class ScaledCodes(Tensor):
    """The data of an `FP8Tensor`, which has its operations."""

    #: As quantised, also where `transposed`. (`data` is a name that torch keeps for itself.)
    codes: Tensor
    scale: Tensor
    granularity: str
    transposed: bool

    @staticmethod
    def __new__(  # noqa: D102  documented by `FP8Tensor`
        cls: type[Self],
        codes: Tensor,
        scale: Tensor,
        granularity: str,
        dtype: torch.dtype = torch.float32,
        transposed: bool = False,
    ) -> Self:
        shape, strides = codes.shape, codes.stride()
        if transposed:
            shape, strides = shape[::-1], strides[::-1]
        return torch.Tensor._make_wrapper_subclass(
            cls, shape, strides=strides, dtype=dtype, device=codes.device, layout=codes.layout, requires_grad=False
        )

    def __init__(
        self,
        codes: Tensor,
        scale: Tensor,
        granularity: str,
        dtype: torch.dtype = torch.float32,
        transposed: bool = False,
    ) -> None:
        require_floating("FP8Tensor", "dtype", dtype)
        check_quantized("FP8Tensor", "codes", codes, scale, granularity)
        if transposed and codes.dim() != 2:
            raise InputError(
                f"FP8Tensor: a transposed one has two dimensions; got codes of {list(codes.shape)}: dequantize() first"
            )
        self.codes = codes
        self.scale = scale
        self.granularity = granularity
        self.transposed = transposed

    def like(self, codes: Tensor, scale: Tensor, *, dtype: torch.dtype | None = None, turn: bool = False) -> Self:
        """Return one of other codes and scale; `turn` makes it transposed if this is not, and the other way round."""
        return type(self)(codes, scale, self.granularity, dtype or self.dtype, self.transposed ^ turn)


def _alias(x: ScaledCodes) -> ScaledCodes:
    return x.like(x.codes.detach(), x.scale.detach())


def _clone(x: ScaledCodes, *, memory_format: torch.memory_format | None = None) -> ScaledCodes:
    return x.like(x.codes.clone(), x.scale.clone())


def _empty_like(
    x: ScaledCodes, *, dtype: torch.dtype | None = None, device: torch.device | None = None, **others: object
) -> ScaledCodes:
    codes, scale = torch.empty_like(x.codes, device=device), torch.empty_like(x.scale, device=device)
    return x.like(codes, scale, dtype=dtype)


def _to_copy(
    x: ScaledCodes,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    non_blocking: bool = False,
    **others: object,
) -> ScaledCodes:
    if dtype is not None:
        require_floating("FP8Tensor.to", "dtype", dtype)
    codes = x.codes.to(device, non_blocking=non_blocking, copy=True)
    return x.like(codes, x.scale.to(device, non_blocking=non_blocking, copy=True), dtype=dtype)


def _copy(x: ScaledCodes, source: Tensor, non_blocking: bool = False) -> ScaledCodes:
    if not isinstance(source, type(x)) or about(source) != about(x):
        what = " ".join(map(str, about(source))) if isinstance(source, type(x)) else f"a tensor of {source.dtype}"
        raise InputError(
            f"FP8Tensor.copy_: expected one like {' '.join(map(str, about(x)))}; got {what}: quantise it alike with "
            "quantize_to_fp8"
        )
    x.codes.copy_(source.codes, non_blocking=non_blocking)
    x.scale.copy_(source.scale, non_blocking=non_blocking)
    return x


def _add(x: ScaledCodes, other: Tensor, *, alpha: float = 1) -> ScaledCodes:
    """Add plain numbers in place, as PEFT merges an adapter, and quantise the sum alike."""
    if x.transposed or isinstance(other, ScaledCodes) or list(other.shape) != list(x.shape):
        raise InputError(
            f"FP8Tensor: in place, it takes a plain tensor of its shape {list(x.shape)}; got {type(other).__name__} "
            f"{list(other.shape)}: dequantize() first"
        )
    numbers = dequantize(x.codes, x.scale, granularity=x.granularity, dtype=torch.float32)
    return replace(x, numbers.add_(other.to(torch.float32), alpha=alpha))


def replace(x: ScaledCodes, numbers: Tensor) -> ScaledCodes:
    """Quantise numbers as `x` is, into its memory."""
    if x.transposed or list(numbers.shape) != list(x.shape):
        raise InputError(f"FP8Tensor: it takes numbers of its shape {list(x.shape)}; got {list(numbers.shape)}")
    if not bool(numbers.isfinite().all()):
        raise InputError("FP8Tensor: what it becomes holds NaN or infinity: look at what is added or set")
    powers = x.scale.dtype is torch.float8_e8m0fnu
    codes, scale = quantize(
        numbers.to(torch.float32),
        dtype=x.codes.dtype,
        granularity=x.granularity,
        scale_dtype=x.scale.dtype,
        scale_rounding="up" if powers else "none",
    )
    x.codes.copy_(codes)
    x.scale.copy_(scale)
    return x


def _subtract(x: ScaledCodes, other: Tensor, *, alpha: float = 1) -> ScaledCodes:
    return _add(x, other, alpha=-alpha)


def _sum(x: ScaledCodes, other: Tensor, *, alpha: float = 1) -> Tensor:
    """Return the sum with plain numbers, which is plain too."""
    numbers = dequantize(x.codes, x.scale, granularity=x.granularity, dtype=x.dtype)
    if isinstance(other, ScaledCodes):
        raise InputError("FP8Tensor: a sum is with plain numbers; got two of 8-bit codes: dequantize() them first")
    return torch.add(numbers.t() if x.transposed else numbers, other, alpha=alpha)


def _difference(x: ScaledCodes, other: Tensor, *, alpha: float = 1) -> Tensor:
    return _sum(x, other, alpha=-alpha)


def about(x: ScaledCodes) -> tuple[object, ...]:
    """Return what two must have in common for one to take the other's place."""
    return x.codes.dtype, list(x.codes.shape), x.granularity, x.scale.dtype, "transposed" if x.transposed else "upright"


def _t(x: ScaledCodes) -> ScaledCodes:
    return _permute(x, list(range(x.dim()))[::-1])


def _transpose(x: ScaledCodes, first: int, second: int) -> ScaledCodes:
    order = list(range(x.dim()))
    one, other = _dim(x, first), _dim(x, second)
    order[one], order[other] = other, one
    return _permute(x, order)


def _permute(x: ScaledCodes, dims: list[int]) -> ScaledCodes:
    order = [_dim(x, dim) for dim in dims]
    if sorted(order) != list(range(x.dim())):
        raise InputError(f"FP8Tensor.permute: needs each dimension of {list(x.shape)} once; got {list(dims)}")
    if order == sorted(order):
        return _alias(x)
    if x.dim() != 2:
        raise InputError(
            f"FP8Tensor: what has two dimensions can be transposed; got {list(x.shape)}: dequantize() first"
        )
    return x.like(x.codes.detach(), x.scale.detach(), turn=True)


def _dim(x: ScaledCodes, dim: int) -> int:
    if not -x.dim() <= dim < x.dim():
        raise InputError(
            f"FP8Tensor: no dimension {dim}; got {list(x.shape)}: give one from {-x.dim()} to {x.dim() - 1}"
        )
    return dim % x.dim()


class Flat(Tensor):
    """A view `[numbers]` of an `FP8Tensor`. FSDP2 takes one and keeps it, unread; it has no operation but `detach`."""

    whole: ScaledCodes

    @staticmethod
    def __new__(cls: type["Flat"], whole: ScaledCodes) -> "Flat":  # noqa: D102  documented by the class
        made: Flat = torch.Tensor._make_wrapper_subclass(
            cls, (whole.numel(),), dtype=whole.dtype, device=whole.device, requires_grad=False
        )
        made.whole = whole
        return made

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]  # no name in torch's stub
        return f"{type(self).__name__}({self.whole!r})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it as if it were no class method
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> "Flat":
        if func is _aten.detach.default:
            return cls(args[0].whole)
        raise InputError(
            f"FP8Tensor: torch's operation {func} is not defined for a flat view of 8-bit codes with scales: call "
            ".dequantize() on the tensor first. If this came from DistributedDataParallel, which broadcasts all "
            "parameters: name the FP8 weights to its _set_params_and_buffers_to_ignore_for_model, as "
            "convert_model_to_fp8 does for the model that it returns"
        )


def _view(x: ScaledCodes, size: list[int]) -> Tensor:
    if list(size) == [-1]:
        return Flat(x)
    if list(size) != list(x.shape):
        raise InputError(
            f"FP8Tensor.view: its rows and columns share scales and stay as they are; got {list(size)} for "
            f"{list(x.shape)}: dequantize() first"
        )
    return _alias(x)


def _as_strided(
    x: ScaledCodes, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> ScaledCodes:
    if list(stride) != list(x.stride()) or storage_offset:
        raise InputError(
            f"FP8Tensor.as_strided: strides are {list(x.stride())}; got {list(stride)} from {storage_offset}: "
            "dequantize() first"
        )
    return cast(ScaledCodes, _view(x, list(size)))


def _new_zeros(
    x: ScaledCodes,
    size: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    **others: object,
) -> ScaledCodes:
    if x.transposed:
        raise InputError("FP8Tensor.new_zeros: expected one as quantised; got a transposed one: call .t() on it first")
    scale = torch.ones(scale_shape(size, x.granularity), dtype=x.scale.dtype, device=device or x.device)
    return x.like(x.codes.new_zeros(size, device=device), scale, dtype=dtype)


def _slice(
    x: ScaledCodes, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> ScaledCodes:
    dim = _dim(x, dim)
    size = x.shape[dim]
    start, end, step = slice(start, end, step).indices(size)
    if (start, step) == (0, 1) and end == size:
        return _alias(x)
    own = x.codes.dim() - 1 - dim if x.transposed else dim
    part = (slice(None),) * own + (slice(start, max(start, end), step),)
    rows, _ = BLOCKS[x.granularity]
    if rows is None:
        return x.like(x.codes[part], x.scale.detach())
    height = rows if own == x.codes.dim() - 2 else 1
    whole = start % height == 0 and (end % height == 0 or end == size) and (step == 1 or height == 1)
    if own == x.codes.dim() - 1 or not whole:
        raise InputError(
            f"FP8Tensor: a slice must not cut what shares a scale of granularity {x.granularity!r}; got {start}:{end} "
            f"of dimension {dim} of {list(x.shape)}: take whole rows, {height} at a time, or dequantize() first"
        )
    scales = slice(start // height, -(-max(start, end) // height), step)
    return x.like(x.codes[part], x.scale[(*(slice(None),) * own, scales)])


def _split(x: ScaledCodes, size: int, dim: int = 0) -> list[ScaledCodes]:
    dim = _dim(x, dim)
    if size < 1:
        raise InputError(f"FP8Tensor.split: parts must have a size of 1 at least; got {size} for {list(x.shape)}")
    return [_slice(x, dim, start, start + size) for start in range(0, max(x.shape[dim], 1), size)]


def _split_with_sizes(x: ScaledCodes, sizes: list[int], dim: int = 0) -> list[ScaledCodes]:
    dim = _dim(x, dim)
    if sum(sizes) != x.shape[dim] or min(sizes, default=0) < 0:
        raise InputError(f"FP8Tensor.split: sizes must be positive and add up to {x.shape[dim]}; got {list(sizes)}")
    ends = [0]
    for size in sizes:
        ends.append(ends[-1] + size)
    return [_slice(x, dim, start, end) for start, end in pairwise(ends)]


#: By torch's operation.
HANDLERS: dict[Any, Callable[..., Any]] = {
    _aten.add.Tensor: _sum,
    _aten.add_.Tensor: _add,
    _aten.alias.default: _alias,
    _aten.as_strided.default: _as_strided,
    _aten.clone.default: _clone,
    _aten.copy_.default: _copy,
    _aten.detach.default: _alias,
    _aten.empty_like.default: _empty_like,
    _aten.new_zeros.default: _new_zeros,
    _aten.permute.default: _permute,
    _aten.slice.Tensor: _slice,
    _aten.split.Tensor: _split,
    _aten.split_with_sizes.default: _split_with_sizes,
    _aten.sub.Tensor: _difference,
    _aten.sub_.Tensor: _subtract,
    _aten.t.default: _t,
    _aten._to_copy.default: _to_copy,
    _aten.transpose.int: _transpose,
    _aten.view.default: _view,
}
