"""`moe.experts` gives the same bits each time, on any thread, whatever lies in fresh memory."""

import contextvars
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from kpt_moe.experts import experts
from oracle import gradients, make_inputs, naive_experts

pytestmark = pytest.mark.usefixtures("path")


def test_a_second_backward_gives_the_same():
    inputs = make_inputs(bias=True).leaves()
    out = experts(*inputs.args)
    first = torch.autograd.grad(out.sum(), inputs.floats, retain_graph=True)
    second = torch.autograd.grad(out.sum(), inputs.floats)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_repeats_bitwise_on_two_threads(dtype):
    inputs = make_inputs(tokens=500, hidden=64, inner=48, bias=True, sentinels=True, dtype=dtype)
    grad = torch.randn(500, 64).to(dtype)
    torch.set_num_threads(2)
    try:
        runs = [gradients(lambda i: experts(*i.args), inputs, grad) for _ in range(3)]
    finally:
        torch.set_num_threads(1)
    for out, grads in runs[1:]:
        assert torch.equal(out, runs[0][0])
        assert all(torch.equal(a, b) for a, b in zip(grads, runs[0][1], strict=True))


def test_eight_threads_at_once():
    inputs = [make_inputs(tokens=40, seed=seed, sentinels=True) for seed in range(8)]
    grad = torch.randn(40, 8, dtype=torch.float64)
    want = [gradients(lambda i: experts(*i.args), i, grad) for i in inputs]
    start = threading.Barrier(8)
    have: dict[int, list[tuple[Tensor, list[Tensor]]]] = {}

    def work(number: int) -> None:
        start.wait(timeout=30)
        have[number] = [gradients(lambda i: experts(*i.args), inputs[number], grad) for _ in range(10)]

    # Each with the choice of this thread's context.
    threads = [threading.Thread(target=contextvars.copy_context().run, args=(work, number)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert sorted(have) == list(range(8)), "a thread failed"
    for number, (out, grads) in enumerate(want):
        for other, other_grads in have[number]:
            assert torch.equal(other, out)
            assert all(torch.equal(a, b) for a, b in zip(other_grads, grads, strict=True))


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Fresh memory is full of NaN: torch does this in deterministic mode."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("sizes", [{"num_experts": 9}, {"tokens": 0}, {"tokens": 1, "num_experts": 9}], ids=str)
def test_uninitialised_memory_is_not_read(sizes, bias):
    inputs = make_inputs(**sizes, bias=bias, sentinels=True)
    grad = torch.randn_like(inputs.x)
    have, have_grads = gradients(lambda i: experts(*i.args), inputs, grad)
    want, want_grads = gradients(naive_experts, inputs, grad)
    torch.testing.assert_close(have, want)
    torch.testing.assert_close(have_grads, want_grads)
    torch.testing.assert_close(experts(*inputs.args), want)
