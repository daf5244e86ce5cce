"""`record` collects what ran, as a tree; a Selection prints and becomes JSON."""

import json
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import kpt_core
from kpt_core import Backend, Selection
from kpt_core.selection import Refused
from loopback import Fault, Loopback, checked, kernel, scale, shifted

Add = Callable[[Backend], Backend]
PARTS = kernel("parts", "sample.shifted", composed_of=("sample.scale",))


def test_calls_are_logged_in_order_with_what_ran(add: Add, x: Tensor) -> None:
    add(Loopback(kernel("first", unsupported="at_most_four_rows")))
    large = torch.ones(5)
    scale(x, x)
    with kpt_core.record() as log:
        scale(x, x)
        scale(large, large)
    scale(x, x)
    refused = Refused("loop", "loopback:first", "5 rows; takes at most 4")
    assert log == [
        Selection("sample.scale", "cpu", "loop", "loopback:first"),
        Selection("sample.scale", "cpu", "reference", "reference", (refused,)),
    ]


def test_ops_called_by_a_kernel_are_its_children(add: Add, x: Tensor) -> None:
    add(Loopback(kernel("first"), PARTS))
    with kpt_core.record() as log:
        shifted(x)
        scale(x, x)
    inner = Selection("sample.scale", "cpu", "loop", "loopback:first")
    assert log == [Selection("sample.shifted", "cpu", "loop", "loopback:parts", (), (inner,)), inner]
    assert [each.identity for each in log] == ["loop/sample.shifted/loopback:parts", "loop/sample.scale/loopback:first"]


def test_blocks_nest_and_the_inner_one_keeps_its_calls(x: Tensor) -> None:
    with kpt_core.record() as outer:
        scale(x, x)
        with kpt_core.record() as inner:
            checked(torch.ones(2))
        scale(x, x)
    assert [selection.op for selection in outer] == ["sample.scale", "sample.scale"]
    assert [selection.op for selection in inner] == ["sample.checked"]


def test_record_and_use_mix_both_ways(add: Add, x: Tensor) -> None:
    add(Loopback(kernel("first")))
    with kpt_core.record() as log, kpt_core.use("reference"):
        scale(x, x)
    with kpt_core.use("reference"), kpt_core.record() as other:
        scale(x, x)
    assert [selection.kernel for selection in (*log, *other)] == ["reference", "reference"]
    assert log == other


def test_a_call_that_raises_leaves_no_entry(add: Add, x: Tensor) -> None:
    with kpt_core.record() as log, pytest.raises(RuntimeError):
        scale(x, torch.ones(3))
    assert log == []


def test_a_kernel_that_raised_is_a_refusal_of_what_ran(add: Add, x: Tensor) -> None:
    add(Loopback(kernel("faulty")))
    Fault.error = RuntimeError("no launch")
    with kpt_core.record() as log, pytest.warns(kpt_core.KernelFailedWarning):
        scale(x, x)
    assert [selection.kernel for selection in log] == ["reference"]
    assert [refusal.reason for refusal in log[0].refusals] == ["it raised RuntimeError: no launch"]


def test_a_selection_prints_as_a_tree_and_becomes_json(add: Add, list_torch: Callable[..., None]) -> None:
    list_torch(PARTS)
    add(Loopback(kernel("whole", "sample.shifted", requires={"amx"})))
    add(Loopback(kernel("first", unsupported="at_most_four_rows"), name="other"))
    selection = kpt_core.explain("sample.shifted", torch.ones(5))
    assert str(selection).splitlines() == [
        "sample.shifted on cpu -> loopback:parts",
        "  not loop (loopback:whole): needs amx, which cpu lacks",
        "  sample.scale on cpu -> reference",
        "    not other (loopback:first): 5 rows; takes at most 4",
    ]
    data = json.loads(json.dumps(selection.as_dict()))
    assert (data["backend"], data["kernel"]) == ("torch", "loopback:parts")
    assert data["refusals"] == [{"backend": "loop", "kernel": "loopback:whole", "reason": "needs amx, which cpu lacks"}]
    (child,) = data["children"]
    assert (child["op"], child["children"], child["refusals"][0]["reason"]) == (
        "sample.scale",
        [],
        "5 rows; takes at most 4",
    )


def test_two_backends_with_one_function_are_told_apart(add: Add, x: Tensor) -> None:
    """Its needs, its refusals, its quarantine and its tuning are each backend's own."""
    add(Loopback(kernel("faulty", unsupported="at_most_four_rows", priority=3), name="a"))
    add(Loopback(kernel("faulty", backward="faulty_backward"), name="b"))
    large, grad = torch.ones(5), torch.ones(4, requires_grad=True)
    with kpt_core.record() as log:
        for argument in (x, large, grad):
            scale(argument, argument)
    assert [each.identity for each in log] == [f"{name}/sample.scale/loopback:faulty" for name in ("a", "b", "b")]
    Fault.error = RuntimeError("no launch")
    for _ in range(3):
        with pytest.warns(kpt_core.KernelFailedWarning):
            scale(x, x)
    assert {refusal.backend for refusal in kpt_core.explain(scale, x, x).refusals} == {"a", "b"}
    kpt_core.refresh()
    Fault.error = None
    for name in ("a", "b"):
        with kpt_core.use(f"{name}/sample.scale/loopback:faulty"):
            assert kpt_core.explain(scale, x, x).backend == name
    with kpt_core.use("loopback:faulty"):  # the function, whosever
        assert kpt_core.explain(scale, x, x).backend == "a"
