"""Devices whose tensors tell neither addresses nor sizes of their memory, as `xla`: torch_xla need not be here."""

import pytest
import torch

from kpt_conformance.checks.process import state_of, unusual
from kpt_conformance.tensors import require_addresses

XLA = torch.device("xla")


def test_checks_of_memory_are_skipped_in_a_sentence():
    require_addresses(torch.device("cpu"))
    with pytest.raises(pytest.skip.Exception, match="tensors on xla do not tell their memory"):
        require_addresses(XLA)


def test_the_state_of_the_process_is_compared_without_a_generator_of_the_device():
    before = torch.get_rng_state()
    with unusual(XLA):
        assert state_of(XLA)["the device's random numbers"] is None
        assert not torch.equal(torch.get_rng_state(), before)
    assert torch.equal(torch.get_rng_state(), before)
