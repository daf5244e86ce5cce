"""Ops are at home on any device: nothing that they make stays on the CPU.

Apart from the other checks, since the fake device stays in the process once it was asked for.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch

from kpt_conformance import fake_device
from kpt_conformance.extent import over
from kpt_conformance.trial import Trial


@over(kernels=False)
def fake_device_result(trial: Trial) -> None:
    """On a device that refuses to mix with CPU tensors, a reference and its gradients give what the CPU gives."""
    if trial.subject.device.type != "cpu":
        pytest.skip("the fake device computes on the CPU, and is held to that")
    fake = fake_device.enable()
    there = replace(trial, subject=replace(trial.subject, device=fake))
    want, got = trial.run(trial.arguments()), there.run(there.arguments())
    for kind, wanted, found in (("", want.outputs, got.outputs), ("gradient of ", want.gradients, got.gradients)):
        for name, value in wanted.items():
            other = found[name]
            assert (value is None) == (other is None), f"{kind}{name}: {value} on the CPU, {other} on {fake}"
            if value is not None and other is not None:
                assert other.device == fake, f"{kind}{name} lies on {other.device}, not on {fake}"
                torch.testing.assert_close(
                    other.cpu(), value, equal_nan=True, msg=partial("{}{}: {}".format, kind, name)
                )
