"""The one way from torch to JAX: a function of `kpt_backend_tpu.pallas` applied to tensors.

Where tensors lie decides how: on `xla` by torch_xla's `call_jax`, which puts the function into the graph that torch_xla
compiles; on `tpu` by torch_tpu's `jax_op` (not verified: it needs a TPU); on the CPU, for tests alone, by JAX itself.
"""

import importlib
import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from .environment import interpreting

_HERE = f"{__package__}.pallas"


def call(target: str, *tensors: Tensor | None, **static: Any) -> Any:
    """Apply a function of JAX to tensors of one device.

    Args:
        target: `module:function` of `kpt_backend_tpu.pallas`.
        *tensors: its arrays; JAX knows no int64, so none may be.
        **static: what the function is specialised for, hashable.

    Returns:
        What the function gives, as tensors on that device.
    """
    device = next(tensor.device for tensor in tensors if tensor is not None)
    bound = _bound(target, device.type, tuple(sorted(static.items())))
    if device.type == "xla":
        from torch_xla.core.xla_builder import call_jax

        return call_jax(bound, tensors)
    if device.type == "cpu":
        return _on_host(bound, tensors)
    return _of_torch_tpu(target, bound)(*tensors)


@contextmanager
def _process_kept() -> Iterator[None]:
    """Put back what JAX and torchax change while they are imported: random numbers and variables of the environment.

    The variables are for a libtpu that JAX would load; here torch_xla has loaded it before.
    """
    state, environ, numpy = random.getstate(), dict(os.environ), sys.modules.get("numpy")
    of_numpy = numpy.random.get_state() if numpy else None
    try:
        yield
    finally:
        random.setstate(state)
        for name in os.environ.keys() - environ.keys():
            del os.environ[name]
        os.environ.update(environ)
        if numpy:
            numpy.random.set_state(of_numpy)


@cache
def _bound(target: str, device_type: str, static: tuple[tuple[str, Any], ...]) -> Callable[..., Any]:
    """Return a function with its static arguments, the same object each time: what it is compiled to is kept by it."""
    module, _, name = target.partition(":")
    with _process_kept():
        if device_type == "xla":
            # Or torch_xla waits for ever for the TPU that JAX took.
            from torch_xla._internal.jax_workarounds import jax_import_guard

            jax_import_guard()
            import torchax  # noqa: F401  `call_jax` would import it
        function = getattr(importlib.import_module(f"{_HERE}.{module}"), name)
    bound = partial(function, **dict(static), interpret=interpreting() or device_type == "cpu")
    if device_type != "cpu":
        return bound
    import jax

    return jax.jit(bound)


def _on_host(function: Callable[..., Any], tensors: tuple[Tensor | None, ...]) -> Any:
    """Apply a function that JAX compiles for the CPU, where its kernels are interpreted."""
    import jax

    def to_jax(tensor: Tensor | None) -> Any:
        # A copy, for JAX wants whole tensors at aligned addresses, and may forward an argument as a result.
        return None if tensor is None else jax.dlpack.from_dlpack(tensor.detach().contiguous().clone())

    with jax.default_device(jax.devices("cpu")[0]):
        found = function(*map(to_jax, tensors))
    return jax.tree.map(lambda array: torch.utils.dlpack.from_dlpack(array).clone(), found)


@cache
def _of_torch_tpu(target: str, bound: Callable[..., Any]) -> Callable[..., Any]:
    """Register a function as an op of torch_tpu's; each specialisation has a name of its own."""
    name = f"{target.replace(':', '_')}_{id(bound):x}"
    op: Callable[..., Any] = torch.tpu.pallas.jax_op(f"kpt_tpu::{name}", bound)  # type: ignore[attr-defined]
    return op
