"""What a quantised weight is, whatever the format of its file: `Scheme` and `QuantizedWeight`."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kpt_fp8.dequantize import dequantize
from kpt_fp8.linear import NONE

#: By dtype, the name that safetensors has for codes.
CODES = {
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}
#: Likewise of numbers that can be quantised.
NUMBERS = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
#: Likewise of scales.
SCALES = {**NUMBERS, "F8_E8M0": torch.float8_e8m0fnu}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """How all weights of a checkpoint are quantised.

    Attributes:
        granularity: what shares a scale of a weight: `tensor`, `row`, or `128x128`.
        activations: likewise of the activations, or `none` where they stay as they are.
        static: activations have one scale that the checkpoint holds; for `activations="tensor"`.
        dtype: of the codes.
        scale_dtype: of the weights' scales in the file.
        bound: the largest magnitude that activations are taken to have, where the format limits it.
    """

    granularity: str
    activations: str = NONE
    static: bool = False
    dtype: torch.dtype = torch.float8_e4m3fn
    scale_dtype: torch.dtype = torch.float32
    bound: float | None = None

    def __str__(self) -> str:
        kind = "static" if self.static else "dynamic"
        activations = "as they are" if self.activations == NONE else f"{kind} scales per {self.activations}"
        return f"{str(self.dtype).removeprefix('torch.')}, scales per {self.granularity}; activations: {activations}"


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A weight: `codes * scale`, with the scale in float32 of `scale_shape(codes.shape, granularity)`.

    `input_scale` is what activations are divided by; None where they have no static scale.
    """

    codes: Tensor
    scale: Tensor
    granularity: str
    input_scale: Tensor | None = None

    def dequantize(self) -> Tensor:
        """The numbers, float32 `[N, K]`."""
        return dequantize(self.codes, self.scale, granularity=self.granularity, dtype=torch.float32)
