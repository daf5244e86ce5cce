"""Quantising experts: the numbers, and the network that holds them."""

import copy

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kpt_core import InputError, UnknownNameError
from kpt_moe.expert_networks import FeedForwardExpert
from kpt_moe.expert_networks.quantized import QuantizedFeedForwardExpert
from kpt_moe.quantized_experts import quantize_weights
from kpt_moe.routers import TopKRouter

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
#: (bits of the mantissa, bias of the exponent, greatest finite code).
FORMATS = {E4M3: (3, 7, 0x7E), E5M2: (2, 15, 0x7B)}
#: (relative error of normal numbers, absolute error in units of the scale).
BOUNDS = {E4M3: (2**-4, 2**-10), E5M2: (2**-3, 2**-17)}


def nearest(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """The codes of the nearest numbers that the format has, the even one of two, saturating: from its definition."""
    mantissa, bias, last = FORMATS[dtype]
    known = []
    for code in range(last + 1):
        exponent, fraction = code >> mantissa, (code & (1 << mantissa) - 1) / (1 << mantissa)
        known.append(fraction * 2.0 ** (1 - bias) if exponent == 0 else (1 + fraction) * 2.0 ** (exponent - bias))
    values = torch.tensor(known, dtype=torch.float64)
    size = numbers.abs().double().clamp(max=known[-1])
    above = torch.searchsorted(values, size).clamp(min=1)
    low, high = size - values[above - 1], values[above] - size
    up = (high < low) | ((high == low) & (above % 2 == 0))
    return torch.where(up, above, above - 1) + 128 * torch.signbit(numbers)


def groups(weight: Tensor, scheme: str):
    """(places of the numbers under one scale, place of that scale)."""
    experts, outputs, inputs = weight.shape
    for e in range(experts):
        if scheme == "row":
            yield from (((e, slice(o, o + 1), slice(None)), (e, o)) for o in range(outputs))
        else:
            for o in range(-(-outputs // 128)):
                for i in range(-(-inputs // 128)):
                    blocks = slice(128 * o, 128 * o + 128), slice(128 * i, 128 * i + 128)
                    yield (e, *blocks), (e, o, i)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("scheme", ["row", "128x128"])
@pytest.mark.parametrize("shape", [(2, 5, 7), (1, 128, 128), (2, 130, 257), (1, 1, 1)])
def test_numbers_are_the_nearest_under_a_scale_of_the_greatest(shape, scheme, dtype):
    weight = torch.randn(shape) * torch.logspace(-6, 0, shape[2])
    codes, scale = quantize_weights(weight, scheme, dtype)
    assert (codes.dtype, codes.shape, scale.dtype) == (dtype, weight.shape, torch.float32)
    count = 0
    for place, own in groups(weight, scheme):
        part = weight[place]
        want = part.abs().max() / {E4M3: 448, E5M2: 57344}[dtype]
        assert scale[own] == want
        assert torch.equal(codes[place].view(torch.uint8).long(), nearest(part / want, dtype))
        count += 1
    assert count == scale.numel()


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("scheme", ["row", "128x128"])
@pytest.mark.parametrize("source", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_error_is_within_the_bound_of_the_dtype(source, scheme, dtype):
    weight = torch.randn(2, 130, 257).to(source)
    codes, scale = quantize_weights(weight, scheme, dtype)
    relative, absolute = BOUNDS[dtype]
    for place, own in groups(weight, scheme):
        number = weight[place].double()
        error = (codes[place].double() * scale[own].double() - number).abs()
        bound = torch.maximum(number.abs() * relative, absolute * scale[own].double())
        assert (error <= bound * (1 + 1e-5)).all()


@pytest.mark.parametrize("scheme", ["row", "128x128"])
def test_zeros_have_scale_one(scheme):
    weight = torch.randn(2, 130, 140)
    weight[1] = 0
    codes, scale = quantize_weights(weight, scheme)
    assert (scale[1] == 1).all()
    assert not codes[1].float().any()
    assert (scale[0] != 1).all()


@pytest.mark.parametrize("amax", [1e-45, 1e-38, 3e38])
def test_extreme_numbers_stay_finite(amax):
    weight = torch.tensor([amax, -amax / 2, 0.0]).view(1, 1, 3)
    codes, scale = quantize_weights(weight)
    assert scale.isfinite().all()
    assert (scale > 0).all()
    assert not codes.isnan().any()
    assert ((codes.double() * scale.double().unsqueeze(2) - weight.double()).abs() <= max(amax * 2**-4, 2e-41)).all()


def test_the_weights_stay_as_they_are():
    weight = torch.randn(2, 128, 256, requires_grad=True)
    before = weight.detach().clone()
    codes, scale = quantize_weights(weight, "128x128")
    assert torch.equal(weight, before)
    assert not codes.requires_grad
    assert not scale.requires_grad


def test_empty_weights():
    codes, scale = quantize_weights(torch.empty(2, 0, 5), "128x128")
    assert (codes.shape, scale.shape) == (torch.Size((2, 0, 5)), torch.Size((2, 0, 1)))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("scheme", ["row", "128x128"])
def test_weights_that_are_not_finite_are_refused(scheme, value):
    weight = torch.randn(4, 5, 6)
    weight[2, 3, 1] = value
    with pytest.raises(InputError, match=r"must hold finite numbers.*got others in experts \[2\]"):
        quantize_weights(weight, scheme)


def test_numbers_beyond_what_a_scale_holds_are_refused():
    with pytest.raises(InputError, match="finite numbers, whose scales float32 can hold"):
        quantize_weights(torch.full((1, 1, 1), 1e300, dtype=torch.float64))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((torch.ones(1, 1, 1), "rwo"), UnknownNameError, "unknown scheme 'rwo': did you mean 'row'"),
        ((torch.ones(1, 1, 1), "row", torch.int8), InputError, "dtype must be float8_e4m3fn or float8_e5m2; got"),
        ((torch.ones(1, 1),), InputError, r"\[num_experts, outputs, inputs\].*got torch.float32 \[1, 1\]"),
        ((torch.ones(1, 1, 1, dtype=torch.int64),), InputError, r"got torch.int64 \[1, 1, 1\]"),
    ],
)
def test_wrong_arguments_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        quantize_weights(*arguments)


def network(
    scheme: str = "128x128", codes: torch.dtype = E4M3, dtype: torch.dtype = torch.float32, **kwargs
) -> tuple[FeedForwardExpert, QuantizedFeedForwardExpert]:
    plain = FeedForwardExpert(144, num_experts=4, intermediate_size=72, bias=True, dtype=dtype, **kwargs)
    with torch.no_grad():
        for bias in (plain.gate_up_proj_bias, plain.down_proj_bias):
            bias.normal_()
    return plain, QuantizedFeedForwardExpert.from_feed_forward(plain, scheme=scheme, dtype=codes)


def tokens(dtype: torch.dtype = torch.float32):
    x = torch.randn(19, 144).to(dtype)
    return x, TopKRouter(144, num_experts=4, top_k=2)(x.float())


def dequantise(made: QuantizedFeedForwardExpert, name: str) -> Tensor:
    codes, scale = getattr(made, name).double(), getattr(made, f"{name}_scale_inv").double()
    if scale.dim() == 2:
        return codes * scale.unsqueeze(2)
    blocks = scale.repeat_interleave(128, 1).repeat_interleave(128, 2)
    return codes * blocks[:, : codes.shape[1], : codes.shape[2]]


@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
@pytest.mark.parametrize("codes", [E4M3, E5M2])
@pytest.mark.parametrize("scheme", ["row", "128x128"])
def test_network_computes_with_the_dequantised_weights(scheme, codes, activation):
    plain, made = network(scheme, codes, activation=activation)
    x, routing = tokens()
    exact = copy.deepcopy(plain).double()
    with torch.no_grad():
        for name in ("gate_up_proj", "down_proj"):
            getattr(exact, name).copy_(dequantise(made, name))
    want = exact(x.double(), routing)
    assert (made(x, routing) - want).abs().max() <= 1e-5 * want.abs().max()
    # Independent relative errors, uniform up to the bound: those of both products and of their activation together.
    original = plain.double()(x.double(), routing)
    assert (want - original).norm() <= 2 * BOUNDS[codes][0] * original.norm()
    assert (want - original).norm() > 0


def test_the_original_is_untouched_and_shares_nothing():
    plain = FeedForwardExpert(8, num_experts=2, intermediate_size=6, bias=True).eval()
    before = copy.deepcopy(plain.state_dict())
    made = QuantizedFeedForwardExpert.from_feed_forward(plain)
    assert not made.training
    with torch.no_grad():
        for tensor in made.parameters():
            tensor.zero_()
        made.down_proj_bias.fill_(3)
    for name, tensor in plain.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_gradients_reach_tokens_and_biases_alone():
    _, made = network()
    x, routing = tokens()
    made(x.requires_grad_(), routing).sum().backward()
    trained = {name for name, parameter in made.named_parameters() if parameter.grad is not None}
    assert trained == {"gate_up_proj_bias", "down_proj_bias"}
    assert {name for name, parameter in made.named_parameters() if parameter.requires_grad} == trained
    assert x.grad.any()


@pytest.mark.parametrize("scheme", ["row", "128x128"])
def test_state_dict_goes_through_safetensors_under_the_names_of_checkpoints(scheme, tmp_path):
    _, made = network(scheme)
    save_file(made.state_dict(), tmp_path / "experts.safetensors")
    state = load_file(tmp_path / "experts.safetensors")
    scales = {"row": ([4, 144], [4, 144]), "128x128": ([4, 2, 2], [4, 2, 1])}[scheme]
    assert {name: (list(t.shape), t.dtype) for name, t in state.items() if not name.endswith("bias")} == {
        "gate_up_proj": ([4, 144, 144], E4M3),
        "gate_up_proj_scale_inv": (scales[0], torch.float32),
        "down_proj": ([4, 144, 72], E4M3),
        "down_proj_scale_inv": (scales[1], torch.float32),
    }
    other = QuantizedFeedForwardExpert(144, num_experts=4, intermediate_size=72, bias=True, scheme=scheme)
    x, routing = tokens()
    assert not other(x, routing).any()
    other.load_state_dict(state)
    assert torch.equal(other(x, routing), made(x, routing))


def test_memory_is_about_half_of_bfloat16():
    plain = FeedForwardExpert(256, num_experts=2, intermediate_size=256, dtype=torch.bfloat16)
    for scheme in ("row", "128x128"):
        made = QuantizedFeedForwardExpert.from_feed_forward(plain, scheme=scheme)
        share = sum(t.nbytes for t in made.parameters()) / sum(t.nbytes for t in plain.parameters())
        assert 0.5 < share < 0.51


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_conversion_of_the_module_leaves_the_quantised_numbers(dtype):
    _, made = network()
    before = copy.deepcopy(made.state_dict())
    made.to(dtype)
    for name, tensor in made.state_dict().items():
        assert tensor.dtype is (dtype if name.endswith("bias") else before[name].dtype)
        assert torch.equal(tensor.float(), before[name].to(tensor.dtype).float())
    x, routing = tokens(dtype)
    assert made(x, routing).dtype is dtype
    assert all(not p.requires_grad for name, p in made.named_parameters() if not name.endswith("bias"))


def test_nothing_stays_behind_on_meta():
    made = QuantizedFeedForwardExpert(144, num_experts=4, intermediate_size=72, bias=True, device="meta")
    moved = network()[1].to("meta")
    x, routing = tokens()
    for layer in (made, moved):
        assert all(t.is_meta for t in layer.state_dict().values())
        out = layer(x.to("meta"), routing.to("meta"))
        assert out.shape == x.shape


def test_compiled_in_one_graph_gives_the_same():
    _, made = network()
    x, routing = tokens()
    routing = routing.detach()
    compiled = torch.compile(made, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, routing), made(x, routing))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"scheme": "block"}, UnknownNameError, "unknown scheme 'block'"),
        ({"weight_dtype": torch.bfloat16}, InputError, "weight_dtype must be float8_e4m3fn or float8_e5m2; got"),
        ({"activation": "swigloo"}, UnknownNameError, "unknown activation 'swigloo'"),
    ],
)
def test_wrong_networks_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        QuantizedFeedForwardExpert(8, num_experts=2, intermediate_size=6, **arguments)


def test_other_networks_are_refused():
    with pytest.raises(InputError, match="experts must be a FeedForwardExpert; got Linear"):
        QuantizedFeedForwardExpert.from_feed_forward(torch.nn.Linear(2, 2))


def test_autocast_leaves_the_quantised_numbers():
    _, made = network()
    x, routing = tokens()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        out = made(x, routing)
    assert (out - made(x, routing)).norm() <= 2e-2 * out.norm()
