"""Making Triton's interpreter bearable: it prepares itself anew for each function, and knows one thread alone."""

import os
import threading
import warnings
from typing import Any


def interpreting() -> bool:
    """Whether Triton interprets kernels instead of compiling them."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes")


def prepare_once() -> None:
    """Let a launch prepare Triton's language once, and one thread launch at a time.

    Kernels that call other functions then take a third of the time, and threads don't meet each other's preparations.
    Float32 becomes bfloat16 as on a chip. What NumPy has to say of NaN and infinity is left out: a chip computes with
    them without a word.

    Does nothing unless Triton is installed and interprets. A Triton whose interpreter looks otherwise is left alone.
    """
    if not interpreting():
        return
    try:
        from triton.runtime import interpreter
    except ImportError:
        return
    if not all(hasattr(interpreter, name) for name in ("_patch_lang", "_LangPatchScope", "GridExecutor")):
        return
    if getattr(interpreter, "_kpt_prepares_once", False):
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
    _convert_as_chips_do(interpreter)
    interpreter._kpt_prepares_once = True


def _convert_as_chips_do(interpreter: Any) -> None:
    from .interpreted_floats import conversion  # with NumPy, which is there where Triton interprets

    if hasattr(interpreter, "_convert_float"):
        interpreter._convert_float = conversion(interpreter.tl, interpreter._convert_float)


def _is_language(value: Any) -> bool:
    return getattr(value, "__name__", "") in ("triton.language", "triton.language.core")
