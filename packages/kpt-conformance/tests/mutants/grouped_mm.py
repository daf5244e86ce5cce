"""Faults in the product itself: tiles, sums, layouts, magnitudes."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import honest

from .mutant import Mutant, Parts, of_parts

MUTANTS: list[Mutant] = []


def fault(name: str, found_by: str, **settings: Any) -> Callable[[Callable[..., Tensor]], None]:
    """Enter a mutant: the decorated function is given the right product and its arguments."""

    def enter(body: Callable[..., Tensor]) -> None:
        def change(parts: Parts) -> Parts:
            return replace(parts, forward=lambda *arguments: body(parts.forward, *arguments))

        MUTANTS.append(of_parts(name, found_by, change, **settings))

    return enter


def in_model(dtype: torch.dtype | None = None) -> Callable[[Any], bool]:
    """Trials of a real model's case: what is lost in long sums shows there."""
    return lambda trial: trial.case.model and dtype in (None, trial.dtype)


def past(**sizes: int) -> Callable[[Any], bool]:
    """Trials of cases that have more than these sizes."""
    return lambda trial: all(trial.case.sizes.get(name, 0) > size for name, size in sizes.items())


def end_of(offsets: Tensor) -> int:
    """Where rows of nobody begin."""
    return int(offsets[-1]) if len(offsets) else 0


@fault("the last row of every expert is left out", "values")
def _(product, x, weight, offsets):
    out = product(x, weight, offsets)
    out[(offsets.long() - 1).clamp(min=0)[: x.shape[0]]] = 0
    return out


