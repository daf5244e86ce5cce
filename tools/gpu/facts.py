"""What a report says of the machine, and the kernels that are tried, as JSON."""

import json
import sys
from dataclasses import asdict
from typing import Any

import torch

from kpt_backend_nvidia import BACKEND, device_info, environment
from kpt_conformance.report import chip_name, versions
from kpt_optimize.cases import case_tables


def facts(device: torch.device) -> dict[str, Any]:
    """Return device, driver and versions, and the kernels, that with the most cases first."""
    tables = case_tables()
    kernels = [kernel for kernel in BACKEND.kernels() if kernel.op in tables]
    kernels.sort(key=lambda kernel: -len(tables[kernel.op].cases))
    found: dict[str, Any] = {
        "device": chip_name(device),
        "interpreted": device.type == "cpu",
        "versions": versions(),
        "environment": asdict(environment()),
        "kernels": [kernel.forward for kernel in kernels],
    }
    if device.type == "cuda":
        found["device_info"] = asdict(device_info(device, live=False))
    return found


if __name__ == "__main__":
    if sys.argv[1] == "cuda" and not torch.cuda.is_available():
        sys.exit("no CUDA device is seen; `--device cpu --tiny` tries this program without one")
    sys.stdout.write(json.dumps(facts(torch.device(sys.argv[1])), default=str))
