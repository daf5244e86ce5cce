"""Calling an operator, or, where nobody looks on, what it is made of.

PyTorch's dispatcher and the boxes that it puts arguments in take 15 microseconds, and several times that where weights
have just passed through the caches, as they do between the layers of a model.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn import Parameter

from .tensors import transformed


def call(operator: Callable[..., Any], implementation: Callable[..., Any], *arguments: Any) -> Any:
    """What `operator` gives, by way of its implementation for CPUs if nothing else depends on the call.

    Args:
        operator: of `torch.ops`. A compiler, tracer, mode, profiler or tensor of another class gets to see it.
        implementation: what is registered for it and CPUs; it records no gradients.
        arguments: positional ones.
    """
    return (implementation if _unseen(arguments) else operator)(*arguments)


def _unseen(arguments: tuple[Any, ...]) -> bool:
    if (
        is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._is_tracing()
        or transformed()
        or torch._C._autograd._profiler_enabled()
    ):
        return False
    # A loop, since generators and functions of their own take longer than all the questions.
    for value in arguments:
        kind = type(value)
        if kind is Tensor or kind is Parameter:
            # PyTorch negates some numbers when they are read, and leaves some zeros out of memory.
            if value.is_neg() or value._is_zerotensor() or torch._is_functional_tensor(value):
                return False
        elif isinstance(value, Tensor):
            return False
    return True