@fault("rows past a multiple of eight are left out", "values")
def _(product, x, weight, offsets):
    out = product(x, weight, offsets)
    for _, start, end in honest.ends_of(offsets):
        out[start + (end - start) // 8 * 8 : end] = 0
    return out


@fault("the last expert is missing", "values")
def _(product, x, weight, offsets):
    out = product(x, weight, offsets)
    for expert, start, end in honest.ends_of(offsets):
        if expert == weight.shape[0] - 1:
            out[start:end] = 0
    return out


@fault("an expert computes 128 rows and leaves out the rest", "values", at=past(rows=128))
def _(product, x, weight, offsets):
    out = product(x, weight, offsets)
    for _, start, end in honest.ends_of(offsets):
        out[start + 128 : end] = 0
    return out


@fault("the second tile of an expert's rows repeats the first", "values", at=past(rows=64))
def _(product, x, weight, offsets):
    out = product(x, weight, offsets)
    for _, start, end in honest.ends_of(offsets):
        second = out[start + 64 : min(start + 128, end)]
        second.copy_(out[start : start + second.shape[0]].clone())
    return out


@fault("groups past the thirty-second have no rows", "values", at=past(groups=32))
def _(product, x, weight, offsets):
    out = product(x, weight, offsets)
    if len(offsets) > 32:
        out[int(offsets[31]) :] = 0
    return out


@fault("experts are lost where their number is no power of two", "values", at=lambda t: "63 rows" in t.case.name)
def _(product, x, weight, offsets):
    out = product(x, weight, offsets)
    kept = 1 << max(len(offsets).bit_length() - 1, 0)
    if kept < len(offsets):
        out[int(offsets[kept - 1]) :] = 0
    return out


@fault("columns past a second tile of 128 are left out", "values", at=past(columns=256))
def _(product, x, weight, offsets):
    out = product(x, weight, offsets)
    out[:, 256:] = 0
    return out


@fault("columns of a second tile that is not whole are those of the first", "values", at=past(columns=64))
def _(product, x, weight, offsets):
    out = product(x, weight, offsets)
    if out.shape[1] > 64 and out.shape[1] % 64:
        rest = out.shape[1] % 64
        out[:, -rest:] = out[:, :rest].clone()
    return out


@fault("an expert of a whole number of tiles loses its last one", "values", at=lambda t: t.case.name == "whole tiles")
def _(product, x, weight, offsets):
    out = product(x, weight, offsets)
    for _, start, end in honest.ends_of(offsets):
        if end > start and (end - start) % 64 == 0:
            out[end - 64 : end] = 0
    return out


@fault("rows of an expert are counted in eight bits", "values", at=past(rows=256))
def _(product, x, weight, offsets):
    out = product(x, weight, offsets)
    for _, start, end in honest.ends_of(offsets):
        out[start + (end - start) % 256 : end] = 0
    return out


@fault("numbers of groups are kept in eight bits", "values", at=past(groups=256))
def _(product, x, weight, offsets):
    out = product(x, weight, offsets)
    if len(offsets) > 256:
        out[int(offsets[255]) :] = 0
    return out


@fault("large numbers are multiplied in bfloat16", "magnitudes")
def _(product, x, weight, offsets):
    if x.dtype is not torch.float32 or not x.numel() or x.abs().max() < 32:
        return product(x, weight, offsets)
    return product(x.bfloat16(), weight.bfloat16(), offsets).float()


@fault("a misaligned x is read from the address before", "layouts")
def _(product, x, weight, offsets):
    if x.data_ptr() % 16 and x.storage_offset() and x.is_contiguous():
        return product(x.as_strided(x.shape, x.stride(), x.storage_offset() - 1), weight, offsets)
    return product(x, weight, offsets)


@fault("the last element of K is not summed", "values")
def _(product, x, weight, offsets):
    return product(x[:, :-1], weight[:, :-1], offsets)


@fault("past 128 of K, what does not fill a tile of 32 is not summed", "values", at=past(inner=128))
def _(product, x, weight, offsets):
    whole = x.shape[1] if x.shape[1] <= 128 else x.shape[1] // 32 * 32
    return product(x[:, :whole], weight[:, :whole], offsets)


@fault("the sum is taken in bfloat16", "values")
def _(product, x, weight, offsets):
    return product(x.bfloat16(), weight.bfloat16(), offsets).to(x.dtype)


@fault("partial sums of K are kept in the dtype", "values", at=past(inner=512))
def _(product, x, weight, offsets):
    out = product(x[:, :0], weight[:, :0], offsets)
    for k in range(0, x.shape[1], 64):
        out = out + product(x[:, k : k + 64], weight[:, k : k + 64], offsets)
    return out


@fault("operands are cut to ten bits, as TF32 does", "values")
def _(product, x, weight, offsets):
    return product(x.half().to(x.dtype), weight.half().to(x.dtype), offsets)


@fault("the result is rounded twice", "values", at=lambda t: t.dtype is torch.bfloat16 and past(columns=64)(t))
def _(product, x, weight, offsets):
    out = product(x, weight, offsets)
    return (out * 3).to(out.dtype) / 3


@fault("x is scaled by 4096 and back, which overflows in half precision", "magnitudes")
def _(product, x, weight, offsets):
    return product((x * 4096), weight, offsets) / 4096


@fault("sums pass through half precision where all is small", "magnitudes")
def _(product, x, weight, offsets):
    out = product(x, weight, offsets)
    return out.clamp(-65504, 65504)


@fault("denormal numbers of half precision count as zero", "magnitudes", at=lambda t: t.dtype is torch.float16)
def _(product, x, weight, offsets):
    tiny = torch.finfo(torch.float16).tiny if x.dtype is torch.float16 else 0.0
    return product(torch.where(x.abs() < tiny, x * 0, x), weight, offsets)


@fault("small results become zero", "magnitudes")
def _(product, x, weight, offsets):
    out = product(x, weight, offsets)
    return torch.where(out.abs() < 1e-6, out * 0, out)


@fault("infinity becomes the largest number", "magnitudes")
def _(product, x, weight, offsets):
    return product(x.nan_to_num(nan=float("nan")), weight, offsets)


@fault("NaN becomes zero", "nans")
def _(product, x, weight, offsets):
    return product(x.nan_to_num(nan=0.0), weight, offsets)


@fault("a NaN spreads to all rows of its expert", "nans")
def _(product, x, weight, offsets):
    out = product(x, weight, offsets)
    for _, start, end in honest.ends_of(offsets):
        out[start:end] += out[start:end].sum(0) * 0
    return out


@fault("padding is multiplied by zero rather than left out", "padding")
def _(product, x, weight, offsets):
    inside = torch.arange(x.shape[0], device=x.device) < end_of(offsets)
    out = product(x, weight, offsets)
    return out + (x * ~inside.unsqueeze(1) * 0).sum(1, keepdim=True)


@fault("rows of nobody are never written", "poisoned_outputs")
def _(product, x, weight, offsets):
    out, right = torch.empty(x.shape[0], weight.shape[2], dtype=x.dtype), product(x, weight, offsets)
    out[: end_of(offsets)] = right[: end_of(offsets)]
    return out


@fault("the rows of small experts are never written", "poisoned_outputs")
def _(product, x, weight, offsets):
    out, right = torch.empty(x.shape[0], weight.shape[2], dtype=x.dtype), product(x, weight, offsets)
    for _, start, end in honest.ends_of(offsets):
        if end - start > 1:
            out[start:end] = right[start:end]
    out[end_of(offsets) :] = right[end_of(offsets) :]
    return out


def _through_int32(tensor: Tensor) -> Tensor:
    """Read a tensor as a kernel does whose offsets are int32."""
    row = torch.arange(tensor.shape[0]) * tensor.stride(0) if tensor.dim() > 1 else torch.zeros(1).long()
    wrapped = (row + 2**31) % 2**32 - 2**31
    if bool((wrapped == row).all()):
        return tensor
    storage = tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)
    rows = []
    for index, start in enumerate(wrapped.tolist()):
        place = (tensor.storage_offset() + start) % storage.shape[0]
        size = 1 + sum((n - 1) * s for n, s in zip(tensor.shape[1:], tensor.stride()[1:], strict=True))
        if min(tensor.shape) == 0 or place + size > storage.shape[0]:
            rows.append(tensor[index])
        else:
            rows.append(storage.as_strided(tensor.shape[1:], tensor.stride()[1:], place))
    return torch.stack(rows)


