"""The process of one part."""

import importlib
import json
import warnings
from dataclasses import asdict
from typing import Any

from .machine import Machine
from .plan import Plan, write_whole


def work(plan: Plan) -> int:
    """Do a part; what it finds is in its folder."""
    machine = Machine(plan)
    write_whole(plan.out / "environment.json", json.dumps(_facts(machine), indent=1, default=str) + "\n")
    module: Any = importlib.import_module(f"{__package__}.{plan.part}")
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        module.run(machine)
    return 0


def _facts(machine: Machine) -> dict[str, Any]:
    """Device, driver, versions and commit."""
    from kpt_backend_nvidia import device_info, environment
    from kpt_conformance.report import chip_name, versions

    facts: dict[str, Any] = {
        "device": chip_name(machine.device),
        "interpreted": machine.interpreted,
        "tiny": machine.plan.tiny,
        "commit": machine.plan.commit or None,
        "versions": versions(),
        "environment": asdict(environment()),
    }
    if machine.device.type == "cuda":
        info = device_info(machine.device, live=False)
        facts["device_info"] = asdict(info)
    return facts
