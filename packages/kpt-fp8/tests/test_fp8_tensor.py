import copy
import pickle

import pytest
import torch
import torch._dynamo.testing
from torch import nn
from torch.nn import functional as F

from kpt_core import InputError
from kpt_fp8 import FP8Tensor, from_tensors, quantize_to_fp8, to_tensors

GRANULARITIES = ("tensor", "row", "1x128", "128x128", "1x32", "mxfp8")


def make(*shape, granularity="row", dtype=torch.float32):
    torch.manual_seed(0)
    return quantize_to_fp8(torch.randn(*shape).to(dtype), granularity=granularity)


def bits(tensor):
    return tensor.detach().view(torch.uint8) if tensor.element_size() == 1 else tensor.detach()


def same(one, other):
    assert isinstance(one, FP8Tensor)
    assert isinstance(other, FP8Tensor)
    assert (one.granularity, one.dtype, one.transposed, one.shape) == (
        other.granularity,
        other.dtype,
        other.transposed,
        other.shape,
    )
    for name in ("codes", "scale"):
        first, second = getattr(one, name), getattr(other, name)
        assert first.dtype is second.dtype
        assert torch.equal(bits(first), bits(second))
    return True


class Layer(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = nn.Parameter(torch.ones(weight.shape[0]))

    def forward(self, x):
        return F.linear(x, self.weight, self.bias)


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_linear_is_that_of_its_numbers_with_gradients(granularity):
    weight = make(136, 200, granularity=granularity, dtype=torch.float64)
    x = torch.randn(2, 3, 200, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(136, dtype=torch.float64, requires_grad=True)
    out, expected = F.linear(x, weight, bias), F.linear(x, weight.dequantize(), bias)
    torch.testing.assert_close(out, expected)
    toward = torch.randn_like(out)
    for one, other in zip(
        torch.autograd.grad(out, (x, bias), toward), torch.autograd.grad(expected, (x, bias), toward), strict=True
    ):
        torch.testing.assert_close(one, other)
    torch.testing.assert_close(x @ weight.t(), F.linear(x, weight.dequantize()))
    torch.testing.assert_close(nn.Parameter(weight, requires_grad=False).dequantize(), weight.dequantize())


def test_conversions():
    tensor = make(6, 40)
    half = tensor.to(torch.bfloat16)
    assert half.dtype is torch.bfloat16
    assert half.dequantize().dtype is torch.bfloat16
    assert torch.equal(bits(half.codes), bits(tensor.codes))
    assert half.scale.dtype is torch.float32
    same(half.float(), tensor)
    moved = tensor.to("meta")
    assert (moved.device.type, moved.codes.device.type, moved.scale.device.type) == ("meta",) * 3
    with pytest.raises(InputError, match="dtype must be float64"):
        tensor.to(torch.int32)


def test_detach_shares_memory_and_clone_does_not():
    tensor = make(6, 40)
    same(tensor.detach(), tensor)
    same(tensor.clone(), tensor)
    same(copy.deepcopy(tensor), tensor)
    assert tensor.detach().codes.data_ptr() == tensor.codes.data_ptr()
    for made in (tensor.clone(), copy.deepcopy(tensor)):
        assert made.codes.data_ptr() != tensor.codes.data_ptr()
        assert made.scale.data_ptr() != tensor.scale.data_ptr()


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_transposed(granularity):
    tensor = make(6, 40, granularity=granularity)
    for turned in (tensor.t(), tensor.T, tensor.mT, tensor.transpose(0, 1), tensor.transpose(-1, -2)):
        assert turned.shape == (40, 6)
        assert torch.equal(turned.dequantize(), tensor.dequantize().t())
    same(tensor.t().t(), tensor)
    same(tensor.transpose(0, 0), tensor)


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_slices_and_splits_of_rows(granularity):
    tensor = make(300, 40, granularity=granularity)
    numbers = tensor.dequantize()
    for part in (slice(128, 256), slice(256, None), slice(None, 128), slice(-44, None), slice(0, 0)):
        assert torch.equal(tensor[part].dequantize(), numbers[part])
    assert torch.equal(tensor.t()[:, 128:].dequantize(), numbers.t()[:, 128:])
    for one, other in zip(tensor.split(128), numbers.split(128), strict=True):
        assert torch.equal(one.dequantize(), other)
    for one, other in zip(tensor.split([128, 172]), numbers.split([128, 172]), strict=True):
        assert torch.equal(one.dequantize(), other)
    if granularity == "128x128":
        with pytest.raises(InputError, match=r"cut what shares a scale of granularity '128x128'; got 3:131"):
            tensor[3:131]
        with pytest.raises(InputError, match=r"got 3:256 of dimension 0 of \[300, 40\]"):
            tensor[3:256]
        with pytest.raises(InputError, match=r"take whole rows, 128 at a time"):
            tensor[128:200]
    else:
        assert torch.equal(tensor[3:131:2].dequantize(), numbers[3:131:2])
    if granularity != "tensor":
        with pytest.raises(InputError, match="must not cut"):
            tensor[:, 1:]


@pytest.mark.parametrize(
    "call",
    [
        lambda t: t * 2,
        lambda t: t.sum(),
        lambda t: t.abs(),
        lambda t: torch.cat([t, t]),
        lambda t: t @ torch.ones(40, 2),
        lambda t: torch.ones(2, 6) @ t,
        lambda t: F.embedding(torch.tensor([1]), t),
        lambda t: t.zero_(),
        lambda t: t.fill_(1),
        lambda t: t[0],
        lambda t: t.view(3, 80),
        lambda t: t.reshape(-1).abs(),
        lambda t: t.view(-1) + 1,
        lambda t: torch.cat([t.view(-1)]),
        lambda t: t.as_strided((6, 20), (40, 2)),
        lambda t: t.t().new_zeros(6, 40),
        lambda t: torch.ones(6, 40).copy_(t),
        lambda t: torch.ones(6, 40) + t,
        lambda t: t.copy_(torch.ones(6, 40)),
        lambda t: t.copy_(make(6, 40, granularity="1x32")),
        lambda t: F.linear(t, t),
        lambda t: F.linear(torch.ones(2, 6), t.t()),
        lambda t: F.linear(torch.ones(2, 7), t),
        lambda t: F.linear(torch.ones(2, 40), nn.Parameter(t)),
    ],
)
def test_nothing_is_dequantised_unasked(call):
    tensor = make(6, 40)
    before = tensor.clone()
    with pytest.raises(InputError, match="FP8Tensor"):
        call(tensor)
    same(tensor, before)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t: t.transpose(0, 2), "no dimension 2; got \\[6, 40\\]: give one from -2 to 1"),
        (lambda t: t.transpose(-3, 0), "no dimension -3"),
        (lambda t: t.permute(0, 0), "each dimension of \\[6, 40\\] once; got \\[0, 0\\]"),
        (lambda t: t.permute(0), "each dimension of \\[6, 40\\] once; got \\[0\\]"),
        (lambda t: t.permute(1, 2), "no dimension 2"),
        (lambda t: t.split(0), "parts must have a size of 1 at least; got 0 for \\[6, 40\\]"),
        (lambda t: t.split([7, -1]), "must be positive and add up to 6; got \\[7, -1\\]"),
        (lambda t: t.split(2, dim=5), "no dimension 5"),
        (lambda t: t.narrow(3, 0, 1), "no dimension 3|Dimension out of range"),
        (lambda t: make(2, 3, 4).transpose(0, 1), "what has two dimensions can be transposed; got \\[2, 3, 4\\]"),
        (lambda t: make(2, 3, 4).t(), "two dimensions|<= 2 dimensions"),
    ],
)
def test_what_can_not_be_turned_or_split(call, message):
    with pytest.raises((InputError, RuntimeError, IndexError), match=message):
        call(make(6, 40))