@fault("offsets of x overflow int32", "far_strides")
def _(product, x, weight, offsets):
    return product(_through_int32(x), weight, offsets)


@fault("offsets of the weight overflow int32", "far_strides")
def _(product, x, weight, offsets):
    return product(x, _through_int32(weight), offsets)


def as_if_contiguous(tensor: Tensor) -> Tensor:
    """The memory of a tensor, read as if it had no strides."""
    strides = [int(torch.tensor(tensor.shape[i + 1 :]).prod()) for i in range(tensor.dim())]
    room = tensor.untyped_storage().nbytes() // tensor.element_size() - tensor.storage_offset()
    return tensor.as_strided(tensor.shape, strides) if tensor.numel() <= room else tensor.contiguous()


@fault("strides are ignored", "layouts")
def _(product, x, weight, offsets):
    return product(as_if_contiguous(x), weight, offsets)


@fault("the weight is taken for contiguous", "layouts")
def _(product, x, weight, offsets):
    return product(x, as_if_contiguous(weight), offsets)


@fault("the weight is taken for contiguous where x is", "layouts")
def _(product, x, weight, offsets):
    return product(x, as_if_contiguous(weight) if x.is_contiguous() else weight, offsets)


@fault("strided offsets are read as if they were contiguous", "layouts")
def _(product, x, weight, offsets):
    read = as_if_contiguous(offsets)
    return product(x, weight, read.clamp(0, x.shape[0]).cummax(0).values)


@fault("the storage offset is ignored", "layouts")
def _(product, x, weight, offsets):
    return product(x.as_strided(x.shape, x.stride(), 0), weight, offsets)


def with_stride(tensor: Tensor, dim: int, stride: int) -> Tensor:
    """A tensor of which one stride is taken for another, which is smaller."""
    strides = [stride if place == dim else each for place, each in enumerate(tensor.stride())]
    return tensor.as_strided(tensor.shape, strides)


@fault("rows of a weight in slices are taken for dense ones", "layouts")
def _(product, x, weight, offsets):
    sliced = weight.stride(2) == 1 and weight.stride(1) > weight.shape[2]
    return product(x, with_stride(weight, 1, weight.shape[2]) if sliced else weight, offsets)


@fault("columns of a weight in slices are taken for dense ones", "layouts")
def _(product, x, weight, offsets):
    sliced = weight.stride(1) == 1 and weight.stride(2) > weight.shape[1]
    return product(x, with_stride(weight, 2, weight.shape[1]) if sliced else weight, offsets)


@fault("matrices of a stack in slices are taken to follow on each other", "layouts")
def _(product, x, weight, offsets):
    dense = weight.stride(1) * weight.shape[1]
    sliced = weight.stride(2) == 1 and weight.stride(0) > dense > 0
    return product(x, with_stride(weight, 0, dense) if sliced else weight, offsets)


@fault("an offset that is aligned is left out", "layouts")
def _(product, x, weight, offsets):
    aligned = weight.storage_offset() * weight.element_size() % 16 == 0
    return product(x, weight.as_strided(weight.shape, weight.stride(), 0) if aligned else weight, offsets)


@fault("stride zero is read as one", "layouts")
def _(product, x, weight, offsets):
    expanded = x.dim() == 2 and x.shape[0] > 1 and x.stride(0) == 0
    return product(torch.zeros_like(x) if expanded else x, weight, offsets)


@fault("the result is contiguous in its columns", "fake_result")
def _(product, x, weight, offsets):
    return product(x, weight, offsets).t().contiguous().t()


@fault("rows of the result are padded to a multiple of sixteen bytes", "fake_result")
def _(product, x, weight, offsets):
    out = product(x, weight, offsets)
    return torch.nn.functional.pad(out, (0, -out.shape[1] % 16))[:, : out.shape[1]]


@fault("half precision gives a float32 result", "result_type")
def _(product, x, weight, offsets):
    return product(x, weight, offsets).float()


@fault("sums are taken in an order that changes", "repeatable", deterministic=True)
def _(product, x, weight, offsets):
    order = torch.randperm(x.shape[1])
    return product(x[:, order], weight[:, order], offsets)
