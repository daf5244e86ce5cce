"""Presets of settings."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import kpt_core
from kpt_core import Backend, Call, InputError, Kernel, NoKernelError, UnknownNameError
from kpt_optimize.config import Config
from loopback import Loopback


@kpt_core.op("config_test.double")
def double(x: Tensor) -> Tensor:
    return 2 * x


def triple(call: Call) -> Tensor:
    """Wrong on purpose, so that it shows who ran."""
    return 3 * call.x


@pytest.fixture(autouse=True)
def backend(add: Callable[[Backend], Backend]) -> None:
    add(Loopback(Kernel("config_test.double", f"{__name__}:triple"), name="triples"))


def test_presets_do_what_they_say() -> None:
    x = torch.ones(1)
    assert double(x).item() == 3
    with Config.preset("inference").active():
        assert double(x).item() == 3
    with Config.preset("development").active():
        assert double(x).item() == 2
    assert double(x).item() == 3
    assert Config.preset("training").level == "conservative"


def test_fields_apply() -> None:
    x = torch.ones(1)
    with Config(disable=("triples",)).active():
        assert double(x).item() == 2
    with Config(use="triples").active():
        assert double(x).item() == 3
    with Config(use="triples", disable=("triples",)).active(), pytest.raises(NoKernelError, match="disabled"):
        double(x)


def test_changes_of_a_preset() -> None:
    config = Config.preset("inference", level="aggressive", max_error=0.5)
    assert config.optimize_arguments() == {"level": "aggressive", "objective": "latency", "max_error": 0.5}


def test_wrong_settings() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'inference'"):
        Config.preset("inferense")
    with pytest.raises(UnknownNameError, match="unknown setting 'levle': did you mean 'level'"):
        Config.preset("inference", levle="balanced")
    with pytest.raises(UnknownNameError, match="did you mean 'balanced'"):
        Config(level="balance")
    with pytest.raises(InputError, match=r"at least 0 or None; got -1"):
        Config(max_error=-1)
    with pytest.raises(InputError, match="True or False; got 'yes'"):
        Config(strict="yes")
    with pytest.raises(InputError, match="tuple of names"):
        Config(disable="cpu")
    with pytest.raises(UnknownNameError, match="unknown backend or kernel 'tripels'"), Config(use="tripels").active():
        pass
