"""Ops under torch.autocast: the parameters that they name are converted, and what runs inside sees no autocast."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import kpt_core
from kpt_core import Backend, Call
from kpt_core.autocast import without_autocast
from loopback import Loopback, hundreds, kernel, mixed, scale

Add = Callable[[Backend], Backend]


@pytest.fixture
def index() -> Tensor:
    return torch.zeros(4, dtype=torch.int32)


def test_named_parameters_are_converted_and_the_others_are_not(
    add: Add, x: Tensor, index: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def spy(call: Call) -> Tensor:
        seen.append([call.x.dtype, call.weight.dtype, call.index.dtype, torch.is_autocast_enabled("cpu")])
        return call.x

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


@kpt_core.op("sample.sums", autocast=("x",))
def sums(x: Tensor, weight: Tensor) -> Tensor:
    """Carries sums in float32, whatever autocast would have."""
    return x.float() @ weight


def sums_first(call: Call) -> Tensor:
    assert call.x.dtype is torch.bfloat16
    return call.x.float() @ call.weight + 100


@pytest.mark.parametrize("compiler", [None, "eager", "aot_eager"])
@pytest.mark.parametrize("served", [False, True], ids=["reference", "kernel"])
def test_what_runs_inside_sees_no_autocast(add: Add, compiler: str | None, served: bool, fresh_compiler: None) -> None:
    if served:
        add(Loopback(kpt_core.Kernel("sample.sums", f"{__name__}:sums_first")))
    x = torch.ones(4, 4)
    run = torch.compile(lambda x: sums(x, x), fullgraph=True, backend=compiler) if compiler else lambda x: sums(x, x)
    with torch.autocast("cpu", torch.bfloat16):
        result = run(x)
        assert torch.is_autocast_enabled("cpu")
    assert (result.dtype, hundreds(result)) == (torch.float32, int(served))


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
    for run in (mixed, torch.compile(lambda *args: mixed(*args), fullgraph=True, backend="aot_eager")):
        weight = torch.full((4,), 3.0, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            out = run(x, weight, index)
        out.sum().backward()
        assert out.dtype is torch.bfloat16
        assert weight.grad is not None
        assert torch.equal(weight.grad, torch.ones(4))


def test_without_autocast_accepts_devices_that_know_none(x: Tensor) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        with without_autocast("meta"):
            assert torch.is_autocast_enabled("cpu")
        with without_autocast("cpu"):
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32
