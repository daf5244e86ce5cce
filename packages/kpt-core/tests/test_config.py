"""Presets of settings."""

from collections.abc import Iterator

import pytest
import torch

import kpt_core
from kpt_core import Config, InputError, NoKernelError, UnknownNameError


@kpt_core.op("config_test.double")
def double(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


def triple(x: torch.Tensor) -> torch.Tensor:
    return 3 * x


class Triples:
    """Wrong on purpose, so that it shows who ran."""

    name = "triples"
    device_type = "cpu"

    def unavailable(self) -> str | None:
        return None

    def capabilities(self, device: torch.device) -> frozenset[str]:
        return frozenset()

    def kernels(self) -> list[kpt_core.Kernel]:
        return [kpt_core.Kernel("config_test.double", f"{__name__}:triple")]


@pytest.fixture(autouse=True)
def backend() -> Iterator[None]:
    kpt_core.add_backend(Triples())
    yield
    kpt_core.remove_backend("triples")


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
        Config(strict="yes")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="tuple of names"):
        Config(disable="cpu")  # type: ignore[arg-type]
    with pytest.raises(UnknownNameError, match="unknown backend or kernel 'tripels'"), Config(use="tripels").active():
        pass
