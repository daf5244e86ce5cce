"""Losses of the balance between experts, over tokens of any sequence."""

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch import distributed as dist

from kpt_core import InputError
from kpt_moe.routing import Routing

from .base import Routings, Score, counted_tokens, listed, probabilities, summed, weighted

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def switch_loss(routings: Routings, *, score: Score = "softmax", group: "ProcessGroup | None" = None) -> Tensor:
    """`num_experts * sum_e f_e P_e`, with `f_e` the choices of expert `e` per token and `P_e` its mean probability.

    With one choice per token it is the loss of the Switch Transformer (arXiv:2101.03961, equations 4 to 6), which is 1
    in balance; with `top_k` choices `f` sums to `top_k`, and so is the loss in balance, as in transformers'
    `load_balancing_loss_func`. Choices refused for want of capacity count.

    Args:
        routings: one routing, or several that are pooled.
        score: how logits become probabilities.
        group: weigh ranks by their tokens. `f` stays that of the rank; see `global_batch_loss`.

    Raises:
        InputError: no routing, or routings of different numbers of experts.
        UnknownNameError: no such `score`.
    """
    given = listed(routings)
    probability, tokens = summed(given, partial(probabilities, score=score))
    asked = torch.stack([routing.asked_per_expert().to(tokens.device) for routing in given]).sum(0)
    return weighted(_product(asked, tokens, probability / tokens.clamp(min=1)), tokens, group)


def global_batch_loss(routings: Routings, load: "GlobalLoad", *, score: Score = "softmax") -> Tensor:
    """`switch_loss` with `f` counted over the global batch (Demons in the Detail, arXiv:2501.11873).

    Balance within every micro-batch keeps experts from specialising where a micro-batch is of one domain. Here `f` is
    that of all tokens in `load`, these included; `P` stays that of these tokens.

    Exact under data parallelism: the mean over the ranks of `load.group`, of values as of gradients, is the loss of all
    their tokens together, however they are spread. Under accumulation it is exact in the last micro-batch alone: the
    k-th knows the choices of the first k, as in the paper's method.

    Args:
        routings: one routing, or several that are pooled.
        load: what is counted so far; to be reset after every step of the optimizer.
        score: how logits become probabilities.

    Raises:
        InputError: no routing, or routings of different numbers of experts, or another number than in `load`.
        UnknownNameError: no such `score`.
    """
    given = listed(routings)
    probability, _ = summed(given, partial(probabilities, score=score))
    everywhere = load.add(given)
    ranks = 1 if load.group is None else load.group.size()
    return _product(load.asked, load.tokens, probability * ranks / everywhere.clamp(min=1))


def gshard_loss(routings: Routings, *, score: Score = "softmax", group: "ProcessGroup | None" = None) -> Tensor:
    """`1/num_experts * sum_e (c_e/S) m_e`, with `c_e` the first choices of expert `e` and `m_e` its mean probability.

    The loss of GShard (arXiv:2006.16668, algorithm 1, line 13), to the letter: a differentiable stand-in for the mean
    over experts of the square of `c_e/S`, with `S` tokens, which is `1/num_experts**2` in balance. (Implementations
    that say `num_experts**2 * mean` give `num_experts**2` times this, the same as `switch_loss` of one choice.) As
    there, choices refused for want of capacity count.

    Args:
        routings: one routing, or several that are pooled.
        score: how logits become probabilities.
        group: weigh ranks by their tokens.

    Raises:
        InputError: no routing, routings of different numbers of experts, or one in which experts choose tokens.
        UnknownNameError: no such `score`.
    """
    given = listed(routings)
    if any(routing.token is not None for routing in given):
        raise InputError(
            "gshard_loss: a token has no first choice where experts choose tokens (Routing.token is given): use "
            "switch_loss, or none, since such a routing is in balance by itself"
        )
    probability, tokens = summed(given, partial(probabilities, score=score))
    first = [Routing(r.index[:, :1], r.weights[:, :1], r.logits, r.mask).asked_per_expert() for r in given]
    asked = torch.stack([count.to(tokens.device) for count in first]).sum(0)
    loss = _product(asked, tokens, probability / tokens.clamp(min=1)) / given[0].num_experts ** 2
    return weighted(loss, tokens, group)


class GlobalLoad:
    """Counts choices over the ranks of a group and over micro-batches, for `global_batch_loss`.

    Args:
        group: ranks that hold different tokens of the same batch; None is this rank alone.

    Raises:
        InputError: its counts are read before any are made.
    """

    def __init__(self, group: "ProcessGroup | None" = None) -> None:
        self.group = group
        self._counts: Tensor | None = None

    @property
    def asked(self) -> Tensor:
        """`[num_experts]` int64, choices of each expert since the last reset."""
        return self._known()[:-1]

    @property
    def tokens(self) -> Tensor:
        """0-d int64, tokens that counted since the last reset."""
        return self._known()[-1]

    def add(self, routings: Routings) -> Tensor:
        """Count the choices of routings on every rank, by one all-reduce of `num_experts + 1` numbers.

        Returns:
            0-d int64, the tokens that count in these routings, of all ranks.

        Raises:
            InputError: the routings are of another number of experts than those before.
        """
        given = listed(routings)
        parts = [torch.cat((routing.asked_per_expert(), counted_tokens(routing).view(1))) for routing in given]
        counts = torch.stack([part.to(parts[0].device) for part in parts]).sum(0)
        if self._counts is not None and self._counts.shape != counts.shape:
            raise InputError(
                f"GlobalLoad: counts {self._counts.numel() - 1} experts; got a routing of {counts.numel() - 1}: use "
                "one GlobalLoad for each kind of layer"
            )
        if self.group is not None:
            dist.all_reduce(counts, group=self.group)
        self._counts = counts if self._counts is None else self._counts + counts
        return counts[-1]

    def reset(self) -> None:
        """Forget what was counted: for after each step of the optimizer."""
        self._counts = None

    def _known(self) -> Tensor:
        if self._counts is None:
            raise InputError("GlobalLoad: nothing is counted yet: call global_batch_loss or add first")
        return self._counts


def _product(asked: Tensor, tokens: Tensor, probability: Tensor) -> Tensor:
    """`num_experts * sum_e f_e P_e`."""
    fraction = asked.to(probability.dtype) / tokens.clamp(min=1)
    return asked.numel() * (fraction * probability).sum()
