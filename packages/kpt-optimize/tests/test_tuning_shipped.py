"""Tables that a backend ships: they configure and order its kernels, and give way to what the user measured."""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import kpt_core
from kpt_core import Backend
from kpt_optimize.tuning import TuningEntry, TuningWarning
from kpt_optimize.tuning.tables import table_name
from loopback import Loopback
from test_tuning_files import DEVICE, ENTRY
from tuning_kernels import SEEN, named, offer, product

Add = Callable[[Backend], Backend]
Setting = Callable[[str, str], None]
TILED = named("tiled")
FEW, MANY, WEIGHT = torch.randn(4, 5), torch.randn(100, 5), torch.randn(5, 3)
SHIPPED = replace(ENTRY, kernel=TILED, config={"rows": 32}, default=TILED, present=(TILED, named("quick")), noise=0.0)


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


def test_entries_of_packages_that_are_not_installed_are_passed_over_in_silence(
    folders: Path, recwarn: pytest.WarningsRecorder
) -> None:
    ship(folders, replace(SHIPPED, op="absent.product"), SHIPPED)
    assert rows_used() == 32
    assert not recwarn.list


def rows_used(x: torch.Tensor = FEW) -> int:
    """Of the tile that a call ran with, of the default 16."""
    product(x, WEIGHT)
    return int(SEEN[-1])


def test_an_entry_configures_the_kernel_and_explain_says_so(folders):
    assert rows_used() == 16
    ship(folders, SHIPPED)
    assert rows_used() == 32
    assert "tuning_kernels:tiled (tuned, rows=32)" in str(kpt_core.explain(product, FEW, WEIGHT))


def test_what_the_user_measured_wins(folders):
    ship(folders, SHIPPED, replace(SHIPPED, key=(128, 3), config={"rows": 8}))
    store(folders / "user", replace(SHIPPED, config={"rows": 64}))
    assert (rows_used(), rows_used(MANY)) == (64, 8)


def test_an_entry_may_put_another_kernel_first(folders):
    ship(folders, replace(SHIPPED, kernel=named("quick"), config=None))
    assert kpt_core.explain(product, FEW, WEIGHT).kernel == "tuning_kernels:quick"


def test_an_entry_of_another_version_is_ignored_with_a_sentence(folders):
    ship(folders, replace(SHIPPED, distribution="kpt-backend-loopback", version="0.0.1"))
    with pytest.warns(TuningWarning, match="was measured as of kpt-backend-loopback 0.0.1"):
        assert rows_used() == 16


def test_a_file_with_the_field_of_older_versions_is_read(folders):
    store(folders / "user", {**asdict(SHIPPED), "method": "measured"})
    assert rows_used() == 32
