"""Choosing each token's experts from logits and weighing them: op `moe.top_k_gating`."""

import torch
from torch import Tensor

from kpt_core import Call, InputError, op
from kpt_core.policy import next_power_of_two

from ._checks import require_bools, require_known, require_number, require_size
from ._dtypes import DTYPES, NAMES_OF_DTYPES, wide_dtype

#: How logits become scores: over all experts before the choice, over the chosen ones after it, or independently.
SCORES = ("softmax", "softmax_after", "sigmoid")


def check_choice(owner: str, num_experts: int, top_k: int, score: str, num_groups: int, top_groups: int) -> None:
    """Raise unless so many experts can be chosen in this way."""
    if type(top_k) is not int or not 1 <= top_k <= num_experts:
        require_size(owner, "top_k", top_k, num_experts, "num_experts")
    if score not in SCORES:
        require_known("score", score, SCORES)
    for name, groups in (("num_groups", num_groups), ("top_groups", top_groups)):
        if type(groups) is not int:
            require_size(owner, name, groups)
    if num_groups < 1 or num_experts % num_groups or not 1 <= top_groups <= num_groups:
        raise InputError(
            f"{owner}: num_groups must divide num_experts ({num_experts}) and top_groups be between "
            f"1 and num_groups; got num_groups={num_groups} and top_groups={top_groups}"
        )
    if top_k > num_experts // num_groups * top_groups:
        raise InputError(
            f"{owner}: {top_groups} of {num_groups} groups hold "
            f"{num_experts // num_groups * top_groups} experts, fewer than top_k ({top_k}): raise top_groups"
        )


def score_experts(logits: Tensor, score: str) -> Tensor:
    """What experts are chosen and weighed by, `[T, E]`."""
    if score == "softmax":
        return logits.softmax(-1)
    return logits.sigmoid() if score == "sigmoid" else logits


def choose_experts(
    scores: Tensor, correction_bias: Tensor | None, top_k: int, num_groups: int, top_groups: int
) -> Tensor:
    """Ids `[T, top_k]` of the highest scores, the correction bias added and all but the best groups left out."""
    if correction_bias is not None:
        scores = scores + correction_bias
    if num_groups > top_groups:
        grouped = scores.unflatten(-1, (num_groups, -1))
        # DeepSeek-V3 judges a group by its two best experts, V2 by its best.
        best = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values
        of_group = best.sum(-1) if correction_bias is not None else best[..., 0]
        groups = of_group.topk(top_groups, dim=-1).indices
        inside = (groups.unsqueeze(-1) == torch.arange(num_groups, device=groups.device)).any(-2)
        scores = grouped.masked_fill(~inside.unsqueeze(-1), float("-inf")).flatten(-2)
    return scores.topk(top_k, dim=-1).indices


def weigh_experts(scores: Tensor, index: Tensor, score: str, renormalize: bool, scale: float) -> Tensor:
    """The scores of the chosen experts, normalised and scaled."""
    weights = scores.gather(1, index)
    if score == "softmax_after":
        weights = weights.softmax(-1)
    if renormalize:
        # Sigmoids may all underflow; DeepSeek-V3 has the same floor.
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights if scale == 1 else weights * scale


def _check(call: Call) -> None:
    logits, correction_bias = call.logits, call.correction_bias
    if logits.dim() != 2 or logits.dtype not in DTYPES:
        raise InputError(
            f"moe.top_k_gating: logits must be [tokens, num_experts] of {NAMES_OF_DTYPES}; "
            f"got {logits.dtype} {list(logits.shape)}"
        )
    check_choice("moe.top_k_gating", logits.shape[1], call.top_k, call.score, call.num_groups, call.top_groups)
    if call.scale != 1:
        require_number("moe.top_k_gating", "scale", call.scale)
    if type(call.renormalize) is not bool:
        require_bools("moe.top_k_gating", renormalize=call.renormalize)
    if correction_bias is None:
        return
    if correction_bias.dtype not in (torch.float32, torch.float64) or correction_bias.shape != logits.shape[1:]:
        raise InputError(
            f"moe.top_k_gating: correction_bias must be float32 or float64 of shape [{logits.shape[1]}]; "
            f"got {correction_bias.dtype} {list(correction_bias.shape)}"
        )
    if correction_bias.device != logits.device:
        raise InputError(
            "moe.top_k_gating: logits and correction_bias must be on one device; "
            f"got {logits.device} and {correction_bias.device}"
        )


def _fake(call: Call) -> tuple[Tensor, Tensor]:
    logits, shape = call.logits, (call.logits.shape[0], call.top_k)
    weights = logits.new_empty(shape, dtype=wide_dtype(logits.dtype))
    return weights, logits.new_empty(shape, dtype=torch.int64)


def _size_key(call: Call) -> tuple[int | str, ...]:
    """Tokens, rounded since they vary from call to call; experts, `top_k`, groups and the score."""
    tokens, experts = call.logits.shape
    return next_power_of_two(tokens), experts, call.top_k, call.num_groups, call.top_groups, call.score


@op("moe.top_k_gating", check=_check, fake=_fake, saves="results", size_key=_size_key)
def top_k_gating(
    logits: Tensor,
    correction_bias: Tensor | None = None,
    *,
    top_k: int,
    score: str = "softmax",
    renormalize: bool = True,
    scale: float = 1.0,
    num_groups: int = 1,
    top_groups: int = 1,
) -> tuple[Tensor, Tensor]:
    """Choose each token's experts by their logits, and weigh them; computed in float32 at least.

    Which of equal scores is chosen, or comes first, is not specified.

    Args:
        logits: `[T, E]` float64, float32, bfloat16 or float16. An expert of -inf has a score of zero (-inf under
            `softmax_after`); there must be enough others to choose.
        correction_bias: `[E]` float32 or float64, added to the scores where experts are chosen, not where they are
            weighed; gets no gradient (arXiv:2408.15664).
        top_k: experts per token.
        score: `softmax` over all experts, `softmax_after` over the chosen ones, or `sigmoid`.
        renormalize: divide the weights by their sum; all stay zero where every score underflowed.
        scale: what weights are multiplied by in the end.
        num_groups: split the experts into as many groups of neighbours.
        top_groups: choose within as many groups alone, the best ones (arXiv:2405.04434): judged by their best expert,
            or, if there is a correction bias, by the sum of their best two.

    Returns:
        Weights `[T, top_k]`, float64 for float64 logits and else float32, differentiable in the logits; and ids
        `[T, top_k]` int64, the best first.

    Raises:
        InputError: a shape, dtype, device or number does not fit.
        UnknownNameError: no such `score`.

    Source: the routers of Mixtral (arXiv:2401.04088), gpt-oss (arXiv:2508.10925) and DeepSeek-V3 (arXiv:2412.19437).
    """
    scores = score_experts(logits.to(wide_dtype(logits.dtype)), score)
    index = choose_experts(scores.detach(), correction_bias, top_k, num_groups, top_groups)
    return weigh_experts(scores, index, score, renormalize, scale), index
