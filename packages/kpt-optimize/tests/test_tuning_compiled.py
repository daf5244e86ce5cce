"""Tuned choices in compiled code: they are made when it runs, by each call's sizes; and the eager short path."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch._dynamo.testing import CompileCounter

import kpt_core
from kpt_core import Backend
from kpt_optimize.tuning import TuningEntry
from kpt_optimize.tuning.files import merge_into
from kpt_optimize.tuning.tables import table_name
from loopback import Loopback, kernel, scale
from test_overhead import SEARCH, python_calls
from test_tuning_files import DEVICE, ENTRY
from tuning_kernels import SEEN, named, offer, product, two

Add = Callable[[Backend], Backend]
Store = Callable[..., None]
WEIGHT = torch.randn(5, 3)


@pytest.fixture
def store(setting: Callable[[str, str], None], tmp_path: Path, fresh_compiler: None) -> Store:
    """Enter results, as `tune` would."""
    setting("KPT_TUNING", str(tmp_path))

    def store_entries(*entries: TuningEntry) -> None:
        merge_into(tmp_path / table_name(DEVICE), DEVICE, entries)
        kpt_core.refresh()

    return store_entries


@pytest.mark.parametrize("dynamic", [None, True])
def test_each_size_has_its_own_choice_in_one_graph(add: Add, store: Store, dynamic: bool | None) -> None:
    """New results take effect at the next call."""
    add(two())
    count = CompileCounter()
    compiled = torch.compile(lambda x, weight: product(x, weight), fullgraph=True, backend=count, dynamic=dynamic)

    def served(rows: int) -> str:
        x = torch.randn(rows, 5)
        with kpt_core.record() as log:
            torch.testing.assert_close(compiled(x, WEIGHT), x @ WEIGHT)
        return log[0].kernel.rpartition(":")[2]

    sizes = (7, 100, 130, 8)  # none of them another dimension's, which Dynamo would tie to it
    assert [served(rows) for rows in sizes] == ["slow"] * 4
    store(replace(ENTRY, key=(8, 3)), replace(ENTRY, key=(128, 3), kernel="reference"))
    assert [served(rows) for rows in sizes] == ["quick", "reference", "slow", "quick"]
    store(replace(ENTRY, key=(128, 3)))
    assert [served(rows) for rows in sizes] == ["quick", "quick", "slow", "quick"]
    assert count.frame_count <= 2


def test_gradients_count_in_compiled_code_too(add: Add, store: Store) -> None:
    add(Loopback(offer("slow", priority=9, backward="backward"), offer("quick", backward="backward")))
    compiled = torch.compile(lambda x, weight: product(x, weight), backend="aot_eager")
    store(replace(ENTRY, key=(4, 3, "gradient")))
    for training, expected in ((False, "slow"), (True, "quick")):
        x = torch.randn(4, 5, requires_grad=training)
        with kpt_core.record() as log:
            compiled(x, WEIGHT)
        assert log[0].kernel.rpartition(":")[2] == expected


def test_a_kernel_gets_the_configuration_of_each_size(add: Add, store: Store) -> None:
    add(Loopback(offer("tiled", configs="tiles", backward="backward")))
    tiled = replace(ENTRY, kernel=named("tiled"))
    store(
        replace(tiled, key=(8, 3), config={"rows": 8}),
        replace(tiled, key=(128, 3), config={"rows": 32}),
        replace(tiled, key=(8, 3, "gradient"), config={"rows": 66}),
    )
    for run in (product, torch.compile(lambda x, weight: product(x, weight), fullgraph=True, backend="aot_eager")):
        SEEN.clear()
        for rows in (7, 100, 130, 8):
            run(torch.randn(rows, 5), WEIGHT)
        run(torch.randn(7, 5, requires_grad=True), WEIGHT)
        assert SEEN == [8, 32, 16, 8, 66]


def test_where_nothing_was_measured_the_short_path_is_as_short(add: Add, store: Store) -> None:
    """Also beside a table for another op."""
    add(two())
    add(Loopback(kernel("first"), name="other"))
    store(ENTRY)
    x, rows = torch.ones(4), torch.randn(4, 5)
    scale(x, x), scale(x, x)  # the first call discovers plug-ins, too
    assert not SEARCH & set(python_calls(lambda: scale(x, x)))
    product(rows, WEIGHT)
    entered = python_calls(lambda: product(rows, WEIGHT))
    assert "size_key" in entered  # the longer path, with a look at the sizes
    assert not {"find_candidates", "tuned_choices", "read_table"} & set(entered)
    assert "size_key" not in python_calls(lambda: product(rows.double(), WEIGHT.double()))
