"""Stores give back what was put into them, and say in a sentence what is wrong with a file."""

import os

import pytest
import torch

from kpt_core import InputError
from kpt_moe.offload import DiskStore, HostStore
from kpt_moe.offload.store import StackedExperts


def weights(dtype: torch.dtype = torch.float32) -> dict[str, dict[str, torch.Tensor]]:
    return {
        "layers.0.experts": {"up": torch.randn(4, 6, 3).to(dtype), "bias": torch.randn(4, 6).to(dtype)},
        "layers.1.experts": {"up": torch.randn(2, 3, 6).to(dtype).mT},
    }


def described(parameters: dict[str, dict[str, torch.Tensor]]) -> dict[str, StackedExperts]:
    return {name: StackedExperts.of(name, len(next(iter(own.values()))), own) for name, own in parameters.items()}


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2],
)
@pytest.mark.parametrize("kind", ["host", "disk"])
def test_gives_back_every_slice(kind, dtype, tmp_path):
    parameters = weights(dtype)
    if kind == "host":
        store = HostStore(parameters)
    else:
        DiskStore.write(tmp_path / "experts", parameters)
        store = DiskStore(tmp_path / "experts", described(parameters))
    for name, own in parameters.items():
        for key, stacked in own.items():
            assert torch.equal(store.stacked(name, key).double(), stacked.double())
            for expert in range(len(stacked)):
                part = store.expert(name, key, expert)
                assert part.dtype is dtype
                assert torch.equal(part.double(), stacked[expert : expert + 1].double())


def test_host_memory_is_not_copied():
    parameters = weights()
    store = HostStore(parameters)
    stacked = parameters["layers.0.experts"]["up"]
    assert store.stacked("layers.0.experts", "up").data_ptr() == stacked.data_ptr()


def test_bytes_of_an_expert():
    sizes = [what.expert_bytes for what in described(weights(torch.bfloat16)).values()]
    assert sizes == [2 * (6 * 3 + 6), 2 * 18]


def test_writing_leaves_a_whole_file_or_none(tmp_path, monkeypatch):
    def fail(tensors, path):
        path.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr("safetensors.torch.save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        DiskStore.write(tmp_path / "experts", weights())
    assert os.listdir(tmp_path) == []


def test_no_file_is_overwritten(tmp_path):
    (tmp_path / "mine").write_text("precious")
    with pytest.raises(InputError, match="mine exists already: name a new file"):
        DiskStore.write(tmp_path / "mine", weights())
    assert (tmp_path / "mine").read_text() == "precious"


def test_a_folder_that_is_missing_is_named(tmp_path):
    with pytest.raises(InputError, match="nowhere is no folder: make it"):
        DiskStore.write(tmp_path / "nowhere" / "experts", weights())


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(InputError, match="gone does not exist: the experts' weights were to be read from it"):
        DiskStore(tmp_path / "gone", described(weights()))


@pytest.mark.parametrize("damage", ["empty", "noise", "truncated"])
def test_a_damaged_file_is_named(damage, tmp_path):
    path = tmp_path / "experts"
    DiskStore.write(path, weights())
    whole = path.read_bytes()
    path.write_bytes({"empty": b"", "noise": b"\xff" * len(whole), "truncated": whole[:-8]}[damage])
    with pytest.raises(InputError, match=r"experts is no readable safetensors file .*: write it anew"):
        DiskStore(path, described(weights()))


def test_a_file_of_another_model_is_refused(tmp_path):
    path = tmp_path / "experts"
    DiskStore.write(path, weights())
    other = weights()
    other["layers.0.experts"]["up"] = torch.randn(4, 6, 5)
    with pytest.raises(
        InputError, match=r"'layers.0.experts.up' must be torch.float32 \[4, 6, 5\]; .* F32 \[4, 6, 3\]"
    ):
        DiskStore(path, described(other))
    with pytest.raises(InputError, match=r"F32 \[4, 6, 3\]"):
        DiskStore(path, described(weights(torch.bfloat16)))
    other = {"layers.2.experts": other["layers.1.experts"]}
    with pytest.raises(InputError, match=r"holds no 'layers.2.experts.up': it was written for another model"):
        DiskStore(path, described(other))
