"""The kernels for a few tokens, called directly; `test_experts.py` has when they are chosen."""

import pytest
import torch
from calls import experts
from hypothesis import given, settings
from hypothesis import strategies as st
from in_float64 import blocks_of_scale, wide
from in_float64 import experts as reference

from kpt_triton.moe.activation import GATED, PLAIN
from kpt_triton.moe.decode import Strip, decode
from kpt_triton.moe.experts_forward import Gating

NAN = float("nan")
STRIP = Strip(n=8, k=16, stages=1)
SWIGLU = Gating("swiglu")


def check(
    index, hidden, inner, device, act=SWIGLU, *, num_experts=4, strip=STRIP, dtype=torch.float32,
    scales_of="", biased=True, turned=True,
):  # fmt: skip
    """Weights of refused pairs are NaN, and so are experts that nobody chose."""
    tokens, top_k = index.shape
    width = 2 * inner if act.gated else inner
    x, weights = torch.randn(tokens, hidden), torch.rand(tokens, top_k)
    here = (index >= 0) & (index < num_experts)
    weights[~here] = NAN
    matrices = [torch.randn(num_experts, width, hidden), torch.randn(num_experts, hidden, inner)]
    biases = [torch.randn(num_experts, size) if biased else None for size in (width, hidden)]
    chosen = index[here].unique()
    for t in (*matrices, *(b for b in biases if b is not None)):
        t[[expert for expert in range(num_experts) if expert not in chosen.tolist()]] = NAN
    matrices = [t / max(t.shape[2], 1) ** 0.5 for t in matrices]
    scales = [None, None]
    if scales_of:
        matrices = [t.to(torch.float8_e4m3fn) for t in matrices]
        sizes = [[-(-size // 128) if scales_of == "block" else size for size in t.shape[1:]] for t in matrices]
        scales = [torch.rand(num_experts, n, k if scales_of == "block" else 1) + 0.5 for n, k in sizes]
    x, *biases = (None if t is None else t.to(dtype) for t in (x, *biases))
    if not scales_of:
        matrices = [t.to(dtype) for t in matrices]
    given = [t if turned else t.mT.contiguous().mT for t in matrices]
    out = decode(
        x.to(device),
        index.to(device),
        weights.to(device),
        *(t.to(device).mT for t in given),
        *(None if t is None else t.to(device) for t in biases),
        *(None if t is None else t.to(device).mT for t in scales),
        act,
        strip,
    )
    exact = [wide(t.float()) for t in matrices]
    exact = [m if s is None else m * blocks_of_scale(wide(s), *m.shape[1:]) for m, s in zip(exact, scales, strict=True)]
    options = {"interleaved": act.interleaved, "alpha": act.alpha, "beta": act.beta, "limit": act.limit}
    rest = [None if t is None else wide(t) for t in biases]
    want = reference(wide(x), index, wide(weights), *exact, *rest, activation_of=act.name, **options)
    assert out.dtype is dtype
    scale = max(1.0, want.abs().max().item()) if want.numel() else 1.0
    # The activation and the result are rounded to the dtype; a chain of float32 sums of about a hundred numbers.
    torch.testing.assert_close(wide(out), want, rtol=0, atol=(2e-6 + 2 * torch.finfo(dtype).eps) * scale)
    return out


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("activation", GATED + PLAIN)
def test_each_activation(activation, interleaved, device):
    act = Gating(activation, interleaved and activation in GATED)
    assert check(torch.tensor([[0, 3], [1, 3]]), 24, 20, device, act).any()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("alpha", "beta", "limit"), [(1.702, 1.0, 1.5), (1.702, 1.0, None), (1.0, 0.0, 0.25)])
def test_parameters_of_swiglu(alpha, beta, limit, interleaved, device):
    check(torch.tensor([[0, 3], [1, 3]]), 24, 20, device, Gating("swiglu", interleaved, alpha, beta, limit))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    "index",
    [
        [[2, 2]],  # an expert twice in a token
        [[0, 0, 0], [3, 0, 3]],
        [[0, -1], [4, 2], [1000, -7]],  # refused pairs, and a token without any other
        [[-1]],
        [[0, 1, 2], [2, 1, -1], [3, 0, 3], [1, 1, 1], [2, 3, 4]],
    ],
)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_duplicates_and_refused_pairs(dtype, index, biased, device):
    out = check(torch.tensor(index, dtype=dtype), 24, 20, device, biased=biased)
    for token, ids in enumerate(index):
        assert bool(out[token].any()) == any(0 <= expert < 4 for expert in ids)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("strip", [STRIP, Strip()])
@pytest.mark.parametrize(("hidden", "inner"), [(16, 32), (17, 31), (1, 1), (7, 40), (40, 3)])
def test_sizes_that_are_no_multiples_of_the_strip(hidden, inner, strip, turned, device):
    check(torch.tensor([[0, 3, 1]]), hidden, inner, device, strip=strip, turned=turned)


@pytest.mark.parametrize("scales_of", ["n", "block"])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
def test_scales_of_8_bit_matrices(activation, interleaved, scales_of, device):
    act = Gating(activation, interleaved and activation in GATED)
    strip = Strip(n=16, k=128, stages=1)
    check(torch.tensor([[0, 3], [1, 3]]), 140, 136, device, act, scales_of=scales_of, strip=strip)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_types(dtype, device):
    check(torch.tensor([[0, 3], [1, 3]]), 24, 20, device, dtype=dtype)


@settings(max_examples=10)
@given(st.data(), st.integers(1, 4), st.integers(1, 5), st.integers(1, 50), st.integers(1, 50))
def test_any_size_and_routing(data, tokens, top_k, hidden, inner):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ids = data.draw(st.lists(st.integers(-1, 4), min_size=tokens * top_k, max_size=tokens * top_k))
    check(torch.tensor(ids).view(tokens, top_k), hidden, inner, device)


def test_no_more_than_a_block_of_scales_is_read_at_a_time(device):
    check(torch.tensor([[0, 1]]), 300, 260, device, scales_of="block", strip=Strip(k=256))


def test_a_down_bias_is_added_where_there_is_nothing_to_multiply(device):
    x, index = torch.ones(2, 4, device=device), torch.zeros(2, 1, dtype=torch.int64, device=device)
    weights, bias = torch.full((2, 1), 0.5, device=device), torch.arange(12.0, device=device).view(3, 4)
    up, down = torch.ones(3, 0, 4, device=device), torch.ones(3, 4, 0, device=device)
    with torch.no_grad():
        out = experts(x, index, weights, up, down, None, bias, activation="silu")
    assert torch.equal(out, bias[:1].expand(2, 4) * 0.5)
