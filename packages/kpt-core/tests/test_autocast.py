"""Ops under torch.autocast: the parameters that they name are converted, and what runs inside sees no autocast."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import kpt_core
from kpt_core import Backend
from loopback import Loopback, hundreds, kernel, mixed, scale

Add = Callable[[Backend], Backend]


@pytest.fixture
def index() -> Tensor:
    return torch.zeros(4, dtype=torch.int32)


def test_named_parameters_are_converted_and_the_others_are_not(
    add: Add, x: Tensor, index: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def spy(x: Tensor, weight: Tensor, index: Tensor) -> Tensor:
        seen.append([x.dtype, weight.dtype, index.dtype, torch.is_autocast_enabled("cpu")])
        return x

    monkeypatch.setattr("loopback.mixed_first", spy)
    add(Loopback(kernel("mixed_first", "sample.mixed")))
    with torch.autocast("cpu", torch.bfloat16):
        mixed(x, x, index)
        assert torch.is_autocast_enabled("cpu")
    mixed(x, x, index)
    assert seen == [
        [torch.bfloat16, torch.bfloat16, torch.int32, False],
        [torch.float32, torch.float32, torch.int32, False],
    ]


def test_keywords_are_converted_like_positions(x: Tensor, index: Tensor) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert mixed(index=index, weight=x, x=x).dtype is torch.bfloat16
        assert mixed(x, weight=x, index=index).dtype is torch.bfloat16


def test_float64_is_left_alone_as_torch_does(x: Tensor, index: Tensor) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert mixed(x.double(), x.double(), index).dtype is torch.float64


def test_ops_that_name_no_parameter_are_left_alone(x: Tensor) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert scale(x, x).dtype is torch.float32


def test_autocast_of_another_device_changes_nothing(x: Tensor, index: Tensor) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert mixed(x.to("meta"), x.to("meta"), index.to("meta")).dtype is torch.float32


def test_autocast_switched_off_inside_changes_nothing(x: Tensor, index: Tensor) -> None:
    with torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", enabled=False):
        assert mixed(x, x, index).dtype is torch.float32


def test_the_kernel_is_chosen_for_the_converted_dtype(add: Add, x: Tensor, index: Tensor) -> None:
    add(Loopback(kernel("mixed_first", "sample.mixed", dtypes={"bfloat16"})))
    assert hundreds(mixed(x, x, index)) == 0
    with torch.autocast("cpu", torch.bfloat16):
        assert hundreds(mixed(x, x, index)) == 1
        assert kpt_core.explain(mixed, x, x, index).kernel == "loopback:mixed_first"
    assert kpt_core.explain(mixed, x, x, index).kernel == "reference"


def test_gradients_come_back_in_the_parameter_s_dtype(x: Tensor, index: Tensor) -> None:
    weight = torch.full((4,), 3.0, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        mixed(x, weight, index).sum().backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.ones(4))


def test_without_autocast_accepts_devices_that_know_none(x: Tensor) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        with kpt_core.without_autocast("meta"):
            assert torch.is_autocast_enabled("cpu")
        with kpt_core.without_autocast("cpu"):
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32
