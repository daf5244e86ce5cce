"""The tables that ship without a measurement are what the model gives today, say so, and are clearly worth it."""

import json
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).parent
sys.path.insert(0, str(TOOLS))

from modelled_tuning import command, devices, readings  # noqa: E402  the package lies beside this file

from kpt_backend_nvidia import peaks_of  # noqa: E402
from kpt_core.tuning.files import read_table  # noqa: E402
from kpt_triton.moe.tiles import default_tile  # noqa: E402
from kpt_triton.tile import Tile  # noqa: E402

SHIPPED = sorted(command.FOLDER.glob("*.json"))


@pytest.fixture(scope="module")
def wanted() -> dict[str, str]:
    """What the model gives."""
    return command.tables()


def test_shipped_tables_are_what_the_model_gives(
    wanted: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """If not: `python tools/modelled_tuning`, after a look at what changed docs/kernels.md, the cases or the model."""
    monkeypatch.setattr(command, "tables", lambda: wanted)
    assert command.run(["--check"]) == 0, capsys.readouterr().out


def test_a_stale_table_is_told_and_written_anew_and_measurements_are_left_alone(
    wanted: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "tables", lambda: wanted)
    measured, stale, *_ = wanted
    gone = "NVIDIA_Gone.json"
    document = json.loads(wanted[measured])
    document["entries"][0]["method"] = "measured"
    (tmp_path / measured).write_text(json.dumps(document))
    (tmp_path / stale).write_text(wanted[stale].replace('"noise": 0.0', '"noise": 0.1'))
    (tmp_path / gone).write_text(wanted[stale])
    check = ["--check", "--out", str(tmp_path)]
    assert command.run(check) == 1
    said = capsys.readouterr().out
    assert stale in said
    assert gone in said
    assert measured not in said
    assert command.run(check[1:]) == 0
    assert command.run(check) == 0
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {**wanted, measured: json.dumps(document)}


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_entry_says_that_it_is_modelled_or_when_it_was_measured(path: Path) -> None:
    entries, malformed = read_table(path, json.loads(path.read_text())["device"])
    assert malformed == []
    for entry in entries:
        assert (entry.method == "modelled") is (entry.date == entry.torch == "not run")


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_an_entry_is_clearly_better_and_not_the_default(path: Path) -> None:
    for entry in read_table(path, json.loads(path.read_text())["device"])[0]:
        assert entry.gain >= 1.05
        assert entry.config is not None
        assert any(entry.config.values())


def test_every_device_with_known_peaks_is_modelled() -> None:
    from kpt_backend_nvidia.chips import _PEAKS

    assert set(devices.DEVICES) == set(_PEAKS)


@pytest.mark.parametrize("device", devices.DEVICES)
def test_figures_give_a_clock_that_a_gpu_can_have(device: str) -> None:
    """The peak, the multiprocessors and what each does in a cycle come from different documents."""
    assert 1.3e9 < devices.processor(device).clock < 2.7e9
    peaks = peaks_of(device)
    assert peaks is not None
    assert devices.processor(device).l2_bandwidth > 1.3 * peaks.bandwidth * 1e9


def test_every_default_tile_is_on_the_page_of_the_matrix() -> None:
    found = readings.read_page()
    for product, chip in found:
        for rows in (16, 32, 64, 1024):
            assert default_tile(product, chip, 2, rows, 1) in found[product, chip]


def test_the_page_is_read_as_it_stands() -> None:
    found = readings.read_page()
    lines = readings.PAGE.read_text().splitlines()
    (head, *_) = (line for line in lines if line.startswith("| program "))
    (line,) = (line for line in lines if line.startswith("| up bf16 | 64x64x32 w4 s4 g8 "))
    for chip, cell in zip(head.split("|")[3:-1], line.split("|")[3:-1], strict=True):
        here = found["pair", chip.strip()].get(Tile.parse("64x64x32 w4 s4 g8"))
        assert (here is None) is (cell.strip() == "-")
        assert here is None or f"{here.occupancy}/" in cell


def test_a_page_of_another_form_is_no_page(tmp_path: Path) -> None:
    page = tmp_path / "kernels.md"
    page.write_text(readings.PAGE.read_text().replace("| bf16 |", "| bfloat16 |"))
    with pytest.raises(ValueError, match="no reading of wgrad"):
        readings.read_page(page)
