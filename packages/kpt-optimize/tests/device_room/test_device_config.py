"""What a user may set, and what is refused."""

import pytest
import torch

from kpt_core import InputError, UnknownNameError
from kpt_optimize.devices import DeviceConfig


def test_the_default_changes_nothing():
    config = DeviceConfig()
    assert (config.device, config.dtype, config.allow_tf32, config.cudnn_benchmark) == (None,) * 4
    assert (config.deterministic, config.memory_fraction, config.channels_last, config.pad) == (
        None,
        None,
        False,
        False,
    )


@pytest.mark.parametrize(
    ("given", "device"),
    [
        (1, torch.device("cuda", 1)),
        ("cuda", torch.device("cuda")),
        ("cuda:2", torch.device("cuda", 2)),
        (torch.device("cuda:0"), torch.device("cuda:0")),
    ],
)
def test_a_device_may_be_named_in_each_of_torchs_ways(given, device):
    assert DeviceConfig(device=given).device == device


@pytest.mark.parametrize("given", ["bfloat16", "torch.bfloat16", torch.bfloat16])
def test_a_dtype_may_be_given_by_name(given):
    assert DeviceConfig(dtype=given).dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("device", "cpu", "of type cuda; got 'cpu'"),
        ("device", "banana", "got 'banana'"),
        ("device", -1, "got -1"),
        ("device", True, "got True"),
        ("device", 1.5, "got 1.5"),
        ("dtype", "float8_e4m3fn", "quantise the model"),
        ("dtype", "bf17", "must be one of float64, float32, bfloat16, float16"),
        ("dtype", torch.int8, "got torch.int8"),
        ("allow_tf32", "yes", "True, False or None; got 'yes'"),
        ("cudnn_benchmark", 1, "True, False or None; got 1"),
        ("deterministic", 0, "True, False or None; got 0"),
        ("channels_last", None, "True or False; got None"),
        ("pad", "all", "True or False; got 'all'"),
        ("memory_fraction", 0, "above 0 and at most 1, or None; got 0"),
        ("memory_fraction", 1.01, "got 1.01"),
        ("memory_fraction", float("nan"), "got nan"),
        ("memory_fraction", "half", "got 'half'"),
        ("memory_fraction", True, "got True"),
    ],
)
def test_a_wrong_value_is_named_with_what_was_expected(field, value, message):
    with pytest.raises(InputError, match=message):
        DeviceConfig(**{field: value})


def test_settings_that_contradict_each_other_are_refused():
    with pytest.raises(InputError, match="deterministic and cudnn_benchmark"):
        DeviceConfig(deterministic=True, cudnn_benchmark=True)


def test_a_file_gives_the_same_configuration_and_a_slip_the_nearest_name():
    settings = {"device": "cuda:1", "dtype": "float16", "memory_fraction": 0.5, "pad": True}
    assert DeviceConfig.from_mapping(settings) == DeviceConfig(
        device=1, dtype=torch.float16, memory_fraction=0.5, pad=True
    )
    with pytest.raises(UnknownNameError, match="'memory_fraction'"):
        DeviceConfig.from_mapping({"memory_fractoin": 0.5})


def test_it_can_not_be_changed():
    with pytest.raises(AttributeError):
        DeviceConfig().pad = True
