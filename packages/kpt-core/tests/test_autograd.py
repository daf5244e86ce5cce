"""Gradients: core ties every kernel to autograd, by what the op declares."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import toy_ops
from kpt_core import Backend, Call
from loopback import Loopback, hundreds, kernel, scale
from toy_ops import KERNELS, RAN, layer

Add = Callable[[Backend], Backend]


def leaf(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def test_core_has_one_autograd_function_and_two_for_torch_func() -> None:
    functions = [each for each in torch.autograd.Function.__subclasses__() if each.__module__.startswith("kpt_core")]
    assert [each.__name__ for each in functions] == ["Dispatched", "Tracked", "TrackedBackward"]


def test_a_kernel_s_backward_serves_its_forward(add: Add) -> None:
    add(Loopback(kernel("first", backward="second_backward")))
    x, weight = torch.ones(4, requires_grad=True), torch.full((4,), 3.0, requires_grad=True)
    out = scale(x, weight, factor=2.0)
    assert hundreds(out) == 1
    out.sum().backward()
    assert x.grad is not None
    assert weight.grad is not None
    assert (x.grad[0], weight.grad[0]) == (206, 202)


def test_needs_are_what_wants_a_gradient_and_autograd_is_off_in_kernels(
    add: Add, x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def forward(call: Call) -> Tensor:
        seen.append((call.needs, torch.is_grad_enabled()))
        return call.x * call.weight

    def backward(call: Call, saved: tuple[()], grad: Tensor) -> dict[str, Tensor]:
        seen.append((call.needs, torch.is_grad_enabled()))
        return dict.fromkeys(call.needs, grad)

    monkeypatch.setattr("loopback.first", forward)
    monkeypatch.setattr("loopback.backward", backward)
    add(Loopback(kernel("first", backward="backward")))
    one, other = (torch.ones(4, requires_grad=True) for _ in range(2))
    scale(x, x)
    for arguments in ((one, x), (x, other), (one, other)):
        out = scale(*arguments)
        assert out.requires_grad
        out.sum().backward()
        with torch.no_grad():
            assert not scale(*arguments).requires_grad
        with torch.inference_mode():
            assert scale(*arguments).is_inference()
    assert [needs for needs, _ in seen] == [
        (),
        *(each for needs in (("x",), ("weight",), ("x", "weight")) for each in (needs, needs, (), ())),
    ]
    assert not any(enabled for needs, enabled in seen if needs)


def test_what_the_op_declares_is_saved_and_no_more(add: Add, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of one kernel may follow the forward of another; unread arguments are let go."""

    def spy(call: Call, saved: Any, grad: Tensor) -> dict[str, Tensor]:
        assert (call.bias.shape, call.bias.stride(), call.bias.sum()) == ((4,), (0,), 0)
        assert [each.shape for each in saved] == [(70, 4), (70,)]
        return backward(call, saved, grad)

    backward = toy_ops.layer_backward
    monkeypatch.setattr(toy_ops, "layer_backward", spy)
    add(Loopback(*KERNELS))
    RAN.clear()
    x, weight = leaf(70, 5), leaf(5, 4)
    bias = torch.randn(4, dtype=torch.float64).requires_grad_() * 1.0
    kept = weakref.ref(bias)
    out = layer(x, weight, bias)
    del bias
    gc.collect()
    assert kept() is None
    out.sum().backward()
    assert RAN == {"layer_kernel_for_many": 1, "layer_backward": 1}
    with torch.no_grad():
        assert isinstance(layer(x, weight), Tensor)


def test_every_kernel_equals_the_reference_by_numbers(add: Add) -> None:
    add(Loopback(*KERNELS))
    arguments = leaf(7, 5), leaf(5, 4), leaf(4)
    assert torch.autograd.gradcheck(layer, arguments)
    assert torch.autograd.gradgradcheck(layer, arguments)
    assert torch.autograd.gradgradcheck(lambda x: toy_ops.best(x)[0], (leaf(3, 16),))
    assert torch.autograd.gradgradcheck(lambda x: toy_ops.dropout(x, 3, 0), (leaf(3, 16),))


