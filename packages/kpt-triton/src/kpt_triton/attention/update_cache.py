"""`attention.update_cache` in one launch: a step of decoding writes little, so that launches are what it takes."""

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kpt_triton.aot import NO_SPILLS, Program
from kpt_triton.contracts import BF16, FP16, FP32, integers, pointers
from kpt_triton.fp8.quantize import codes_of, format_of
from kpt_triton.launching import on_its_device
from kpt_triton.numeric import narrow

_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
#: Numbers of a token that a program has at once, and the largest head_dim.
_NUMBERS, _MOST_DIM = 2048, 4096
#: What a launch has in place of a format of 8 bits.
_NO_FORMAT = {"MANTISSA": 0, "BIAS": 0, "MOST": 0, "MAGIC": 0, "FNUZ": False}


def unsupported(call: Any) -> str | None:
    """Return why a call is not for the kernel, or None."""
    if not (call.k.numel() and call.v.numel() and call.k_cache.numel()):
        return "there is nothing to write"
    if any(each is not None and each.dtype is torch.float64 for each in (call.k, call.k_scale, call.v_scale)):
        return "float64; this kernel computes in float32"
    dim = max(call.k.shape[2], call.v.shape[2])
    return f"head_dim {dim}; this kernel holds up to {_MOST_DIM}" if dim > _MOST_DIM else None


@triton.jit
def _write(
    cache, rows, scale, token, slot, size, heads,
    stride_cp, stride_cs, stride_ch, stride_cd, stride_rt, stride_rh, stride_rd,
    SCALED: tl.constexpr, EIGHT: tl.constexpr, DIM: tl.constexpr, DIMS: tl.constexpr, HEADS: tl.constexpr,
    MANTISSA: tl.constexpr, BIAS: tl.constexpr, MOST: tl.constexpr, MAGIC: tl.constexpr, FNUZ: tl.constexpr,
):  # fmt: skip
    """A token's heads, HEADS at a time, into its slot."""
    dims = tl.arange(0, DIMS)
    place = cache + slot // size * stride_cp + slot % size * stride_cs + dims[None, :] * stride_cd
    source = rows + token * stride_rt + dims[None, :] * stride_rd
    for first in range(0, heads, HEADS):
        head = first + tl.arange(0, HEADS)
        inside = (head < heads)[:, None] & (dims < DIM)[None, :]
        found = tl.load(source + head.to(tl.int64)[:, None] * stride_rh, mask=inside, other=0.0)
        to = place + head.to(tl.int64)[:, None] * stride_ch
        if EIGHT or SCALED:
            found = found.to(tl.float32)
            own = tl.full((HEADS,), 1.0, tl.float32)
            if SCALED:
                own = tl.load(scale + head, mask=head < heads, other=1.0)
            spread = tl.broadcast_to(own[:, None], found.shape)
            if EIGHT:
                tl.store(to, codes_of(found, spread, MANTISSA, BIAS, MOST, MAGIC, FNUZ), mask=inside)
            else:
                tl.store(to, narrow(tl.div_rn(found, spread), cache.dtype.element_ty), mask=inside)
        else:
            tl.store(to, found, mask=inside)


