from itertools import pairwise

import pytest
import torch
from calls import experts, record
from hypothesis import given, settings
from hypothesis import strategies as st
from in_float64 import SMALL_BY_DESCRIPTORS, blocks_of_scale, wide
from in_float64 import experts as reference

from kpt_triton import launching
from kpt_triton.moe import experts as module
from kpt_triton.moe.activation import GATED, PLAIN
from kpt_triton.moe.experts_backward import parts_of
from kpt_triton.tile import Tile

# By descriptors a tile also reads rows that are not its own, and may not be written yet; NumPy, by which the
# interpreter multiplies, warns where they happen to hold infinity.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")

NAN = float("nan")
NAMES = ("x", "weights", "up", "down", "up_bias", "down_bias")
PRODUCTS = ("up", "down", "slope", "wgrad")
TILES = dict.fromkeys(PRODUCTS, "16x16x32 w4 s1 g2")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Layer:
    """Inputs of a call; `index` refuses a pair in five or so."""

    def __init__(
        self, tokens=7, top_k=2, num_experts=4, hidden=24, inner=20, *, activation="swiglu", transposed=False,
        biased=False, dtype=torch.float32, **options
    ):  # fmt: skip
        width = 2 * inner if activation in GATED else inner
        self.options = {"activation": activation, "transposed": transposed, **options}
        self.index = torch.randint(-1, num_experts + 1, (tokens, top_k)).to(DEVICE)
        up, down = (num_experts, width, hidden), (num_experts, hidden, inner)
        if transposed:
            up, down = (num_experts, hidden, width), (num_experts, inner, hidden)
        shapes = [(tokens, hidden), (tokens, top_k), up, down, (num_experts, width), (num_experts, hidden)]
        tensors = [torch.randn(shape) for shape in shapes]
        for matrix, size in ((2, hidden), (3, inner)):
            tensors[matrix] /= max(size, 1) ** 0.5
        self.tensors = [t.to(DEVICE, dtype) for t in tensors]
        self.scales = [None, None]
        if not biased:
            self.tensors[4:] = [None, None]

    def quantise(self, by_blocks):
        """Matrices of 8-bit numbers, with scales of output channels or of blocks."""
        for place in (2, 3):
            stored = self.tensors[place].shape
            sizes = [-(-size // 128) for size in stored[1:]] if by_blocks else [stored[1]]
            if self.options["transposed"] and not by_blocks:
                sizes = [stored[2]]
            self.scales[place - 2] = (torch.rand(stored[0], *sizes) + 0.5).to(DEVICE)
            self.tensors[place] = self.tensors[place].to(torch.float8_e4m3fn)
        return self

    def run(self, grad=None, needed=(True,) * 6, tiles=TILES):
        """The output, and with `grad` the gradients too."""
        tensors = [t if t is None else t.detach() for t in self.tensors]
        if grad is not None:
            for t, wanted in zip(tensors, needed, strict=True):
                if t is not None and t.dtype.itemsize > 1:
                    t.requires_grad_(wanted)
        x, weights, *rest = tensors
        scales = dict(zip(("gate_up_scale", "down_scale"), self.scales, strict=True))
        out = experts(x, self.index, weights, *rest, **self.options, **scales, tiles=tiles)
        if grad is None:
            return out
        out.backward(grad)
        return out.detach(), [None if t is None else t.grad for t in tensors]

    def exact(self, grad):
        """The same in float64, of the numbers that matrices and scales make together."""
        tensors = [None if t is None else wide(t.float()) for t in self.tensors]
        for place, scale in enumerate(self.scales, start=2):
            if scale is not None:
                scale = wide(scale)
                if scale.dim() == 2:
                    scale = scale.unsqueeze(1 if self.options["transposed"] else 2)
                tensors[place] = tensors[place] * blocks_of_scale(scale, *tensors[place].shape[1:])
        for t in tensors:
            if t is not None:
                t.requires_grad_()
        x, weights, *rest = tensors
        options = dict(self.options)
        out = reference(x, self.index, weights, *rest, activation_of=options.pop("activation"), **options)
        if out.requires_grad:
            out.backward(wide(grad))
        return out.detach(), [None if t is None else t.grad for t in tensors]

    def grad(self):
        return torch.randn_like(self.tensors[0])


def assert_alike(got, want, roundings=0.0):
    """As float32 is to float64: sums of under a hundred numbers of order one in a chain of four products.

    `roundings` is the relative error of narrow intermediate results, added to that of the root of a sum's length.
    """
    scale = max(1.0, want.abs().max().item()) if want.numel() else 1.0
    torch.testing.assert_close(wide(got), want, rtol=0, atol=(2e-6 + roundings) * scale)


def check(layer, tiles=TILES):
    grad = layer.grad()
    out, grads = layer.run(grad, tiles=tiles)
    want, exact = layer.exact(grad)
    assert out.dtype is layer.tensors[0].dtype
    assert_alike(out, want)
    for name, one, other in zip(NAMES, grads, exact, strict=True):
        if one is not None:
            assert_alike(one, torch.zeros_like(wide(one)) if other is None else other), name
    return out, grads


@pytest.mark.parametrize(("transposed", "biased"), [(False, True), (True, False)])
@pytest.mark.parametrize(
    ("activation", "interleaved"),
    [(name, way) for name in GATED for way in (False, True)] + [(n, False) for n in PLAIN],
)
def test_output_and_gradients_are_those_of_float64(activation, interleaved, transposed, biased):
    layer = Layer(activation=activation, interleaved=interleaved, transposed=transposed, biased=biased)
    _, grads = check(layer)
    assert all(g is None or g.abs().max() > 0 for g in grads)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("parameters", [(1.702, 1.0, 1.5), (1.702, 1.0, None), (1.0, 0.0, 0.25)])
def test_parameters_of_swiglu(parameters, interleaved):
    alpha, beta, limit = parameters
    check(Layer(interleaved=interleaved, biased=True, alpha=alpha, beta=beta, limit=limit))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_tiles_by_descriptors_and_of_other_sizes(interleaved, transposed):
    layer = Layer(hidden=32, inner=48, interleaved=interleaved, transposed=transposed, biased=True)
    for text in (SMALL_BY_DESCRIPTORS, "32x64x16 w4 s1 g1 tma"):
        check(layer, dict.fromkeys(PRODUCTS, text))
    check(layer, None)


@pytest.mark.parametrize("name", ["swiglu", "gelu"])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("tile", "parts", "of_interleaved"),
    [("16x64x16 w1 s1 g2", 2, 4), ("16x128x16 w1 s1 g2", 4, 8), ("16x128x16 w1 s1 g2 r128 tma", 8, 8)],
)
def test_what_follows_the_product_is_computed_in_parts(tile, parts, of_interleaved, interleaved, name):
    """Of two tiles of columns, the second ends within a part."""
    read = Tile.parse(tile)
    assert (parts_of(read, False), parts_of(read, True)) == (parts, of_interleaved)
    interleaved = interleaved and name in GATED
    inner = 2 * read.n - 28
    layer = Layer(tokens=9, hidden=16, inner=inner, activation=name, interleaved=interleaved, biased=True)
    check(layer, TILES | {"slope": tile})


@pytest.mark.parametrize(
    "sizes", [(0, 2, 3, 8, 8), (1, 1, 1, 1, 1), (3, 3, 2, 17, 33), (20, 1, 3, 8, 8), (4, 2, 3, 0, 8), (4, 2, 3, 8, 0)]
)
def test_sizes_that_are_unusual(sizes):
    check(Layer(*sizes, biased=True))
    with torch.no_grad():
        layer = Layer(*sizes, biased=True)
        assert_alike(layer.run(tiles=None), layer.exact(layer.grad())[0])


@pytest.mark.parametrize("expert", [-3, 0, 3, 4, 1000])
def test_all_pairs_may_be_of_one_expert_or_of_none(expert):
    layer = Layer(tokens=20, biased=True)
    layer.index.fill_(expert)
    out, grads = check(layer)
    if not 0 <= expert < 4:
        assert not out.any()
        assert not any(g.any() for g in grads)


def test_ids_may_be_int32_and_strided():
    layer = Layer(biased=True)
    want = layer.run()
    layer.index = layer.index.int().T.contiguous().T
    assert torch.equal(layer.run(), want)


@settings(max_examples=8)
@given(
    st.integers(0, 20), st.integers(1, 3), st.integers(1, 6), st.integers(1, 40), st.integers(1, 40),
    st.sampled_from(GATED + PLAIN), st.booleans(), st.booleans(), st.booleans(),
    st.sampled_from(["16x16x16 w4 s1 g2", "16x32x16 w4 s1 g1 tma", "32x16x64 w4 s1 g4", ""]),
)  # fmt: skip
def test_any_size_load_and_tile(
    tokens, top_k, num_experts, hidden, inner, activation, interleaved, transposed, biased, tile
):
    interleaved = interleaved and activation in GATED
    sizes = (tokens, top_k, num_experts, hidden, inner)
    layer = Layer(*sizes, activation=activation, interleaved=interleaved, transposed=transposed, biased=biased)
    check(layer, dict.fromkeys(PRODUCTS, tile))


@pytest.mark.parametrize("name", NAMES)
def test_each_gradient_may_be_wanted_alone(name):
    layer = Layer(biased=True)
    grad = layer.grad()
    _, all_grads = layer.run(grad)
    _, grads = layer.run(grad, [name == other for other in NAMES])
    for other, one, full in zip(NAMES, grads, all_grads, strict=True):
        assert (one is not None) == (other == name)
        assert one is None or torch.equal(one, full)


@pytest.mark.parametrize("transposed", [False, True])
def test_gradients_of_matrices_have_their_memory_order(transposed):
    layer = Layer(transposed=transposed)
    _, grads = layer.run(layer.grad())
    assert [g.stride() for g in grads[2:4]] == [t.stride() for t in layer.tensors[2:4]]


@pytest.mark.parametrize("tokens", [3, 9])
@pytest.mark.parametrize("tiles", [TILES, None])
def test_weights_of_refused_pairs_are_not_looked_at(tiles, tokens):
    layer = Layer(tokens=tokens, num_experts=8, biased=True)
    layer.index[0, 1], layer.index[1] = -1, 8
    refused = (layer.index < 0) | (layer.index >= 8)
    grad = layer.grad()
    layer.tensors[1][refused] = 0
    want, exact = layer.run(grad, tiles=tiles)
    with torch.no_grad():
        plain = layer.run(tiles=tiles)
    layer.tensors[1][refused] = NAN
    got, grads = layer.run(grad, tiles=tiles)
    assert torch.equal(got, want)
    assert all(torch.equal(one, other) for one, other in zip(grads, exact, strict=True))
    assert not grads[1][refused].any()
    with torch.no_grad():
        assert torch.equal(layer.run(tiles=tiles), plain)


def test_an_expert_that_nobody_chose_may_hold_nan():
    layer = Layer(tokens=20, biased=True, num_experts=4)
    layer.index[layer.index == 2] = 1
    want, exact = layer.run(layer.grad().fill_(1))
    for t in layer.tensors[2:]:
        t[2] = NAN
    got, grads = layer.run(layer.grad().fill_(1))
    assert torch.equal(got, want)
    assert all(torch.equal(one, other) for one, other in zip(grads, exact, strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_narrow_types_err_no_more_than_a_loop_in_them(activation, dtype):
    """On average at most 1.1 times as much as products, activations and sums of that dtype, each rounded."""
    layer = Layer(24, 2, 3, 32, 40, activation=activation, biased=True, dtype=dtype)
    grad = layer.grad()
    out, grads = layer.run(grad)
    want, exact = layer.exact(grad)
    tensors = [t.detach().cpu().requires_grad_() for t in layer.tensors]
    x, weights, *rest = tensors
    loop = reference(x, layer.index.cpu(), weights, *rest, activation_of=activation)
    loop.backward(grad.cpu())
    results = zip((out, *grads), (want, *exact), (loop, *(t.grad for t in tensors)), strict=True)
    for name, (got, right, other) in zip(("out", *NAMES), results, strict=True):
        assert got.dtype is dtype, name
        ours, theirs = ((wide(t) - right).abs().mean() for t in (got, other))
        assert 0 < ours <= 1.1 * theirs, name


@pytest.mark.usefixtures("widening")
@pytest.mark.parametrize("by_blocks", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
def test_8_bit_matrices_are_what_their_scales_make_of_them(activation, transposed, by_blocks):
    layer = Layer(12, 2, 3, 136, 136, activation=activation, transposed=transposed, biased=True).quantise(by_blocks)
    check(layer, None)


@pytest.mark.usefixtures("widening")
@pytest.mark.parametrize("by_blocks", [False, True])
def test_8_bit_matrices_with_interleaved_gates(by_blocks):
    layer = Layer(12, 2, 3, 136, 136, interleaved=True, biased=True).quantise(by_blocks)
    check(layer, dict.fromkeys(PRODUCTS, "32x64x64 w4 s1 g1 tma"))


def arguments(layer):
    """Of a call's record."""
    names = ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias")
    x, weights, *rest = layer.tensors
    named = {"x": x, "top_k_index": layer.index, "top_k_weights": weights, **dict(zip(names, rest, strict=True))}
    return {**named, **layer.options}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_saved_is_the_preactivation_without_bias_and_the_sorted_order(dtype):
    layer = Layer(tokens=16, biased=True, dtype=dtype)
    out, saved = module.forward(record(module, needs=("x",), **arguments(layer)))
    h, order, offsets = saved
    assert [(t.dtype, list(t.shape)) for t in saved] == [
        (dtype, [32, 40]), (torch.int32, [32]), (torch.int32, [4])
    ]  # fmt: skip
    assert sorted(order.tolist()) == list(range(32))
    ids, x, up = layer.index.flatten()[order.long()], wide(layer.tensors[0]), wide(layer.tensors[2])
    start = 0
    for expert, end in enumerate(offsets.tolist()):
        assert (ids[start:end] == expert).all()
        want = x[(order[start:end] // 2).long().cpu()] @ up[expert].T
        torch.testing.assert_close(wide(h[start:end]), want, rtol=torch.finfo(dtype).eps, atol=1e-5)
        start = end
    assert ((ids[start:] < 0) | (ids[start:] >= 4)).all()
    plain, nothing = module.forward(record(module, **arguments(layer)))
    assert torch.equal(plain, out)
    assert nothing == ()


def test_what_another_kernel_saved_serves_too():
    """The order within an expert is free, and rows of no expert may hold anything."""
    layer = Layer(tokens=16, biased=True)
    names = ("x", "top_k_weights", "gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias")
    call = record(module, needs=names, **arguments(layer))
    _, (h, order, offsets) = module.forward(call)
    grad = layer.grad()
    want = module.backward(call, (h, order, offsets), grad)
    bounds = [0, *offsets.tolist(), len(order)]
    turned = torch.cat([torch.arange(a, b).flip(0) for a, b in pairwise(bounds)]).to(DEVICE)
    h = h[turned]
    h[offsets[-1] :] = NAN
    got = module.backward(call, (h, order[turned], offsets), grad)
    assert got.keys() == want.keys() == set(names)
    for name in names:
        assert_alike(got[name], wide(want[name]))


@pytest.mark.parametrize("activation", ["swiglu", "silu"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("scaled", [None, False, True])
def test_a_few_tokens_without_gradients_are_computed_pair_by_pair(scaled, transposed, activation, monkeypatch):
    calls = []
    decode = module.decode
    monkeypatch.setattr(module, "decode", lambda *args, **options: calls.append(1) or decode(*args, **options))
    layer = Layer(3, 2, 24, 136, 72, activation=activation, transposed=transposed, biased=True)
    if scaled is not None:
        layer.quantise(scaled)
    with torch.no_grad():
        few = layer.run(tiles=None)
        # Matrices stored as input by output are not read in whole vectors there.
        assert calls == ([] if transposed else [1])
        assert_alike(few, layer.exact(layer.grad())[0])
        monkeypatch.setattr(module, "is_few", lambda *sizes: False)
        assert_alike(few, wide(layer.run(tiles=None)))
    assert calls == ([] if transposed else [1])


@pytest.mark.parametrize(
    ("tokens", "top_k", "num_experts", "few"),
    [(0, 8, 128, False), (1, 8, 8, True), (1, 8, 128, True), (4, 8, 128, True), (5, 8, 128, False), (8, 1, 64, True),
     (9, 1, 64, False), (2, 2, 8, False)],
)  # fmt: skip
def test_few_are_those_that_hardly_share_an_expert(tokens, top_k, num_experts, few):
    assert module.is_few(tokens, top_k, num_experts) is few


def test_results_are_the_same_bit_by_bit_whenever_and_by_however_many_programs(monkeypatch):
    layer = Layer(tokens=24, hidden=24, inner=24, biased=True)
    grad = layer.grad()
    results = []
    for processors in (1, 1, 2, 5):
        monkeypatch.setattr(launching, "_processors", lambda device, found=processors: found)
        out, grads = layer.run(grad, tiles=dict.fromkeys(PRODUCTS, "16x16x16 w16 s1 g2"))
        results.append((out, *grads))
    for other in results[1:]:
        assert all(torch.equal(one, two) for one, two in zip(results[0], other, strict=True))
