"""A simulated TPU: its place on the PCI bus, what is installed, and torch_xla's answers; nothing is computed."""

import sys
from types import ModuleType

import pytest
import torch

from kpt_backend_tpu import TPUS, chips

MODULE = sys.modules["kpt_backend_tpu.environment"]
INSTALLED = {"torch-xla": torch.__version__, "jax": "0.7.1", "torchax": "0.0.13", "flax": "0.12.0", "libtpu": "0.0.51"}


@pytest.fixture
def see(monkeypatch, tmp_path):
    """Return a function that puts these chips on the bus."""

    def install(*found, distributions=INSTALLED, devices=None, memory=None):
        for place, number in enumerate(found):
            folder = tmp_path / f"0000:00:{place:02x}.0"
            folder.mkdir()
            (folder / "vendor").write_text("0x1ae0\n" if number else "0x8086\n")
            (folder / "device").write_text(f"{TPUS[number].pci if number in TPUS else number}\n")
        monkeypatch.setattr(chips, "_PCI", tmp_path)
        monkeypatch.setattr(MODULE, "_version", distributions.get)
        monkeypatch.delenv("PJRT_DEVICE", raising=False)
        monkeypatch.delenv("KPT_TPU_INTERPRET", raising=False)
        torch_xla, core, model = (ModuleType(name) for name in ("torch_xla", "core", "xla_model"))
        torch_xla.device_count = lambda: len(found) if devices is None else devices
        torch_xla.sync = lambda wait: synced.append(wait)

        def get_memory_info(device):
            if memory is None:
                raise RuntimeError("UNIMPLEMENTED: GetAllocatorStats is not supported\nmore")
            return memory

        model.get_memory_info = get_memory_info
        for name, module in (("", torch_xla), (".core", core), (".core.xla_model", model)):
            monkeypatch.setitem(sys.modules, f"torch_xla{name}", module)

    synced = []
    install.synced = synced
    return install
