"""Gradients of results of every kind: several, unused, integers, complex numbers, and the argument itself."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import kpt_core
from kpt_core import Backend, Call
from loopback import Loopback
from test_autograd import leaf

Add = Callable[[Backend], Backend]


@kpt_core.op("grad.pair")
def pair(x: Tensor, y: Tensor, index: Tensor | None = None) -> tuple[Tensor, Tensor]:
    return x * y, x * 3.0


@kpt_core.op("grad.same")
def same(x: Tensor, shape: int = 1) -> Tensor:
    return x.view_as(x) if shape == 1 else x.reshape(shape, -1)


def pair_kernel(call: Call) -> tuple[Tensor, Tensor]:
    return call.x * call.y, call.x * 3.0


#: The gradients that `pair_backward` was handed.
HANDED: list[Any] = []


def pair_backward(call: Call, saved: tuple[()], one: Tensor | None, other: Tensor | None) -> dict[str, Tensor]:
    HANDED.append((one is not None, other is not None, call.needs))
    zero = torch.zeros_like(call.x)
    one, other = zero if one is None else one, zero if other is None else other
    found = {"x": one * call.y + 3.0 * other, "y": one * call.x}
    return {name: found[name] for name in call.needs}


def same_kernel(call: Call) -> Tensor:
    return call.x if call.shape == 1 else call.x.reshape(call.shape, -1)


def same_backward(call: Call, saved: tuple[()], grad: Tensor) -> dict[str, Tensor]:
    return {"x": grad.reshape(call.x.shape)}


def mine(attribute: str, op: str, **settings: Any) -> Loopback:
    backward = f"{__name__}:{attribute.replace('kernel', 'backward')}"
    return Loopback(kpt_core.Kernel(op, f"{__name__}:{attribute}", **{"backward": backward, **settings}))


def test_results_that_are_not_used_hand_over_no_gradient(add: Add) -> None:
    add(mine("pair_kernel", "grad.pair"))
    x, y = leaf(3), leaf(3)
    for use, handed in ((0, (True, False)), (1, (False, True))):
        HANDED.clear()
        results = pair(x, y)
        expected = torch.autograd.grad(pair.reference(x, y)[use].sum(), (x, y), allow_unused=True)
        found = torch.autograd.grad(results[use].sum(), (x, y))
        assert [(*handed, ("x", "y"))] == HANDED
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, torch.zeros(3) if other is None else other)
    HANDED.clear()
    assert all(result.requires_grad for result in pair(x, y))
    assert HANDED == []


def test_integers_and_absent_arguments_have_none(add: Add) -> None:
    add(mine("pair_kernel", "grad.pair"))
    x, y = leaf(3), leaf(3)
    one, _ = pair(x, y, torch.arange(3))
    one.sum().backward()
    assert torch.equal(x.grad, y.detach())


@pytest.mark.parametrize("shape", [1, 2])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_kernel_may_give_back_its_argument(add: Add, shape: int, compiled: bool) -> None:
    """Writing to the result then writes to no argument where a compiler thinks it a tensor of its own."""
    add(mine("same_kernel", "grad.same"))
    run = torch.compile(lambda x, n: same(x, n).mul(2), fullgraph=True, backend="aot_eager") if compiled else None
    x = leaf(4)
    out = run(x, shape) if run else same(x, shape).mul(2)
    (gradient,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(gradient, torch.full((4,), 2.0))

    def writes(x: Tensor) -> Tensor:
        result = same(x, shape)
        return result.add_(1).sum() + x.sum()

    if compiled:
        plain = torch.zeros(4)
        assert torch.compile(writes, fullgraph=True, backend="aot_eager")(plain) == 4
        assert plain.sum() == 0
        operator = torch.ops.kpt.grad_same.default
        given = operator(plain, shape, "")
        assert given.untyped_storage().data_ptr() != plain.untyped_storage().data_ptr()


@kpt_core.op("grad.turned")
def turned(x: Tensor, angle: Tensor) -> tuple[Tensor, Tensor]:
    result = x * torch.polar(torch.ones_like(angle), angle)
    return result, result.abs()


def turned_kernel(call: Call) -> tuple[Tensor, Tensor]:
    return turned.reference(call.x, call.angle)


def turned_backward(call: Call, saved: tuple[()], *grads: Tensor | None) -> dict[str, Tensor]:
    with torch.enable_grad():
        wanting = [each.detach().requires_grad_() for each in (call.x, call.angle)]
        results = turned.reference(*wanting)
    used = [(result, grad) for result, grad in zip(results, grads, strict=True) if grad is not None]
    found = torch.autograd.grad([r for r, _ in used], wanting, [g for _, g in used])
    return dict(zip(("x", "angle"), found, strict=True))


@pytest.mark.parametrize("looked_on", [False, True])
def test_complex_numbers_have_gradients_as_well(add: Add, looked_on: bool) -> None:
    add(mine("turned_kernel", "grad.turned"))
    x, angle = torch.randn(3, dtype=torch.complex128, requires_grad=True), leaf(3)
    with torch.autograd.profiler.profile() if looked_on else nullcontext():
        assert all(result.requires_grad for result in turned(x, angle))
        assert torch.autograd.gradcheck(turned, (x, angle))
        assert torch.autograd.gradgradcheck(turned, (x, angle))


@kpt_core.op("grad.index")
def index(x: Tensor) -> Tensor:
    return x.argmax(-1)


def index_kernel(call: Call) -> Tensor:
    return call.x.argmax(-1) + 100


def index_backward(call: Call, saved: tuple[()], nothing: None) -> dict[str, Tensor]:
    raise AssertionError("integers have no gradient")


def test_a_result_of_integers_is_not_differentiable(add: Add) -> None:
    add(mine("index_kernel", "grad.index"))
    for run in (index, torch.compile(lambda x: index(x), backend="aot_eager")):
        x = leaf(3, 4)
        found = run(x)
        assert (found[0] >= 100, found.requires_grad) == (True, False)
