"""Intel GPUs are simulated: `torch.xpu` answers for devices that are not there, and nothing is computed on them."""

import sys
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

import kpt_backend_xpu  # noqa: F401  its modules are patched

GIB = 2**30


def device(architecture: int = 0x30F000700, name: str = "Intel(R) Data Center GPU Max 1550", **more) -> SimpleNamespace:
    """Return a device's properties as torch tells them."""
    facts = dict.fromkeys(
        ("has_fp16", "has_fp64", "has_bfloat16_conversions", "has_subgroup_matrix_multiply_accumulate"), True
    )
    told = {
        "name": name,
        "architecture": architecture,
        "total_memory": 64 * GIB,
        "max_compute_units": 512,
        "gpu_subslice_count": 64,
        "local_mem_size": 128 * 1024,
        "driver_version": "1.6.33578",
        "has_subgroup_2d_block_io": True,
    }
    return SimpleNamespace(**{**facts, **told, **more})


@pytest.fixture
def see(monkeypatch):
    """Simulate a torch for Intel GPUs that sees these devices, and a Triton with a part for them."""

    def install(*devices: SimpleNamespace) -> None:
        state = SimpleNamespace(current=0)

        def index_of(device=None):
            index = device if isinstance(device, int) or device is None else torch.device(device).index
            return state.current if index is None else index

        @contextmanager
        def on(device):
            before, state.current = state.current, index_of(device)
            try:
                yield
            finally:
                state.current = before

        answers = {
            "_is_compiled": lambda: True,
            "is_available": lambda: bool(devices),
            "device_count": lambda: len(devices),
            "current_device": lambda: state.current,
            "get_device_properties": lambda device=None: devices[index_of(device)],
            "mem_get_info": lambda device=None: (devices[index_of(device)].total_memory,) * 2,
            "memory_stats": lambda device=None: {},
            "memory_allocated": lambda device=None: 0,
            "memory_reserved": lambda device=None: 0,
            "max_memory_allocated": lambda device=None: 0,
            "max_memory_reserved": lambda device=None: 0,
            "device": on,
            "power_draw": lambda device=None: 300,
        }
        for name, answer in answers.items():
            monkeypatch.setattr(torch.xpu, name, answer)
        monkeypatch.setattr(sys.modules["kpt_backend_xpu.environment"], "_why_no_triton", lambda: None)

    return install
