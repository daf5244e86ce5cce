"""The network that holds quantised experts."""

import copy

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kpt_core import InputError, UnknownNameError
from kpt_moe.expert_networks import FeedForwardExpert
from kpt_moe.expert_networks.quantized import QuantizedFeedForwardExpert
from kpt_moe.routers import TopKRouter

kpt_fp8 = pytest.importorskip("kpt_fp8")

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
#: Relative error of normal numbers.
BOUNDS = {E4M3: 2**-4, E5M2: 2**-3}


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
    assert (want - original).norm() <= 2 * BOUNDS[codes] * original.norm()
    assert (want - original).norm() > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scheme", ["row", "128x128"])
def test_numbers_are_those_of_kpt_fp8(scheme, dtype):
    plain, made = network(scheme, dtype=dtype)
    for name in ("gate_up_proj", "down_proj"):
        want = kpt_fp8.quantize_to_fp8(getattr(plain, name), E4M3, scheme)
        assert torch.equal(getattr(made, name).view(torch.uint8), want.codes.view(torch.uint8))
        assert torch.equal(getattr(made, f"{name}_scale_inv"), want.scale)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("scheme", ["row", "128x128"])
def test_weights_that_are_not_finite_are_refused(scheme, value):
    plain = FeedForwardExpert(8, num_experts=4, intermediate_size=6)
    with torch.no_grad():
        plain.down_proj[2, 3, 1] = value
    with pytest.raises(InputError, match=r"down_proj must hold finite numbers.*got others in experts \[2\]"):
        QuantizedFeedForwardExpert.from_feed_forward(plain, scheme=scheme)


def test_numbers_beyond_what_a_scale_holds_are_refused():
    plain = FeedForwardExpert(8, num_experts=1, intermediate_size=6, dtype=torch.float64)
    torch.nn.init.constant_(plain.gate_up_proj, 1e300)
    with pytest.raises(InputError, match="finite numbers, whose scales float32 can hold"):
        QuantizedFeedForwardExpert.from_feed_forward(plain)


def test_without_kpt_fp8_the_error_says_what_to_install(monkeypatch):
    def absent(name: str) -> None:
        raise UnknownNameError("op", name, ())

    monkeypatch.setattr("kpt_moe.expert_networks.quantized.get_op", absent)
    with pytest.raises(InputError, match=r"unknown op 'fp8\.quantize'.*pip install kpt-fp8"):
        network()


def test_experts_without_numbers_stay_without():
    plain = FeedForwardExpert(8, num_experts=2, intermediate_size=6, device="meta")
    made = QuantizedFeedForwardExpert.from_feed_forward(plain)
    assert all(tensor.is_meta for tensor in made.state_dict().values())


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
