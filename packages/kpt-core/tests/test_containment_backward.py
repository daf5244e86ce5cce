"""A kernel that raises in backward is named, and the next one's gradient comes, or the reference's."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import kpt_core
import toy_ops
from kpt_core import Backend, Call, KernelFailedWarning
from loopback import Fault, Loopback, hundreds, kernel, scale
from toy_ops import KERNELS, RAN, layer

Add = Callable[[Backend], Backend]


@pytest.fixture(params=["eager", "compiled"])
def run(request: pytest.FixtureRequest, fresh_compiler: None) -> Callable[..., Tensor]:
    if request.param == "eager":
        return scale
    return torch.compile(lambda x, weight: scale(x, weight), fullgraph=True, backend="aot_eager")


def leaf() -> Tensor:
    return torch.full((4,), 3.0, requires_grad=True)


def gradient(run: Callable[..., Tensor], x: Tensor | None = None) -> int:
    """Whose gradient it is, by its hundreds."""
    x = leaf() if x is None else x
    out = run(x, torch.ones(4))
    assert hundreds(out) in (0, 2, 5)
    (found,) = torch.autograd.grad(out.sum(), x)
    return hundreds(found)


def test_the_next_one_s_gradient_comes_with_a_warning(add: Add, run: Callable[..., Tensor]) -> None:
    add(
        Loopback(kernel("faulty", backward="faulty_backward", priority=5), kernel("second", backward="second_backward"))
    )
    assert gradient(run) == 5
    Fault.in_backward = RuntimeError("no launch")
    with pytest.warns(KernelFailedWarning) as warned:
        assert gradient(run) == 2
    assert [str(w.message) for w in warned] == [
        "the backward of kernel loopback:faulty raised RuntimeError: no launch; loopback:second ran "
        "sample.scale in its place; after 3 failures it is off (KPT_STRICT=1 raises instead)"
    ]
    assert [w.filename for w in warned] == [__file__]
    assert Fault.backward_calls == 2
    assert hundreds(scale(torch.ones(4), torch.ones(4))) == 5


def test_the_reference_s_gradient_comes_where_there_is_no_other(add: Add, run: Callable[..., Tensor]) -> None:
    add(Loopback(kernel("faulty", backward="faulty_backward", priority=5), kernel("second")))
    Fault.in_backward = RuntimeError("no launch")
    with pytest.warns(KernelFailedWarning, match="the backward of kernel loopback:faulty .*; the reference ran"):
        assert gradient(run) == 0


def test_after_three_failures_it_is_off(add: Add, run: Callable[..., Tensor]) -> None:
    add(Loopback(kernel("faulty", backward="faulty_backward", priority=5)))
    Fault.in_backward = RuntimeError("no launch")
    with pytest.warns(KernelFailedWarning) as warned:  # noqa: PT031
        for rows in range(2, 12):
            x = torch.ones(rows, requires_grad=True)
            run(x, torch.ones(rows)).sum().backward()
            assert torch.equal(x.grad, torch.ones(rows))
    assert Fault.backward_calls == len(warned) == 3


@pytest.mark.parametrize("how", ["strict", "explicit", "memory"])
def test_what_is_not_contained_is_raised_with_the_kernel_s_name(add: Add, run: Callable[..., Tensor], how: str) -> None:
    add(Loopback(kernel("faulty", backward="faulty_backward", priority=5)))
    error = torch.OutOfMemoryError("16 GiB") if how == "memory" else RuntimeError("no launch")
    Fault.in_backward = error
    choice: dict[str, Any] = {"strict": {"strict": True}, "explicit": {"name": "loop"}, "memory": {}}[how]
    with kpt_core.use(**choice), pytest.raises(type(error), match=str(error)) as caught:
        gradient(run)
    assert "raised by the backward of kernel loop/sample.scale/loopback:faulty" in str(caught.value.__notes__)
    Fault.in_backward = None
    assert gradient(run) == 5


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_another_kernel_takes_what_the_first_one_saved(
    add: Add, monkeypatch: pytest.MonkeyPatch, compiled: bool, fresh_compiler: None
) -> None:
    def fail(call: Call, saved: Any, grad: Tensor) -> dict[str, Tensor]:
        RAN["fail"] += 1
        raise RuntimeError("no launch")

    monkeypatch.setattr("loopback.backward", fail)
    settings: dict[str, Any] = {"backward": "loopback:backward", "priority": 9}
    add(Loopback(kpt_core.Kernel("toy.layer", "toy_ops:layer_kernel", **settings), *KERNELS[-1:]))
    x, weight, bias = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((3, 5), (5, 4), (4,)))
    run: Any = torch.compile(lambda *args: layer(*args), backend="aot_eager") if compiled else layer
    expected = torch.autograd.grad(layer.reference(x, weight, bias).sum(), (x, weight, bias))
    RAN.clear()
    with pytest.warns(KernelFailedWarning) as warned:  # noqa: PT031
        for _ in range(3):
            found = torch.autograd.grad(run(x, weight, bias).sum(), (x, weight, bias))
            torch.testing.assert_close(found, expected)
    assert len(warned) == 3
    assert RAN == {"layer_kernel": 3, "fail": 3, "layer_backward": 3}
    assert toy_ops.RAN is RAN


def test_a_wrong_gradient_gets_the_reference_s_error_caused_by_the_kernel_s(
    add: Add, run: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the reference can't either, the kernel is not to blame."""
    add(Loopback(kernel("faulty", backward="faulty_backward", priority=5)))
    Fault.in_backward = RuntimeError("no launch")

    def fail(call: Call) -> Tensor:
        raise ValueError("not even plain PyTorch")

    monkeypatch.setattr(scale, "fake", lambda call: torch.empty_like(call.x))
    monkeypatch.setattr(scale, "run_reference", fail)
    with pytest.raises(ValueError, match="not even plain PyTorch") as caught:
        gradient(run)
    assert caught.value.__cause__ is Fault.in_backward
    Fault.in_backward = None
    assert gradient(run) == 5


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((1, 2), r"TypeError: it gave \(1, 2\); expected a dictionary: name of an argument to its gradient"),
        ({"x": torch.ones(2, 2)}, r"ValueError: it gave x a gradient of shape \[2, 2\]; x has \[4\]"),
    ],
)
def test_what_is_no_gradient_is_the_kernel_s_failure(
    add: Add, run: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch, given: Any, said: str
) -> None:
    monkeypatch.setattr("loopback.faulty_backward", lambda call, saved, grad: given)
    add(
        Loopback(kernel("faulty", backward="faulty_backward", priority=5), kernel("second", backward="second_backward"))
    )
    with pytest.warns(KernelFailedWarning, match=f"the backward of kernel loopback:faulty raised {said}"):
        assert gradient(run) == 2


