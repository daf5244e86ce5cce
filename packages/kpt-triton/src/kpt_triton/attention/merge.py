"""`attention.merge` in one launch, and its gradients in another: each number is read once, and written once."""

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kpt_triton.aot import NO_SPILLS, Program
from kpt_triton.contracts import BF16, FP32, integers, pointers
from kpt_triton.launching import on_its_device
from kpt_triton.numeric import narrow

from .scores import LOWEST

#: Numbers of one output that a program has at once.
_NUMBERS = 2048
_MOST_DIM = 4096


def unsupported(call: Any) -> str | None:
    """Return why a call is not for the kernel, or None."""
    if not call.out.numel():
        return "there is nothing to compute"
    if any(each.dtype is torch.float64 for each in (call.out, call.lse, call.other_lse)):
        return "float64; this kernel computes in float32"
    if call.out.shape[-1] > _MOST_DIM:
        return f"head_dim {call.out.shape[-1]}; this kernel holds up to {_MOST_DIM}"
    return None


@triton.jit
def _shares(lse, other_lse, row, inside):
    """Of each row: the shares of both outputs, the larger log-sum-exp, and the sum of exponentials less that."""
    one = tl.load(lse + row, mask=inside, other=0.0).to(tl.float32)
    two = tl.load(other_lse + row, mask=inside, other=0.0).to(tl.float32)
    top = tl.maximum(tl.maximum(one, two), LOWEST)
    one = tl.exp(one - top)
    two = tl.exp(two - top)
    total = one + two
    total = tl.where(total == 0, 1.0, total)
    return one / total, two / total, top, one + two


@triton.jit(do_not_specialize=["rows"])
def _forward_kernel(
    out, lse, other_out, other_lse, merged, merged_lse, rows, DIM: tl.constexpr, DIMS: tl.constexpr, ROWS: tl.constexpr
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    dims = tl.arange(0, DIMS)
    place = row.to(tl.int64)
    share, other_share, top, total = _shares(lse, other_lse, place, inside)
    at = place[:, None] * DIM + dims[None, :]
    read = inside[:, None] & (dims < DIM)[None, :]
    found = tl.load(out + at, mask=read, other=0.0).to(tl.float32) * share[:, None]
    found += tl.load(other_out + at, mask=read, other=0.0).to(tl.float32) * other_share[:, None]
    tl.store(merged + at, narrow(found, merged.dtype.element_ty), mask=read)
    tl.store(merged_lse + place, tl.where(total == 0, float("-inf"), top + tl.log(total)), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _backward_kernel(
    out, lse, other_out, other_lse, grad, grad_lse, of_out, of_lse, of_other_out, of_other_lse, rows,
    OUT: tl.constexpr, LSE: tl.constexpr, DIM: tl.constexpr, DIMS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """OUT, LSE: whether the output has a gradient, and the log-sum-exp."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    dims = tl.arange(0, DIMS)
    place = row.to(tl.int64)
    share, other_share, _, _ = _shares(lse, other_lse, place, inside)
    change = tl.zeros((ROWS,), tl.float32)
    other_change = tl.zeros((ROWS,), tl.float32)
    at = place[:, None] * DIM + dims[None, :]
    read = inside[:, None] & (dims < DIM)[None, :]
    if OUT:
        given = tl.load(grad + at, mask=read, other=0.0).to(tl.float32)
        one = tl.sum(given * tl.load(out + at, mask=read, other=0.0).to(tl.float32), 1)
        two = tl.sum(given * tl.load(other_out + at, mask=read, other=0.0).to(tl.float32), 1)
        # Shares sum to one, so that what one gains the other loses.
        change = share * other_share * (one - two)
        other_change = -change
        tl.store(of_out + at, narrow(given * share[:, None], of_out.dtype.element_ty), mask=read)
        tl.store(of_other_out + at, narrow(given * other_share[:, None], of_other_out.dtype.element_ty), mask=read)
    if LSE:
        of_both = tl.load(grad_lse + place, mask=inside, other=0.0)
        change += of_both * share
        other_change += of_both * other_share
    tl.store(of_lse + place, change, mask=inside)
    tl.store(of_other_lse + place, other_change, mask=inside)


@on_its_device
def forward(call: Any) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exp."""
    given = _given(call)
    merged, lse = torch.empty_like(given[0]), torch.empty_like(given[1], dtype=torch.float32)
    options = _options(call.out.shape[-1])
    _forward_kernel[(triton.cdiv(lse.numel(), options["ROWS"]),)](*given, merged, lse, lse.numel(), **options)
    return merged, lse


@on_its_device
def backward(call: Any, saved: tuple[()], grad: Tensor | None, grad_lse: Tensor | None) -> dict[str, Tensor]:
    """Return the gradients of what is needed.

    Args:
        call: of the op.
        saved: nothing.
        grad: of the output.
        grad_lse: of the log-sum-exp.
    """
    given = _given(call)
    found = {
        name: torch.zeros_like(each) if grad is None and "out" in name else torch.empty_like(each)
        for name, each in zip(("out", "lse", "other_out", "other_lse"), given, strict=True)
    }
    sums = {name: found[name].float() for name in ("lse", "other_lse")}
    options = _options(call.out.shape[-1])
    rows = given[1].numel()
    _backward_kernel[(triton.cdiv(rows, options["ROWS"]),)](
        *given, given[0] if grad is None else grad.contiguous(), sums["lse"] if grad_lse is None else
        grad_lse.contiguous(), found["out"], sums["lse"], found["other_out"], sums["other_lse"], rows,
        OUT=grad is not None, LSE=grad_lse is not None, **options,
    )  # fmt: skip
    found |= {name: each.to(found[name].dtype) for name, each in sums.items()}
    return {name: each for name, each in found.items() if name in call.needs}


def _given(call: Any) -> tuple[Tensor, ...]:
    return tuple(each.detach().contiguous() for each in (call.out, call.lse, call.other_out, call.other_lse))


def _options(dim: int) -> dict[str, Any]:
    dims = triton.next_power_of_2(dim)
    return {
        "DIM": dim, "DIMS": dims, "ROWS": max(1, _NUMBERS // dims), "num_warps": 4, "enable_fp_fusion": True
    }  # fmt: skip


def _program(name: str, function: Any, dtype: str, **options: bool) -> Program:
    signature = {
        **pointers("out other_out merged grad of_out of_other_out", dtype),
        **pointers("lse other_lse merged_lse grad_lse of_lse of_other_lse", FP32), **integers("rows", ""),
    }  # fmt: skip

    def launches(chip: str) -> dict[str, Mapping[str, Any]]:
        return {str(dim): {**options, **_options(dim)} for dim in (64, 128)}

    own = {name: kind for name, kind in signature.items() if name in function.arg_names}
    return Program(f"{name} {dtype}", function, own, NO_SPILLS, launches)


#: What is compiled ahead of time.
AOT = tuple(
    _program(name, function, dtype, **options)
    for dtype in (BF16, FP32)
    for name, function, options in (
        ("forward", _forward_kernel, {}),
        ("backward", _backward_kernel, {"OUT": True, "LSE": True}),
    )
)
