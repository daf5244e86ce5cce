import json
import os
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from kpt_core import InputError
from kpt_moe import Routing, TopKRouter
from kpt_moe.routing_files import load_routing, num_tokens, save_routing
from routings import assert_same, routings


def a_routing(tokens: int = 4, num_experts: int = 6) -> Routing:
    return TopKRouter(8, num_experts, 2)(torch.randn(tokens, 8)).detach()


@given(routings(), st.booleans())
def test_what_was_saved_is_loaded(routing, logits):
    with tempfile.TemporaryDirectory() as folder:
        save_routing(routing, f"{folder}/r", logits=logits)
        loaded = load_routing(f"{folder}/r")
    assert num_tokens(loaded) == num_tokens(routing)
    assert loaded.num_experts == routing.num_experts
    if logits:
        assert_same(loaded, routing)
        return
    assert loaded.logits.shape == (0, routing.num_experts)
    assert torch.equal(loaded.index, routing.index)
    assert torch.equal(loaded.weights, routing.weights)
    assert torch.equal(loaded.counts(), routing.counts())
    assert torch.equal(loaded.tokens_per_expert(), routing.tokens_per_expert())
    assert torch.equal(loaded.asked_per_expert(), routing.asked_per_expert())


@pytest.mark.parametrize(
    ("extremes", "name"),
    [
        ((-(2**15), 2**15 - 1), "I16"),
        ((0, 2**15), "I32"),
        ((-(2**15) - 1, 0), "I32"),
        ((-(2**31), 2**31 - 1), "I32"),
        ((0, 2**31), "I64"),
    ],
)
def test_ids_take_as_few_bytes_as_they_fit_in(tmp_path, extremes, name):
    routing = Routing(torch.tensor([extremes]), torch.ones(1, 2), torch.zeros(1, 3))
    routing.save(tmp_path / "r")
    with safe_open(tmp_path / "r", "pt") as file:
        assert file.get_slice("index").get_dtype() == name
    assert_same(Routing.load(tmp_path / "r"), routing)


def test_the_file_is_plain_safetensors_with_a_format_and_a_version(tmp_path):
    a_routing().save(tmp_path / "r")
    with safe_open(tmp_path / "r", "pt") as file:
        assert file.metadata() == {"format": "kpt.routing", "version": "1", "num_experts": "6"}
        assert sorted(file.keys()) == ["index", "logits", "weights"]


def test_parts_that_share_memory_or_are_strided_are_saved(tmp_path):
    both = torch.arange(12).view(6, 2).t()
    weights = both.double()
    routing = Routing(both, weights, weights, token=both[:, 0])
    routing.save(tmp_path / "r")
    assert_same(Routing.load(tmp_path / "r"), routing)


def test_a_file_replaces_another_whole_with_the_mode_of_the_umask(tmp_path):
    path = tmp_path / "r"
    a_routing().save(path)
    second = a_routing(9)
    second.save(path)
    assert_same(Routing.load(path), second)
    assert os.listdir(tmp_path) == ["r"]
    plain = tmp_path / "plain"
    plain.touch()
    assert path.stat().st_mode == plain.stat().st_mode


def test_a_failing_write_leaves_the_old_file_alone(tmp_path, monkeypatch):
    path, first = tmp_path / "r", a_routing()
    first.save(path)

    def fail(self: Path, target: Path) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        a_routing(9).save(path)
    monkeypatch.undo()
    assert os.listdir(tmp_path) == ["r"]
    assert_same(Routing.load(path), first)


def test_a_loaded_routing_does_not_change_with_its_file(tmp_path):
    path, routing = tmp_path / "r", a_routing()
    routing.save(path)
    loaded = Routing.load(path)
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.write(b"\xff" * size)
    assert_same(loaded, routing)


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def header_cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:20])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def garbage(path: Path) -> None:
    path.write_bytes(bytes(range(256)) * 4)


def gone(path: Path) -> None:
    path.unlink()


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def foreign(path: Path) -> None:
    save_file({"weight": torch.zeros(2)}, path)


def of_a_trace(path: Path) -> None:
    save_file({"0.sizes": torch.zeros(0, 6)}, path, {"format": "kpt.routing_trace", "version": "1", "paths": "[]"})


def newer(path: Path) -> None:
    save_file({"index": torch.zeros(2)}, path, {"format": "kpt.routing", "version": "2"})


def rewritten(metadata: dict[str, str], **tensors: torch.Tensor | None):
    def damage(path: Path) -> None:
        with safe_open(path, "pt") as file:
            old, found = file.metadata(), {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        found = {name: t for name, t in {**found, **tensors}.items() if t is not None}
        save_file(found, path, {**old, **metadata})

    return damage


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (gone, "no such file"),
        (folder, "no such file"),
        (empty, "no whole safetensors file"),
        (truncated, "no whole safetensors file"),
        (header_cut, "no whole safetensors file"),
        (garbage, "no whole safetensors file"),
        (foreign, "tensors of no known format, not kpt.routing"),
        (of_a_trace, "holds kpt.routing_trace, not kpt.routing"),
        (newer, "version 2, and this KPT reads version 1"),
        (rewritten({}, index=None), "damaged"),
        (rewritten({}, weights=torch.zeros(3, 2)), "damaged"),
        (rewritten({}, weights=torch.zeros(4, 2).int()), "damaged"),
        (rewritten({}, mask=torch.ones(5).bool()), "damaged"),
        (rewritten({}, mask=torch.ones(4)), "damaged"),
        (rewritten({}, token=torch.tensor([0, 1, 2, 4])), "damaged"),
        (rewritten({}, token=torch.tensor([0, 1, 2, -1])), "damaged"),
        (rewritten({}, token=torch.zeros(3).long()), "damaged"),
        (rewritten({}, logits=torch.zeros(5, 6)), "damaged"),
        (rewritten({"num_experts": "many"}, logits=None), "damaged"),
        (rewritten({"num_experts": "0"}, logits=None), "damaged"),
        (rewritten({"num_experts": "-1"}, logits=None), "damaged"),
    ],
)
def test_a_file_that_holds_no_routing_is_refused_by_name_in_one_line(tmp_path, damage, says):
    path = tmp_path / "r.safetensors"
    a_routing().save(path)
    damage(path)
    with pytest.raises(InputError, match=says) as error:
        Routing.load(path)
    assert "r.safetensors" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_folder_is_the_systems_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        a_routing().save(tmp_path / "none" / "r")


def test_metadata_survives_json(tmp_path):
    a_routing().save(tmp_path / "r", logits=False)
    data = (tmp_path / "r").read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert header["__metadata__"]["num_experts"] == "6"
    assert "logits" not in header
