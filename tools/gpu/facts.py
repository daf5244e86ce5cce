"""What a report says of the machine, as JSON."""

import json
import sys
from dataclasses import asdict
from importlib import import_module
from typing import Any

import torch

from kpt_conformance.report import chip_name, versions


def facts(backend: str, device: torch.device) -> dict[str, Any]:
    """Return device, driver and versions; clocks and power are those before anything ran."""
    vendor = import_module(f"kpt_backend_{backend}")
    found: dict[str, Any] = {
        "device": chip_name(device),
        "interpreted": device.type == "cpu",
        "versions": versions(),
        "environment": asdict(vendor.environment()),
    }
    if device.type != "cpu":
        found["device_info"] = asdict(vendor.device_info(device))
    return found


if __name__ == "__main__":
    place = torch.device(sys.argv[2])
    if place.type != "cpu" and not torch.get_device_module(place).is_available():
        sys.exit(f"torch sees no device of type {place.type}; --dry-run tries this program without one")
    sys.stdout.write(json.dumps(facts(sys.argv[1], place), default=str))
