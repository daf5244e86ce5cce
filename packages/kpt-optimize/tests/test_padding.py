"""Awkward sizes: found, priced, and padded without changing a result."""

import copy
import io
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from kpt_core import InputError
from kpt_optimize.padding import (
    PaddedLinear,
    advise,
    aligned_size,
    pad_linear,
    pad_model,
    tile_efficiency,
    unpad_model,
    wave_efficiency,
)

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]


@given(st.integers(0, 10_000), st.sampled_from(DTYPES))
def test_an_aligned_row_is_the_least_of_whole_16_bytes(size, dtype):
    aligned = aligned_size(size, dtype)
    fits = [n for n in range(size, size + 17) if n * dtype.itemsize % 16 == 0]
    assert aligned == fits[0]


def test_multiples_are_those_of_nvidias_guide():
    assert [aligned_size(1, dtype) for dtype in (*DTYPES, torch.int8)] == [2, 4, 8, 8, 16, 16, 16]


def test_wrong_sizes_and_dtypes_are_refused():
    with pytest.raises(InputError, match="at least 0; got -1"):
        aligned_size(-1, torch.float16)
    with pytest.raises(InputError, match=r"got torch\.int64"):
        aligned_size(8, torch.int64)
    with pytest.raises(InputError, match="rows must be at least 1; got 0"):
        tile_efficiency(0, 4)
    with pytest.raises(InputError, match="multiprocessors must be at least 1; got 0"):
        wave_efficiency(4, 0)


@given(st.integers(1, 300), st.integers(1, 300), st.sampled_from([64, 128]), st.sampled_from([64, 128, 256]))
def test_tile_efficiency_is_the_share_of_elements_in_tiles_that_are_wanted(rows, columns, height, width):
    covered = sum(height * width for _ in range(0, rows, height) for _ in range(0, columns, width))
    assert tile_efficiency(rows, columns, (height, width)) == pytest.approx(float(Fraction(rows * columns, covered)))


@given(st.integers(1, 500), st.integers(1, 150), st.integers(1, 3))
def test_wave_efficiency_is_the_mean_share_of_places_taken(tiles, multiprocessors, each):
    left, taken = tiles, []
    while left > 0:
        taken.append(min(left, multiprocessors * each))
        left -= multiprocessors * each
    mean = sum(taken) / len(taken) / (multiprocessors * each)
    assert wave_efficiency(tiles, multiprocessors, each) == pytest.approx(mean)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(3, 10, 64))


def test_advice_lists_awkward_matrices_with_the_cost_and_leaves_good_ones_out():
    model = nn.ModuleDict(
        {
            "awkward": nn.Linear(30, 50),
            "good": nn.Linear(32, 64),
            "words": nn.Embedding(51, 20),
            "experts": Experts(),
            "convolution": nn.Conv1d(3, 5, 7),
            "norm": nn.LayerNorm(13),
        }
    ).to(torch.bfloat16)
    found = {advice.name: advice for advice in advise(model)}
    assert list(found) == ["awkward.weight", "words.weight", "experts.up"]
    linear = found["awkward.weight"]
    assert (linear.kind, linear.shape, linear.aligned_shape, linear.multiple) == ("linear", (50, 30), (56, 32), 8)
    assert linear.extra_bytes == (56 * 32 - 50 * 30) * 2
    assert linear.extra == pytest.approx(56 * 32 / (50 * 30) - 1)
    assert found["words.weight"].aligned_shape == (51, 24)
    assert (found["experts.up"].kind, found["experts.up"].aligned_shape) == ("experts", (3, 16, 64))
    assert "50x30" in str(linear)
    assert "56x32" in str(linear)


def test_advice_depends_on_the_dtype_of_the_product():
    model = nn.Sequential(nn.Linear(12, 12))
    assert advise(model) == ()
    assert [advice.aligned_shape for advice in advise(model, torch.bfloat16)] == [(16, 16)]
    assert [advice.aligned_shape for advice in advise(model, torch.float8_e4m3fn)] == [(16, 16)]
    assert advise(model, torch.bfloat16)[0].extra_bytes == (256 - 144) * 2


def test_advice_tells_a_tied_weight_once_and_needs_no_data():
    with torch.device("meta"):
        model = nn.ModuleDict({"words": nn.Embedding(51, 30), "head": nn.Linear(30, 51, bias=False)})
    model["head"].weight = model["words"].weight
    assert [advice.name for advice in advise(model)] == ["words.weight"]


def grads(module, x, dy):
    """Output and gradients of input, weight and bias, with the padding of the weight's cut off."""
    x = x.clone().requires_grad_()
    y = module(x)
    y.backward(dy)
    if isinstance(module, PaddedLinear):
        rows, columns = module.out_features, module.in_features
        weight = module.padded_weight.grad[:rows, :columns]
        bias = None if module.padded_bias is None else module.padded_bias.grad[:rows]
    else:
        weight, bias = module.weight.grad, None if module.bias is None else module.bias.grad
    return [t for t in (y, x.grad, weight, bias) if t is not None]


