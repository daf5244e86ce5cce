"""Asking for a backend, a kernel or the reference: what is asked for runs, or the call raises."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import kpt_core
from kpt_core import Backend, NoKernelError, UnknownNameError, registry
from loopback import Fault, Loopback, hundreds, kernel, mixed, scale, shifted

Add = Callable[[Backend], Backend]


@pytest.fixture(autouse=True)
def two_backends(add: Add, list_torch: Callable[..., None]) -> None:
    """The composite is served as a whole by `far`, and in plain PyTorch through its parts."""
    list_torch(kernel("parts", "sample.shifted", composed_of=("sample.scale",)))
    add(Loopback(kernel("first", priority=3), kernel("second", priority=2), name="near"))
    add(Loopback(kernel("third", unsupported="at_most_four_rows"), kernel("whole", "sample.shifted"), name="far"))


@pytest.mark.parametrize(
    ("name", "served"),
    [
        ("near", 1),
        ("far", 3),
        ("loopback:second", 2),
        ("near/sample.scale/loopback:second", 2),
        ("loopback:third", 3),
        ("reference", 0),
        (None, 1),
    ],
)
def test_what_is_named_runs_and_only_inside_the_block(x: Tensor, name: str | None, served: int) -> None:
    with kpt_core.use(name):
        assert hundreds(scale(x, x)) == served
        assert hundreds(scale(x, x)) == served
    assert hundreds(scale(x, x)) == 1


def test_the_innermost_choice_wins_and_the_outer_one_comes_back(x: Tensor) -> None:
    with kpt_core.use("far"):
        with kpt_core.use("reference"):
            assert hundreds(scale(x, x)) == 0
            with kpt_core.use("near"):
                assert hundreds(scale(x, x)) == 1
        assert hundreds(scale(x, x)) == 3


def test_the_block_is_left_when_it_raises(x: Tensor) -> None:
    with pytest.raises(ZeroDivisionError), kpt_core.use("reference"):
        raise ZeroDivisionError
    assert hundreds(scale(x, x)) == 1


def test_a_choice_for_one_op_leaves_the_others_free(x: Tensor) -> None:
    with kpt_core.use("reference", op="sample.shifted"):
        assert shifted(x)[0] == 3  # which is plain PyTorch, and calls no op
    with kpt_core.use("reference", op="sample.scale"):
        assert hundreds(scale(x, x)) == 0
        assert hundreds(shifted(x)) == 4


def test_a_choice_for_one_op_inside_a_choice_for_all(x: Tensor) -> None:
    with kpt_core.use("far"), kpt_core.use("reference", op="sample.shifted"):
        assert [shifted(x)[0], hundreds(scale(x, x))] == [3, 3]
    with kpt_core.use("reference", op="sample.shifted"), kpt_core.use("far"):
        assert hundreds(shifted(x)) == 4


@pytest.mark.parametrize(("name", "served"), [("reference", 3), ("torch", 103)])
def test_the_reference_is_plain_and_plain_pytorch_calls_ops(x: Tensor, name: str, served: int) -> None:
    with kpt_core.use(name, op="sample.shifted"):
        assert shifted(x)[0] == served


def test_asked_for_plain_pytorch_an_op_without_such_kernels_runs_its_reference(
    list_torch: Callable[..., None], x: Tensor
) -> None:
    """One that has some must run them."""
    with kpt_core.use("torch"):
        assert [hundreds(scale(x, x)), shifted(x)[0], hundreds(mixed(x, x, x))] == [0, 3, 0]
    list_torch(kernel("third", unsupported="at_most_four_rows"))
    with kpt_core.use("torch"):
        assert hundreds(scale(x, x)) == 3
        with pytest.raises(NoKernelError, match="5 rows; takes at most 4"):
            scale(torch.ones(5), torch.ones(5))


def test_a_backend_that_serves_only_the_inner_op_serves_the_composite_through_it(x: Tensor) -> None:
    assert hundreds(shifted(x)) == 4
    with kpt_core.use("near"):
        assert shifted(x)[0] == 103


def test_a_backend_asked_of_the_composite_alone_must_serve_that_itself(x: Tensor) -> None:
    with (
        kpt_core.use("near", op="sample.shifted"),
        pytest.raises(NoKernelError, match=r"no kernel for sample.shifted on cpu: near was asked for"),
    ):
        shifted(x)


def test_a_choice_for_one_op_is_forgotten_inside_a_choice_of_the_same_for_all(x: Tensor) -> None:
    registry.remove_backend("far")
    with kpt_core.use("loopback:second", op="sample.shifted"), kpt_core.use("loopback:second"):
        assert shifted(x)[0] == 203


def test_a_backend_that_serves_the_composite_must(x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    far = kpt_core.backends()["far"]
    monkeypatch.setattr(far, "able", frozenset())
    monkeypatch.setattr(far, "offered", [kernel("whole", "sample.shifted", requires={"amx"}), kernel("third")])
    kpt_core.refresh()
    with kpt_core.use("far"), pytest.raises(NoKernelError, match="needs amx, which cpu lacks"):
        shifted(x)


def test_a_kernel_of_the_composite_must(add: Add, x: Tensor) -> None:
    add(Loopback(kernel("mixed_first", "sample.shifted", requires={"amx"}), name="third"))
    with (
        kpt_core.use("loopback:mixed_first"),
        pytest.raises(NoKernelError, match="needs amx, which cpu lacks"),
    ):
        shifted(x)


def test_a_kernel_of_the_inner_op_serves_the_composite_through_it(x: Tensor) -> None:
    registry.remove_backend("far")
    with kpt_core.use("loopback:second"):
        assert shifted(x)[0] == 203


def test_a_backend_without_a_kernel_for_the_op_raises(x: Tensor) -> None:
    with kpt_core.use("near"), pytest.raises(NoKernelError, match=r"no kernel for sample.mixed on cpu: near was asked"):
        mixed(x, x, x)


def test_refusals_of_what_was_asked_for_raise_and_list_all_the_others(x: Tensor) -> None:
    large = torch.ones(5)
    with kpt_core.use("far"):
        for call in (scale, scale.explain):
            with pytest.raises(NoKernelError) as caught:
                call(large, large)
            assert str(caught.value).splitlines() == [
                "no kernel for sample.scale on cpu: far was asked for",
                "  near (loopback:first): far was asked for (use or KPT_USE)",
                "  near (loopback:second): far was asked for (use or KPT_USE)",
                "  far (loopback:third): 5 rows; takes at most 4",
            ]
        assert hundreds(scale(x, x)) == 3


def test_a_kernel_that_is_not_the_op_s_raises() -> None:
    with (
        kpt_core.use("loopback:whole", op="sample.scale"),
        pytest.raises(NoKernelError, match="loopback:whole was asked"),
    ):
        scale(torch.ones(4), torch.ones(4))


@pytest.mark.parametrize(
    ("wrong", "offer"),
    [
        ("nera", "did you mean 'near'"),
        ("loopback:secnd", "did you mean 'loopback:second'"),
        ("refrence", "did you mean 'reference'"),
        ("zzz", "known: far, near, reference, torch, .* and [0-9]+ more"),
    ],
)
def test_unknown_names_offer_the_nearest(wrong: str, offer: str) -> None:
    with pytest.raises(UnknownNameError, match=f"unknown backend or kernel '{wrong}': {offer}"), kpt_core.use(wrong):
        pytest.fail("the block must not be entered")


def test_an_unknown_op_offers_the_nearest() -> None:
    expected = pytest.raises(UnknownNameError, match=r"unknown op 'sample.scael': did you mean 'sample.scale'")
    with expected, kpt_core.use("near", op="sample.scael"):
        pytest.fail("the block must not be entered")


def test_a_backend_removed_inside_the_block_is_asked_for_in_vain(x: Tensor) -> None:
    with kpt_core.use("near"):
        assert hundreds(scale(x, x)) == 1
        registry.remove_backend("near")
        with pytest.raises(UnknownNameError, match="near"):
            scale(x, x)


def test_strict_raises_what_a_kernel_raises(add: Add, x: Tensor) -> None:
    add(Loopback(kernel("faulty", priority=9)))
    Fault.error = RuntimeError("no launch")
    with kpt_core.use(strict=True), pytest.raises(RuntimeError, match="no launch"):
        scale(x, x)
    assert Fault.calls == 1


def test_strict_is_inherited_and_can_be_lifted(add: Add, x: Tensor) -> None:
    add(Loopback(kernel("faulty", priority=9)))
    Fault.error = RuntimeError("no launch")
    with kpt_core.use(strict=True):
        with kpt_core.use(op="sample.mixed"), pytest.raises(RuntimeError, match="no launch"):
            scale(x, x)
        with kpt_core.use(strict=False), pytest.warns(kpt_core.KernelFailedWarning):
            assert hundreds(scale(x, x)) == 1


def test_choices_reach_autocast_calls(add: Add, x: Tensor) -> None:
    add(Loopback(kernel("mixed_first", "sample.mixed")))
    with torch.autocast("cpu", torch.bfloat16), kpt_core.use("reference"):
        assert hundreds(mixed(x, x, x)) == 0


def test_a_name_that_is_no_string_is_unknown_too():
    assert (
        str(UnknownNameError("granularity", None, ["row", "tensor"])) == "unknown granularity None: known: row, tensor"
    )
