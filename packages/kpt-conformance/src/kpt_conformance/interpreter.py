"""Making Triton's interpreter bearable: it prepares itself anew for each function, and knows one thread alone."""

import os
import threading
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.typing import NDArray


def interpreting() -> bool:
    """Return whether Triton interprets kernels instead of compiling them."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes")


def prepare_once() -> None:
    """Let a launch prepare Triton's language once, and one thread launch at a time; where Triton interprets.

    Kernels that call other functions then take a third of the time, and threads don't meet each other's preparations.
    Float32 becomes bfloat16 as on a chip. NumPy's warnings of NaN and infinity are left out. A Triton whose interpreter
    looks otherwise is left alone.
    """
    if not interpreting():
        return
    try:
        from triton.runtime import interpreter
    except ImportError:
        return
    known = all(hasattr(interpreter, name) for name in ("_patch_lang", "_LangPatchScope", "GridExecutor"))
    if not known or getattr(interpreter, "_kpt_prepares_once", False):
        return
    prepare, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    prepared: set[frozenset[int]] = set()
    languages: dict[int, frozenset[int]] = {}
    depth = 0
    alone = threading.RLock()

    def prepare_new(function: Any) -> Any:
        modules = languages.get(id(function.__globals__))
        if modules is None:
            modules = frozenset(id(value) for value in function.__globals__.values() if _is_language(value))
            languages[id(function.__globals__)] = modules
        if depth and modules in prepared:
            return interpreter._LangPatchScope()
        prepared.add(modules)
        return prepare(function)

    def launch_once(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal depth
        with alone, warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            if depth == 0:
                prepared.clear()
            depth += 1
            try:
                return launch(self, *args, **kwargs)
            finally:
                depth -= 1

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = prepare_new, launch_once
    if hasattr(interpreter, "_convert_float"):
        interpreter._convert_float = conversion(interpreter.tl, interpreter._convert_float)
    interpreter._kpt_prepares_once = True


def _is_language(value: Any) -> bool:
    return getattr(value, "__name__", "") in ("triton.language", "triton.language.core")


def conversion(language: Any, others: "Callable[..., NDArray[Any]]") -> "Callable[..., NDArray[Any]]":
    """Return what converts numbers of one of Triton's types to another, as the interpreter's `_convert_float`.

    Between float32 and bfloat16 the interpreter cuts off where chips round, and gets denormals wrong.

    Args:
        language: `triton.language`.
        others: converts between all other types.
    """
    import numpy as np  # which is there where Triton interprets

    def convert(values: "NDArray[Any]", source: Any, target: Any, rounding: Any) -> "NDArray[Any]":
        if (source, target) == (language.float32, language.bfloat16):
            return to_bfloat16(values)
        if (source, target) == (language.bfloat16, language.float32):
            return values.view(np.uint16).astype(np.uint32) << np.uint32(16)
        return others(values, source, target, rounding)

    return convert


def to_bfloat16(values: "NDArray[Any]") -> "NDArray[Any]":
    """Return the bits of float32 numbers in bfloat16, rounded to nearest even; NaN stays NaN."""
    import numpy as np

    bits = values.view(np.uint32)
    above = bits >> np.uint32(16)
    rounded = (bits + np.uint32(0x7FFF) + (above & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), above | np.uint32(0x40), rounded).astype(np.uint16)
