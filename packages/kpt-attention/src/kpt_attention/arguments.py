"""Arguments that are counts, numbers or tensors: taken as such, or refused with their value."""

import math
import numbers
import operator
from typing import Any

import torch
from torch import Tensor

from kpt_core import InputError


def integer(owner: str, name: str, value: Any, least: int | None = None) -> int:
    """Return a count or a place as an int, of numpy's too; raise `InputError` for anything else, bool included.

    Args:
        owner: whose argument it is.
        name: of the argument.
        value: what was given.
        least: what it is at least; nothing if None.
    """
    if isinstance(value, torch.SymInt) or torch.compiler.is_compiling():  # sizes of a graph
        return value  # type: ignore[no-any-return]
    try:
        found = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        found = None
    if found is None or (least is not None and found < least):
        told = "" if least is None else f" of at least {least}"
        raise InputError(f"{owner}: {name} must be an integer{told}; got {value!r}")
    return found


def check_tensor(owner: str, name: str, value: object) -> None:
    """Raise `InputError` unless an argument is a tensor."""
    if not isinstance(value, Tensor):
        raise InputError(
            f"{owner}: {name} must be a tensor; got {type(value).__name__} {value!r}: torch.tensor makes one"
        )


def number(owner: str, name: str, value: Any) -> float:
    """Return a number as a float; raise `InputError` for NaN, inf, and what is no number."""
    if isinstance(value, torch.SymFloat) or torch.compiler.is_compiling():
        return value  # type: ignore[no-any-return]
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise InputError(f"{owner}: {name} must be a finite number; got {value!r}")
    return float(value)
