"""Ops and kernels age apart: what was written for another version of an op serves where that makes no difference."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import kpt_core
from kpt_core import Backend, Call, Kernel
from loopback import Loopback, hundreds

Add = Callable[[Backend], Backend]


@kpt_core.op("aged.scale", version=3, since={"bias": 2, "names": 2, "factor": 3})
def scale(x: Tensor, bias: Tensor | None = None, *, names: str = "a", size: int = 1, factor: float = 1.0) -> Tensor:
    """`bias` and `names` came with version 2, `factor` with version 3."""
    result = x * factor * size
    return result if bias is None else result + bias


def old(call: Call) -> Tensor:
    """Knows x and size, as all there was."""
    return call.x * call.size + 100


def middle(call: Call) -> Tensor:
    return call.x * call.size + (0 if call.bias is None else call.bias) + 200


def new(call: Call) -> Tensor:
    return scale.run_reference(call) + 300


def offer(attribute: str, version: int, **settings: Any) -> Kernel:
    return Kernel("aged.scale", f"{__name__}:{attribute}", version=version, **settings)


def reason(*args: Any, **kwargs: Any) -> list[str]:
    return [refusal.reason for refusal in kpt_core.explain(scale, *args, **kwargs).refusals]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_an_older_kernel_serves_where_new_arguments_have_their_defaults(
    add: Add, x: Tensor, compiled: bool, fresh_compiler: None
) -> None:
    add(Loopback(offer("old", 1, priority=2), offer("middle", 2, priority=1)))
    run: Any = torch.compile(lambda *a, **k: scale(*a, **k), backend="eager") if compiled else scale
    assert hundreds(run(x)) == 1
    assert hundreds(run(x, None, names="a", size=3, factor=1.0)) == 1
    assert hundreds(run(x, x)) == 2
    assert hundreds(run(x, names="b")) == 2
    assert run(x, x, factor=2.0)[0] == 3
    assert reason(x) == []
    assert reason(x, x) == [
        "bias came with version 2 of the op, and this kernel is for version 1: upgrade test_versions",
    ]
    assert reason(x, names="b") == [
        "names came with version 2 of the op, and this kernel is for version 1: upgrade test_versions",
    ]
    assert reason(x, factor=2.0) == [
        "factor came with version 3 of the op, and this kernel is for version 1: upgrade test_versions",
        "factor came with version 3 of the op, and this kernel is for version 2: upgrade test_versions",
    ]


def test_a_newer_kernel_is_refused_with_the_package_to_upgrade_and_others_notice_nothing(add: Add, x: Tensor) -> None:
    add(Loopback(offer("new", 4, priority=9), offer("old", 1)))
    with kpt_core.record() as log:
        assert hundreds(scale(x)) == 1
    assert [refusal.reason for refusal in log[0].refusals] == [
        "written for version 4 of aged.scale, which test_versions has in version 3: upgrade test_versions"
    ]
    with kpt_core.use("test_versions:new"), pytest.raises(kpt_core.NoKernelError, match="upgrade test_versions"):
        scale(x)


def test_the_same_version_takes_all_arguments(add: Add, x: Tensor) -> None:
    add(Loopback(offer("new", 3)))
    assert hundreds(scale(x, x, names="b", factor=2.0)) == 3
    assert reason(x, x, factor=2.0) == []


def test_versions_are_refused_before_the_kernel_s_own_conditions(
    add: Add, x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which are written for the arguments of their time."""

    def condition(call: Call) -> str | None:
        assert call.bias is None
        return None

    monkeypatch.setattr("loopback.never_refuses", condition)
    add(Loopback(offer("old", 1, unsupported="loopback:never_refuses")))
    assert hundreds(scale(x)) == 1
    assert hundreds(scale(x, x)) == 0


def test_gradients_of_new_arguments_come_from_who_knows_them(add: Add, x: Tensor) -> None:
    add(Loopback(offer("old", 1)))
    bias = torch.ones(4, requires_grad=True)
    scale(x, bias).sum().backward()
    assert torch.equal(bias.grad, torch.ones(4))
