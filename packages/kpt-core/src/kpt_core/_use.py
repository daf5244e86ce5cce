"""Scopes that the user opens, each in one thread: which kernels must run, and what strictness applies."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from . import _registry
from ._errors import InputError, UnknownNameError
from ._op import Op
from ._selection import Selection
from ._settings import effective, scoped


@contextmanager
def use(name: str | None = None, *, op: str = "*", strict: bool | None = None) -> Iterator[None]:
    """Decide what runs inside the block, in this thread.

    Backward runs under the settings of the thread that runs it. Autograd uses threads of its own for accelerators, so
    that there a block reaches the forward only, even around `loss.backward()`; on the CPU it is the thread that calls
    `backward`. The environment variables reach both.

    Args:
        name: a backend (`nvidia`), a kernel's full name (`package.module:attribute`) or `reference`. What is named
            must run: where it can't, the call raises `NoKernelError` with every refusal. None leaves the choice free.
        op: limit `name` to one op.
        strict: True turns a failing kernel and a fallback on an accelerator into errors; None leaves it as it is.

    Raises:
        UnknownNameError: no such backend, kernel or op is installed.
    """
    if torch.compiler.is_compiling():
        raise InputError("use() can't be opened inside a compiled function: open it around the call")
    if op != "*":
        _registry.get_op(op)
    if name is not None and name not in _registry.known_choices():
        raise UnknownNameError("backend or kernel", name, _registry.known_choices(), "(`kpt kernels` lists all)")
    scope = effective()
    if name is not None:
        scope = replace(scope, choices=(*scope.choices, (op, name)))
    if strict is not None:
        scope = replace(scope, strict=strict)
    with scoped(scope):
        yield


def explain(op: Op[..., Any] | str, *args: Any, **kwargs: Any) -> Selection:
    """What `op(*args, **kwargs)` would run, and why not the others; nothing is computed.

    Raises:
        UnknownNameError: no op has that name.
        InputError: the op refuses the arguments.
        NoKernelError: an explicit choice or strict mode can't be satisfied.
    """
    return (_registry.get_op(op) if isinstance(op, str) else op).explain(*args, **kwargs)
