"""Routings for tests that need no router."""

import dataclasses

import torch
from hypothesis import strategies as st

from kpt_moe import Routing


@st.composite
def routings(draw: st.DrawFn, num_experts: int | None = None, dtype: torch.dtype | None = None) -> Routing:
    """Any routing: with refused and absent choices, chosen by experts or by tokens, without tokens at all."""
    tokens, top_k = draw(st.integers(0, 6)), draw(st.integers(1, 3))
    experts = num_experts or draw(st.sampled_from([1, 7, 300, 40_000]))
    dtype = dtype or draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    by_experts = tokens > 0 and draw(st.booleans())
    rows = draw(st.integers(0, 9)) if by_experts else tokens
    return Routing(
        torch.randint(-experts, experts + 2, (rows, top_k), generator=generator),
        torch.randn(rows, top_k, generator=generator, dtype=torch.float64).to(dtype),
        torch.randn(tokens, experts, generator=generator, dtype=torch.float64).to(dtype),
        torch.rand(tokens, generator=generator) < 0.5 if draw(st.booleans()) else None,
        torch.randint(tokens, (rows,), generator=generator) if by_experts else None,
    )


def assert_same(have: Routing, want: Routing, *, logits: bool = True) -> None:
    """Equal bit by bit, with the same dtypes; None where the other is None."""
    for field in dataclasses.fields(Routing):
        if field.name == "logits" and not logits:
            continue
        a, b = getattr(have, field.name), getattr(want, field.name)
        if not isinstance(b, torch.Tensor):
            assert a == b, field.name
        else:
            assert (a.dtype, a.shape) == (b.dtype, b.shape), field.name
            assert torch.equal(a, b), field.name


def routing_from_logits(logits: torch.Tensor, *, top_k: int, mask: torch.Tensor | None = None) -> Routing:
    """Each token's highest logits, weighted by their softmax."""
    logits = logits.reshape(-1, logits.shape[-1])
    best = logits.softmax(-1).topk(top_k, dim=-1)
    return Routing(best.indices, best.values, logits, None if mask is None else mask.reshape(-1).bool())
