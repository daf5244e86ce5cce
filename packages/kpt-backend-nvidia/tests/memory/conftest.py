"""What the memory tests share."""

import pytest
import torch

from kpt_backend_nvidia import NVIDIAMemoryManager
from simulated_allocator import MIB, SimulatedAllocator, simulate_allocator


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> SimulatedAllocator:
    """A simulated CUDA device of 1000 MiB."""
    return simulate_allocator(monkeypatch, 1000 * MIB)


@pytest.fixture
def simulated(allocator: SimulatedAllocator) -> NVIDIAMemoryManager:
    """A manager on the simulated device, with a margin of 100 MiB."""
    return NVIDIAMemoryManager(safety_margin=0.1)


@pytest.fixture
def on_cpu() -> NVIDIAMemoryManager:
    """A manager of main memory, nothing simulated."""
    return NVIDIAMemoryManager("cpu")
