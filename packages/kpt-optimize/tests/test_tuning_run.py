"""What `tune` is asked, what it writes and where; which tables are then in force."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import kpt_core
import kpt_optimize
import tuning_kernels
from kpt_core import Backend, InputError, UnknownNameError
from kpt_core.policy import next_power_of_two
from kpt_optimize.cases import Case, CaseTable
from kpt_optimize.tuning import TuningEntry, TuningWarning, device_name, run, tables
from kpt_optimize.tuning.run import model_cases
from tuning_kernels import FEW, WEIGHT, kernel, named, product, tune, two

Add = Callable[[Backend], Backend]
Setting = Callable[[str, str], None]


@pytest.fixture(autouse=True)
def folder(tuning_folder: Path) -> Path:
    return tuning_folder


def test_nothing_is_written_where_there_is_nothing_to_choose(folder: Path) -> None:
    found = tune()
    assert (found.entries, found.path) == ((), None)
    assert [result.entry for result in found.results] == [None, None]
    assert not folder.exists()


@pytest.mark.parametrize("place", ["/proc/kpt/table.json", "/dev/null/table.json"])
def test_a_table_that_can_not_be_written_is_refused_at_once(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "try_case", None)
    with pytest.raises(InputError, match=f"table {place} can't be written .*dry_run"):
        tune(path=place)


def test_a_dry_run_writes_nothing_and_changes_nothing(add: Add, folder: Path) -> None:
    add(two())
    assert tune(dry_run=True).entries
    assert not folder.exists()
    assert kernel(product, FEW, WEIGHT) == "slow"


def test_switched_off(add: Add, setting: Setting, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add(two())
    tune()
    setting("KPT_TUNING", "0")
    assert kernel(product, FEW, WEIGHT) == "slow"
    setting("KPT_TUNING", str(folder))
    assert kernel(product, FEW, WEIGHT) == "quick"


def test_the_user_s_table_lies_in_the_cache(
    add: Add, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: Setting
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    setting("KPT_TUNING", "")
    add(two())
    path = tune().path
    assert path is not None
    assert path.parent == tmp_path / "cache" / "kpt" / "tuning"
    document = json.loads(path.read_text())
    assert document["device"] == device_name("cpu")
    assert document["versions"] == {"torch": torch.__version__}
    assert kernel(product, FEW, WEIGHT) == "quick"


def test_a_file_of_its_own_is_not_in_force(add: Add, tmp_path: Path) -> None:
    add(two())
    assert tune(path=tmp_path / "mine.json").path == tmp_path / "mine.json"
    assert kernel(product, FEW, WEIGHT) == "slow"


def test_a_choice_in_force_is_refused(add: Add) -> None:
    add(two())
    with kpt_core.use("loop"), pytest.raises(InputError, match=r"loop was asked for .* take that back"):
        tune()


def test_unknown_names_offer_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'many'"):
        tune(cases=["mny"])
    with pytest.raises(UnknownNameError, match=r"did you mean 'tuning\.product'"):
        tune("tuning.prodct")


def test_ops_without_cases_are_named(add: Add) -> None:
    add(two())
    found = kpt_optimize.tune(["sample.scale", "tuning.product"], cases=["few"])
    assert list(found.skipped) == ["sample.scale"]
    assert len(found.entries) == 1
    assert tune("tuning.composed", training=True).skipped == {
        "tuning.composed": "its cases name no argument with a gradient"
    }


def test_progress_is_told(add: Add) -> None:
    add(two())
    told: list[tuple[int, int, str]] = []
    tune(on_progress=lambda *told_now: told.append(told_now))
    assert told == [(0, 2, "tuning.product: few"), (1, 2, "tuning.product: many")]


def test_a_key_that_json_would_change_is_refused(add: Add, monkeypatch: pytest.MonkeyPatch) -> None:
    add(two())
    monkeypatch.setattr(product, "size_key", lambda call: (4, True))
    with pytest.raises(kpt_core.RegistrationError, match=r"tuning.product: its size_key gave \(4, True\)"):
        tune()


def test_large_cases_run_on_a_cpu_only_when_named() -> None:
    table: CaseTable = tuning_kernels.TABLES["tuning.product"]

    def names(*arguments: object) -> list[str]:
        found: list[Case] = model_cases(table, *arguments)
        return [case.name for case in found]

    assert names(torch.device("cpu")) == ["few", "many"]
    assert names(torch.device("cuda")) == ["few", "many", "huge"]
    assert names(torch.device("cpu"), ["huge"]) == ["huge"]


def test_next_power_of_two() -> None:
    assert [next_power_of_two(size) for size in (0, 1, 2, 3, 4, 5, 63, 64, 65)] == [
        1, 1, 2, 4, 4, 8, 64, 64, 128,
    ]  # fmt: skip


def test_a_size_key_may_be_a_list(add: Add, monkeypatch: pytest.MonkeyPatch) -> None:
    add(two())
    monkeypatch.setattr(product, "size_key", lambda call: [call.x.shape[0]])
    tune(cases=["few"])
    assert torch.equal(product(FEW, WEIGHT), FEW @ WEIGHT)
    assert kernel(product, FEW, WEIGHT) == "quick"


def test_tables_that_are_refreshed_while_they_are_read_do_not_stay(
    add: Add, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call reads the old table; meanwhile another thread tunes, or refreshes."""
    add(two())
    read = tables._read_tables

    def slowly(device: str, where: Path) -> list[TuningEntry]:
        found = read(device, where)
        monkeypatch.setattr(tables, "_read_tables", read)
        tune(cases=["few"])
        return found

    monkeypatch.setattr(tables, "_read_tables", slowly)
    product(FEW, WEIGHT)
    assert kernel(product, FEW, WEIGHT) == "quick"


def test_shipped_tables_serve_until_the_user_has_measured(
    add: Add, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = two()
    add(backend)
    package = tmp_path / "shipping_backend"
    package.mkdir()
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    name = tune(cases=["few"], path=tmp_path / "found.json").device
    shipped = package / "tuning"
    shipped.mkdir()
    table = json.loads((tmp_path / "found.json").read_text())
    (shipped / tables.table_name(name)).write_text(json.dumps(table))
    monkeypatch.setattr(backend, "tuning", "shipping_backend:tuning")
    kpt_core.refresh()
    assert kernel(product, FEW, WEIGHT) == "quick"
    table["entries"][0]["kernel"] = named("slow")
    folder.mkdir()
    (folder / tables.table_name(name)).write_text(json.dumps(table))
    kpt_core.refresh()
    assert kernel(product, FEW, WEIGHT) == "slow"
    monkeypatch.setattr(backend, "tuning", "no_such_package:tuning")
    kpt_core.refresh()
    with pytest.warns(TuningWarning, match=r"backend 'loop' at 'no_such_package:tuning': ignored, because ModuleNot"):
        product(FEW, WEIGHT)
