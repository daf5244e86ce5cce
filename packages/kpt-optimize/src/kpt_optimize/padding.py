"""Sizes that matrix units like: find awkward ones, tell what padding costs, and pad without a change of results."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kpt_core.errors import InputError

#: Bytes to which rows must be aligned for `cp.async` of 16 bytes, for TMA, and for cuBLAS' best kernels ("Matrix
#: Multiplication Background", tensor core requirements).
ROW_BYTES = 16


@dataclass(frozen=True, slots=True)
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


class PaddedLinear(nn.Module):
    """`nn.Linear` of awkward sizes, computed with sizes that tensor cores like.

    The padding never takes part: inputs are padded by zeros and padded outputs are cut off, so the gradient of the
    padding is zero and an optimiser leaves it zero. The state dict holds `weight` and `bias` of the original sizes, as
    copies.

    Args:
        module: whose weight and bias are copied.
        padded_in: columns of the parameter `padded_weight`, at least `in_features`.
        padded_out: its rows, and the size of the parameter `padded_bias`, at least `out_features`.
    """

    def __init__(self, module: nn.Linear, padded_in: int, padded_out: int) -> None:
        super().__init__()
        self.in_features, self.out_features = module.in_features, module.out_features
        self._extra_in, self._extra_out = padded_in - module.in_features, padded_out - module.out_features
        self.padded_weight = self._padded(module.weight)
        bias: Tensor | None = module.bias  # torch's types leave the None out
        self.padded_bias = None if bias is None else self._padded(bias)

    @property
    def weight(self) -> Tensor:
        """A view of the parameter: `[out_features, in_features]`."""
        return self.padded_weight[: self.out_features, : self.in_features]

    @property
    def bias(self) -> Tensor | None:
        """A view of the parameter, `[out_features]`, or None."""
        padded: Tensor | None = self.padded_bias
        return None if padded is None else padded[: self.out_features]

    def forward(self, x: Tensor) -> Tensor:
        """Compute what `nn.Linear` does: `[..., in_features]` to `[..., out_features]`, contiguous."""
        if x.shape[-1] != self.in_features:  # padded, a wrong size could pass for a right one
            raise InputError(
                f"the input's last dimension must be in_features={self.in_features}; got shape {tuple(x.shape)}"
            )
        if self._extra_in:
            x = F.pad(x, (0, self._extra_in))
        y = F.linear(x, self.padded_weight, self.padded_bias)
        return y[..., : self.out_features].contiguous() if self._extra_out else y

    def unpadded(self) -> nn.Linear:
        """Return a plain layer with a copy of the weights as they are now."""
        weight, bias = self.weight, self.bias
        module = nn.Linear(self.in_features, self.out_features, bias=bias is not None, device="meta")
        module.weight = nn.Parameter(weight.detach().clone(), weight.requires_grad)
        if bias is not None:
            module.bias = nn.Parameter(bias.detach().clone(), bias.requires_grad)
        return module.train(self.training)

    def extra_repr(self) -> str:
        """Return both pairs of sizes."""
        rows, columns = self.padded_weight.shape
        plain = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        return f"{plain}, padded to {columns} and {rows}"

    def _padded(self, original: Tensor) -> nn.Parameter:
        """Return a parameter of the padded size with the values of a weight or bias."""
        extra = (0, self._extra_out) if original.ndim == 1 else (0, self._extra_in, 0, self._extra_out)
        return nn.Parameter(F.pad(original.detach(), extra), original.requires_grad)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        for name, value in (("weight", self.weight), ("bias", self.bias)):
            if value is not None:
                destination[prefix + name] = value if keep_vars else value.detach().clone()

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, local_metadata: Mapping[str, Any], *rest: Any
    ) -> None:
        plain = self.unpadded()  # takes the entries, and complains of them, as `nn.Linear` does
        plain._load_from_state_dict(state_dict, prefix, local_metadata, *rest)
        for name, value in plain.named_parameters():
            if local_metadata.get("assign_to_params_buffers", False):
                setattr(self, f"padded_{name}", self._padded(value))
            else:
                with torch.no_grad():
                    getattr(self, name).copy_(value)


def aligned_size(size: int, dtype: torch.dtype) -> int:
    """Return the least size that is at least `size` and has whole 16-byte rows.

    It is a multiple of 2 for float64, 4 for float32 (TF32), 8 for float16 and bfloat16, 16 for FP8 and int8.

    Raises:
        InputError: the size is negative, or matrix units don't multiply the dtype.
    """
    if size < 0:
        raise InputError(f"size must be at least 0; got {size}")
    if not (dtype.is_floating_point or dtype is torch.int8):
        raise InputError(f"tensor cores multiply floating-point numbers and int8; got {dtype}")
    multiple = ROW_BYTES // dtype.itemsize
    return -(-size // multiple) * multiple


def tile_efficiency(rows: int, columns: int, tile: tuple[int, int] = (128, 128)) -> float:
    """Return the share of the work on whole tiles of a product that is wanted, 0 to 1 (tile quantisation)."""
    return _share(rows=rows, tile_rows=tile[0]) * _share(columns=columns, tile_columns=tile[1])


def wave_efficiency(tiles: int, multiprocessors: int, per_multiprocessor: int = 1) -> float:
    """Return the share of the device that is busy on average, 0 to 1 (wave quantisation).

    Args:
        tiles: blocks of the launch.
        multiprocessors: of the device (`device_info` of a backend).
        per_multiprocessor: blocks that one of them holds at a time.
    """
    return _share(tiles=tiles, multiprocessors=multiprocessors, per_multiprocessor=per_multiprocessor)


def _share(**numbers: int) -> float:
    """Return the first number as a share of the least multiple of the others' product that holds it."""
    for name, number in numbers.items():
        if number < 1:
            raise InputError(f"{name} must be at least 1; got {number}")
    wanted, *factors = numbers.values()
    unit = prod(factors)
    return wanted / (-(-wanted // unit) * unit)


def advise(model: nn.Module, dtype: torch.dtype | None = None) -> tuple[ShapeAdvice, ...]:
    """Find the matrices of a model whose sizes tensor cores don't like, in its order, each parameter once.

    Looked at are weights of `nn.Linear` and `nn.Embedding`, and three-dimensional parameters, one matrix per expert.

    Args:
        model: the model; it needs no data.
        dtype: in which they will be multiplied; None for each parameter's own.
    """
    found = []
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(prefix, recurse=False):
            kind, used, shape = _kind(module, parameter), dtype or parameter.dtype, tuple(parameter.shape)
            if kind is None or id(parameter) in seen or 0 in shape or not used.is_floating_point:
                continue
            seen.add(id(parameter))
            # Rows of an embedding are looked up one by one, and experts are apart: their number does not matter.
            free = 0 if kind == "linear" else 1
            aligned = shape[:free] + tuple(aligned_size(size, used) for size in shape[free:])
            if aligned != shape:
                extra = (prod(aligned) - prod(shape)) * used.itemsize
                found.append(ShapeAdvice(name, kind, shape, aligned, aligned_size(1, used), extra))
    return tuple(found)


def pad_linear(module: nn.Linear, dtype: torch.dtype | None = None) -> nn.Linear | PaddedLinear:
    """Return a layer that gives what `module` gives, with both sizes padded by zeros where matrix units want it.

    `module` stays as it is, and is what is returned if its sizes are good; they are judged by the `dtype` in which it
    will be multiplied, None for its weight's own.
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
    uses = Counter(id(parameter) for module in model.modules() for parameter in module.parameters(recurse=False))
    padded: list[ShapeAdvice] = []
    skipped: dict[str, str] = {}
    for advice in advise(model, dtype):
        name = advice.name.rpartition(".")[0]
        module = model.get_submodule(name)
        if advice.kind != "linear" or not isinstance(module, nn.Linear):
            continue
        if (reason := _why_not(module, advice, uses, limit)) is not None:
            skipped[name] = reason
        else:
            _replace(model, module, pad_linear(module, dtype))
            padded.append(advice)
    return Padding(padded=tuple(padded), skipped=skipped)


def unpad_model(model: nn.Module) -> int:
    """Put plain `nn.Linear` layers in the place of padded ones, with their weights now, and return how many."""
    padded = [module for module in model.modules() if isinstance(module, PaddedLinear)]
    for module in padded:
        _replace(model, module, module.unpadded())
    return len(padded)


def _kind(module: nn.Module, parameter: nn.Parameter) -> str | None:
    if parameter.ndim == 2:
        return "linear" if isinstance(module, nn.Linear) else "embedding" if isinstance(module, nn.Embedding) else None
    return "experts" if parameter.ndim == 3 and not isinstance(module, nn.modules.conv._ConvNd) else None


def _why_not(module: nn.Linear, advice: ShapeAdvice, uses: Counter[int], limit: float) -> str | None:
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
