"""What torch and drivers tell of the devices of a machine."""

import warnings

import torch

from kpt_optimize.devices import machine


def test_broken_driver_costs_a_note(monkeypatch):
    def complain():
        warnings.warn("CUDA initialization: the driver is too old", UserWarning, stacklevel=1)
        raise RuntimeError("no")

    monkeypatch.setattr(torch.cuda, "is_available", complain)
    found = machine.present()
    assert [device.device for device in found.devices][:1] == ["cpu"]
    assert any("RuntimeError: no" in note for note in found.notes)
    assert any("driver is too old" in note for note in found.notes)


def test_gpu_as_torch_tells_it(monkeypatch):
    class Properties:
        name, total_memory, major, minor = "H9000", 80 * 2**30, 9, 0

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties)
    found = [device for device in machine.present().devices if device.type == "cuda"]
    assert [device.device for device in found] == ["cuda:0", "cuda:1"]
    assert found[0].features == ("sm90",)
    assert found[0].memory_bytes == 80 * 2**30


def test_older_torch(monkeypatch):
    for name in [name for name in dir(torch.cpu) if name.startswith("_is_") and name.endswith("_supported")]:
        monkeypatch.setattr(torch.cpu, name, lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_avx2_supported", lambda: True, raising=False)
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    found = machine.present()
    assert "avx2" in found.devices[0].features
    assert found.notes == ()
