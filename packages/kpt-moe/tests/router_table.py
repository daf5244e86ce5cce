"""Small routers of every kind, for the tests of what all of them promise."""

from collections.abc import Callable

import torch
from torch import Tensor

from kpt_moe.routers.base import Router
from kpt_moe.routers.dynamic_capacity import DynamicCapacityRouter
from kpt_moe.routers.hash import HashRouter
from kpt_moe.routers.learned import LearnedRouter
from kpt_moe.routers.switch import SwitchRouter
from kpt_moe.routers.top_k import TopKRouter

HIDDEN, EXPERTS, TOP_K, VOCAB = 16, 6, 3, 50

Make = Callable[[torch.device | str | None, torch.dtype | None], Router]


def _top_k(**choices) -> Make:
    return lambda device, dtype: TopKRouter(
        HIDDEN, num_experts=EXPERTS, top_k=TOP_K, device=device, dtype=dtype, **choices
    )


def _hash(**choices) -> Make:
    return lambda device, dtype: HashRouter(
        HIDDEN, num_experts=EXPERTS, top_k=TOP_K, vocab_size=VOCAB, device=device, dtype=dtype, **choices
    )


def _learned(**choices) -> Make:
    return lambda device, dtype: LearnedRouter(
        HIDDEN, num_experts=EXPERTS, top_k=TOP_K, device=device, dtype=dtype, **choices
    )


def _dynamic(**choices) -> Make:
    return lambda device, dtype: DynamicCapacityRouter(
        HIDDEN, num_experts=EXPERTS, top_k=TOP_K, device=device, dtype=dtype, **choices
    )


#: Without jitter, see `JITTERED`.
ROUTERS: dict[str, Make] = {
    "top_k": _top_k(bias=True),
    "top_k all weights": _top_k(renormalize=False, scale=2.5),
    "top_k softmax_after": _top_k(score="softmax_after"),
    "top_k sigmoid": _top_k(score="sigmoid"),
    "top_k groups": _top_k(num_groups=3, top_groups=2),
    "top_k correction bias": _top_k(score="sigmoid", correction_bias=True, num_groups=2, top_groups=1),
    "top_k capacity": _top_k(capacity_factor=0.7),
    "top_k capacity by weight": _top_k(capacity_factor=0.7, priority="weight"),
    "switch": lambda device, dtype: SwitchRouter(
        HIDDEN, num_experts=EXPERTS, jitter=0, eval_capacity_factor=1.1, device=device, dtype=dtype
    ),
    "hash": _hash(),
    "hash capacity": _hash(capacity_factor=0.8),
    "hash learned": _hash(learned_weights=True, score="sqrtsoftplus"),
    "learned": _learned(bias=True),
    "learned gated": _learned(activation="swiglu", inner_size=10),
    "dynamic": _dynamic(min_capacity_factor=0.5, max_capacity_factor=1.0),
    "dynamic adaptive": _dynamic(min_capacity_factor=0.4, max_capacity_factor=0.9, adaptive_top_k=True),
    "dynamic threshold": _dynamic(max_capacity_factor=1.2, adaptive_top_k=True, threshold=0.7),
    "dynamic all weights": _dynamic(renormalize=False),
}

JITTERED: dict[str, Make] = {
    "top_k": _top_k(jitter=0.3),
    "switch": lambda device, dtype: SwitchRouter(HIDDEN, num_experts=EXPERTS, jitter=0.3, device=device, dtype=dtype),
    "hash learned": _hash(learned_weights=True, jitter=0.3),
    "learned": _learned(jitter=0.3),
    "dynamic": _dynamic(jitter=0.3),
}

#: Those whose weights of a token sum to one, refused choices included.
RENORMALIZED = frozenset(ROUTERS) - {"top_k all weights", "switch", "dynamic all weights"}

#: Those without a gate.
WITHOUT_PARAMETERS = frozenset({"hash", "hash capacity"})


def token_ids(tokens: int) -> Tensor:
    """Vocabulary ids `[tokens]`, for the routers that go by them; the others take them too."""
    return torch.arange(tokens) * 7 % VOCAB
