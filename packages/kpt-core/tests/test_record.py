"""`record` collects what ran, as a tree; a Selection prints and becomes JSON."""

import json
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import kpt_core
from kpt_core import Backend, Refusal, Selection
from loopback import Fault, Loopback, checked, kernel, scale, shifted

Add = Callable[[Backend], Backend]


def test_calls_are_logged_in_order_with_what_ran(add: Add, x: Tensor) -> None:
    add(Loopback(kernel("first", unsupported="at_most_four_rows")))
    large = torch.ones(5)
    scale(x, x)
    with kpt_core.record() as log:
        scale(x, x)
        scale(large, large)
    scale(x, x)
    refusal = Refusal("loop", "loopback:first", "5 rows; takes at most 4")
    assert log == [
        Selection("sample.scale", "cpu", "loop", "loopback:first"),
        Selection("sample.scale", "cpu", "reference", "reference", (refusal,)),
    ]


def test_ops_called_by_a_reference_are_its_children(add: Add, x: Tensor) -> None:
    add(Loopback(kernel("first")))
    with kpt_core.record() as log:
        shifted(x)
        scale(x, x)
    inner = Selection("sample.scale", "cpu", "loop", "loopback:first")
    assert log == [Selection("sample.shifted", "cpu", "reference", "reference", (), (inner,)), inner]


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
    assert [refusal.reason for refusal in log[0].refusals] == [
        "quarantined for this signature: it raised RuntimeError: no launch"
    ]


def test_a_selection_prints_as_a_tree_and_becomes_json(add: Add) -> None:
    add(Loopback(kernel("first", unsupported="at_most_four_rows"), kernel("whole", "sample.shifted", requires={"amx"})))
    selection = kpt_core.explain("sample.shifted", torch.ones(5))
    assert str(selection).splitlines() == [
        "sample.shifted on cpu -> reference",
        "  not loop (loopback:whole): needs amx, which cpu lacks",
        "  sample.scale on cpu -> reference",
        "    not loop (loopback:first): 5 rows; takes at most 4",
    ]
    data = json.loads(json.dumps(selection.as_dict()))
    assert data["kernel"] == "reference"
    assert data["refusals"] == [{"backend": "loop", "kernel": "loopback:whole", "reason": "needs amx, which cpu lacks"}]
    assert [child["op"] for child in data["children"]] == ["sample.scale"]
    assert data["children"][0]["children"] == []
