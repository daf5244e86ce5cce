"""Kernels by the names of their modules; where there is no library, tests skip with the backend's reason."""

from functools import partial

import pytest

from kpt_backend_cpu import BACKEND
from kpt_core import get_op
from kpt_core.dispatch import force


def by_module(run):
    reason = BACKEND.unavailable()
    if reason is not None:
        pytest.skip(reason)
    return {kernel.forward.rpartition(":")[0].rpartition(".")[2]: partial(run, kernel) for kernel in BACKEND.kernels()}


@pytest.fixture
def kernels():
    """What a kernel's forward gives for the arguments of its op, whatever the kernel would refuse."""
    return by_module(forward)


@pytest.fixture
def trained():
    """The same by way of the op, so that autograd can ask for the kernel's backward."""
    return by_module(through_op)


def forward(kernel, *arguments, **options):
    op = get_op(kernel.op)
    results = kernel.load()(op.bind(*arguments, **options))
    return results[0] if kernel.backward and op.saved_count else results


def through_op(kernel, *arguments, **options):
    with force("cpu", kernel):
        return get_op(kernel.op)(*arguments, **options)
