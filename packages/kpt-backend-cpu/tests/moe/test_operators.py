"""An operator's implementation is called directly only where nobody would notice."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import kpt_core
import kpt_moe
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


@pytest.mark.parametrize(
    "x",
    [
        torch.ones(2).as_subclass(Noticed),
        torch._neg_view(torch.ones(2)),
        torch._efficientzerotensor(2),
        torch._to_functional_tensor(torch.ones(2)),
    ],
    ids=["subclass", "negated", "zeros", "functional"],
)
def test_a_tensor_whose_memory_does_not_say_all_is_seen(x):
    assert which(x) == "operator"


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


def operations():
    x, weight, offsets = torch.randn(4, 3), torch.randn(2, 3, 5), torch.tensor([1, 4], dtype=torch.int32)
    codes, scale = kpt_moe.quantise_weights(weight.mT, "row")
    index = torch.randint(2, (4, 2))
    up, down = torch.randn(2, 8, 3), torch.randn(2, 3, 4)
    many = torch.randn(100, 3), torch.randint(2, (100, 2)), torch.rand(100, 2)
    return {
        "top_k_gating": (lambda v: kpt_core.get_op("moe.top_k_gating")(v, top_k=2)[0], x),
        "grouped_mm": (lambda v: kpt_moe.grouped_mm(v, weight, offsets), x),
        "grouped_mm_wgrad": (lambda v: kpt_moe.grouped_mm_wgrad(v, x, offsets), x),
        "scaled_grouped_mm": (lambda v: kpt_moe.scaled_grouped_mm(v, codes.mT, scale, offsets), x),
        "experts, few": (lambda v: kpt_moe.experts(v, index, torch.rand(4, 2), up, down), x),
        "experts, many": (lambda v: kpt_moe.experts(v, *many[1:], up, down), many[0]),
    }


@pytest.mark.parametrize("name", operations())
@pytest.mark.filterwarnings("ignore:.*jit.script.*:DeprecationWarning")
def test_a_forward_derivative_is_left_to_the_reference_and_never_left_out(name, kernels):
    operation, x = operations()[name]
    with forward_ad.dual_level(), kpt_core.record() as log:
        try:
            out = operation(forward_ad.make_dual(x, torch.ones_like(x)))
        except (NotImplementedError, RuntimeError, kpt_core.KptError):
            pass
        else:
            assert forward_ad.unpack_dual(out).tangent is not None
            assert {selection.backend for selection in log} == {"reference"}
    # Nothing failed that would keep the kernel from later calls.
    with kpt_core.record() as log:
        operation(x)
    assert {selection.backend for selection in log} == {"cpu"}


def test_vmap_is_left_to_the_reference(kernels):
    logits = torch.randn(3, 4, 16)
    with kpt_core.record() as log:
        weights, _ = torch.func.vmap(lambda v: kpt_core.get_op("moe.top_k_gating")(v, top_k=2))(logits)
    assert {selection.backend for selection in log} == {"reference"}
    for one, own in zip(logits, weights, strict=True):
        torch.testing.assert_close(own, kpt_core.get_op("moe.top_k_gating")(one, top_k=2)[0])
