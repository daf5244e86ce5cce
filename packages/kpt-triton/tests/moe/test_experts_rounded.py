"""`moe.experts` with activations that may be rounded to 8 bits: the codes of both sides are multiplied."""

import pytest
import torch
from calls import record
from in_float64 import SMALL
from torch.nn import functional as F

from kpt_triton.moe import experts

E4M3 = torch.float8_e4m3fn
ACTIVATIONS = {
    "swiglu": lambda gate, up: F.silu(gate) * up,
    "geglu": lambda gate, up: F.gelu(gate) * up,
    "silu": lambda gate, up: F.silu(gate),
}


def blocks(size):
    return -(-size // 128)


def quantised(x, width, height=1):
    """Codes, scales of `height` by `width`, and what they stand for."""
    rows, columns = x.shape[-2:]
    whole = F.pad(x.float(), (0, -columns % width, 0, -rows % height))
    largest = whole.abs().unflatten(-1, (-1, width)).unflatten(-3, (-1, height)).amax((-3, -1))
    scale = torch.where(largest == 0, 1.0, largest / 448)
    spread = scale.repeat_interleave(height, -2)[..., :rows, :].repeat_interleave(width, -1)[..., :columns]
    codes = (x.float() / spread).to(E4M3)
    return codes, scale, codes.double() * spread.double()


def make(device, activation="swiglu", by_blocks=True, transposed=False, biased=False, inner=72, tokens=150, hidden=200):
    """A call without `activations`, and the weights in float64."""
    width, num_experts = inner if activation == "silu" else 2 * inner, 4
    weights, given = [], {}
    for name, rows, columns in (("gate_up", width, hidden), ("down", hidden, inner)):
        sides = (128, 128) if by_blocks else (columns, 1)
        codes, scale, numbers = quantised(torch.randn(num_experts, rows, columns), *sides)
        scale = scale if by_blocks else scale.squeeze(-1)
        if transposed:
            codes, scale = codes.mT.contiguous(), scale.mT if by_blocks else scale
        given |= {f"{name}_proj": codes.to(device), f"{name}_scale": scale.to(device)}
        if biased:
            given[f"{name}_proj_bias"] = torch.randn(num_experts, rows, dtype=torch.bfloat16, device=device)
        weights.append(numbers * columns**-0.5)
        given[f"{name}_scale"] *= columns**-0.5
    chosen = torch.rand(tokens, num_experts + 1).argsort(1)[:, :2]
    call = {
        "x": torch.randn(tokens, hidden, dtype=torch.bfloat16, device=device),
        "top_k_index": chosen.to(device),
        "top_k_weights": torch.rand(tokens, 2, device=device),
        "activation": activation,
        "transposed": transposed,
        **given,
    }
    return call, weights


def truth(call, weights, width, interleaved=False):
    """Compute what comes of activations that were rounded by `width`, or with None were not."""
    rounded = lambda x: x.double() if width is None else quantised(x.bfloat16(), width or x.shape[1])[2]  # noqa: E731
    x, out = rounded(call["x"].cpu()), 0
    for expert, (up, down) in enumerate(zip(*weights, strict=True)):
        up_bias, down_bias = (
            call[name][expert].cpu().double() if name in call else 0 for name in ("gate_up_proj_bias", "down_proj_bias")
        )
        h = x @ up.T + up_bias
        gate, second = (h[:, ::2], h[:, 1::2]) if interleaved else h.chunk(2, 1)
        inside = ACTIVATIONS[call["activation"]](h if call["activation"] == "silu" else gate, second)
        share = torch.where(call["top_k_index"] == expert, call["top_k_weights"], 0).sum(1).cpu().double()
        out = out + (rounded(inside) @ down.T + down_bias) * share[:, None]
    return out


def off(got, want):
    return float((got.cpu().double() - want).norm() / want.norm())


def run(call, activations, **more):
    return experts.forward(record(experts, **call, activations=activations, **more))[0]


@pytest.mark.parametrize(("activations", "width"), [("row", 0), ("1x128", 128)])
@pytest.mark.parametrize("by_blocks", [False, True])
@pytest.mark.parametrize(
    "kind",
    [
        {},
        {"inner": 192, "biased": True},
        {"activation": "geglu", "transposed": True, "inner": 136},
        {"activation": "silu", "inner": 200},
    ],
    ids=str,
)
def test_products_are_those_of_rounded_activations(kind, by_blocks, activations, width, device):
    call, weights = make(device, by_blocks=by_blocks, **kind)
    got = run(call, activations)
    assert got.dtype is torch.bfloat16
    assert off(got, truth(call, weights, width)) < 0.005  # 0.018 to 0.045 where one of both is not rounded
    assert off(run(call, "none"), truth(call, weights, None)) < 0.005


def test_other_tiles_give_the_same(device):
    call, weights = make(device, tokens=66, hidden=136)
    got = run(call, "1x128", config={"up": str(SMALL), "down": str(SMALL)})
    assert off(got, truth(call, weights, 128)) < 0.005


def test_gates_may_alternate(device):
    call, weights = make(device, inner=192)
    got = run({**call, "interleaved": True}, "1x128")
    assert off(got, truth(call, weights, 128, interleaved=True)) < 0.005


@pytest.mark.parametrize("place", ["x", "inside"])
def test_an_overflow_is_seen(place, device):
    """Quantising alone would make an infinity the largest number."""
    call, _ = make(device, biased=True)
    if place == "x":
        call["x"][7, 3] = float("inf")
    else:
        call["gate_up_proj_bias"][int(call["top_k_index"][7].min()), 1] = float("inf")
    got = run(call, "1x128")
    assert not got[7].isfinite().any()
    assert torch.equal(got.isfinite().all(1), run(call, "none").isfinite().all(1))


@pytest.mark.parametrize(
    ("why", "change"),
    [
        ("gradients are needed", {"needs": ("x",)}),
        ("few rows of an expert", {"tokens": 64}),
        ("float16 has more digits", {"dtype": torch.float16}),
        ("nobody allowed it", {"activations": "none"}),
    ],
)
def test_activations_stay_where(why, change, device):
    call, weights = make(device, tokens=change.get("tokens", 66))
    call["x"] = call["x"].to(change.get("dtype", torch.bfloat16))
    assert experts.rounds(record(experts, **call, activations="1x128")) == (change.keys() <= {"needs", "activations"})
    activations = change.get("activations", "1x128")
    assert not experts.rounds(record(experts, **call, activations=activations, needs=change.get("needs", ())))
    got = run(call, activations, needs=change.get("needs", ()))
    assert off(got, truth(call, weights, None)) < 0.005
