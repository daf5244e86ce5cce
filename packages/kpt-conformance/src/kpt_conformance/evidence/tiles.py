"""Which tiles of a Triton kernel ran: what its functions were launched with."""

from collections.abc import Callable
from typing import Any

#: Parameters and options that say how a kernel is cut; others follow from a call's arguments.
_OPTIONS = ("num_warps", "num_stages")
_BLOCK = "BLOCK"


def observe(note: Callable[[str], None]) -> None:
    """Have every launch of a Triton function told from now on: `grouped_mm_kernel BLOCK_K=128 BLOCK_M=64 num_warps=4`.

    Does nothing where there is no Triton.
    """
    try:
        from triton.runtime import interpreter, jit
    except ImportError:
        return
    launch, run = interpreter.GridExecutor.__call__, jit.JITFunction.run

    def told_launch(self: Any, *args: Any, **kwargs: Any) -> Any:
        note(_words(self.fn.__name__, kwargs))
        return launch(self, *args, **kwargs)

    def told_run(self: Any, *args: Any, **kwargs: Any) -> Any:
        note(_words(self.fn.__name__, kwargs))
        return run(self, *args, **kwargs)

    interpreter.GridExecutor.__call__, jit.JITFunction.run = told_launch, told_run


def _words(function: str, options: dict[str, Any]) -> str:
    cut = [f"{name}={options[name]}" for name in sorted(options) if name.startswith(_BLOCK) or name in _OPTIONS]
    return " ".join([function.strip("_"), *cut])