def test_more_dimensions_that_stay():
    tensor = make(2, 3, 40)
    same(tensor.permute(0, 1, 2), tensor)
    same(tensor.transpose(1, 1), tensor)
    same(tensor.transpose(1, -2), tensor)
    assert torch.equal(make(0, 40).split(4)[0].dequantize(), torch.empty(0, 40))


@pytest.mark.parametrize(("granularity", "scales"), [("row", 6 * 4), ("tensor", 4), ("mxfp8", 6 * 2)])
def test_bytes_are_those_in_memory(granularity, scales):
    tensor = make(6, 40, granularity=granularity)
    assert tensor.nbytes == 6 * 40 + scales
    assert tensor.t().nbytes == tensor.nbytes
    assert nn.Parameter(tensor, requires_grad=False).numel() * tensor.element_size() == 6 * 40


def test_in_inference_mode():
    tensor, x = make(6, 40), torch.randn(3, 40)
    expected = F.linear(x, tensor)
    with torch.inference_mode():
        assert torch.equal(F.linear(x, tensor), expected)
        assert torch.equal(x @ tensor.t(), expected)
        torch.testing.assert_close(F.linear(x, tensor[2:]), expected[:, 2:])
        same(make(6, 40).t().t(), tensor)


def test_shared_memory():
    layer = Layer(make(6, 40))
    assert not layer.weight.is_shared()
    layer.share_memory()
    assert layer.weight.is_shared()
    same(layer.weight.detach(), make(6, 40))


