"""Plans as files."""

import json
import math
import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from kpt_core import InputError
from kpt_optimize import Budget, Plan, PlanEntry

ENTRY = PlanEntry("layers.0.experts", "moe.experts", "moe.experts", "reference", 1.25, 1e-7, True, "1.25x faster")
PLAN = Plan(
    model="Model",
    level="balanced",
    objective="latency",
    device="cpu",
    max_error=0.02,
    versions={"torch": "2.13.0"},
    entries=(
        ENTRY,
        replace(ENTRY, module="layers.1.experts", kept=False, gain=0.8, noise=0.01, reason="1.25x slower (±2.5%)"),
    ),
    seconds_before=0.2,
    seconds_after=0.1,
    bytes_before=2**20,
    bytes_after=2**19,
    error=1e-7,
    gain=2.0,
    noise=0.01,
    budgets=(Budget(0.0301, 2, 9), Budget(0.0302, 3, 9), Budget(0.25, 9, 9)),
)


def test_round_trip(tmp_path: Path) -> None:
    PLAN.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == PLAN
    assert [entry.module for entry in PLAN.kept] == ["layers.0.experts"]
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_infinite_error_survives_as_valid_json(tmp_path: Path) -> None:
    plan = replace(PLAN, entries=(replace(ENTRY, error=math.inf, kept=False),))
    plan.save(tmp_path / "plan.json")
    assert "Infinity" not in (tmp_path / "plan.json").read_text()
    assert Plan.load(tmp_path / "plan.json") == plan


def test_table_names_every_entry_and_the_total() -> None:
    text = str(PLAN)
    assert "layers.0.experts" in text
    assert "layers.1.experts" in text
    assert (
        "200.00 ms before, 100.00 ms after, 2.00x faster (±1.0%); 1.0 MiB before, 0.5 MiB after, 2.00x smaller" in text
    )
    for gain in ("1.25x faster", "1.25x slower (±2.5%)"):
        assert text.count(gain) == 1
    unmeasured = replace(ENTRY, gain=1.0, kept=False, reason="of no use")
    noted = str(replace(PLAN, entries=(unmeasured,), note="the machine is busy")).splitlines()
    assert noted[0] == "the machine is busy"
    assert noted[2].split() == [
        "layers.0.experts",
        *("moe.experts", "reference", "-", "1.0e-07", "back", "of", "no", "use"),
    ]


def test_outlook_rounds_budgets_up_and_names_each_once() -> None:
    told = (
        "Larger budgets, by the errors measured: max_error=0.031 would allow 3 of 9, max_error=0.25 would allow 9 of 9"
    )
    assert str(PLAN).endswith(f"{told} modules.")
    smaller = replace(PLAN, objective="memory", budgets=PLAN.budgets[2:]).outlook("--max-error ")
    assert smaller == "Larger budgets, by the errors measured: --max-error 0.25 would keep 9 of 9 modules."


def test_failed_save_leaves_the_old_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.json"
    PLAN.save(path)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        replace(PLAN, level="aggressive").save(path)
    assert Plan.load(path) == PLAN
    assert [entry.name for entry in tmp_path.iterdir()] == ["plan.json"]


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_file_has_the_mode_that_the_umask_gives(tmp_path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        PLAN.save(tmp_path / "plan.json")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "plan.json").stat().st_mode) == mode


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not a plan"),
        ("[]", r"not a plan of format 1 \(found 'list'\)"),
        ('{"format": 7}', r"not a plan of format 1 \(found 7\)"),
        ('{"format": 1}', "is not a complete plan"),
        ('{"format": 1, "entries": [{"module": "x"}]}', "is not a complete plan"),
    ],
)
def test_what_is_no_plan_is_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(content)
    with pytest.raises(InputError, match=message):
        Plan.load(path)


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("kept", "false", "kept is 'false', and no bool"),
        ("rewrite", ["a"], r"rewrite is \['a'\], and no str"),
        ("gain", True, "gain is True, and no float"),
    ],
)
def test_a_value_of_another_type_is_refused(tmp_path: Path, part: str, value: object, message: str) -> None:
    path = tmp_path / "plan.json"
    PLAN.save(path)
    plan = json.loads(path.read_text())
    plan["entries"][0][part] = value
    path.write_text(json.dumps(plan))
    with pytest.raises(InputError, match=message):
        Plan.load(path)


def test_missing_plan(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no plan at"):
        Plan.load(tmp_path / "plan.json")
