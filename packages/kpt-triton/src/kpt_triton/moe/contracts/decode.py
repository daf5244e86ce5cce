"""Contracts of `kpt_triton.moe.decode`: many loads under way, for nothing but reading weights takes time."""

from collections.abc import Mapping
from typing import Any

from kpt_triton.aot import Program
from kpt_triton.contracts import BF16, E4M3, FP16, FP32, integers, lean, pointers
from kpt_triton.moe.decode import Strip, decode_down_kernel, decode_up_kernel

from .common import weight_strides

_STRIP, _OF_BLOCKS = Strip(), Strip(k=128)
_UP = {"NAME": "swiglu", "IS_GATED": True, "INTERLEAVED": False, "LIMITED": False, "BIAS": False, "SCALE": ""}
_DOWN = {"BIAS": False, "SCALE": ""}


def _program(
    name: str, dtype: str, defaults: Mapping[str, Any], strip: Strip, weight: str, layout: str, **constants: Any
) -> Program:
    up = defaults is _UP
    signature = {
        **pointers("x out bias" if up else "a out bias", dtype),
        **pointers("w", weight or dtype),
        **pointers("scale" if up else "scale weights", FP32),
        **pointers("index", "i64"),
        **integers("N K stride_or stride_be" + (" stride_xr" if up else " stride_ar")),
        **integers("experts top_k stride_se stride_sk stride_sn", ""),
        **dict.fromkeys(("alpha", "beta", "limit") if up else (), "fp32"),
        **weight_strides(layout),
    }
    launch = {
        "BLOCK_N": strip.n, "BLOCK_K": strip.k, "STAGES": strip.stages, "num_warps": strip.warps,
        "enable_fp_fusion": True, **defaults, **constants,
    }  # fmt: skip
    written = f"{strip.n}x{strip.k} w{strip.warps} s{strip.stages}"
    contracts = lean("cp.async")
    function = decode_up_kernel if up else decode_down_kernel
    return Program(name, function, signature, contracts, lambda chip: {written: launch})


def _up(name: str, dtype: str = BF16, strip: Strip = _STRIP, weight: str = "", **constants: Any) -> Program:
    return _program(f"decode, up {name}", dtype, _UP, strip, weight, "NK", **constants)


def _down(name: str, dtype: str = BF16, strip: Strip = _STRIP, weight: str = "", **constants: Any) -> Program:
    return _program(f"decode, down {name}", dtype, _DOWN, strip, weight, "NK", **constants)


AOT = (
    _up("bf16"),
    _up("fp16", FP16),
    _up("fp32", FP32),
    _up("bf16, interleaved, biases", INTERLEAVED=True, LIMITED=True, BIAS=True),
    _up("bf16, gelu", NAME="gelu", IS_GATED=False),
    _up("bf16 by e4m3, columns", weight=E4M3, SCALE="n"),
    _up("bf16 by e4m3, blocks", weight=E4M3, SCALE="block", strip=_OF_BLOCKS),
    _down("bf16"),
    _down("fp32", FP32),
    _down("bf16, biases", BIAS=True),
    _down("bf16 by e4m3, columns", weight=E4M3, SCALE="n"),
    _down("bf16 by e4m3, blocks", weight=E4M3, SCALE="block", strip=_OF_BLOCKS),
)
