"""Choosing among what this package has for its ops."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import kpt_core
from kpt_core.dispatch import force
from kpt_moe.ops import KERNELS


@contextmanager
def served_by(*functions: str) -> Iterator[None]:
    """The kernels of this package that are named `module:function` serve their ops; none of them: the references do."""
    chosen = [kernel for kernel in KERNELS if kernel.forward.removeprefix("kpt_moe.torch_kernels.") in functions]
    assert len(chosen) == len(functions)
    with ExitStack() as stack:
        if not chosen:
            stack.enter_context(kpt_core.use("reference"))
        for kernel in chosen:
            stack.enter_context(force("torch", kernel))
        yield
