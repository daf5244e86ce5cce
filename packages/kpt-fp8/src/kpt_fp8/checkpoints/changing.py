"""From one scheme to another: which numbers stay the same to the bit, and what is quantised anew."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kpt_core import InputError
from kpt_fp8.formats import FORMATS
from kpt_fp8.functions import compute_fp8_scale, quantize_to_fp8
from kpt_fp8.quality import QualityMeter
from kpt_fp8.scales import LEAST
from kpt_fp8.weights import quantize_weight, require_finite

from .scheme import QuantizedWeight, Scheme

#: Sign and magnitude of a code.
_MAGNITUDE = 0x7F
_MINUS_ZERO = 0x80


@dataclass(frozen=True, slots=True)
class ConvertedTensor:
    """What became of a quantised weight.

    Attributes:
        name: of the weight in the model.
        exact: it stands for the same numbers as before, to the bit but for the sign of zeros, which `how` tells of.
        how: what was done.
        sqnr: signal-to-noise ratio in dB against the numbers before; None where they are the same.
    """

    name: str
    exact: bool
    how: str
    sqnr: float | None = None


class Inexact(Exception):
    """The same numbers can't be written in the other scheme; the message says why."""


def same_numbers(name: str, weight: QuantizedWeight, scheme: Scheme) -> tuple[QuantizedWeight, ConvertedTensor]:
    """Write a sound weight with the same numbers in another scheme; raise `Inexact` where that has none."""
    done = []
    codes, scale = weight.codes, weight.scale
    if weight.granularity != scheme.granularity:
        scale = _finer(weight, scheme.granularity)
        done.append(f"the scale repeated per {scheme.granularity}")
    if codes.dtype is not scheme.dtype:
        zeros = int(torch.count_nonzero(codes.view(torch.uint8) == _MINUS_ZERO))
        codes, scale = recoded(codes, scale, scheme.dtype)
        if zeros:  # in e4m3fn alone: in fnuz that code is NaN
            done.append(f"{zeros} minus zeros as zeros")
        done.append(f"codes of {scheme.dtype} with scales times {'2' if FORMATS[scheme.dtype].bias == 8 else '1/2'}")
    if not torch.equal(scale.to(scheme.scale_dtype).to(torch.float32), scale):
        raise Inexact(f"its scales are no numbers of {scheme.scale_dtype}")
    changed = replace(weight, codes=codes, scale=scale, granularity=scheme.granularity)
    return changed, ConvertedTensor(name, True, ", ".join(done) or "codes and scales as they were")


def _finer(weight: QuantizedWeight, granularity: str) -> Tensor:
    if weight.granularity != "tensor":
        raise Inexact(f"its scales are per {weight.granularity}, not per {granularity}")
    rows, columns = weight.codes.shape
    if granularity == "row":
        return weight.scale.expand(rows).clone()
    return weight.scale.expand(-(-rows // 128), -(-columns // 128)).clone()


def recoded(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return codes of e4m3fn as e4m3fnuz, whose exponent has a bias that is one more, or the other way round.

    Raises:
        Inexact: they can't be written so.
    """
    pair = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
    if codes.dtype not in pair or dtype not in pair:
        raise Inexact(f"its codes are {codes.dtype}, not {dtype}")
    bits = codes.view(torch.uint8)
    if dtype is torch.float8_e4m3fnuz:
        doubled = scale * 2
        if not bool(doubled.isfinite().all()):
            raise Inexact("twice its scale is infinite")
        # Minus zero is the one NaN there.
        return torch.where(bits == _MINUS_ZERO, 0, bits).to(torch.uint8).view(dtype), doubled
    if bool(((bits & _MAGNITUDE) == _MAGNITUDE).any()):
        raise Inexact("it holds the largest code of float8_e4m3fnuz, which is NaN in float8_e4m3fn")
    if bool((scale < 2 * LEAST).any()):
        raise Inexact("half its scale is no normal number")
    return bits.clone().view(dtype), scale / 2


def quantized_anew(
    name: str, numbers: Tensor, scheme: Scheme, input_scale: Tensor | None
) -> tuple[QuantizedWeight, ConvertedTensor]:
    """Quantise numbers `[N, K]`; raise `InputError` for NaN or infinity, or where K is no multiple of a block."""
    require_finite("convert_checkpoint", name, numbers)
    if scheme.granularity == "128x128" and numbers.shape[1] % 128:
        raise InputError(
            f"{name} is {list(numbers.shape)}, and K={numbers.shape[1]} is no multiple of the block of 128, which "
            "readers ask for: exclude it, or choose another granularity"
        )
    powers = scheme.scale_dtype is torch.float8_e8m0fnu
    if scheme.scale_dtype is torch.bfloat16:
        scale = _rounded_up(compute_fp8_scale(numbers, scheme.dtype, scheme.granularity))
        codes = quantize_to_fp8(numbers, scheme.dtype, scheme.granularity, scale).codes
        meter = QualityMeter()
        made = QuantizedWeight(codes, scale, scheme.granularity, input_scale)
        meter.add(numbers, made.dequantize())
        quality = meter.result()
    else:
        codes, scale, quality = quantize_weight(
            numbers, dtype=scheme.dtype, granularity=scheme.granularity, power_of_two=powers
        )
        made = QuantizedWeight(codes, scale, scheme.granularity, input_scale)
    return made, ConvertedTensor(name, False, f"quantised anew per {scheme.granularity}", quality.sqnr)


def _rounded_up(scale: Tensor) -> Tensor:
    """Scales that are numbers of bfloat16, not smaller, so that nothing saturates."""
    near = scale.to(torch.bfloat16)
    above = torch.nextafter(near, torch.full_like(near, float("inf")))
    return torch.where(near.to(torch.float32) < scale, above, near).to(torch.float32)
