"""What a result is, before its values: device, dtype and shape, on the device, on meta and on fake tensors."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import kpt_core
from kpt_conformance import fake_device
from kpt_conformance.extent import over
from kpt_conformance.tensors import tensors_of, with_tensors
from kpt_conformance.trial import Trial
from kpt_core.selection import REFERENCE
from kpt_optimize.cases import Arguments


def _described(outputs: dict[str, Tensor]) -> dict[str, str]:
    return {name: f"{str(out.dtype).removeprefix('torch.')}{list(out.shape)}" for name, out in outputs.items()}


def _expected(trial: Trial, arguments: Arguments) -> dict[str, str]:
    """What the reference gives."""
    with torch.no_grad(), kpt_core.use(REFERENCE):
        return _described(trial.outputs(trial.leaves(arguments)))


@over(models="first", drawn="first", dtypes=True, telling=("scale_dtype", "return_lse"))
def result_type(trial: Trial) -> None:
    """The result is on the arguments' device, its dtype and shape are the reference's; gradients are like arguments."""
    arguments = trial.arguments()
    got = trial.run(arguments)
    assert _described(dict(got.outputs)) == _expected(trial, arguments)
    for name, out in got.outputs.items():
        assert out.device == trial.subject.device, f"{name} is on {out.device}; expected {trial.subject.device}"
    for name, gradient in got.gradients.items():
        if gradient is not None:
            both = gradient, tensors_of(arguments)[name]
            is_, expected = (f"{each.dtype} {list(each.shape)} on {each.device}" for each in both)
            assert is_ == expected, f"gradient of {name} is {is_}; the argument is {expected}"


@over(drawn="first", dtypes=True)
def fake_result(trial: Trial) -> None:
    """On fake tensors, as torch.compile and torch.export use, shape, dtype, device and strides are the real ones."""
    arguments = trial.arguments()
    with torch.no_grad(), trial.subject.chosen():
        real = trial.outputs(trial.leaves(arguments))
        mode = FakeTensorMode(allow_non_fake_inputs=False)
        fakes = with_tensors(arguments, lambda name, tensor: mode.from_tensor(tensor))
        with mode:
            faked = trial.outputs(fakes)
    assert _described(faked) == _described(real), "on fake tensors it gives something else"
    for name, out in faked.items():
        assert out.device == real[name].device, f"{name} is on {out.device} as a fake, on {real[name].device} in truth"
        # The stride of a dimension of one means nothing.
        strides = [[s for s, n in zip(o.stride(), o.shape, strict=True) if n != 1] for o in (out, real[name])]
        assert strides[0] == strides[1] or real[name].numel() == 0, (
            f"{name} has strides {list(out.stride())} as a fake, {list(real[name].stride())} in truth"
        )


@over(dtypes=True, kernels=False)
def meta_result(trial: Trial) -> None:
    """The op gives shapes and dtypes on the meta device, where no kernel runs."""
    arguments = trial.arguments()
    expected = _expected(trial, arguments)
    with torch.no_grad():
        outputs = trial.outputs(with_tensors(arguments, lambda name, tensor: tensor.to("meta")))
    assert _described(outputs) == expected
    assert all(out.device.type == "meta" for out in outputs.values())


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
