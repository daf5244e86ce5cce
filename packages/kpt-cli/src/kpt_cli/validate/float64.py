"""The float64 reference of a model: the same weights, widened, and nothing on the way rounded to less."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

_NARROW = (torch.float32, torch.float16, torch.bfloat16)
_CASTS = (Tensor.float, Tensor.half, Tensor.bfloat16)
#: What can run in float64 on any machine.
_PLAIN_ATTENTION = ("eager", "sdpa")


def widened(model: nn.Module) -> nn.Module:
    """A copy of the model on the CPU with its weights and buffers in float64, each exactly what it was."""
    # Copied one by one: a narrow copy of all beside the wide one, and on the model's device, might not fit.
    widen: dict[int, Any] = {id(p): nn.Parameter(_wide(p), p.requires_grad) for p in model.parameters()}
    widen |= {id(b): _wide(b) for b in model.buffers()}
    wide: Any = copy.deepcopy(model, widen)
    config = getattr(wide, "config", None)
    if getattr(config, "_attn_implementation", None) not in (None, *_PLAIN_ATTENTION):
        wide.set_attn_implementation("eager")
    return wide  # type: ignore[no-any-return]


def _wide(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.float64 if tensor.is_floating_point() else tensor.dtype, copy=True)


class _Widen(TorchFunctionMode):
    """Turn every conversion to a narrower floating dtype into one to float64.

    Models convert to float32 inside, in norms and routers for instance. That is wide beside bfloat16; in a float64 run
    it would make the oracle as coarse as what it judges.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _CASTS:
            return args[0].double()
        args, kwargs = tree_map(lambda leaf: torch.float64 if _is_narrow(leaf) else leaf, (tuple(args), kwargs or {}))
        return func(*args, **kwargs)


def _is_narrow(leaf: object) -> bool:
    return isinstance(leaf, torch.dtype) and leaf in _NARROW


@contextmanager
def in_float64() -> Iterator[None]:
    """Compute everything in float64 inside the block."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Widen():
            yield
    finally:
        torch.set_default_dtype(before)


def cast(model: nn.Module, dtype: torch.dtype, *, only: torch.dtype | None = None) -> None:
    """Convert a model's floating parameters and saved buffers in place.

    Buffers that are not saved, such as rotary frequencies, stay: they are computed, and models hold them in float32.

    Args:
        model: any module.
        dtype: what they become.
        only: convert tensors of this dtype alone; a model may keep some wider on purpose.
    """
    saved = model.state_dict(keep_vars=True)
    for tensor in saved.values():
        if isinstance(tensor, Tensor) and tensor.is_floating_point() and (only is None or tensor.dtype is only):
            tensor.data = tensor.data.to(dtype)
