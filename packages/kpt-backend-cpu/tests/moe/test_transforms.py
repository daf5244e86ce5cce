"""Transforms of torch.func, forward-mode differentiation and second derivatives: the references serve them."""

import pytest
import torch
from torch.autograd import forward_ad

import kpt_core
from kpt_moe.experts import experts
from kpt_moe.grouped_mm import grouped_mm, grouped_mm_wgrad
from kpt_moe.scaled_grouped_mm import scaled_grouped_mm

INDEX = torch.tensor([[0, 1], [1, 0], [1, 1], [0, 2]])
OFFSETS = torch.tensor([1, 4], dtype=torch.int32)


def operations():
    """Name to a function of one tensor, and that tensor."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    x, weight, up, down = normal(4, 3), normal(2, 3, 5), normal(2, 8, 3), normal(2, 3, 4)
    codes, scale = (weight.mT * 100).to(torch.float8_e4m3fn), torch.full((2, 5), 0.01)
    weights = torch.rand(4, 2, generator=generator)
    return {
        "top_k_gating": (lambda v: kpt_core.get_op("moe.top_k_gating")(v, top_k=2)[0], x),
        "grouped_mm": (lambda v: grouped_mm(v, weight, OFFSETS), x),
        "grouped_mm_wgrad": (lambda v: grouped_mm_wgrad(v, x, OFFSETS), x),
        "scaled_grouped_mm": (lambda v: scaled_grouped_mm(v, codes.mT, scale, OFFSETS), x),
        "experts": (lambda v: experts(v, INDEX, weights, up, down), x),
    }


OPERATIONS = pytest.mark.parametrize("name", operations())


def one_by_one(operation, batch):
    return torch.stack([operation(each) for each in batch])


# torch 2.13: forward-mode differentiation brings in decompositions, and with them torch.jit.
@pytest.mark.filterwarnings("ignore:.*jit.script.*:DeprecationWarning")
@OPERATIONS
def test_a_transform_gives_what_the_reference_gives_and_no_kernel_is_given_up_for_it(name, kernels):
    operation, x = operations()[name]
    batch = torch.stack((x, 2 * x))
    with kpt_core.use("reference"):
        want = one_by_one(operation, batch)
        _, want_tangent = torch.func.jvp(operation, (x,), (torch.ones_like(x),))
        want_grad = torch.func.grad(lambda v: operation(v).square().sum())(x)
    torch.testing.assert_close(torch.func.vmap(operation)(batch), want)
    with forward_ad.dual_level():
        out = operation(forward_ad.make_dual(x, torch.ones_like(x)))
        torch.testing.assert_close(forward_ad.unpack_dual(out).tangent, want_tangent)
    torch.testing.assert_close(torch.func.jvp(operation, (x,), (torch.ones_like(x),))[1], want_tangent)
    torch.testing.assert_close(torch.func.grad(lambda v: operation(v).square().sum())(x), want_grad)
    with kpt_core.record() as log:
        operation(x)
    assert [selection.backend for selection in log] == ["cpu"]


@OPERATIONS
def test_second_derivatives_are_the_reference_s(name, kernels):
    operation, x = operations()[name]

    def penalty():
        leaf = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(operation(leaf).square().sum(), leaf, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), leaf)[0]

    got = penalty()
    with kpt_core.use("reference"):
        torch.testing.assert_close(got, penalty(), rtol=1e-4, atol=1e-4)
    assert got.abs().sum() > 0