@pytest.mark.parametrize("served", [False, True], ids=["reference", "kernel"])
def test_a_second_derivative_is_the_reference_s(add: Add, served: bool) -> None:
    """Also where one argument is made of the other, outside of the op."""
    if served:
        add(Loopback(*KERNELS))
    x, weight = leaf(6, 5), leaf(5, 4)

    def penalty(function: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        out = function(x * 2.0, weight * x.sum()).square().sum()
        grads = torch.autograd.grad(out, (x, weight), create_graph=True)
        again = torch.autograd.grad(sum(grad.square().sum() for grad in grads), (x, weight), create_graph=True)
        third = torch.autograd.grad(sum(grad.sum() for grad in again), (x, weight))
        return (*grads, *again, *third)

    RAN.clear()
    torch.testing.assert_close(penalty(layer), penalty(layer.reference))
    assert bool(RAN["layer_kernel"]) == served


def test_backward_may_be_run_again_and_not_after_what_it_reads_was_changed(add: Add) -> None:
    add(Loopback(kernel("first", backward="backward")))
    x, weight = leaf(4), leaf(4)
    out = scale(x, weight).sum()
    out.backward(retain_graph=True)
    once = x.grad.clone()
    out.backward()
    assert torch.equal(x.grad, 2 * once)
    with pytest.raises(RuntimeError, match="second time"):
        out.backward()
    out = scale(x, weight).sum()
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


def test_gradients_in_another_layout_are_right(add: Add) -> None:
    add(Loopback(*KERNELS))
    x = torch.randn(5, 7, dtype=torch.float64).T.requires_grad_()
    weight = torch.randn(4, 5, dtype=torch.float64).T.requires_grad_()
    for run in (layer, torch.compile(lambda *args: layer(*args), fullgraph=True, backend="aot_eager")):
        found = torch.autograd.grad(run(x, weight).T[::2].sum(), (x, weight))
        torch.testing.assert_close(found, torch.autograd.grad(layer.reference(x, weight).T[::2].sum(), (x, weight)))


def test_a_differentiable_kernel_is_plain_pytorch(add: Add, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loopback.first", lambda call: call.x * call.weight * 5.0)
    add(Loopback(kernel("first", differentiable=True)))
    x, weight = leaf(4), leaf(4)
    (grad,) = torch.autograd.grad(scale(x, weight).sum(), x, create_graph=True)
    assert torch.equal(grad, 5.0 * weight)
    assert torch.equal(torch.autograd.grad(grad.sum(), weight)[0], torch.full((4,), 5.0))


def test_tensors_are_let_go_with_the_result(add: Add) -> None:
    """By their counts alone: no cycle keeps them for the garbage collector."""
    add(Loopback(*KERNELS))
    gc.disable()
    try:
        x, weight = leaf(3, 5), leaf(5, 4)
        kept = weakref.ref(x)
        out = layer(x, weight).sum()
        out.backward()
        del x
        del out
        assert kept() is None
    finally:
        gc.enable()


def test_hooks_may_put_what_is_saved_elsewhere(add: Add) -> None:
    add(Loopback(*KERNELS))
    x, weight, packed = leaf(3, 5), leaf(5, 4), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t.shape) or t.clone(), lambda t: t):
        out = layer(x, weight)
    assert len(packed) == 4  # the arguments, and what the op declares
    torch.testing.assert_close(
        torch.autograd.grad(out.sum(), (x, weight)), torch.autograd.grad(layer.reference(x, weight).sum(), (x, weight))
    )


def test_hooks_see_the_gradients(add: Add) -> None:
    add(Loopback(kernel("first", backward="backward")))
    x, seen = leaf(4), []
    inner = x * 1.0
    inner.register_hook(lambda grad: seen.append(grad) or 2 * grad)
    scale(inner, torch.ones(4)).sum().backward()
    assert torch.equal(x.grad, torch.full((4,), 2.0))
    assert len(seen) == 1


def test_a_result_can_be_written_to(add: Add) -> None:
    add(Loopback(kernel("first", backward="backward")))
    x = leaf(4)
    scale(x, torch.ones(4)).mul_(3).sum().backward()
    assert torch.equal(x.grad, torch.full((4,), 3.0))
