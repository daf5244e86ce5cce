"""What a process of `tools/gpu` is told: where it works and how large things are."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import devices
import torch

CHECKOUT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Setting:
    """What a process is told.

    Attributes:
        out: folder of the reports.
        device: a GPU, or the CPU, on which Triton interprets the kernels.
        tiny: sizes so small that Triton's interpreter computes them in seconds.
    """

    out: Path
    device: torch.device
    tiny: bool

    def dtype(self, wanted: torch.dtype) -> torch.dtype:
        """Return the dtype, or float32 where Triton's interpreter gets its products wrong."""
        return torch.float32 if self.device.type == "cpu" and wanted is torch.bfloat16 else wanted

    def alive(self) -> bool:
        """Return whether the device still answers."""
        return devices.alive(self.device)

    def wait(self) -> None:
        """Wait for the device."""
        devices.wait(self.device)

    @contextmanager
    def served(self) -> Iterator[None]:
        """Have dispatch choose the nvidia backend's kernels, on a CPU too."""
        if self.device.type == "cuda":
            yield
        else:
            with devices.interpreted():
                yield


def read_setting() -> tuple[Setting, argparse.Namespace]:
    """Return what the command line says."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("out", type=Path)
    parser.add_argument("device")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--share", help="compile this share alone, as in 2/5")
    options = parser.parse_args()
    if options.device == "cpu":
        from kpt_conformance.interpreter import prepare_once

        prepare_once()
    return Setting(options.out, torch.device(options.device), options.tiny), options
