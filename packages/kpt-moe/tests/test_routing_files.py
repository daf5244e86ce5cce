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
from kpt_moe.routing_trace import RoutingTrace
from routings import assert_same, routings


def a_routing(tokens: int = 4, num_experts: int = 6) -> Routing:
    return TopKRouter(8, num_experts=num_experts, top_k=2)(torch.randn(tokens, 8)).detach()


def save(routing: Routing, path) -> None:
    RoutingTrace({"": [routing]}).save(path)


def load(path) -> Routing:
    ((routing,),) = RoutingTrace.load(path).calls.values()
    return routing


@given(routings(), st.booleans())
def test_what_was_saved_is_loaded(routing, logits):
    with tempfile.TemporaryDirectory() as folder:
        save(routing if logits else routing.without_logits(), f"{folder}/r")
        loaded = load(f"{folder}/r")
    assert loaded.num_tokens == routing.num_tokens
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
    save(routing, tmp_path / "r")
    with safe_open(tmp_path / "r", "pt") as file:
        assert file.get_slice("0.index").get_dtype() == name
    assert_same(load(tmp_path / "r"), routing)


def test_the_file_is_plain_safetensors_with_a_format_and_a_version(tmp_path):
    save(a_routing(), tmp_path / "r")
    with safe_open(tmp_path / "r", "pt") as file:
        assert file.metadata() == {"format": "kpt.routing", "version": "1", "paths": '[""]'}
        assert sorted(file.keys()) == ["0.index", "0.logits", "0.sizes", "0.weights"]
        assert file.get_tensor("0.sizes").tolist() == [[4, 2, 4, 6, -1, 0, 0]]


def test_parts_that_share_memory_or_are_strided_are_saved(tmp_path):
    both = torch.arange(12).view(6, 2).t()
    weights = both.double()
    routing = Routing(both, weights, weights, token=both[:, 0])
    save(routing, tmp_path / "r")
    assert_same(load(tmp_path / "r"), routing)


def test_a_file_replaces_another_whole_with_the_mode_of_the_umask(tmp_path):
    path = tmp_path / "r"
    save(a_routing(), path)
    second = a_routing(9)
    save(second, path)
    assert_same(load(path), second)
    assert os.listdir(tmp_path) == ["r"]
    plain = tmp_path / "plain"
    plain.touch()
    assert path.stat().st_mode == plain.stat().st_mode


def test_a_failing_write_leaves_the_old_file_alone(tmp_path, monkeypatch):
    path, first = tmp_path / "r", a_routing()
    save(first, path)

    def fail(self: Path, target: Path) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        save(a_routing(9), path)
    monkeypatch.undo()
    assert os.listdir(tmp_path) == ["r"]
    assert_same(load(path), first)


def test_a_loaded_routing_does_not_change_with_its_file(tmp_path):
    path, routing = tmp_path / "r", a_routing()
    save(routing, path)
    loaded = load(path)
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


def newer(path: Path) -> None:
    save_file({"index": torch.zeros(2)}, path, {"format": "kpt.routing", "version": "2"})


def rewritten(**tensors: torch.Tensor | None):
    def damage(path: Path) -> None:
        with safe_open(path, "pt") as file:
            old, found = file.metadata(), {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        changed = {f"0.{name}": tensor for name, tensor in tensors.items()}
        save_file({name: t for name, t in {**found, **changed}.items() if t is not None}, path, old)

    return damage


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (gone, "is no file"),
        (folder, "is no file"),
        (empty, "no whole safetensors file"),
        (truncated, "no whole safetensors file"),
        (header_cut, "no whole safetensors file"),
        (garbage, "no whole safetensors file"),
        (foreign, "must be of .*kpt.routing.*; got .*None"),
        (newer, "must be of .*'version': '1'.*; got .*'version': '2'"),
        (rewritten(index=None), "damaged"),
        (rewritten(index=torch.zeros(5).short()), "damaged"),
        (rewritten(index=torch.zeros(9).short()), "damaged.*add up"),
        (rewritten(weights=torch.zeros(6)), "damaged"),
        (rewritten(weights=torch.zeros(8).int()), "damaged.*fit"),
        (rewritten(mask=torch.ones(4).bool()), "damaged.*add up"),
        (rewritten(sizes=None), "damaged"),
        (rewritten(sizes=torch.tensor([[4, 2, 4]])), "damaged"),
        (rewritten(sizes=torch.tensor([[4, 2, 4, 6, 5, 0, 0]]), mask=torch.ones(5).bool()), "damaged.*fit"),
        (rewritten(sizes=torch.tensor([[4, 2, 4, 6, 4, 0, 0]]), mask=torch.ones(4)), "damaged.*fit"),
        (rewritten(sizes=torch.tensor([[4, 2, 4, 6, -1, 1, 0]]), token=torch.tensor([0, 1, 2, 4])), "damaged.*fit"),
        (rewritten(sizes=torch.tensor([[4, 2, 4, 6, -1, 1, 0]]), token=torch.tensor([0, 1, 2, -1])), "damaged.*fit"),
        (rewritten(sizes=torch.tensor([[4, 2, 3, 8, -1, 0, 0]])), "damaged.*fit"),
        (rewritten(sizes=torch.tensor([[4, 2, 0, 0, -1, 0, 0]]), logits=None), "damaged"),
    ],
)
def test_a_file_that_holds_no_routing_is_refused_by_name_in_one_line(tmp_path, damage, says):
    path = tmp_path / "r.safetensors"
    save(a_routing(), path)
    damage(path)
    with pytest.raises(InputError, match=says) as error:
        load(path)
    assert "r.safetensors" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(InputError, match=r"none is no folder: make it"):
        save(a_routing(), tmp_path / "none" / "r")
