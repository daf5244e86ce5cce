"""Tuned choices and torch.compile: no graph break, no recompilation for the sake of sizes; and the eager short path."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

import kpt_core
from kpt_core import Backend, _tuning, _tuning_files
from loopback import Loopback, kernel, scale
from test_overhead import python_calls
from test_tuning_files import DEVICE, ENTRY
from tuning_kernels import SEEN, offer, product, two

Add = Callable[[Backend], Backend]
Store = Callable[..., None]
WEIGHT = torch.randn(5, 3)


@pytest.fixture
def store(setting: Callable[[str, str], None], tmp_path: Path) -> Store:
    """Enter results, as `tune` would."""
    torch._dynamo.reset()
    setting("KPT_TUNING", str(tmp_path))

    def store_entries(*entries: kpt_core.TuningEntry) -> None:
        _tuning_files.merge_into(tmp_path / _tuning.table_name(DEVICE), DEVICE, entries)
        kpt_core.refresh()

    return store_entries


def targets(*args: Tensor) -> list[str]:
    """Names of the functions that the graph of a compiled product was traced through."""
    graphs: list[torch.fx.GraphModule] = []

    def keep(module: torch.fx.GraphModule, inputs: object) -> Callable[..., object]:
        graphs.append(module)
        return module.forward

    torch.compile(lambda x, weight: product(x, weight), fullgraph=True, backend=keep)(*args)
    (graph,) = graphs
    stacks = [node.meta.get("stack_trace") or "" for node in graph.graph.nodes]
    return [name for name in ("slow", "quick", "tiled") if any(f"in {name}\n" in stack for stack in stacks)]


def test_a_choice_that_holds_for_all_sizes_is_taken(add: Add, store: Store) -> None:
    add(two())
    assert targets(torch.randn(4, 5), WEIGHT) == ["slow"]
    store(ENTRY, replace(ENTRY, key=(128, 3)))
    assert targets(torch.randn(4, 5), WEIGHT) == ["quick"]
    assert targets(torch.randn(77, 5), WEIGHT) == ["quick"]


def test_choices_that_differ_by_size_are_left_to_eager_calls(add: Add, store: Store) -> None:
    add(two())
    store(ENTRY, replace(ENTRY, key=(128, 3), kernel="tuning_kernels:slow"))
    assert targets(torch.randn(4, 5), WEIGHT) == ["slow"]
    assert kpt_core.explain(product, torch.randn(4, 5), WEIGHT).kernel == "tuning_kernels:quick"


def test_gradients_count_in_compiled_code_too(add: Add, store: Store) -> None:
    add(two())
    store(ENTRY)
    assert targets(torch.randn(4, 5, requires_grad=True), WEIGHT) == ["slow"]
    store(ENTRY, replace(ENTRY, key=(4, 3, "gradient")))
    assert targets(torch.randn(4, 5, requires_grad=True), WEIGHT) == ["quick"]


def test_the_reference_may_be_the_choice(add: Add, store: Store) -> None:
    add(two())
    store(replace(ENTRY, kernel="reference"))
    assert targets(torch.randn(4, 5), WEIGHT) == []


@pytest.mark.parametrize("differ", [False, True])
def test_dynamic_sizes_are_compiled_once(add: Add, store: Store, differ: bool) -> None:
    add(two())
    store(ENTRY, *([replace(ENTRY, key=(128, 3), kernel="tuning_kernels:slow")] if differ else []))
    count = CompileCounter()
    compiled = torch.compile(lambda x, weight: product(x, weight), fullgraph=True, dynamic=True, backend=count)
    for rows in (7, 8, 9, 60, 130):  # none of them another dimension's size, which Dynamo would tie to it
        x = torch.randn(rows, 5)
        torch.testing.assert_close(compiled(x, WEIGHT), x @ WEIGHT)
    assert count.frame_count == 1


def test_new_results_compile_again(add: Add, store: Store) -> None:
    add(two())
    count = CompileCounter()
    compiled = torch.compile(lambda x, weight: product(x, weight), fullgraph=True, backend=count)
    x = torch.randn(4, 5)
    compiled(x, WEIGHT)
    store(ENTRY)
    compiled(x, WEIGHT)
    compiled(x, WEIGHT)
    assert count.frame_count == 2


def test_a_kernel_reads_the_configuration_of_all_sizes(add: Add, store: Store) -> None:
    add(Loopback(offer("tiled", configs="tiles")))
    x = torch.randn(4, 5)
    tiled = replace(ENTRY, kernel="tuning_kernels:tiled")
    for entries, rows in (
        ((), 16),
        ((replace(tiled, config={"rows": 32}),), 32),
        ((replace(tiled, config={"rows": 8}), replace(tiled, key=(128, 3), config={"rows": 32})), 16),
    ):
        store(*entries)
        torch._dynamo.reset()
        before = len(SEEN)
        compiled = torch.compile(lambda x, weight: product(x, weight), fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(x, WEIGHT), x @ WEIGHT)
        assert SEEN[before:] == [rows]


def test_where_nothing_was_measured_the_short_path_is_as_short(add: Add, store: Store) -> None:
    """Also beside a table for another op."""
    add(two())
    add(Loopback(kernel("first"), name="other"))
    store(ENTRY)
    x = torch.ones(4)
    scale(x, x)
    assert python_calls(lambda: scale(x, x)) == ["Op.__call__", "is_dynamo_compiling", "first"]
    rows = torch.randn(4, 5)
    product(rows, WEIGHT)
    entered = python_calls(lambda: product(rows, WEIGHT))
    assert "_size_key" in entered  # the longer path, with a look at the sizes
    assert not {"find_candidates", "tuned_choices", "read_table"} & set(entered)
    assert "_size_key" not in python_calls(lambda: product(rows.double(), WEIGHT.double()))
