"""`python -m kpt_core`: what is installed and what would run, without the `kpt` command."""

import sys

import torch

from . import __version__
from .registry import backends, ops, origin, problems


def main() -> int:
    """Print the state; 1 if a plug-in is broken."""
    print(f"kpt-core {__version__}, torch {torch.__version__}")
    devices = ["cpu"]
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        devices += [f"{kind}:{index}" for index in range(torch.accelerator.device_count())]
    print(f"devices: {', '.join(devices)}")
    for name, backend in backends().items():
        print(f"backend {name} ({origin(name)}): {backend.unavailable() or 'ready'}")
    if not backends():
        print("no backend is installed: the PyTorch references serve every op")
    for name, op in ops().items():
        for device in devices:
            found = op.candidates(torch.device(device), torch.float32)
            kernel = found.accepted[0].kernel.forward if found.accepted else "reference"
            print(f"op {name} on {device} (float32): {kernel}")
            for refusal in found.refusals:
                print(f"    not {refusal}")
    for problem in problems():
        print(f"broken: {problem}")
    return 1 if problems() else 0


if __name__ == "__main__":
    sys.exit(main())
