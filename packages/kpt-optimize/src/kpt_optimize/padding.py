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


class PaddedLinear(nn.Module):
    """`nn.Linear` of awkward sizes, computed with sizes that tensor cores like.

    The padding never takes part: inputs are padded by zeros and padded outputs are cut off, so the gradient of the
    padding is zero and an optimiser leaves it zero. The state dict holds `weight` and `bias` of the original sizes, as
    copies.

    Args:
        module: whose weight and bias are copied.
        padded_in: columns of the padded weight, at least `in_features`.
        padded_out: rows of the padded weight, at least `out_features`.

    Attributes:
        in_features: of the input, without padding.
        out_features: of the output, without padding.
        padded_weight: `[padded_out, padded_in]`, the parameter.
        padded_bias: `[padded_out]`, the parameter, or None.
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
        """`[out_features, in_features]`, a view of the parameter."""
        return self.padded_weight[: self.out_features, : self.in_features]

    @property
    def bias(self) -> Tensor | None:
        """`[out_features]`, a view of the parameter, or None."""
        padded: Tensor | None = self.padded_bias
        return None if padded is None else padded[: self.out_features]

    def forward(self, x: Tensor) -> Tensor:
        """As `nn.Linear`: `[..., in_features]` to `[..., out_features]`, contiguous.

        Raises:
            InputError: the last dimension is another.
        """
        if x.shape[-1] != self.in_features:  # padded, a wrong size could pass for a right one
            raise InputError(
                f"the input's last dimension must be in_features={self.in_features}; got shape {tuple(x.shape)}"
            )
        if self._extra_in:
            x = F.pad(x, (0, self._extra_in))
        y = F.linear(x, self.padded_weight, self.padded_bias)
        return y[..., : self.out_features].contiguous() if self._extra_out else y

    def unpadded(self) -> nn.Linear:
        """A plain layer with a copy of the weights as they are now."""
        weight, bias = self.weight, self.bias
        module = nn.Linear(self.in_features, self.out_features, bias=bias is not None, device="meta")
        module.weight = nn.Parameter(weight.detach().clone(), weight.requires_grad)
        if bias is not None:
            module.bias = nn.Parameter(bias.detach().clone(), bias.requires_grad)
        return module.train(self.training)

    def extra_repr(self) -> str:
        """Both pairs of sizes."""
        padded_out, padded_in = self.padded_weight.shape
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"padded to {padded_in} and {padded_out}"
        )

    def _padded(self, original: Tensor) -> nn.Parameter:
        """A parameter of the padded size with the values of a weight or bias."""
        extra = (0, self._extra_out) if original.ndim == 1 else (0, self._extra_in, 0, self._extra_out)
        return nn.Parameter(F.pad(original.detach(), extra), original.requires_grad)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        for name, value in (("weight", self.weight), ("bias", self.bias)):
            if value is not None:
                destination[prefix + name] = value if keep_vars else value.detach().clone()

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        own = {"weight": self.weight} if self.bias is None else {"weight": self.weight, "bias": self.bias}
        for name, view in own.items():
            given = state_dict.get(prefix + name)
            if given is None:
                missing_keys.append(prefix + name)
            elif given.shape != view.shape:
                error_msgs.append(
                    f"size mismatch for {prefix + name}: copying a param with shape {tuple(given.shape)} from "
                    f"checkpoint, the shape in current model is {tuple(view.shape)}."
                )
            elif local_metadata.get("assign_to_params_buffers", False):
                kept = getattr(self, f"padded_{name}").requires_grad
                setattr(self, f"padded_{name}", self._padded(given).requires_grad_(kept))
            else:
                with torch.no_grad():
                    view.copy_(given)
        if strict:
            unexpected_keys += [key for key in state_dict if key.startswith(prefix) and key[len(prefix) :] not in own]


def required_multiple(dtype: torch.dtype) -> int:
    """Return what sizes of a matrix should be multiples of: 16 bytes' worth of elements.

    That is 2 for float64, 4 for float32 (TF32), 8 for float16 and bfloat16, 16 for FP8 and int8.

    Raises:
        InputError: matrix units don't multiply the dtype.
    """
    if not (dtype.is_floating_point or dtype is torch.int8):
        raise InputError(f"tensor cores multiply floating-point numbers and int8; got {dtype}")
    return ROW_BYTES // dtype.itemsize


def aligned_size(size: int, dtype: torch.dtype) -> int:
    """Return the least size that is at least `size` and has whole 16-byte rows.

    Raises:
        InputError: the size is negative, or matrix units don't multiply the dtype.
    """
    if size < 0:
        raise InputError(f"size must be at least 0; got {size}")
    multiple = required_multiple(dtype)
    return -(-size // multiple) * multiple


def tile_efficiency(rows: int, columns: int, tile: tuple[int, int] = (128, 128)) -> float:
    """Return the share of the work on whole tiles that is wanted, 0 to 1 (tile quantisation).

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
    """Return the share of the device that is busy on average, 0 to 1 (wave quantisation).

    Args:
        tiles: blocks of the launch.
        multiprocessors: of the device (`device_info` of a backend).
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
    """Return a layer that gives what `module` gives, with both sizes padded by zeros where matrix units want it.

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
    uses = Counter(id(parameter) for module in model.modules() for parameter in module.parameters(recurse=False))
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
