"""KPT without the kernels of any vendor's backend, to tell what they gain."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import kpt_core
from kpt_core.contract import TORCH
from kpt_core.dispatch.settings import effective, scoped


@contextmanager
def plain_pytorch() -> Iterator[None]:
    """Have kernels in plain PyTorch serve the ops inside the block, or their references where there is none."""
    scope = effective()
    vendors = kpt_core.backends().keys() - {TORCH}
    with scoped(replace(scope, disabled=scope.disabled | vendors)):
        yield
