"""The case table of `moe.top_k_gating`."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kpt_core import InputError, UnknownNameError
from kpt_core.policy import next_power_of_two
from kpt_moe.top_k_gating import SCORES, score_experts
from kpt_optimize.cases import Arguments, CaseTable, Domain, Sizes, WrongInput

from .common import MANY, case, wrong

_wrong = partial(wrong, "moe.top_k_gating")

#: More of them bfloat16 can't tell apart, see `_distinct`.
_MOST_EXPERTS = 512
#: Choices of an expert for a token among all experts, so that cases stay small in an interpreter too.
_MOST_WORK = 200_000


def _distinct(generator: torch.Generator, tokens: int, experts: int, spread: str, score: str) -> Tensor:
    """Logits of which no two of a token are alike, in any dtype: multiples of a power of two.

    Which of equal scores a kernel chooses is not specified.

    Args:
        generator: what they are drawn from.
        tokens: rows.
        experts: columns, `_MOST_EXPERTS` at most: beyond that bfloat16 can't tell the multiples apart.
        spread: `near`, between -2 and 2; `far`, down to -32; `masked`, like near, but a third is -inf; `high`, around
            100, which bfloat16 tells apart for 8 experts at most; or `low`, -1024 and less: sigmoids of it are zero.
        score: with `far`, sigmoids go up to 4, above which too few digits are left in float32. The others have several
            experts near the best: a softmax of one alone would have gradients of nothing but rounding.
    """
    values = (torch.arange(experts, dtype=torch.float64) - experts // 2) * (4 / next_power_of_two(experts))
    if spread == "far" and experts > 3:
        values = torch.where(values < 0, values * 16, values * 2 if score == "sigmoid" else values)
        values[0].clamp_(max=-31)
    if spread == "high":
        values = values + 100
    if spread == "low":
        # Bfloat16 has 128 numbers between powers of two.
        place = torch.arange(experts)
        values = -torch.exp2(10.0 + place // 128) * (1 + place % 128 / 128).double()
    logits = values[torch.rand(tokens, experts, generator=generator).argsort(-1)]
    if spread == "masked":
        away = torch.rand(tokens, experts, generator=generator) < 1 / 3
        logits = logits.masked_fill(away, float("-inf"))
    return logits


def _bias(generator: torch.Generator, experts: int, kind: str | None) -> Tensor | None:
    """A correction bias: of zeros and ones, of distinct fractions up to 1, in float64 too, or far above any score."""
    if kind is None:
        return None
    if kind == "ones":
        # Scores lie between 0 and 1: what one more makes of them is distinct still.
        return torch.randint(0, 2, (experts,), generator=generator).float()
    if kind == "large":
        return torch.rand(experts, generator=generator) * 2000 - 1000
    places = torch.randperm(experts, generator=generator).to(
        torch.float64 if kind == "wide fractions" else torch.float32
    )
    return (places + 1) / (experts + 1)


def _clear(judged: Tensor, top_k: int, num_groups: int, top_groups: int, biased: bool) -> Tensor:
    """`[tokens]` bool: whether no rounding changes which groups and which experts are chosen, and in which order."""
    grouped = judged.unflatten(-1, (num_groups, -1))
    limited = num_groups > top_groups
    best = grouped.sort(-1, descending=True).values[..., : 2 if biased else 1].sum(-1).sort(-1, descending=True)
    inside = best.indices[:, :top_groups]
    kept = torch.zeros_like(best.values, dtype=torch.bool).scatter_(1, inside, True)
    chosen = grouped.masked_fill(~kept.unsqueeze(-1), float("-inf")).flatten(1).sort(-1, descending=True).values
    # A difference of two infinities is NaN, which is no gap either.
    gaps = torch.cat((-best.values.diff(dim=-1)[:, : top_groups * limited], -chosen.diff(dim=-1)[:, :top_k]), dim=-1)
    finite = chosen[:, :top_k].isfinite().all(-1)
    clear: Tensor = finite & (gaps > 3e-6 * judged.clamp(min=0).amax().clamp(min=1)).all(-1)
    return clear


def _counts(experts: int, num_groups: int, top_groups: int | str, top_k: int | str) -> tuple[int, int, int]:
    """Experts, a multiple of their groups; groups and experts that are chosen, as many as there are at most."""
    experts += -experts % num_groups
    best = int({"half": -(-num_groups // 2), "every": num_groups}.get(str(top_groups), top_groups))
    available = experts // num_groups * best
    return experts, best, available if top_k == "every" else min(int(top_k), available)


def _build(
    generator: torch.Generator,
    tokens: int = 24,
    experts: int = 8,
    num_groups: int = 1,
    top_groups: int | str = 1,
    top_k: int | str = 2,
    spread: str = "near",
    bias: str | None = None,
    **settings: Any,
) -> Arguments:
    experts, best, chosen = _counts(experts, num_groups, top_groups, top_k)
    correction, score = _bias(generator, experts, bias), settings.get("score", "softmax")
    found = torch.empty(0, experts, dtype=torch.float64)
    for _ in range(100):
        logits = _distinct(generator, 2 * tokens + 1, experts, spread, score)
        # Without a bias the order is that of the logits, however small the scores are.
        judged = logits if correction is None else score_experts(logits, score) + correction
        clear = _clear(judged, chosen, num_groups, best, correction is not None)
        found = torch.cat((found, logits[clear]))[:tokens]
        if len(found) == tokens:
            break
    else:
        raise InputError(
            f"case table of moe.top_k_gating: {len(found)} of {tokens} tokens have a clear choice of {chosen} among "
            f"{experts} experts with {spread=}, {bias=} and {settings}: leave this out of the domain"
        )
    biased = {} if correction is None else {"correction_bias": correction}
    groups = {} if num_groups == 1 else {"num_groups": num_groups, "top_groups": best}
    return {"logits": found, **biased, "top_k": chosen, **groups, **settings}


def _allowed(values: Mapping[str, Any]) -> bool:
    if values["spread"] == "masked" and values["top_k"] == "every":
        return False
    if values["spread"] == "low" and (values["score"], values["bias"]) != ("sigmoid", "large"):
        return False  # a bias alone tells zeros apart, and sums of two fractions may be alike
    sizes = {name: values.get(name, least) for name, least in (("experts", 4), ("num_groups", 1))}
    experts, _, chosen = _counts(**sizes, top_groups=values["top_groups"], top_k=values["top_k"])
    # A single weight that is renormalised is one, its gradient nothing but rounding: there is nothing to compare with.
    # Of sigmoids of zero it is zero.
    single = chosen == 1 and values["renormalize"] and values["spread"] != "low"
    constant = single and values["score"] != "softmax_after"
    # Nor is there where one of the few weights is nearly all, which a bias alone may choose beside one near zero.
    alone = values.get("tokens", 8) < 8 and (values["spread"], values["bias"]) == ("far", "large")
    work = values.get("tokens", 1) * experts * chosen
    return experts <= _MOST_EXPERTS and work <= _MOST_WORK and not constant and not alone


def _specified(arguments: Arguments) -> bool:
    """Whether the choice is clear in float32, where scores far apart may all be zero."""
    if not len(arguments["logits"]):
        return True
    score, bias = arguments.get("score", "softmax"), arguments.get("correction_bias")
    judged = score_experts(arguments["logits"].float(), score)
    if bias is not None:
        judged = judged + bias
    elif score != "softmax_after":
        judged = judged.log()  # small scores are as different as large ones
    groups = arguments.get("num_groups", 1), arguments.get("top_groups", 1)
    return bool(_clear(judged, arguments["top_k"], *groups, bias is not None).all())


def _family(experts: int, top_k: int, **settings: Any) -> dict[str, Any]:
    return {"tokens": 9, "experts": experts, "top_k": top_k, **settings}


def _with(arguments: Arguments, **changes: Any) -> Arguments:
    return {**arguments, **changes}


GROUPS: dict[str, Any] = {"experts": 12, "num_groups": 4, "top_groups": 2, "top_k": 3}

# fmt: off
TOP_K_GATING = CaseTable(
    op="moe.top_k_gating",
    build=_build,
    cases=(
        case("small"),
        case("no tokens", tokens=0),
        case("one token", tokens=1),
        case("63 tokens, odd sizes", tokens=63, experts=7, top_k=3),
        case("one expert", experts=1, top_k=1),
        case("large logits", spread="high"),
        case("large logits, softmax after", spread="high", score="softmax_after"),
        case("every expert", experts=6, top_k=6),
        case("not renormalised", renormalize=False),
        case("scaled", scale=2.5, renormalize=False),
        case("softmax after", score="softmax_after", renormalize=False, top_k=3),
        case("softmax after, renormalised", score="softmax_after", scale=0.5),
        case("sigmoid", score="sigmoid", experts=12, top_k=3),
        case("sigmoid, not renormalised", score="sigmoid", renormalize=False, top_k=1),
        case("sigmoids of zero", score="sigmoid", spread="low", bias="fractions", top_k=3),
        case("correction bias", score="sigmoid", bias="ones", top_k=3),
        case("softmax with correction bias", bias="ones", experts=20, top_k=5),
        case("groups", **GROUPS),
        case("groups with correction bias", **GROUPS, score="sigmoid", bias="ones", scale=2.5),
        case("groups of one expert", num_groups=8, top_groups=3, score="sigmoid"),
        case("every group", **{**GROUPS, "top_groups": 4}),
        case("mixtral-8x7b", tokens=512, model=True),
        case("qwen3-30b-a3b", tokens=512, experts=128, top_k=8, model=True),
        case("gpt-oss-120b", tokens=512, experts=128, top_k=4, score="softmax_after", renormalize=False, model=True),
        case("deepseek-v3", tokens=512, experts=256, top_k=8, score="sigmoid", bias="ones", scale=2.5, num_groups=8,
            top_groups=4, model=True),
        case("qwen3-30b-a3b, training", tokens=16384, experts=128, top_k=8, model=True, large=True),
    ),
    wrong=(
        _wrong("one dimension too many", r"logits must be \[tokens, num_experts\].*got torch\.float32 \[1, 24, 8\]",
            logits=lambda t: t[None]),
        _wrong("integers", r"logits must be .*; got torch\.int32 \[24, 8\]", logits=Tensor.int),
        _wrong("more choices than experts", r"top_k \(9\) must not exceed num_experts \(8\)", top_k=lambda _: 9),
        WrongInput(
            name="no such score",
            change=lambda a: _with(a, score="sigmoids"),
            message="unknown score 'sigmoids': did you mean 'sigmoid'",
            error=UnknownNameError,
        ),
        _wrong("groups that do not divide the experts",
            r"num_groups must divide num_experts \(8\).*; got num_groups=3 and top_groups=1", num_groups=lambda _: 3),
        _wrong("groups of too few experts", r"1 of 8 groups hold 1 experts, fewer than top_k \(2\): raise top_groups",
            num_groups=lambda _: 8),
        _wrong("a bias of another number of experts",
            r"correction_bias must be float32 or float64 of shape \[8\]; got torch\.float32 \[7\]",
            correction_bias=lambda _: torch.zeros(7)),
        _wrong("a bias of bfloat16",
            r"correction_bias must be float32 or float64 of shape \[8\]; got torch\.bfloat16 \[8\]",
            correction_bias=lambda _: torch.zeros(8).bfloat16()),
        _wrong("two devices", "logits and correction_bias must be on one device; got cpu and meta",
            correction_bias=lambda _: torch.zeros(8, device="meta")),
    ),
    gradients=("logits",),
    reduction=lambda arguments: arguments["logits"].shape[1],
    rare=(torch.float64,),
    domain=Domain(
        sizes={
            "tokens": Sizes(many=MANY, usual=(1, 8)),
            "experts": Sizes(1, _MOST_EXPERTS, usual=(60, 128, 256)),
            "num_groups": Sizes(1, usual=(8,)),
        },
        options={
            "score": SCORES,
            "spread": ("near", "far", "masked", "low"),
            "bias": (None, "fractions", "large", "wide fractions"),
            "top_groups": (1, "half", "every"),
            "top_k": (2, 1, "every"),
            "renormalize": (True, False),
            "scale": (1.0, 2.5, -1.5, 0.0),
        },
        sized=("score", "bias"),
        families={
            "Mixtral": _family(8, 2),
            "GraniteMoe": _family(32, 8, score="softmax_after", renormalize=False),
            "OLMoE": _family(64, 8, renormalize=False),
            "Qwen2-MoE": _family(60, 4, renormalize=False),
            "Qwen3-MoE": _family(128, 8),
            "Qwen3-Next": _family(512, 10),
            "gpt-oss": _family(128, 4, score="softmax_after", renormalize=False),
            "Llama 4": _family(16, 1, score="sigmoid", renormalize=False),
            "DeepSeek-V2": _family(160, 6, num_groups=8, top_groups=3, renormalize=False, scale=16.0),
            "DeepSeek-V3": _family(
                256, 8, score="sigmoid", bias="fractions", num_groups=8, top_groups=4, scale=2.5
            ),
            "GLM-4.5": _family(128, 8, score="sigmoid", bias="fractions"),
            "Kimi K2": _family(384, 8, score="sigmoid", bias="fractions", scale=2.827),
            "sixteen choices": _family(64, 16, score="sigmoid", bias="fractions"),
        },
        allowed=_allowed,
    ),
    specified=_specified,
    kept=frozenset({"correction_bias"}),
)
# fmt: on
