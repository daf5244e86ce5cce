"""Calling an operator, or, where nobody looks on, what it is made of.

PyTorch's dispatcher and the boxes that it puts arguments in take 15 microseconds, and several times that where weights
have just passed through the caches, as they do between the layers of a model.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling

_PLAIN = (Tensor, torch.nn.Parameter)


def call(operator: Callable[..., Any], implementation: Callable[..., Any], *arguments: Any) -> Any:
    """What `operator` gives, by way of its implementation for CPUs if nothing else depends on the call.

    Args:
        operator: of `torch.ops`. A compiler, tracer, mode, profiler or tensor of another class gets to see it.
        implementation: what is registered for it and CPUs; it records no gradients.
        arguments: positional ones.
    """
    return (implementation if _unseen(arguments) else operator)(*arguments)


def _unseen(arguments: tuple[Any, ...]) -> bool:
    return not (
        is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._is_tracing()
        or torch._C._are_functorch_transforms_active()
        or torch._C._autograd._profiler_enabled()
        or forward_ad._current_level >= 0
        or any(isinstance(value, Tensor) and type(value) not in _PLAIN for value in arguments)
    )
