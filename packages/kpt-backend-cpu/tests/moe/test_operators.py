"""An operator's implementation is called directly only where nobody would notice."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from kpt_backend_cpu.moe.operators import call


class Noticed(torch.Tensor):
    """A tensor of another class."""


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def which(x: torch.Tensor) -> str:
    return call(lambda *_: "operator", lambda *_: "implementation", x, None, 3)


def test_a_plain_call_and_one_with_parameters_go_to_the_implementation():
    assert which(torch.ones(2)) == "implementation"
    with torch.inference_mode():
        assert which(torch.nn.Parameter(torch.ones(2))) == "implementation"


def test_a_tensor_of_another_class_is_seen():
    assert which(torch.ones(2).as_subclass(Noticed)) == "operator"


@pytest.mark.parametrize(
    "context",
    [
        Mode,
        lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
        forward_ad.dual_level,
        lambda: torch.device("cpu"),  # a mode for torch functions
    ],
    ids=["mode", "profiler", "dual numbers", "default device"],
)
def test_who_looks_on_sees_the_operator(context):
    with context():
        assert which(torch.ones(2)) == "operator"


@pytest.mark.filterwarnings("ignore:.*jit.trace.*:DeprecationWarning")
def test_a_tracer_and_a_transform_see_it():
    seen = []

    def function(x):
        seen.append(which(x))
        return x + 1

    torch.jit.trace(function, torch.ones(2), check_trace=False)
    torch.func.vmap(function)(torch.ones(2))
    assert seen == ["operator", "operator"]
