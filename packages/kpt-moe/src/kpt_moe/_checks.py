"""Checks of arguments that several modules share: type, range and shape, where a setting enters."""

import math
from collections.abc import Callable, Collection, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from kpt_core import InputError, UnknownNameError

_RANGES: dict[str, Callable[[Any], bool]] = {
    "a finite number": lambda number: True,
    "a positive number": lambda number: number > 0,
    "at least 0": lambda number: number >= 0,
    "at least 0 and at most 1": lambda number: 0 <= number <= 1,
    "at least 0 and below 1": lambda number: 0 <= number < 1,
    "above 0 and at most 1": lambda number: 0 < number <= 1,
}
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def require_size(owner: str, name: str, size: object, most: int | None = None, of: str = "", least: int = 1) -> None:
    """Raise `InputError` unless a size is an integer of at least `least`, and at most `most`, which is called `of`."""
    if not isinstance(size, int) or isinstance(size, bool) or size < least:
        kind = "a positive integer" if least == 1 else f"an integer of at least {least}"
        raise InputError(f"{owner}: {name} must be {kind}; got {size!r}")
    if most is not None and size > most:
        raise InputError(f"{owner}: {name} ({size}) must not exceed {of} ({most})")


def require_number(owner: str, name: str, number: Any, within: str = "a finite number") -> None:
    """Raise `InputError` unless it is a finite number, no bool, within a range of `_RANGES`."""
    if torch.compiler.is_compiling():  # where numbers are symbols
        return
    real = type(number) is not bool and isinstance(number, Real) and math.isfinite(number)
    if not real or not _RANGES[within](number):
        raise InputError(f"{owner}: {name} must be {within}; got {number!r}")


def require_bools(owner: str, **values: object) -> None:
    """Raise `InputError` unless each value is True or False."""
    for name, value in values.items():
        if not isinstance(value, bool):
            raise InputError(f"{owner}: {name} must be True or False; got {value!r}")


def require_known(what: str, name: object, known: Collection[str]) -> None:
    """Raise `UnknownNameError` unless a name is among the known ones of its kind."""
    if not isinstance(name, str) or name not in known:
        raise UnknownNameError(what, name, known)  # type: ignore[arg-type]  # it takes what users give


def require_same_tokens(owner: str, shape: Sequence[int], mask: object, token_ids: object) -> None:
    """Raise `InputError` unless a mask is bool, and ids are integers, of the tokens' shape; None is none."""
    if mask is not None and not (isinstance(mask, Tensor) and mask.dtype is torch.bool and mask.shape == shape):
        advice = ": an attention mask of integers is mask.bool(), with the shape of the tokens"
        raise InputError(f"{owner}: mask must be bool {list(shape)}; got {described(mask)}{advice}")
    fits = isinstance(token_ids, Tensor) and token_ids.dtype in INTEGERS and token_ids.shape == shape
    if token_ids is not None and not fits:
        raise InputError(f"{owner}: token_ids must be integers {list(shape)}; got {described(token_ids)}")


def require_tokens(owner: str, x: object, hidden_size: int) -> None:
    """Raise `InputError` unless x is `[tokens, hidden_size]`."""
    if not isinstance(x, Tensor) or x.dim() != 2 or x.shape[1] != hidden_size:
        raise InputError(f"{owner}: x must be [tokens, {hidden_size}]; got {shape_of(x)}")


def require_sequences(owner: str, cu_seqlens: Any, tokens: int, device: torch.device | None = None) -> None:
    """Raise `InputError` unless it tells where sequences of `tokens` begin and end; values are read on a CPU alone."""
    fits = isinstance(cu_seqlens, Tensor) and cu_seqlens.dim() == 1 and cu_seqlens.dtype in (torch.int32, torch.int64)
    if fits and device is not None:
        fits = cu_seqlens.device == device
    if not fits or cu_seqlens.shape[0] < (1 if tokens == 0 else 2):
        place = "" if device is None else f" on {device}"
        got = described(cu_seqlens)
        raise InputError(f"{owner}: cu_seqlens must be int32 of shape [sequences + 1]{place}; got {got}")
    if type(cu_seqlens) is not Tensor or cu_seqlens.device.type != "cpu" or torch.compiler.is_compiling():
        return
    if not torch._C._functorch.is_functorch_wrapped_tensor(cu_seqlens):
        values = cu_seqlens.tolist()
        if values[0] != 0 or values != sorted(values) or values[-1] > tokens:
            raise InputError(
                f"{owner}: cu_seqlens must begin with 0, ascend, and end with the number of tokens ({tokens}) at most; "
                f"got {values if len(values) < 9 else [*values[:8], '...']}"
            )


def described(value: object) -> str:
    """Return what was given, in short: a tensor's dtype, shape and device, or the type."""
    if isinstance(value, Tensor):
        return f"{value.dtype} {list(value.shape)} on {value.device}"
    return "None" if value is None else f"a {type(value).__name__}"


def shape_of(value: object) -> object:
    """Return a tensor's shape, or what was given in its place."""
    return list(value.shape) if isinstance(value, Tensor) else described(value)
