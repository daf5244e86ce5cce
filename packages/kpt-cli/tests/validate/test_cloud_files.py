"""The SkyPilot files in deploy/cloud: fields that SkyPilot 0.14.1 knows, and a run that validates and checks."""

from pathlib import Path

import pytest
import yaml

CLOUD = Path(__file__).parents[4] / "deploy" / "cloud"
#: Of `sky.utils.schemas` of 0.14.1, those that may stand in a file.
TASK = {"name", "workdir", "num_nodes", "resources", "envs", "secrets", "file_mounts", "volumes", "setup", "run"}
RESOURCES = {
    *("infra", "accelerators", "accelerator_args", "cpus", "memory", "disk_size", "disk_tier", "instance_type"),
    *("use_spot", "autostop", "image_id", "ports", "labels", "any_of", "ordered", "job_recovery", "network_tier"),
}
EXTRAS = {"l4": "nvidia", "a10g": "nvidia", "h100": "nvidia", "mi300x": "amd", "tpu-v5e": "tpu"}


def test_every_platform_has_a_file() -> None:
    assert {file.name for file in CLOUD.iterdir()} == {f"{name}.sky.yaml" for name in EXTRAS}


@pytest.mark.parametrize("name", EXTRAS)
def test_fields_are_known_and_the_run_validates_and_checks(name) -> None:
    task = yaml.safe_load((CLOUD / f"{name}.sky.yaml").read_text())
    assert task.keys() <= TASK
    assert task["resources"].keys() <= RESOURCES
    assert task["resources"]["accelerators"]
    assert task["workdir"] == "."
    assert f"'.[{EXTRAS[name]}]'" in task["setup"]
    assert "./packages/kpt-conformance" in task["setup"]
    assert task["run"].splitlines()[-1] == "kpt validate platform -o report && kpt validate check report"
