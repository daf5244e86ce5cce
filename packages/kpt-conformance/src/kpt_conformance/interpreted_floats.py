"""Between float32 and bfloat16 in Triton's interpreter: it cuts off where chips round, and gets denormals wrong."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray


def conversion(language: Any, others: Callable[..., NDArray[Any]]) -> Callable[..., NDArray[Any]]:
    """What converts numbers of one of Triton's types to another, as the interpreter's `_convert_float`.

    Args:
        language: `triton.language`.
        others: converts between all other types.
    """

    def convert(values: NDArray[Any], source: Any, target: Any, rounding: Any) -> NDArray[Any]:
        if (source, target) == (language.float32, language.bfloat16):
            return to_bfloat16(values)
        if (source, target) == (language.bfloat16, language.float32):
            return values.view(np.uint16).astype(np.uint32) << np.uint32(16)
        return others(values, source, target, rounding)

    return convert


def to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The bits of float32 numbers in bfloat16, rounded to nearest even; NaN stays NaN."""
    bits = values.view(np.uint32)
    above = bits >> np.uint32(16)
    rounded = (bits + np.uint32(0x7FFF) + (above & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), above | np.uint32(0x40), rounded).astype(np.uint16)
