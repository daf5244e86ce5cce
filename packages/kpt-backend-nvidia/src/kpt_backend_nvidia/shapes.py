"""Sizes that tensor cores like: what is awkward, what padding would cost, and padding that changes no result."""

from dataclasses import dataclass
from math import prod

import torch
from torch import nn

from kpt_core import InputError

from .chips import capabilities_of, compute_capability
from .padded_linear import PaddedLinear

#: Bytes to which rows must be aligned for `cp.async` of 16 bytes, for TMA, and for cuBLAS' best kernels ("Matrix
#: Multiplication Background", tensor core requirements).
ROW_BYTES = 16

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeAdvice:
    """A parameter whose sizes are awkward.

    Attributes:
        name: of the parameter.
        kind: `linear`, `embedding` or `experts` (three-dimensional, one matrix per expert).
        shape: as it is.
        aligned_shape: as tensor cores would like it.
        multiple: what its sizes should be multiples of.
        extra_bytes: that the padding takes.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    aligned_shape: tuple[int, ...]
    multiple: int
    extra_bytes: int

    @property
    def extra(self) -> float:
        """Memory of the padding as a share of the parameter's own."""
        return prod(self.aligned_shape) / prod(self.shape) - 1

    def __str__(self) -> str:
        sizes, wanted = ("x".join(map(str, shape)) for shape in (self.shape, self.aligned_shape))
        return (
            f"{self.name} ({self.kind}) is {sizes}; {wanted} has rows of whole {ROW_BYTES} bytes and takes "
            f"{self.extra_bytes:,} bytes ({self.extra:.1%}) more"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Padding:
    """What `pad_model` did.

    Attributes:
        padded: advice that was followed.
        skipped: name of a module to the reason why it was not.
    """

    padded: tuple[ShapeAdvice, ...]
    skipped: dict[str, str]

    @property
    def extra_bytes(self) -> int:
        """That the padding takes."""
        return sum(advice.extra_bytes for advice in self.padded)


def required_multiple(dtype: torch.dtype, chip: str | None = None) -> int:
    """What sizes of a matrix should be multiples of: 16 bytes' worth of elements.

    That is 2 for float64, 4 for float32 (TF32), 8 for float16 and bfloat16, 16 for FP8, on every chip that multiplies
    the dtype.

    Args:
        dtype: of the elements.
        chip: for instance `sm80`; None asks for the dtype alone.

    Raises:
        InputError: the dtype is none that tensor cores, or those of this chip, multiply.
        UnknownNameError: `chip` is no chip's name.
    """
    if not (dtype.is_floating_point or dtype is torch.int8):
        raise InputError(f"tensor cores multiply floating-point numbers and int8; got {dtype}")
    if chip is not None and dtype in _FP8:
        name = str(dtype).removeprefix("torch.").replace("float8", "fp8")
        if name not in capabilities_of(compute_capability(chip)):
            raise InputError(f"{dtype} is multiplied by the tensor cores of sm89 and newer; got {chip}, use bfloat16")
    return ROW_BYTES // dtype.itemsize


def aligned_size(size: int, dtype: torch.dtype, chip: str | None = None) -> int:
    """The least size that is at least `size` and has whole 16-byte rows.

    Args:
        size: in elements.
        dtype: of the elements.
        chip: for instance `sm80`; None asks for the dtype alone.

    Raises:
        InputError: the size is negative, or the dtype is none that tensor cores, or those of this chip, multiply.
        UnknownNameError: `chip` is no chip's name.
    """
    if size < 0:
        raise InputError(f"size must be at least 0; got {size}")
    multiple = required_multiple(dtype, chip)
    return -(-size // multiple) * multiple


def tile_efficiency(rows: int, columns: int, tile: tuple[int, int] = (128, 128)) -> float:
    """Share of the work on whole tiles that is wanted: tile quantisation, 0 to 1.

    Args:
        rows: of the product.
        columns: of the product.
        tile: rows and columns that one block computes.

    Raises:
        InputError: a size is not positive.
    """
    _check_positive(rows=rows, columns=columns, tile_rows=tile[0], tile_columns=tile[1])
    covered = -(-rows // tile[0]) * tile[0] * -(-columns // tile[1]) * tile[1]
    return rows * columns / covered


def wave_efficiency(tiles: int, multiprocessors: int, per_multiprocessor: int = 1) -> float:
    """Share of the device that is busy on average: wave quantisation, 0 to 1.

    Args:
        tiles: blocks of the launch.
        multiprocessors: of the device (`device_info().multiprocessors`).
        per_multiprocessor: blocks that one of them holds at a time.

    Raises:
        InputError: a number is not positive.
    """
    _check_positive(tiles=tiles, multiprocessors=multiprocessors, per_multiprocessor=per_multiprocessor)
    at_once = multiprocessors * per_multiprocessor
    return tiles / (-(-tiles // at_once) * at_once)


def advise(model: nn.Module, dtype: torch.dtype | None = None) -> tuple[ShapeAdvice, ...]:
    """Find the matrices of a model whose sizes tensor cores don't like.

    Args:
        model: looked at are weights of `nn.Linear` and `nn.Embedding`, and three-dimensional parameters, one matrix per
            expert.
        dtype: in which they will be multiplied; None for each parameter's own.

    Returns:
        One for each such parameter, in the model's order; a parameter that has two names is told once.
    """
    found = []
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(prefix, recurse=False):
            kind = _kind(module, parameter)
            if kind is None or id(parameter) in seen or 0 in parameter.shape:
                continue
            seen.add(id(parameter))
            used = dtype or parameter.dtype
            if not used.is_floating_point:
                continue
            shape = tuple(parameter.shape)
            aligned = _aligned_shape(kind, shape, used)
            if aligned != shape:
                found.append(
                    ShapeAdvice(
                        name=name,
                        kind=kind,
                        shape=shape,
                        aligned_shape=aligned,
                        multiple=required_multiple(used),
                        extra_bytes=(prod(aligned) - prod(shape)) * used.itemsize,
                    )
                )
    return tuple(found)


def pad_linear(module: nn.Linear, dtype: torch.dtype | None = None) -> nn.Linear | PaddedLinear:
    """A layer that gives what `module` gives, with both sizes padded by zeros where tensor cores want it.

    Args:
        module: stays as it is.
        dtype: in which it will be multiplied; None for its weight's own.

    Returns:
        The padded layer, whose parameters are its own; `module` itself if its sizes are good.
    """
    used = dtype or module.weight.dtype
    sizes = aligned_size(module.in_features, used), aligned_size(module.out_features, used)
    return module if sizes == (module.in_features, module.out_features) else PaddedLinear(module, *sizes)


def pad_model(model: nn.Module, dtype: torch.dtype | None = None, limit: float = 0.25) -> Padding:
    """Pad the `nn.Linear` layers of a model that have awkward sizes, in place.

    Outputs, gradients and the state dict stay what they were; `unpad_model` takes it back. Parameters are replaced, so
    make the optimiser afterwards. An input or output that is padded costs a copy of it in each call: measure.

    Args:
        model: its layers are replaced.
        dtype: in which they will be multiplied; None for each weight's own.
        limit: a layer whose weight would grow by more than this share is skipped.

    Returns:
        What was padded, and what was not and why: layers whose weight another module has too (tied), with hooks, of a
        subclass, or too small.

    Raises:
        InputError: the model itself is an `nn.Linear` (use `pad_linear`), or `limit` is negative.
    """
    if isinstance(model, nn.Linear):
        raise InputError("the model is itself an nn.Linear, which can't be replaced in place; use pad_linear")
    if not limit >= 0:
        raise InputError(f"limit must be at least 0; got {limit!r}")
    uses = _uses(model)
    padded: list[ShapeAdvice] = []
    skipped: dict[str, str] = {}
    for advice in advise(model, dtype):
        name = advice.name.rpartition(".")[0]
        module = model.get_submodule(name)
        if advice.kind != "linear" or isinstance(module, PaddedLinear):
            continue
        assert isinstance(module, nn.Linear)
        reason = _why_not(module, advice, uses, limit)
        if reason is not None:
            skipped[name] = reason
            continue
        _replace(model, module, pad_linear(module, dtype))
        padded.append(advice)
    return Padding(padded=tuple(padded), skipped=skipped)


def unpad_model(model: nn.Module) -> int:
    """Put plain `nn.Linear` layers in the place of padded ones, with what their weights are now.

    Returns:
        How many there were.
    """
    padded = [module for module in model.modules() if isinstance(module, PaddedLinear)]
    for module in padded:
        _replace(model, module, module.unpadded())
    return len(padded)


def _check_positive(**numbers: int) -> None:
    for name, number in numbers.items():
        if number < 1:
            raise InputError(f"{name} must be at least 1; got {number}")


def _kind(module: nn.Module, parameter: nn.Parameter) -> str | None:
    if isinstance(module, PaddedLinear):
        return None
    if isinstance(module, nn.Linear) and parameter.ndim == 2:
        return "linear"
    if isinstance(module, nn.Embedding) and parameter.ndim == 2:
        return "embedding"
    is_convolution = isinstance(module, nn.modules.conv._ConvNd)
    return "experts" if parameter.ndim == 3 and not is_convolution else None


def _aligned_shape(kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[int, ...]:
    # Rows of an embedding are looked up one by one: their number does not matter.
    free = 1 if kind in ("embedding", "experts") else 0
    return shape[:free] + tuple(aligned_size(size, dtype) for size in shape[free:])


def _uses(model: nn.Module) -> dict[int, int]:
    """How many modules have each parameter."""
    uses: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    return uses


def _why_not(module: nn.Linear, advice: ShapeAdvice, uses: dict[int, int], limit: float) -> str | None:
    if type(module) is not nn.Linear:
        return f"it is a {type(module).__name__}, whose forward may be another"
    if any(uses[id(parameter)] > 1 for parameter in module.parameters()):
        return "another module has its weight or bias too (tied)"
    if any((module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)):
        return "it has hooks, which a replacement would lose"
    if advice.extra > limit:
        return f"its weight would grow by {advice.extra:.0%}, more than the limit of {limit:.0%}"
    return None


def _replace(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Put a module in the place of another, everywhere."""
    new.train(old.training)
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child is old:
                setattr(parent, name, new)
