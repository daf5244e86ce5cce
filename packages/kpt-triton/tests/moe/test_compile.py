import pytest
import torch
from in_float64 import SMALL, ends

from kpt_triton.moe.experts import ExpertsTiles, experts
from kpt_triton.moe.grouped_mm import grouped_mm
from kpt_triton.moe.scaled_grouped_mm import scaled_grouped_mm

OPS = torch.ops.kpt_triton


pytestmark = pytest.mark.filterwarnings("ignore:.*Function.* should not be instantiated:DeprecationWarning")


def make(device):
    """x, offsets, weight `[experts, K, N]` with N contiguous, and with K contiguous."""
    x, weight = torch.randn(10, 24, device=device), torch.randn(3, 24, 16, device=device)
    return x, ends([5, 0, 4], device), weight, weight.mT.contiguous().mT


def layer(device, biased=True):
    index = torch.tensor([[0, 2], [1, -1], [2, 2], [3, 0]], device=device)
    shapes = [(4, 24), (4, 2), (3, 32, 24), (3, 24, 16)] + [(3, 32), (3, 24)] * biased
    x, *rest = [torch.randn(shape, device=device) for shape in shapes]
    return [x, index, *rest]


def assert_compiles_alike(function, tensors):
    """Output and gradients are those of the uncompiled function, and there is one graph."""
    torch._dynamo.reset()
    results = []
    for call in (function, torch.compile(function, fullgraph=True, backend="aot_eager")):
        given = [t.detach().clone().requires_grad_() if t.is_floating_point() else t for t in tensors]
        out = call(*given)
        out.square().sum().backward()
        results.append([out.detach(), *(t.grad for t in given if t.is_floating_point())])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
        assert one.stride() == other.stride()


def test_grouped_mm_compiles_whole(device):
    x, offsets, weight, turned = make(device)
    assert_compiles_alike(lambda x, w, o: grouped_mm(x, w, o, tile=SMALL), (x, weight, offsets))
    assert_compiles_alike(lambda x, w, o: grouped_mm(x, w.mT, o), (x, turned.mT, offsets))


def test_scaled_grouped_mm_compiles_whole(device):
    x, offsets, weight, _ = make(device)
    weight, scale = weight.to(torch.float8_e4m3fn), torch.rand(3, 16, device=device)
    assert_compiles_alike(lambda x: scaled_grouped_mm(x, weight, scale, offsets), (x,))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
def test_experts_compile_whole(dynamic, biased, device):
    tensors = layer(device, biased)
    if dynamic:
        for t in tensors[:3]:
            torch._dynamo.maybe_mark_dynamic(t, 0)
    assert_compiles_alike(lambda *tensors: experts(*tensors), tensors)


def test_experts_without_gradients_compile_whole(device):
    torch._dynamo.reset()
    tensors = layer(device)
    compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(compiled(*tensors), experts(*tensors))
        tensors[:3] = [t.repeat(4, 1) for t in tensors[:3]]
        assert torch.equal(compiled(*tensors), experts(*tensors))


@pytest.mark.parametrize("turned", [False, True])
def test_products_pass_opcheck(turned, device):
    x, offsets, *weights = make(device)
    weight = weights[turned]
    torch.library.opcheck(OPS.grouped_mm.default, (x, weight, offsets, SMALL))
    torch.library.opcheck(OPS.grouped_mm_wgrad.default, (x, torch.randn(10, 16, device=device), offsets, ""))
    scale, weight = torch.rand(3, 1, 16, device=device), weight.to(torch.float8_e4m3fn)
    # Its look at the schema compares inputs before and after, for which torch lacks arithmetic in 8 bits on the CPU.
    tests = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    args = (x, weight, scale, None, offsets, torch.float32, "")
    torch.library.opcheck(OPS.scaled_grouped_mm.default, args, test_utils=tests)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("tokens", [4, 40])
def test_experts_pass_opcheck(tokens, transposed, device):
    x, index, weights, up, down, *biases = layer(device)
    # Rows of refused pairs are not written, and so differ from run to run.
    x, index, weights = (t.repeat(tokens // 4, 1) for t in (x, index.clamp(0, 2), weights))
    up, down = (up.mT.contiguous(), down.mT.contiguous()) if transposed else (up.mT, down.mT)
    options = ("swiglu", False, 1.0, 0.0, None, "")
    rest = (up, down, *biases, None, None)
    torch.library.opcheck(OPS.experts_forward.default, (x, index, weights, *rest, *options))
    torch.library.opcheck(OPS.experts_training.default, (x, index, weights, *rest, *options))
    out, *sorted_rows = OPS.experts_training.default(x, index, weights, *rest, *options)
    for needed in ([True] * 6, [True, False, False, True, False, True], [False] * 6):
        torch.library.opcheck(OPS.experts_backward.default, (out, x, weights, *rest, *sorted_rows, needed, *options))


def test_tiles_are_part_of_a_compiled_call(device):
    tensors = layer(device)
    assert_compiles_alike(lambda *tensors: experts(*tensors, tiles=ExpertsTiles(*[SMALL] * 4)), tensors)
