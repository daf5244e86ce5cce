"""Tables: names stay whole, whatever the width."""

import pytest

from kpt_cli import console
from kpt_cli.console import out, table

NAMES = ("kpt_moe.torch_kernels.experts_grouped:forward", "model.layers.0.mlp.experts")


def printed(capsys, columns, monkeypatch):
    if columns is None:
        monkeypatch.delenv("COLUMNS", raising=False)
    else:
        monkeypatch.setenv("COLUMNS", str(columns))
    made = table("module", "kernel", "gain", "reason", right=("gain",))
    reason = "with it the model's error exceeds the noise of the measurement, which was large (28.5%)"
    made.add_row(NAMES[1], f"{NAMES[0]} if it takes the call\nelse reference", "1.03x", reason)
    out().print(made)
    return capsys.readouterr().out


@pytest.mark.parametrize("columns", [40, 60, 100, 140, None], ids=str)
def test_names_are_never_folded_and_nothing_is_lost(capsys, monkeypatch, columns):
    shown = printed(capsys, columns, monkeypatch)
    for name in (*NAMES, "1.03x"):
        assert name in shown
    words = set(shown.split())
    assert {"measurement,", "(28.5%)", "reference", "gain", "reason"} <= words


def test_a_table_that_does_not_fit_becomes_blocks(capsys, monkeypatch):
    lines = printed(capsys, 60, monkeypatch).splitlines()
    assert lines[0] == f"module  {NAMES[1]}"
    assert lines[1] == f"kernel  {NAMES[0]} if it"
    assert lines[2] == "        takes the call"
    assert lines[3] == "        else reference"
    assert lines[4] == "gain    1.03x"


def test_a_table_fits_its_terminal(capsys, monkeypatch):
    assert max(map(len, printed(capsys, 110, monkeypatch).splitlines())) <= 110


def test_without_a_terminal_a_table_is_as_wide_as_its_names_need(capsys, monkeypatch):
    lines = printed(capsys, None, monkeypatch).splitlines()
    assert lines[1].startswith("─" * 60)
    assert any(NAMES[0] in line and NAMES[1] in line for line in lines)
    assert max(map(len, lines)) <= max(console.WIDTH, 120)


@pytest.mark.parametrize("columns", ["60", "100", None])
@pytest.mark.parametrize("command", [["kernels"], ["doctor"]], ids=lambda command: command[0])
def test_kernels_of_this_installation_stay_whole(kpt, monkeypatch, columns, command):
    if columns is None:
        monkeypatch.delenv("COLUMNS")
    else:
        monkeypatch.setenv("COLUMNS", columns)
    shown = kpt(*command).stdout
    for name in ("kpt_moe.torch_kernels.experts_loop:forward", "kpt_moe.torch_kernels.scaled_grouped_mm:loop"):
        assert name in shown
