"""What is wrong with a quantised weight, whoever reads it: `faults_of`, for `load`, converting and checking alike."""

import math

import torch
from torch import Tensor

from kpt_core import InputError
from kpt_fp8.formats import FORMATS

from .scheme import QuantizedWeight

#: Weights of trained layers are far below this; scales that are reciprocals make them far larger.
_LARGE = 64.0
_PART = 1 << 17
_MAGNITUDE, _MINUS_ZERO = 0x7F, 0x80


def require_sound(name: str, weight: QuantizedWeight) -> None:
    """Raise `InputError` with the first of a weight's faults."""
    for fault in faults_of(name, weight):
        raise InputError(fault)


def faults_of(
    name: str, weight: QuantizedWeight, scale_name: str | None = None, input_name: str | None = None
) -> list[str]:
    """Return a sentence for each thing that speaks against codes or scales of a weight; names are of their tensors."""
    # In parts, which take no memory to speak of; a sum would make int64 of it.
    bad = sum(int(torch.count_nonzero(_nan_codes(part))) for part in weight.codes.split(_rows(weight.codes)))
    if bad:
        return [
            f"{name} holds {bad} of {weight.codes.numel()} codes that are NaN; expected numbers: quantise the weight "
            "again from a sound one"
        ]
    for what, scale in (("scale", weight.scale), ("static scale of activations", weight.input_scale)):
        if scale is not None and not bool((sound := scale.isfinite() & (scale > 0)).all()):
            wrong = scale[~sound].flatten()[0].item()
            return [f"{name} has a {what} of {wrong}; expected positive finite numbers: quantise the weight again"]
    scale_name, input_name = scale_name or f"the scale of {name}", input_name or f"the static input scale of {name}"
    given = weight.input_scale
    return [*_reciprocal(scale_name, weight), *_odd_input_scale(input_name, None if given is None else float(given))]


def _rows(codes: Tensor) -> int:
    return max(_PART // max(codes.shape[-1], 1), 1)


def _nan_codes(codes: Tensor) -> Tensor:
    """Where codes are NaN or infinite, bool of the same shape."""
    bits = codes.view(torch.uint8)
    special = FORMATS[codes.dtype].special
    return bits == special if special == _MINUS_ZERO else (bits & _MAGNITUDE) >= special


def _reciprocal(scale_name: str, weight: QuantizedWeight) -> list[str]:
    """Tell whether weights would be usual if the scale were 1 by what is stored."""
    most = FORMATS[weight.codes.dtype].most
    if weight.codes.numel() == 0 or float(weight.scale.max()) * most <= _LARGE:
        return []  # most are, and nothing is widened for them
    largest = _largest(weight)
    inverse = QuantizedWeight(weight.codes, 1 / weight.scale, weight.granularity)
    usual = _largest(inverse)
    # By codes alone the largest is 448, so that a scale of 1 tells nothing: both must be clearly apart.
    if largest <= _LARGE or not math.isfinite(usual) or usual > _LARGE or largest < 100 * usual:
        return []
    return [
        f"{scale_name} looks like the reciprocal of a scale: weights of up to {largest:.3g} with it, and {usual:.3g} "
        "with 1 by it; readers multiply by it, whatever its name says, so store the reciprocal"
    ]


def _largest(weight: QuantizedWeight) -> float:
    return float(weight.dequantize().abs().amax().to(torch.float64))


def _odd_input_scale(input_name: str, scale: float | None) -> list[str]:
    # Activations of up to 448 times the scale are told apart.
    if scale is None or 1e-8 <= scale <= 1e4:
        return []
    return [
        f"{input_name} is {scale:.3g}, for activations of up to {448 * scale:.3g}: calibrate again, or store its "
        "reciprocal, if it is one"
    ]