@triton.jit(do_not_specialize=["room"])
def _update_kernel(
    k_cache, v_cache, k, v, slots, k_scale, v_scale, room, size, heads,
    stride_kp, stride_ks, stride_kh, stride_kd, stride_vp, stride_vs, stride_vh, stride_vd,
    stride_xt, stride_xh, stride_xd, stride_yt, stride_yh, stride_yd, stride_st,
    K_SCALED: tl.constexpr, V_SCALED: tl.constexpr, EIGHT: tl.constexpr,
    DIM: tl.constexpr, DIMS: tl.constexpr, HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUES: tl.constexpr, VALUE_HEADS: tl.constexpr,
    MANTISSA: tl.constexpr, BIAS: tl.constexpr, MOST: tl.constexpr, MAGIC: tl.constexpr, FNUZ: tl.constexpr,
):  # fmt: skip
    """The keys of a token, or in the second half of programs its values; a slot that is not there is left out."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token * stride_st)
    if (slot >= 0) & (slot < room):
        if tl.program_id(1) == 0:
            _write(
                k_cache, k, k_scale, token, slot, size, heads, stride_kp, stride_ks, stride_kh, stride_kd,
                stride_xt, stride_xh, stride_xd, K_SCALED, EIGHT, DIM, DIMS, HEADS,
                MANTISSA, BIAS, MOST, MAGIC, FNUZ,
            )  # fmt: skip
        else:
            _write(
                v_cache, v, v_scale, token, slot, size, heads, stride_vp, stride_vs, stride_vh, stride_vd,
                stride_yt, stride_yh, stride_yd, V_SCALED, EIGHT, VALUE_DIM, VALUES, VALUE_HEADS,
                MANTISSA, BIAS, MOST, MAGIC, FNUZ,
            )  # fmt: skip


@on_its_device
def forward(call: Any) -> None:
    """Write the rows; nothing is read on the host, so that a launch may be captured and replayed."""
    k, v, slots = call.k.detach(), call.v.detach(), call.slots
    k_cache, v_cache = call.k_cache.detach(), call.v_cache.detach()
    k_scale, v_scale = (None if each is None else each.detach().contiguous() for each in (call.k_scale, call.v_scale))
    eight, (pages, size) = k_cache.dtype in _FLOAT8, k_cache.shape[:2]
    launch = _launch_of(k_cache.dtype, k_scale is not None, v_scale is not None, k.shape[2], v.shape[2])
    if eight:
        k_cache, v_cache = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
    _update_kernel[(k.shape[0], 2)](
        k_cache, v_cache, k, v, slots, _there(k_scale, k), _there(v_scale, k), pages * size, size, k.shape[1],
        *k_cache.stride(), *v_cache.stride(), *k.stride(), *v.stride(), slots.stride(0), **launch,
    )  # fmt: skip


def _there(tensor: Tensor | None, other: Tensor) -> Tensor:
    return other if tensor is None else tensor


def _launch_of(cache: torch.dtype, k_scaled: bool, v_scaled: bool, dim: int, value_dim: int) -> dict[str, Any]:
    """Return what the kernel is launched with, for caches of a dtype."""
    eight = cache in _FLOAT8
    dims, values = triton.next_power_of_2(dim), triton.next_power_of_2(value_dim)
    return {
        "K_SCALED": k_scaled, "V_SCALED": v_scaled, "EIGHT": eight,
        "DIM": dim, "DIMS": dims, "HEADS": max(1, _NUMBERS // dims),
        "VALUE_DIM": value_dim, "VALUES": values, "VALUE_HEADS": max(1, _NUMBERS // values),
        **(format_of(cache) if eight else _NO_FORMAT), "num_warps": 4, "enable_fp_fusion": False,
    }  # fmt: skip


def _program(dtype: str, cache: str, *kinds: torch.dtype) -> Program:
    signature = {
        **pointers("k_cache v_cache", cache), **pointers("k v", dtype), **pointers("slots", "i64"),
        **pointers("k_scale v_scale", FP32), **integers("room", ""), **integers("size heads", ""),
        **integers("stride_kp stride_ks stride_kh stride_vp stride_vs stride_vh"),
        **integers("stride_xt stride_xh stride_yt stride_yh"),
        **integers("stride_kd stride_vd stride_xd stride_yd stride_st", ":1"),
    }  # fmt: skip

    def launches(chip: str) -> dict[str, Mapping[str, Any]]:
        return {
            f"{str(kind).removeprefix('torch.')} {dim}": _launch_of(kind, scaled, scaled, dim, dim)
            for kind in kinds for scaled, dim in ((kind in _FLOAT8, 128), (True, 80))
        }  # fmt: skip

    return Program(f"update {dtype}, {cache}", _update_kernel, signature, NO_SPILLS, launches)


#: What is compiled ahead of time.
AOT = (
    _program(BF16, BF16, torch.bfloat16),
    _program(FP16, FP16, torch.float16),
    _program(FP32, FP32, torch.float32),
    _program(BF16, "u8", *_FLOAT8),
)
