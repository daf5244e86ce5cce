"""What of these kernels is compiled ahead of time, and the contract that each chip's code keeps."""

from functools import partial
from typing import Any

from kpt_backend_tpu.chips import CHIPS
from kpt_backend_tpu.layouts import Activation, Choice, Layout
from kpt_backend_tpu.programs import Arguments, Program
from kpt_backend_tpu.tiles import tile_of

#: As a rule half of what XLA gives a kernel of a core's VMEM; and how many bytes of sums may go there for lack of
#: registers, over the whole code of a program, of which experts have several kernels.
_CONTRACT = "mosaic, mxu of {dtype}, spills <= {spills} KiB, vmem <= {vmem} MiB"
_DTYPES = {"bf16": "bfloat16", "f32": "float32"}

#: Whole tiles, tiles of few rows, and sizes that are no multiple of anything.
_SIZES: dict[str, dict[str, Any]] = {
    "prefill": {"rows": 4096, "groups": 8, "inner": 2048, "columns": 1408},
    "decode": {"rows": 64, "groups": 128, "inner": 2048, "columns": 768},
    "odd": {"rows": 1001, "groups": 5, "inner": 193, "columns": 70},
}


def _product(dtype: str, transposed: bool, rows: int, groups: int, inner: int, columns: int) -> Arguments:
    matrix = (columns, inner) if transposed else (inner, columns)
    tile = tile_of(rows, groups, inner, columns, 2 if dtype == "bfloat16" else 4)
    arrays = ((dtype, rows, inner), (dtype, groups, *matrix), ("int32", groups))
    return arrays, {"tile": tile, "transposed": transposed}


def _weight_gradient(dtype: str, rows: int, groups: int, inner: int, columns: int) -> Arguments:
    tile = tile_of(rows, groups, inner, columns, 2 if dtype == "bfloat16" else 4)
    return ((dtype, rows, inner), (dtype, rows, columns), ("int32", groups)), {"tile": tile}


def _experts(dtype: str, rows: int, groups: int, inner: int, columns: int, backward: bool) -> Arguments:
    tokens, biases = (rows // 2, 2), ((dtype, groups, 2 * columns), (dtype, groups, inner))
    x = (dtype, tokens[0], inner)
    weights = ((dtype, groups, 2 * columns, inner), (dtype, groups, inner, columns))
    layout = Layout(Activation("swiglu", 1.0, 0.0, None, False), transposed=False)
    if not backward:
        return (x, ("int32", *tokens), ("float32", *tokens), *weights, *biases), {"layout": layout}
    saved = ((dtype, tokens[0] * 2, 2 * columns), ("int32", tokens[0] * 2), ("int32", groups))
    needs = ("x", "top_k_weights", "gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias")
    return (x, ("float32", *tokens), *weights, *biases, *saved, x), {"layout": layout, "needs": needs}


def _contract(function: str, dtype: str, chip: str) -> str:
    several = function.startswith("experts")
    # In the whole program the compiler gives the same kernel up to 18 MiB of the 64 that a core of this chip has.
    vmem = 32 if several and chip == "tpu7x" else 8
    return _CONTRACT.format(dtype=dtype, spills=8192 if several else 2048, vmem=vmem)


def _program(name: str, short: str, function: str, arguments: Any, **more: Any) -> Program:
    return Program(
        name=f"{name} {short}",
        function=function,
        sizes=_SIZES,
        arguments=partial(arguments, _DTYPES[short], **more),
        contracts={chip: _contract(function, short, chip) for chip in CHIPS},
    )


grouped_mm = tuple(
    _program(name, short, "grouped_mm:product", _product, transposed=transposed)
    for short in _DTYPES
    for name, transposed in (("forward", False), ("backward of x", True))
)
grouped_mm_wgrad = tuple(
    _program("forward", short, "grouped_mm:weight_gradient", _weight_gradient) for short in _DTYPES
)
experts = tuple(
    _program(name, short, f"experts:{name}", _experts, backward=name == "backward")
    for short in _DTYPES
    for name in ("forward", "backward")
)

#: Of published models: tokens, experts, whether there is a correction bias, and the choice.
_GATINGS: dict[str, dict[str, Any]] = {
    "qwen3": {"tokens": 4096, "experts": 128, "choice": Choice(8, "softmax", True, 1.0, 1, 1)},
    "gpt-oss": {"tokens": 64, "experts": 128, "choice": Choice(4, "softmax_after", False, 1.0, 1, 1)},
    "deepseek-v3": {"tokens": 4096, "experts": 256, "choice": Choice(8, "sigmoid", True, 2.5, 8, 4), "biased": True},
    "odd": {"tokens": 1001, "experts": 70, "choice": Choice(3, "softmax", False, 1.0, 7, 2)},
}


def _gating(dtype: str, tokens: int, experts: int, choice: Choice, biased: bool = False) -> Arguments:
    return ((dtype, tokens, experts), ("float32", experts) if biased else None), {"choice": choice}


top_k_gating = tuple(
    Program(
        name=f"forward {short}",
        function="gating:forward",
        sizes=_GATINGS,
        arguments=partial(_gating, dtype),
        contracts=dict.fromkeys(CHIPS, "mosaic, spills <= 4096 KiB, vmem <= 8 MiB"),
    )
    for short, dtype in _DTYPES.items()
)
