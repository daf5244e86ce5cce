"""The case table of `moe.top_k_gating`."""

from typing import Any

import torch
from torch import Tensor

from kpt_core import UnknownNameError
from kpt_core.cases import Arguments, Case, CaseTable, WrongInput
from kpt_core.tuning import next_power_of_two
from kpt_moe.top_k_gating import score_experts

_PREFIX = r"moe\.top_k_gating"


def _distinct(generator: torch.Generator, tokens: int, experts: int) -> Tensor:
    """Logits of which no two of a token are alike, in any dtype: multiples of a power of two between -2 and 2.

    Which of equal scores a kernel chooses is not specified. Further out, what is left to a sigmoid would lose digits.
    """
    steps = torch.arange(experts, dtype=torch.float64) - experts // 2
    order = torch.rand(tokens, experts, generator=generator).argsort(-1)
    return steps[order] * (4 / next_power_of_two(experts))


def _groups_differ(judged: Tensor, num_groups: int) -> Tensor:
    """`[tokens]` bool: whether no two groups' sums of their best two scores are nearly alike."""
    best = judged.unflatten(-1, (num_groups, -1)).sort(-1, descending=True).values[..., :2].sum(-1)
    gaps: Tensor = best.sort(-1).values.diff(dim=-1)
    return (gaps > 1e-5).all(-1)


def _build(
    generator: torch.Generator,
    tokens: int = 24,
    experts: int = 8,
    top_k: int = 2,
    biased: bool = False,
    **settings: Any,
) -> Arguments:
    if not biased:
        return {"logits": _distinct(generator, tokens, experts), "top_k": top_k, **settings}
    # Scores lie between 0 and 1: what one more makes of them is distinct still.
    bias = torch.randint(0, 2, (experts,), generator=generator).float()
    logits = _distinct(generator, 2 * tokens, experts)
    judged = score_experts(logits, settings.get("score", "softmax")) + bias
    logits = logits[_groups_differ(judged, settings.get("num_groups", 1))][:tokens]
    return {"logits": logits, "correction_bias": bias, "top_k": top_k, **settings}


def _with(arguments: Arguments, **changes: Any) -> Arguments:
    return {**arguments, **changes}


GROUPS = {"experts": 12, "num_groups": 4, "top_groups": 2, "top_k": 3}

TOP_K_GATING = CaseTable(
    op="moe.top_k_gating",
    build=_build,
    cases=(
        Case(name="small"),
        Case(name="no tokens", sizes={"tokens": 0}),
        Case(name="one token", sizes={"tokens": 1}),
        Case(name="63 tokens, odd sizes", sizes={"tokens": 63, "experts": 7, "top_k": 3}),
        Case(name="one expert", sizes={"experts": 1, "top_k": 1}),
        Case(name="every expert", sizes={"experts": 6, "top_k": 6}),
        Case(name="not renormalised", sizes={"renormalize": False}),
        Case(name="scaled", sizes={"scale": 2.5, "renormalize": False}),
        Case(name="softmax after", sizes={"score": "softmax_after", "renormalize": False, "top_k": 3}),
        Case(name="softmax after, renormalised", sizes={"score": "softmax_after", "scale": 0.5}),
        Case(name="sigmoid", sizes={"score": "sigmoid", "experts": 12, "top_k": 3}),
        Case(name="sigmoid, not renormalised", sizes={"score": "sigmoid", "renormalize": False, "top_k": 1}),
        Case(name="correction bias", sizes={"score": "sigmoid", "biased": True, "top_k": 3}),
        Case(name="softmax with correction bias", sizes={"biased": True, "experts": 20, "top_k": 5}),
        Case(name="groups", sizes=GROUPS),
        Case(name="groups with correction bias", sizes={**GROUPS, "score": "sigmoid", "biased": True, "scale": 2.5}),
        Case(
            name="groups of one expert",
            sizes={"num_groups": 8, "top_groups": 3, "score": "sigmoid"},
        ),
        Case(name="every group", sizes={**GROUPS, "top_groups": 4}),
        Case(name="mixtral-8x7b", sizes={"tokens": 512}, model=True),
        Case(name="qwen3-30b-a3b", sizes={"tokens": 512, "experts": 128, "top_k": 8}, model=True),
        Case(
            name="gpt-oss-120b",
            sizes={"tokens": 512, "experts": 128, "top_k": 4, "score": "softmax_after", "renormalize": False},
            model=True,
        ),
        Case(
            name="deepseek-v3",
            sizes={
                "tokens": 512,
                "experts": 256,
                "top_k": 8,
                "score": "sigmoid",
                "biased": True,
                "scale": 2.5,
                "num_groups": 8,
                "top_groups": 4,
            },
            model=True,
        ),
        Case(
            name="qwen3-30b-a3b, training",
            sizes={"tokens": 16384, "experts": 128, "top_k": 8},
            model=True,
            large=True,
        ),
    ),
    wrong=(
        WrongInput(
            name="one dimension too many",
            change=lambda a: _with(a, logits=a["logits"][None]),
            message=rf"{_PREFIX}: logits must be \[tokens, num_experts\].*got torch\.float32 \[1, 24, 8\]",
        ),
        WrongInput(
            name="integers",
            change=lambda a: _with(a, logits=a["logits"].int()),
            message=rf"{_PREFIX}: logits must be .*; got torch\.int32 \[24, 8\]",
        ),
        WrongInput(
            name="more choices than experts",
            change=lambda a: _with(a, top_k=9),
            message=rf"{_PREFIX}: top_k \(9\) must not exceed num_experts \(8\)",
        ),
        WrongInput(
            name="no such score",
            change=lambda a: _with(a, score="sigmoids"),
            message="unknown score 'sigmoids': did you mean 'sigmoid'",
            error=UnknownNameError,
        ),
        WrongInput(
            name="groups that do not divide the experts",
            change=lambda a: _with(a, num_groups=3),
            message=rf"{_PREFIX}: num_groups must divide num_experts \(8\).*; got num_groups=3 and top_groups=1",
        ),
        WrongInput(
            name="groups of too few experts",
            change=lambda a: _with(a, num_groups=8),
            message=rf"{_PREFIX}: 1 of 8 groups hold 1 experts, fewer than top_k \(2\): raise top_groups",
        ),
        WrongInput(
            name="a bias of another number of experts",
            change=lambda a: _with(a, correction_bias=torch.zeros(7)),
            message=rf"{_PREFIX}: correction_bias must be float32 or float64 of shape \[8\]; got torch\.float32 \[7\]",
        ),
        WrongInput(
            name="a bias of bfloat16",
            change=lambda a: _with(a, correction_bias=torch.zeros(8).bfloat16()),
            message=rf"{_PREFIX}: correction_bias must be float32 or float64 of shape \[8\]; got torch\.bfloat16 \[8\]",
        ),
        WrongInput(
            name="two devices",
            change=lambda a: _with(a, correction_bias=torch.zeros(8, device="meta")),
            message=rf"{_PREFIX}: logits and correction_bias must be on one device; got cpu and meta",
        ),
    ),
    gradients=("logits",),
    reduction=lambda arguments: arguments["logits"].shape[1],
)