WRONG: list[tuple[dict[str, Any], str]] = [
    ({}, "it gave no gradient of x; expected one of each of"),
    ({"x": 3.0, "weight": None}, "it gave x a gradient of <class 'float'>; x has"),
]


@pytest.mark.parametrize(("given", "said"), WRONG)
def test_gradients_that_are_left_out_or_none_are_contained(
    add: Add, monkeypatch: pytest.MonkeyPatch, run: Callable[..., Tensor], given: dict[str, Any], said: str
) -> None:
    monkeypatch.setattr("loopback.first_backward", lambda call, saved, grad: given)
    add(Loopback(kernel("first", backward="first_backward")))
    x = leaf()
    with pytest.warns(KernelFailedWarning, match=said):
        (found,) = torch.autograd.grad(run(x, torch.ones(4)).sum(), x)
    assert torch.equal(found, torch.ones(4))


def test_none_for_a_gradient_means_zeros(add: Add, monkeypatch: pytest.MonkeyPatch, run: Callable[..., Tensor]) -> None:
    monkeypatch.setattr("loopback.first_backward", lambda call, saved, grad: dict.fromkeys(call.needs))
    add(Loopback(kernel("first", backward="first_backward")))
    x = leaf()
    (found,) = torch.autograd.grad(run(x, torch.ones(4)).sum(), x)
    assert torch.equal(found, torch.zeros(4))
