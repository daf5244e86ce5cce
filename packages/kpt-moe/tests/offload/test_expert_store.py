"""Stores give back what was put into them, and say in a sentence what is wrong with a file."""

import os

import pytest
import torch

from kpt_core import InputError
from kpt_moe.offload.store import DiskStore, HostStore


def weights(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {
        "layers.0.experts.up": torch.randn(4, 6, 3).to(dtype),
        "layers.0.experts.bias": torch.randn(4, 6).to(dtype),
        "layers.1.experts.up": torch.randn(2, 3, 6).to(dtype).mT,
    }


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
        store = DiskStore(tmp_path / "experts", parameters)
    for name, stacked in parameters.items():
        assert torch.equal(store.read(name).double(), stacked.double())
        for expert in range(len(stacked)):
            part = store.read(name, expert)
            assert part.dtype is dtype
            assert torch.equal(part.double(), stacked[expert : expert + 1].double())


def test_host_memory_is_not_copied():
    parameters = weights()
    read = HostStore(parameters).read("layers.0.experts.up")
    assert read.data_ptr() == parameters["layers.0.experts.up"].data_ptr()


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
    with pytest.raises(InputError, match="gone is no file: name one that exists"):
        DiskStore(tmp_path / "gone", weights())


@pytest.mark.parametrize("damage", ["empty", "noise", "truncated"])
def test_a_damaged_file_is_named(damage, tmp_path):
    path = tmp_path / "experts"
    DiskStore.write(path, weights())
    whole = path.read_bytes()
    path.write_bytes({"empty": b"", "noise": b"\xff" * len(whole), "truncated": whole[:-8]}[damage])
    with pytest.raises(InputError, match=r"experts is no whole safetensors file .*: write it again"):
        DiskStore(path, weights())


def test_a_file_of_another_model_is_refused(tmp_path):
    path = tmp_path / "experts"
    DiskStore.write(path, weights())
    other = weights()
    other["layers.0.experts.up"] = torch.randn(4, 6, 5)
    with pytest.raises(
        InputError, match=r"'layers.0.experts.up' must be torch.float32 \[4, 6, 5\]; .* torch.float32 \[4, 6, 3\]"
    ):
        DiskStore(path, other)
    with pytest.raises(InputError, match=r"the file has torch.float32 \[4, 6, 3\]"):
        DiskStore(path, weights(torch.bfloat16))
    other = {"layers.2.experts.up": other["layers.1.experts.up"]}
    with pytest.raises(InputError, match=r"holds no 'layers.2.experts.up': it was written for another model"):
        DiskStore(path, other)
