import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kpt_moe import Routing
from kpt_moe.placement import Placement
from kpt_moe.placement.__main__ import main
from kpt_moe.routing_trace import RoutingTrace

SIZES = ["--ranks", "4", "--hidden-size", "1024", "--intermediate-size", "2048"]


@pytest.fixture
def trace(tmp_path: Path) -> str:
    weights = torch.tensor([8.0, 7.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0])
    index = torch.multinomial(weights.expand(4096, -1), 2)
    routing = Routing(index, torch.ones(index.shape), torch.empty(0, 8))
    RoutingTrace({"model.layer": [routing, routing], "silent": []}).save(tmp_path / "trace.safetensors")
    return str(tmp_path / "trace.safetensors")


@pytest.fixture
def loads(tmp_path: Path) -> str:
    (tmp_path / "loads.json").write_text(
        json.dumps({"tokens": 64_000, "top_k": 2, "loads": {"x": [60_000, 60_000, 4000, 4000]}})
    )
    return str(tmp_path / "loads.json")


def test_a_trace_is_planned_printed_and_written(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "placement.json")
    assert main([trace, *SIZES, "--ranks-per-node", "2", "--replicas", "4", "--chunks", "2", "-o", out]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "never compared with a real cluster" in lines[0]
    assert [line.split()[:2] for line in lines[2:3]] == [["model.layer", "before"]]
    assert lines[3].split()[0] == "after"
    # Columns after the words: ms, dispatch, compute, combine, max/mean.
    before, after = (line.split() for line in lines[2:4])
    assert float(after[5]) < 1.1 < 2 < float(before[6])
    assert "times as fast" in lines[-1]
    placement = Placement.load(out)
    assert (placement.layers, placement.ranks, placement.slots) == (("model.layer",), 4, 12)


def test_json_holds_both_predictions_and_the_placement(loads: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([loads, *SIZES, "--replicas", "4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["after"]["layers"][0]["imbalance"] == 34 / 32
    assert found["before"]["layers"][0]["imbalance"] == 60 / 32
    assert found["after"]["seconds"] < found["before"]["seconds"]
    assert found["placement"]["format"] == "kpt.placement"


def test_groups_keep_rows_in_their_node(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Tokens choose two experts of one half, whose members are apart if nodes do not matter.
    weights = torch.tensor([[8.0, 1, 1, 1, 0, 0, 0, 0], [0, 0, 0, 0, 9, 9, 1, 1]])
    index = torch.multinomial(weights.repeat(150, 1), 2)
    RoutingTrace({"x": [Routing(index, torch.ones(300, 2), torch.empty(0, 8))]}).save(tmp_path / "trace.safetensors")
    command = [str(tmp_path / "trace.safetensors"), *SIZES, "--ranks-per-node", "2", "--json", "--hierarchical"]
    sent = []
    for groups in ([], ["--groups", "2"]):
        assert main([*command, *groups]) == 0
        found = json.loads(capsys.readouterr().out)
        sent.append(found["after"]["layers"][0]["inter_bytes"])
    nodes = torch.tensor(found["placement"]["layers"][0]["expert_of_slot"]).view(2, 4)
    assert all(len({int(e) // 4 for e in node}) == 1 for node in nodes)
    assert sent[1] < sent[0]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[]", "holds no loads"),
        ('{"tokens": 1, "top_k": 1, "loads": {"x": "abc"}}', "holds no loads"),
        ('{"tokens": 1, "loads": {}}', "holds no loads"),
        ('{"tokens": 4, "top_k": 2, "loads": {"x": [9, 9, 9, 9]}}', "9 rows of 4 tokens"),
        ('{"tokens": 4, "top_k": 2, "loads": {}}', "as many experts in every layer"),
    ],
)
def test_what_does_not_fit_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, says: str) -> None:
    path = tmp_path / "loads.json"
    path.write_text(text)
    assert main([str(path), *SIZES]) == 1
    assert says in capsys.readouterr().err


def test_files_that_are_missing_or_empty_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("none.json", "none.safetensors"):
        assert main([str(tmp_path / name), *SIZES]) == 1
        assert name in capsys.readouterr().err
    RoutingTrace({"silent": []}).save(tmp_path / "empty.safetensors")
    assert main([str(tmp_path / "empty.safetensors"), *SIZES]) == 1
    assert "holds no calls" in capsys.readouterr().err


def test_it_runs_as_a_module(loads: str) -> None:
    command = [sys.executable, "-m", "kpt_moe.placement", loads, *SIZES]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "times as fast" in done.stdout
