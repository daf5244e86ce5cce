"""`kpt_optimize.accelerator`, which is `kpt_optimize.devices` now."""

import pytest

from kpt_optimize import accelerator, devices


@pytest.mark.parametrize("name", devices.__all__)
def test_former_path_warns_and_gives_the_same(name):
    with pytest.warns(DeprecationWarning, match=rf"is kpt_optimize\.devices\.{name}; .* for one release"):
        assert getattr(accelerator, name) is getattr(devices, name)


def test_former_name_of_the_alias_still_works():
    with pytest.warns(DeprecationWarning, match=r"kpt_optimize\.devices\.DeviceLike"):
        assert accelerator.Device == devices.DeviceLike


def test_former_path_has_nothing_else():
    with pytest.raises(AttributeError, match="has no attribute 'present'"):
        _ = accelerator.present
