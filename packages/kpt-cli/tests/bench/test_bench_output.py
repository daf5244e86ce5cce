"""`kpt bench -o`: a place that can't be written is refused before anything is measured."""

import pytest


@pytest.mark.parametrize("command", ["moe", "moe-training", "attention", "fp8"])
@pytest.mark.parametrize(
    ("place", "said"),
    [("none/figures.json", "does not exist; make it first"), (".", "is a folder; expected a file name")],
)
def test_no_place_for_figures_is_refused_at_once(kpt, monkeypatch, tmp_path, command, place, said):
    def never(*_, **__):
        raise AssertionError("measured before the place was checked")

    for function in ("moe.run", "contest.measure"):
        monkeypatch.setattr(f"kpt_cli.bench.{function}", never)
    result = kpt("bench", command, "--quick", "-o", tmp_path / place)
    assert result.exit_code == 2
    assert said in result.stderr
    assert not list(tmp_path.iterdir())
