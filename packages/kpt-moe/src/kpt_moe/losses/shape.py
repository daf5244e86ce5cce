"""Losses of the shape of a router's distribution: its entropy, and the size of its logits."""

import math
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .base import Routings, Score, listed, probabilities, summed, weighted

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def entropy_loss(
    routings: Routings, *, per_token: bool = False, score: Score = "softmax", group: "ProcessGroup | None" = None
) -> Tensor:
    """`log(num_experts) - H(mean probability)`: zero if experts are equally likely over all tokens together.

    Up to its constant the global entropy loss of LIMoE (arXiv:2206.02770, section 2.2).

    Args:
        routings: one routing, or several that are pooled.
        per_token: `log(num_experts) - mean H(token's probability)` instead, which draws every token's own probabilities
            towards equality; with a negative weight it is LIMoE's local loss, which makes tokens decide.
        score: how logits become probabilities.
        group: weigh ranks by their tokens. Exact with `per_token`; else each rank has an entropy of its own.

    Raises:
        InputError: no routing, or routings of different numbers of experts.
        UnknownNameError: no such `score`.
    """
    given = listed(routings)
    if per_token:
        entropy, tokens = summed(given, lambda logits: _entropy(probabilities(logits, score)))
        entropy = entropy / tokens.clamp(min=1)
    else:
        probability, tokens = summed(given, partial(probabilities, score=score))
        entropy = _entropy(probability / tokens.clamp(min=1))
    loss = torch.where(tokens > 0, math.log(given[0].num_experts) - entropy, 0)
    return weighted(loss, tokens, group)


def z_loss(routings: Routings, *, group: "ProcessGroup | None" = None) -> Tensor:
    """The mean over tokens of `logsumexp(logits)**2`, which keeps logits small (ST-MoE, arXiv:2202.08906, equation 5).

    Args:
        routings: one routing, or several that are pooled.
        group: weigh ranks by their tokens; then exact.

    Raises:
        InputError: no routing, or routings of different numbers of experts.
    """
    squares, tokens = summed(listed(routings), lambda logits: logits.logsumexp(-1).square())
    return weighted(squares / tokens.clamp(min=1), tokens, group)


def _entropy(probability: Tensor) -> Tensor:
    # The derivative of p log p at 0 is -inf, and would be NaN times the softmax's zero.
    return -(probability * probability.clamp(min=torch.finfo(probability.dtype).tiny).log()).sum(-1)
