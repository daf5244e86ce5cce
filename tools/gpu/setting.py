"""What the checks are told: where they run and how large things are; and on a CPU what takes a GPU's place."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from unittest import mock

import devices
import pytest
import torch


@dataclass(frozen=True, slots=True)
class Setting:
    """What a process is told.

    Attributes:
        device: a GPU, or the CPU, on which Triton interprets the kernels.
        tiny: sizes so small that Triton's interpreter computes them in seconds.
    """

    device: torch.device
    tiny: bool

    @classmethod
    def of(cls, config: pytest.Config) -> "Setting":
        """Return what the command line says."""
        return cls(torch.device(config.getoption("--gpu-device")), config.getoption("--gpu-tiny"))

    @property
    def on_gpu(self) -> bool:
        """Return whether this is the real thing."""
        return self.device.type == "cuda"

    def dtype(self, wanted: torch.dtype) -> torch.dtype:
        """Return the dtype, or float32 where Triton's interpreter gets its products wrong."""
        return torch.float32 if not self.on_gpu and wanted is torch.bfloat16 else wanted

    def wait(self) -> None:
        """Wait for the device."""
        devices.wait(self.device)


def need_gpu(setting: Setting, why: str = "needs CUDA") -> None:
    """Leave a check out without a GPU."""
    if not setting.on_gpu:
        pytest.skip(why)


def _validate_nothing(*tensors: torch.Tensor) -> None:
    """Let all pass; a mock could not be traced."""


@contextmanager
def served(setting: Setting) -> Iterator[None]:
    """Have dispatch choose what a GPU's calls would have: on a CPU Triton's interpreter, and no compiled attention."""
    if setting.on_gpu:
        yield
        return
    import kpt_core
    from kpt_attention.torch_kernels import gpu_flex

    program = gpu_flex._compiled
    with ExitStack() as stack:
        stack.enter_context(mock.patch("kpt_core.contract._GPUS", ("cpu",)))
        stack.enter_context(mock.patch.object(gpu_flex, "_compiled", lambda kind: program(kind, "eager")))
        # Its own function differentiates on any device; torch refuses, since its compiler has no kernel for CPUs.
        stack.enter_context(mock.patch("torch.nn.attention.flex_attention._validate_device", _validate_nothing))
        kpt_core.refresh()
        stack.enter_context(devices.interpreted())
        yield
    kpt_core.refresh()