SIZES = [(7, 5), (8, 5), (7, 8), (1, 1), (33, 64), (64, 65)]


@pytest.mark.parametrize("leading", [(), (3,), (2, 3), (0,)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_padded_layer_equals_the_plain_one_forward_and_backward(sizes, bias, leading):
    torch.manual_seed(0)
    plain = nn.Linear(*sizes, bias=bias, dtype=torch.float64)
    padded = pad_linear(plain, torch.bfloat16)
    assert isinstance(padded, PaddedLinear)
    assert all(size % 8 == 0 for size in padded.padded_weight.shape)
    x = torch.randn(*leading, sizes[0], dtype=torch.float64)
    dy = torch.randn(*leading, sizes[1], dtype=torch.float64)
    for got, want in zip(grads(padded, x, dy), grads(plain, x, dy), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-13)
    assert padded(x).is_contiguous()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_padded_layer_in_few_bits_is_as_right_as_the_plain_one(dtype):
    torch.manual_seed(0)
    plain = nn.Linear(500, 301, dtype=dtype)
    padded = pad_linear(plain, torch.float8_e4m3fn)
    x = torch.randn(40, 500, dtype=dtype)
    exact = nn.functional.linear(x.double(), plain.weight.double(), plain.bias.double())
    own, reference = (padded(x).double() - exact).abs(), (plain(x).double() - exact).abs()
    assert own.mean() <= 1.1 * reference.mean()
    assert own.max() <= 2 * reference.max()


@pytest.mark.parametrize("steps", [3])
@pytest.mark.parametrize("optimiser", [torch.optim.SGD, torch.optim.AdamW])
def test_training_keeps_the_padding_zero_and_follows_the_plain_layer(optimiser, steps):
    torch.manual_seed(0)
    plain = nn.Linear(7, 5, dtype=torch.float64)
    padded = pad_linear(plain, torch.bfloat16)
    x = torch.randn(9, 7, dtype=torch.float64)
    for module in (plain, padded):
        optimizer = optimiser(module.parameters(), lr=0.1, weight_decay=0.1)
        for _ in range(steps):
            optimizer.zero_grad()
            module(x).square().sum().backward()
            optimizer.step()
    torch.testing.assert_close(padded.weight, plain.weight, rtol=1e-12, atol=1e-12)
    assert padded.padded_weight[5:].count_nonzero() == 0
    assert padded.padded_weight[:, 7:].count_nonzero() == 0
    assert padded.padded_bias[5:].count_nonzero() == 0


def test_a_good_layer_is_given_back_as_it_is():
    good = nn.Linear(16, 8)
    assert pad_linear(good, torch.bfloat16) is good


def test_a_wrong_input_size_that_the_padding_would_hide_is_refused():
    padded = pad_linear(nn.Linear(7, 5), torch.bfloat16)
    for size in (6, 8):
        with pytest.raises(InputError, match=rf"in_features=7; got shape \(2, {size}\)"):
            padded(torch.randn(2, size))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.good = nn.Linear(63, 130), nn.Linear(64, 64)
        self.down = nn.Linear(130, 63, bias=False)
        self.head = nn.Linear(63, 2)

    def forward(self, x):
        return self.head(self.down(torch.relu(self.up(x))))


def test_a_model_is_padded_in_place_and_unpadded_again():
    torch.manual_seed(0)
    model = Block().double().eval()
    original, x = copy.deepcopy(model), torch.randn(4, 63, dtype=torch.float64)
    want = original(x)
    padding = pad_model(model, torch.bfloat16)
    assert [advice.name for advice in padding.padded] == ["up.weight", "down.weight"]
    assert padding.extra_bytes == 2 * (136 * 64 - 130 * 63) * 2
    assert list(padding.skipped) == ["head"]  # 2 outputs would become 8
    assert "limit of 25%" in padding.skipped["head"]
    assert isinstance(model.up, PaddedLinear)
    assert type(model.good) is nn.Linear
    assert not model.up.training
    torch.testing.assert_close(model(x), want, rtol=1e-13, atol=1e-13)
    assert unpad_model(model) == 2
    assert type(model.up) is nn.Linear
    assert not model.up.training
    for got, expected in zip(model.parameters(), original.parameters(), strict=True):
        assert torch.equal(got, expected)
    torch.testing.assert_close(model(x), want, rtol=0, atol=0)
    assert unpad_model(model) == 0


def test_the_limit_decides_what_is_worth_it():
    assert pad_model(Block(), torch.bfloat16, limit=3.1).skipped == {}
    assert pad_model(Block(), torch.bfloat16, limit=0).padded == ()
    with pytest.raises(InputError, match="limit must be at least 0; got -1"):
        pad_model(Block(), limit=-1)


def test_padding_twice_pads_nothing_more():
    model = Block()
    pad_model(model, torch.bfloat16)
    assert pad_model(model, torch.bfloat16).padded == ()


@pytest.mark.parametrize("assign", [False, True])
def test_the_state_dict_is_that_of_the_plain_model_both_ways(assign):
    torch.manual_seed(0)
    plain, other = Block(), Block()
    padded = copy.deepcopy(plain)
    pad_model(padded, torch.bfloat16)
    saved = padded.state_dict()
    assert {k: v.shape for k, v in saved.items()} == {k: v.shape for k, v in plain.state_dict().items()}
    assert all(torch.equal(saved[name], value) for name, value in plain.state_dict().items())
    assert all(value.is_contiguous() for value in saved.values())
    plain.load_state_dict(saved)
    padded.load_state_dict(other.state_dict(), assign=assign)
    x = torch.randn(4, 63)
    torch.testing.assert_close(padded(x), other(x))
    assert padded.up.padded_weight[130:].count_nonzero() == 0
    assert padded.up.padded_weight.requires_grad


def test_a_state_dict_that_does_not_fit_is_refused_by_the_names_of_the_plain_model():
    padded = Block()
    pad_model(padded, torch.bfloat16)
    saved = padded.state_dict()
    del saved["up.bias"]
    saved["down.surplus"] = torch.zeros(1)
    saved["up.weight"] = torch.zeros(136, 64)
    with pytest.raises(RuntimeError) as raised:
        padded.load_state_dict(saved)
    message = str(raised.value)
    for part in (
        'Missing key(s) in state_dict: "up.bias"',
        '"down.surplus"',
        "size mismatch for up.weight",
        "130, 63]",
    ):
        assert part in message
    assert "padded_weight" not in message


def test_a_padded_model_is_saved_and_loaded_as_a_file():
    model = Block()
    pad_model(model, torch.bfloat16)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    Block().load_state_dict(torch.load(file, weights_only=True))


def test_tied_hooked_and_derived_layers_are_left_alone_with_the_reason():
    class Derived(nn.Linear):
        pass

    model = nn.ModuleDict(
        {
            "tied": nn.Linear(63, 130),
            "twin": nn.Linear(63, 130),
            "hooked": nn.Linear(63, 130),
            "derived": Derived(63, 130),
        }
    )
    model["twin"].weight = model["tied"].weight
    model["hooked"].register_forward_hook(lambda *args: None)
    kept = dict(model.items())
    padding = pad_model(model, torch.bfloat16)
    assert padding.padded == ()
    assert all(model[name] is module for name, module in kept.items())
    assert set(padding.skipped) == {"tied", "hooked", "derived"}
    assert "tied" in padding.skipped["tied"]
    assert "hooks" in padding.skipped["hooked"]
    assert "Derived" in padding.skipped["derived"]


def test_a_layer_that_stands_in_two_places_is_padded_once_in_both():
    shared = nn.Linear(63, 63)
    model = nn.Sequential(shared, nn.ReLU(), shared)
    x = torch.randn(2, 63)
    want = model(x)
    assert len(pad_model(model, torch.bfloat16).padded) == 1
    assert model[0] is model[2]
    assert isinstance(model[0], PaddedLinear)
    torch.testing.assert_close(model(x), want)


def test_a_frozen_layer_stays_frozen_also_when_unpadded_without_gradients():
    model = Block()
    model.up.weight.requires_grad_(False)
    pad_model(model, torch.bfloat16)
    assert not model.up.padded_weight.requires_grad
    assert model.up.padded_bias.requires_grad
    with torch.no_grad():
        unpad_model(model)
    assert [p.requires_grad for p in (model.up.weight, model.up.bias, model.down.weight)] == [False, True, True]


def test_a_model_that_is_a_linear_layer_is_refused_with_the_next_step():
    with pytest.raises(InputError, match="use pad_linear"):
        pad_model(nn.Linear(3, 5))


def test_a_module_that_reads_the_weights_itself_gets_them_without_padding():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, dim_feedforward=63, batch_first=True).eval()
    x = torch.randn(2, 5, 32)
    want = layer(x)
    assert [advice.name for advice in pad_model(layer, torch.bfloat16).padded] == ["linear1.weight", "linear2.weight"]
    torch.testing.assert_close(layer(x), want)
    with torch.no_grad():  # a fused path, which reads `linear1.weight`
        torch.testing.assert_close(layer(x), want)


def test_a_padded_layer_is_compiled_whole():
    torch.manual_seed(0)
    padded = pad_linear(nn.Linear(7, 5), torch.bfloat16)
    x = torch.randn(2, 7)
    compiled = torch.compile(padded, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), padded(x))
