"""The reference on an accelerator: said once, an error when strict. Fake tensors stand for the accelerator."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import kpt_core
from kpt_core import Backend, FallbackWarning, NoKernelError
from loopback import Loopback, kernel, mixed, scale, shifted

Add = Callable[[Backend], Backend]


@pytest.fixture(autouse=True)
def fakes() -> Iterator[None]:
    with FakeTensorMode():
        yield


@pytest.fixture
def gpu() -> Tensor:
    return torch.empty(4, device="cuda")


def test_is_said_once_for_each_op_and_type_of_device(gpu: Tensor) -> None:
    other = torch.empty(4, device="mtia")
    with pytest.warns(FallbackWarning) as warned:
        [scale(x, x) for x in (gpu, gpu, gpu.double(), torch.empty(4, device="cuda:1"), other, other)]
    with pytest.warns(FallbackWarning) as warned_of_mixed:
        [mixed(x, x, x) for x in (gpu, gpu)]
    assert [str(w.message).partition(";")[0] for w in (*warned, *warned_of_mixed)] == [
        "sample.scale runs its PyTorch reference on cuda:0, which is slow",
        "sample.scale runs its PyTorch reference on mtia:0, which is slow",
        "sample.mixed runs its PyTorch reference on cuda:0, which is slow",
    ]
    assert {w.filename for w in warned} == {__file__}


def test_tells_that_a_backend_is_missing(gpu: Tensor) -> None:
    with pytest.warns(FallbackWarning) as warned:
        scale(gpu, gpu)
    assert str(warned[0].message).partition("; ")[2].splitlines() == [
        "no backend for cuda is installed; see `kpt doctor`",
        "  cuda backend: none is installed",
    ]


def test_tells_every_refusal(add: Add, gpu: Tensor) -> None:
    add(Loopback(kernel("third"), name="host"))
    add(Loopback(kernel("first", requires={"sm90"}), device_type="cuda", capabilities={"sm80"}))
    with pytest.warns(FallbackWarning) as warned:
        scale(gpu, gpu)
    assert str(warned[0].message).splitlines() == [
        "sample.scale runs its PyTorch reference on cuda:0, which is slow; see `kpt doctor`",
        "  host (loopback:third): runs on cpu; this call is on cuda",
        "  loop (loopback:first): needs sm90, which cuda:0 lacks",
    ]


def test_is_said_at_the_caller_s_line_under_autocast_too(gpu: Tensor) -> None:
    with torch.autocast("cpu", torch.bfloat16), pytest.warns(FallbackWarning) as warned:
        mixed(gpu, gpu, gpu)
    assert [w.filename for w in warned] == [__file__]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_is_not_said_where_the_reference_is_at_home(device: str) -> None:
    x = torch.empty(4, device=device)
    with kpt_core.use(strict=True):
        assert scale(x, x).device.type == device


def test_is_not_said_when_asked_for(gpu: Tensor) -> None:
    with kpt_core.use("reference", strict=True):
        assert scale(gpu, gpu).device.type == "cuda"


def test_is_not_said_by_explain_which_leaves_it_to_the_call(gpu: Tensor) -> None:
    assert kpt_core.explain(shifted, gpu).kernel == "reference"
    with pytest.warns(FallbackWarning) as warned:
        shifted(gpu)
    assert [str(w.message).partition(" ")[0] for w in warned] == ["sample.shifted", "sample.scale"]


def test_is_not_said_where_a_kernel_serves(add: Add, gpu: Tensor) -> None:
    add(Loopback(kernel("first"), device_type="cuda"))
    assert scale(gpu, gpu).device.type == "cuda"


def test_strict_makes_it_an_error_with_every_refusal(add: Add, gpu: Tensor) -> None:
    add(Loopback(kernel("first", unsupported="at_most_four_rows"), device_type="cuda"))
    large = torch.empty(5, device="cuda")
    with kpt_core.use(strict=True):
        scale(gpu, gpu)
        for call in (scale, scale.explain):
            with pytest.raises(NoKernelError, match=r"\(strict\).*\n  loop \(loopback:first\): 5 rows"):
                call(large, large)


def test_strict_from_the_environment(setting: Callable[[str, str], None], gpu: Tensor) -> None:
    setting("KPT_STRICT", "1")
    with pytest.raises(NoKernelError, match=r"no kernel for sample.scale on cuda:0 \(strict\)"):
        scale(gpu, gpu)
    with kpt_core.use(strict=False), pytest.warns(FallbackWarning):
        scale(gpu, gpu)


def test_refresh_lets_it_be_said_again(gpu: Tensor) -> None:
    for _ in range(2):
        with pytest.warns(FallbackWarning):
            scale(gpu, gpu)
        kpt_core.refresh()


def test_compiled_code_says_it_when_it_is_compiled(gpu: Tensor) -> None:
    compiled = torch.compile(lambda x: scale(x, x), fullgraph=True, backend="eager")
    with pytest.warns(FallbackWarning, match="sample.scale runs its PyTorch reference on cuda:0"):
        compiled(gpu)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled(gpu)


def test_compiled_code_obeys_strict(gpu: Tensor) -> None:
    compiled = torch.compile(lambda x: scale(x, x), backend="eager")
    with kpt_core.use(strict=True), pytest.raises(NoKernelError, match=r"\(strict\)"):
        compiled(gpu)


def test_a_composite_whose_parts_a_kernel_serves_is_not_slow(add: Add, gpu: Tensor) -> None:
    add(Loopback(kernel("first"), device_type="cuda"))
    with kpt_core.use(strict=True):
        assert [child.kernel for child in kpt_core.explain(shifted, gpu).children] == ["loopback:first"]
        assert shifted(gpu).device.type == "cuda"
        torch.compile(shifted, fullgraph=True, backend="eager")(gpu)


def test_a_composite_leaves_it_to_the_part_that_its_kernel_refuses(add: Add) -> None:
    add(Loopback(kernel("first", unsupported="at_most_four_rows"), device_type="cuda"))
    large = torch.empty(5, device="cuda")
    for call in (shifted, torch.compile(shifted, backend="eager")):
        kpt_core.refresh()
        with pytest.warns(FallbackWarning) as warned:
            call(large)
        assert [str(w.message).partition(" ")[0] for w in warned] == ["sample.scale"]
        for strict_call in (shifted.explain, call):
            with (
                kpt_core.use(strict=True),
                pytest.raises(NoKernelError, match=r"no kernel for sample\.scale on"),
            ):
                strict_call(large)


@pytest.mark.parametrize("needs", [{"requires": {"sm90"}}, {"dtypes": {"bfloat16"}}])
def test_a_composite_is_slow_where_no_kernel_may_serve_its_parts(add: Add, gpu: Tensor, needs: dict[str, Any]) -> None:
    add(Loopback(kernel("first", **needs), device_type="cuda"))
    with pytest.warns(FallbackWarning) as warned:
        shifted(gpu)
    assert [str(w.message).partition(" ")[0] for w in warned] == ["sample.shifted", "sample.scale"]
    with kpt_core.use(strict=True):
        for call in (shifted, shifted.explain, torch.compile(shifted, backend="eager")):
            with pytest.raises(NoKernelError, match=r"no kernel for sample\.shifted on cuda:0 \(strict\)"):
                call(gpu)


def test_parts_count_at_every_depth_and_unknown_ones_do_not(add: Add, gpu: Tensor) -> None:
    @kpt_core.op("sample.deep", composed_of=("sample.gone", "sample.shifted"))
    def deep(x: Tensor) -> Tensor:
        return shifted(x)

    with pytest.warns(FallbackWarning) as warned:
        deep(gpu)
    assert [str(w.message).partition(" ")[0] for w in warned] == ["sample.deep", "sample.shifted", "sample.scale"]
    add(Loopback(kernel("first"), device_type="cuda"))
    with kpt_core.use(strict=True):
        assert deep(gpu).device.type == "cuda"


def test_tables_are_no_matter_on_a_device_that_is_not_here(add: Add, setting: Callable[[str, str], None]) -> None:
    """Its name, by which tables are found, can't be asked for."""
    setting("KPT_TUNING", "1")
    add(Loopback(kernel("first"), device_type="cuda"))
    absent = torch.empty(4, device="cuda:63")
    assert scale(absent, absent).device == absent.device