def test_repr():
    tensor = make(6, 40)
    assert repr(tensor) == (
        "FP8Tensor([6, 40], torch.float8_e4m3fn, granularity='row', stands for torch.float32, device='cpu')"
    )
    assert "transposed" in repr(tensor.t())
    assert "FP8Tensor" in repr(nn.Parameter(tensor, requires_grad=False))
    assert "FP8Tensor" in str(Layer(tensor).state_dict())


def test_a_parameter_in_state_dicts_copies_and_files(tmp_path):
    layer, other = Layer(make(6, 40)), Layer(quantize_to_fp8(torch.zeros(6, 40)))
    assert isinstance(layer.weight, nn.Parameter)
    assert not layer.weight.requires_grad
    x = torch.randn(3, 40)
    expected = layer(x)
    torch.save(layer.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    same(state["weight"], layer.weight)
    other.load_state_dict(state)
    assert torch.equal(other(x), expected)
    copied = copy.deepcopy(layer)
    assert isinstance(copied.weight, nn.Parameter)
    assert torch.equal(copied(x), expected)
    with torch.no_grad():
        copied.weight.codes.view(torch.uint8).zero_()
    assert torch.equal(layer(x), expected)
    fresh = Layer(quantize_to_fp8(torch.zeros(6, 40)))
    fresh.load_state_dict(state, assign=True)
    assert torch.equal(fresh(x), expected)
    with pytest.raises(RuntimeError, match="expected one like"):
        fresh.load_state_dict({"weight": torch.ones(6, 40), "bias": torch.ones(6)})


@pytest.mark.parametrize("granularity", ["row", "tensor", "128x128", "mxfp8"])
def test_pickle(granularity):
    layer = pickle.loads(pickle.dumps(Layer(make(6, 40, granularity=granularity))))
    assert isinstance(layer.weight, nn.Parameter)
    assert not layer.weight.requires_grad
    same(layer.weight.detach(), make(6, 40, granularity=granularity))
    turned = pickle.loads(pickle.dumps(make(6, 40, granularity=granularity).t()))
    assert turned.transposed
    assert not isinstance(turned, nn.Parameter)


def test_made_in_inference_mode_it_goes_to_other_dtypes():
    with torch.inference_mode():
        layer = Layer(make(6, 40))
        same(layer.weight.to(torch.float32), make(6, 40))
    x = torch.randn(3, 40)
    assert layer.bfloat16()(x.bfloat16()).dtype is torch.bfloat16
    assert layer.weight.dtype is torch.bfloat16
    assert layer.to("meta").weight.codes.is_meta
    with pytest.raises(InputError, match=r"aten\.\w+\.\w+ is not defined for 8-bit codes"):
        layer.weight * 2


def test_data_can_be_set_to_another_one_like_it_or_to_numbers():
    layer, other = Layer(make(6, 40)), make(6, 40)
    for wrong in (make(6, 40, granularity="tensor"), make(6, 41)):
        with pytest.raises(InputError, match=r"setting \.data takes numbers, .* or another one like it; got"):
            layer.weight.data = wrong
    for numbers, said in ((torch.ones(6, 41), "numbers of its shape"), (torch.full((6, 40), torch.nan), "holds NaN")):
        with pytest.raises(InputError, match=said):
            layer.weight.data = numbers
    numbers = torch.randn(6, 40)
    layer.weight.data = numbers
    expected = quantize_to_fp8(numbers, other.codes.dtype, other.granularity)
    assert torch.equal(layer.weight.dequantize(), expected.dequantize())
    layer.weight.data = other
    assert torch.equal(layer.weight.dequantize(), other.dequantize())


@pytest.mark.parametrize("turned", [False, True])
def test_a_sum_with_numbers_and_what_is_asked_of_numbers_is_plain(turned):
    tensor = make(6, 256, granularity="row")
    tensor, numbers = (each.t() if turned else each for each in (tensor, tensor.dequantize()))
    more = torch.randn_like(numbers, requires_grad=True)
    for got, expected in ((tensor + 2 * more, numbers + 2 * more), (tensor - more, numbers - more)):
        assert type(got) is torch.Tensor
        assert torch.equal(got, expected)
    (tensor + more).sum().backward()
    assert torch.equal(more.grad, torch.ones_like(more))
    assert torch.equal(torch.linalg.norm(tensor, dim=1), torch.linalg.norm(numbers, dim=1))


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_numbers_are_added_in_place_and_quantised_alike(granularity):
    tensor, more = make(6, 256, granularity=granularity), torch.randn(6, 256)
    expected = quantize_to_fp8(tensor.dequantize() - 2 * more, tensor.codes.dtype, granularity)
    codes = tensor.codes
    tensor.sub_(more, alpha=2)
    assert tensor.codes is codes
    assert torch.equal(tensor.dequantize(), expected.dequantize())
    for wrong in (more[:, :5], torch.full_like(more, torch.inf)):
        with pytest.raises(InputError, match=r"a plain tensor of its shape|holds NaN or infinity"):
            tensor.add_(wrong)


def test_a_module_converts_what_it_stands_for():
    layer = Layer(make(6, 40))
    codes = bits(layer.weight.codes).clone()
    layer.bfloat16()
    assert layer.weight.dtype is torch.bfloat16
    assert layer.weight.scale.dtype is torch.float32
    assert torch.equal(bits(layer.weight.codes), codes)
    assert layer(torch.randn(3, 40, dtype=torch.bfloat16)).dtype is torch.bfloat16
    assert layer.to("meta").weight.codes.is_meta


@pytest.mark.parametrize("granularity", ["row", "128x128", "mxfp8"])
def test_compiled(granularity):
    layer = Layer(make(6, 40, granularity=granularity))
    x = torch.randn(3, 40, requires_grad=True)
    expected = torch.autograd.grad(layer(x).square().sum(), (x, layer.bias))
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    got = torch.autograd.grad(compiled(x).square().sum(), (x, layer.bias))
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_compiled_once_for_any_number_of_rows():
    layer = Layer(make(6, 40))
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(layer, backend=counter, fullgraph=True, dynamic=True)
    for rows in (2, 5, 9):
        x = torch.randn(rows, 3, 40)
        torch.testing.assert_close(compiled(x), layer(x))
    assert counter.frame_count == 1


def test_plain_tensors_for_files(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    tensor = make(6, 40, granularity="mxfp8")
    plain = to_tensors("mlp.weight", tensor)
    assert sorted(plain) == ["mlp.weight", "mlp.weight_scale"]
    assert all(type(each) is torch.Tensor for each in plain.values())
    safetensors.save_file(plain, tmp_path / "model.safetensors")
    read = safetensors.load_file(tmp_path / "model.safetensors")
    same(from_tensors("mlp.weight", read, granularity="1x32"), tensor)
    with pytest.raises(InputError, match=r"got no mlp\.weight_scale"):
        from_tensors("mlp.weight", {"mlp.weight": tensor.codes}, granularity="1x32")
    with pytest.raises(InputError, match="is transposed"):
        to_tensors("mlp.weight", tensor.t())


def test_what_does_not_fit_is_refused():
    tensor = make(6, 40)
    with pytest.raises(InputError, match=r"scale must be .* shape \[6\].*got torch.float32 \[5\]"):
        FP8Tensor(tensor.codes, tensor.scale[:5], "row")
    with pytest.raises(InputError, match="codes must be float8_e4m3fn"):
        FP8Tensor(torch.ones(6, 40), tensor.scale, "row")
    with pytest.raises(InputError, match="dtype must be float64"):
        FP8Tensor(tensor.codes, tensor.scale, "row", torch.int8)
