"""Modelled entries: they configure the kernel that comes first, say so, and give way to whatever was measured."""

import json
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import kpt_core
import tuning_kernels
from kpt_core import Backend
from kpt_core.lock import write_lock
from kpt_core.tuning import TuningEntry, TuningWarning
from kpt_core.tuning.files import read_table
from kpt_core.tuning.tables import table_name
from loopback import Loopback
from test_tuning_files import DEVICE, ENTRY
from tuning_kernels import SEEN, named, offer, product

Add = Callable[[Backend], Backend]
Setting = Callable[[str, str], None]
TILED = named("tiled")
FEW, MANY, WEIGHT = torch.randn(4, 5), torch.randn(100, 5), torch.randn(5, 3)
MODELLED = replace(
    ENTRY, kernel=TILED, config={"rows": 32}, default=TILED, present=(TILED,), noise=0.0, method="modelled"
)
MEASURED = replace(MODELLED, config={"rows": 64}, method="measured")
GRADIENT = (*MODELLED.key, "gradient")


@pytest.fixture(autouse=True)
def folders(add: Add, setting: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A backend whose first kernel has configurations, with a folder of its own for tables, and one for the user's."""
    (tmp_path / "shipping" / "tables").mkdir(parents=True)
    (tmp_path / "shipping" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "shipping", raising=False)  # that of the test before
    backend = Loopback(
        offer("tiled", priority=9, configs="tiles", backward="backward"), offer("quick", backward="backward")
    )
    backend.tuning = "shipping:tables"
    add(backend)
    setting("KPT_TUNING", str(tmp_path / "user"))
    SEEN.clear()
    return tmp_path


def store(folder: Path, *entries: TuningEntry | dict[str, Any]) -> None:
    raw = [asdict(entry) if isinstance(entry, TuningEntry) else entry for entry in entries]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / table_name(DEVICE)).write_text(json.dumps({"format": 1, "device": DEVICE, "entries": raw}))
    kpt_core.refresh()


def ship(folders: Path, *entries: TuningEntry | dict[str, Any]) -> None:
    store(folders / "shipping" / "tables", *entries)


def rows_used(x: torch.Tensor = FEW) -> int:
    """Of the tile that a call ran with, of the default 16."""
    product(x, WEIGHT)
    return int(SEEN[-1])


def test_a_modelled_entry_configures_the_kernel_and_explain_says_that_it_is_modelled(folders):
    assert rows_used() == 16
    ship(folders, MODELLED)
    assert (rows_used(), rows_used(MANY)) == (32, 16)
    said = kpt_core.explain(product, FEW, WEIGHT)
    assert (said.tuned, said.modelled) == (True, True)
    assert "tuning_kernels:tiled (tuned, modelled, rows=32)" in str(said)
    assert said.as_dict()["modelled"] is True
    ship(folders, MEASURED)
    said = kpt_core.explain(product, FEW, WEIGHT)
    assert (said.tuned, said.modelled) == (True, False)
    assert "(tuned, rows=64)" in str(said)


def test_what_a_user_measured_wins_and_only_for_its_sizes(folders):
    ship(folders, MODELLED, replace(MODELLED, key=(128, 3), config={"rows": 8}))
    store(folders / "user", MEASURED)
    assert (rows_used(), rows_used(MANY)) == (64, 8)


@pytest.mark.parametrize("place", ["user", "shipping/tables"])
def test_what_was_measured_wins_wherever_the_modelled_entry_lies(folders, place):
    other = {"user": "shipping/tables", "shipping/tables": "user"}[place]
    store(folders / place, MODELLED)
    store(folders / other, MEASURED)
    assert rows_used() == 64


@pytest.mark.parametrize(("measured", "modelled"), [(MODELLED.key, GRADIENT), (GRADIENT, MODELLED.key)])
def test_sizes_measured_with_or_without_a_gradient_are_not_modelled(folders, measured, modelled):
    ship(folders, replace(MODELLED, key=modelled))
    store(folders / "user", replace(MEASURED, key=measured))
    for x in (FEW, FEW.clone().requires_grad_()):
        assert rows_used(x) == 64


def test_a_measured_default_takes_a_modelled_configuration_away(folders):
    ship(folders, MODELLED)
    store(folders / "user", replace(MEASURED, config=None, gain=1.0))
    assert rows_used() == 16


def test_a_modelled_entry_never_puts_a_kernel_first(folders):
    ship(folders, replace(MODELLED, kernel=named("quick"), config=None))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kpt_core.explain(product, FEW, WEIGHT).identity == TILED
    ship(folders, replace(MODELLED, kernel=named("quick"), config=None, method="measured", default=TILED))
    assert kpt_core.explain(product, FEW, WEIGHT).kernel == "tuning_kernels:quick"


def test_a_kernel_that_comes_before_is_no_news(folders, add):
    """What was measured is ignored with a sentence there; nobody measured this."""
    ship(folders, MODELLED)
    add(Loopback(offer("slow", priority=99), name="earlier"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kpt_core.explain(product, FEW, WEIGHT).kernel == "tuning_kernels:slow"


def test_compiled_code_takes_what_is_modelled_for_each_size(folders, fresh_compiler):
    compiled = torch.compile(lambda x, weight: product(x, weight), fullgraph=True, backend="eager")
    for x, entry, rows in ((FEW, MODELLED, 32), (MANY, MODELLED, 16), (MANY, replace(MEASURED, key=(128, 3)), 64)):
        ship(folders, entry)
        compiled(x, WEIGHT)
        assert SEEN[-1] == rows


def test_a_file_without_the_field_is_of_measurements(folders):
    old = asdict(MEASURED)
    del old["method"]
    store(folders / "user", old)
    ship(folders, MODELLED)
    assert rows_used() == 64


def test_another_method_is_refused_with_a_sentence(folders):
    ship(folders, asdict(MODELLED) | {"method": "guessed"})
    with pytest.warns(TuningWarning, match="method is 'guessed', not 'measured' or 'modelled'"):
        assert rows_used() == 16


def test_an_entry_of_another_version_is_told_as_modelled(folders):
    ship(folders, replace(MODELLED, distribution="kpt-backend-loopback", version="0.0.1"))
    with pytest.warns(TuningWarning, match="was modelled as of kpt-backend-loopback 0.0.1"):
        assert rows_used() == 16


def test_tune_measures_the_modelled_configuration_too_and_replaces_the_entry(folders, monkeypatch):
    """The kernel names 8, 32, 66 and 99 rows; those of a model may combine what the kernel names apart."""
    ship(folders, replace(MODELLED, config={"rows": 24}))
    tuning_kernels.use_cases(monkeypatch)
    SEEN.clear()
    found = kpt_core.tune(["tuning.product"], cases=["few"])
    assert {8, 16, 24, 32} <= set(SEEN)
    (entry,) = found.entries
    assert (entry.method, entry.config, entry.kernel) == ("measured", None, named("quick")) or (
        entry.method,
        entry.config,
    ) == ("measured", {"rows": 32})
    entries, _ = read_table(folders / "user" / table_name(DEVICE), DEVICE)
    assert [entry.method for entry in entries] == ["measured"]


def test_a_lock_tells_that_the_table_is_modelled(folders):
    with kpt_core.record() as log:
        product(FEW, WEIGHT)
    lock = write_lock(folders / "kpt.lock", log)
    assert not [text for text in lock.differences() if "tuning" in text]
    ship(folders, MODELLED)
    (text,) = [text for text in lock.differences() if "tuning" in text]
    assert 'configuration {"rows": 32} (modelled) is in force' in text
