"""Losses of the balance between experts, over all tokens or within each sequence, and of the size of logits."""

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch import distributed as dist
from torch.nn import functional as F

from kpt_core import InputError
from kpt_moe._checks import described, require_known, require_sequences, require_size
from kpt_moe._recomputation import in_recomputation
from kpt_moe.routing import SCORES as SCORES
from kpt_moe.routing import Routing
from kpt_moe.top_k_gating import score_experts

#: How logits become a token's probabilities: a softmax (for `softmax_after` too, of all experts); or sigmoids, or roots
#: of softplus, divided by their sum (DeepSeek-V3, V4).
Score = Literal["softmax", "softmax_after", "sigmoid", "sqrtsoftplus"]

Routings = Routing | Sequence[Routing]


def listed(routings: Routings) -> Sequence[Routing]:
    """One routing or several as a list of at least one, all of one number of experts."""
    given: Any = [routings] if isinstance(routings, Routing) else routings
    if not isinstance(given, Sequence) or not all(isinstance(each, Routing) for each in given):
        raise InputError(
            f"a loss is of a Routing, or a sequence of them; got {described(routings)}: route() of a layer gives one"
        )
    experts = sorted({routing.num_experts for routing in given})
    if len(experts) != 1:
        raise InputError(
            f"a loss needs routings of one number of experts, at least one; got {len(given)} of {experts} experts: "
            "take the loss of each kind of layer by itself"
        )
    return given


def without_padding(logits: Tensor, counted: Tensor | None) -> Tensor:
    """Logits in float32 or float64, zero for padding, whose own may be NaN."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return wide if counted is None else wide.masked_fill(~counted.unsqueeze(1), 0)


def scored(logits: Tensor, score: str) -> Tensor:
    """What experts are chosen and weighed by, `[tokens, num_experts]`; for `softmax_after` the logits."""
    if score != "sqrtsoftplus":
        return score_experts(logits, score)
    # Where softplus underflows, its root would have no gradient.
    return F.softplus(logits).clamp_min(torch.finfo(logits.dtype).tiny).sqrt()


def probabilities(logits: Tensor, score: str) -> Tensor:
    """`[tokens, num_experts]` that sum to one for each token, as `score` says."""
    require_known("score", score, SCORES)
    if score in ("softmax", "softmax_after"):
        return logits.softmax(-1)
    scores = scored(logits, score)
    # All may underflow; DeepSeek-V3 has the same floor.
    return scores / (scores.sum(-1, keepdim=True) + 1e-20)


def summed(
    routings: Sequence[Routing], of: Callable[[Tensor, str], Tensor], score: Score | None = None
) -> tuple[Tensor, Tensor]:
    """The sum of `of(logits, score)` `[tokens, ...]` over the tokens that count, and how many those are.

    None is the score of each routing.
    """
    device, sums, tokens = routings[0].logits.device, [], []
    for routing in routings:
        values = of(without_padding(routing.logits, routing.mask), score or routing.score)
        if routing.mask is not None:
            values = torch.where(routing.mask.unsqueeze(1) if values.dim() > 1 else routing.mask, values, 0)
        sums.append(values.sum(0).to(device))
        tokens.append(routing.counted_tokens().to(device))
    return torch.stack(sums).sum(0), torch.stack(tokens).sum(0)


def weighted(loss: Tensor, number: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """A rank's loss such that its mean over the group is weighted by what each rank counts."""
    if group is None:
        return loss
    everywhere = number.clone()
    dist.all_reduce(everywhere, group=group)
    return loss * (number.to(loss.dtype) * group.size() / everywhere.clamp(min=1))


def switch_loss(routings: Routings, *, score: Score | None = None, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return `num_experts * sum_e f_e P_e`, `f_e` expert `e`'s share of all choices, `P_e` its mean probability.

    With one choice per token it is the loss of the Switch Transformer (arXiv:2101.03961, equations 4 to 6). With more,
    transformers' `load_balancing_loss_func` and ST-MoE count choices per token instead: `top_k` times this. Choices
    refused for want of capacity count. With `group`, `f` stays that of the rank; see `global_batch_loss`.
    """
    given = listed(routings)
    return _balance(given, [routing.asked_per_expert() for routing in given], score, group)


def global_batch_loss(routings: Routings, *, load: "GlobalLoad", score: Score | None = None) -> Tensor:
    """Return `switch_loss` with `f` counted over the global batch (Demons in the Detail, arXiv:2501.11873).

    Balance within every micro-batch keeps experts from specialising where a micro-batch is of one domain. Here `f` is
    that of all tokens in `load`, these included; `P` stays that of these tokens. The paper's is `top_k` times this.

    Exact under data parallelism: the mean over the ranks of `load.group`, of values as of gradients, is the loss of all
    their tokens together, however they are spread. Under accumulation it is exact in the last micro-batch alone: the
    k-th knows the choices of the first k, as in the paper's method. `load` is to be reset after every step of the
    optimizer.

    Raises:
        InputError: routings of another number of experts than in `load`.
    """
    given = listed(routings)
    probability, _ = summed(given, probabilities, score)
    everywhere = load.add(given)
    ranks = 1 if load.group is None else load.group.size()
    return _product(load.asked, probability * ranks / everywhere.clamp(min=1))


def gshard_loss(routings: Routings, *, score: Score | None = None, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return `switch_loss` of first choices alone, as in GShard (arXiv:2006.16668, algorithm 1, line 13).

    The algorithm's letter is a mean over experts of choices per token by mean probability, `1/num_experts**2` times
    this. As there, choices refused for want of capacity count.

    Raises:
        InputError: a routing in which experts choose tokens.
    """
    given = listed(routings)
    if any(routing.token is not None for routing in given):
        raise InputError(
            "gshard_loss: a token has no first choice where experts choose tokens (Routing.token is given): use "
            "switch_loss, or none, since such a routing is in balance by itself"
        )
    first = [Routing(r.index[:, :1], r.weights[:, :1], r.logits, r.mask).asked_per_expert() for r in given]
    return _balance(given, first, score, group)


def entropy_loss(
    routings: Routings, *, per_token: bool = False, score: Score | None = None, group: dist.ProcessGroup | None = None
) -> Tensor:
    """Return `log(num_experts) - H(mean probability)`: zero if experts are equally likely over all tokens together.

    Up to its constant the global entropy loss of LIMoE (arXiv:2206.02770, section 2.2). With `per_token` it is
    `log(num_experts) - mean H(token's probability)` instead, which draws every token's own probabilities towards
    equality; with a negative weight that is LIMoE's local loss, which makes tokens decide. With `group`, `per_token` is
    exact; else each rank has an entropy of its own.
    """
    given = listed(routings)
    if per_token:
        entropy, tokens = summed(given, lambda logits, by: _entropy(probabilities(logits, by)), score)
        entropy = entropy / tokens.clamp(min=1)
    else:
        probability, tokens = summed(given, probabilities, score)
        entropy = _entropy(probability / tokens.clamp(min=1))
    loss = torch.where(tokens > 0, math.log(given[0].num_experts) - entropy, 0)
    return weighted(loss, tokens, group)


def z_loss(routings: Routings, *, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return the mean over tokens of `logsumexp(logits)**2`, to keep logits small (ST-MoE, arXiv:2202.08906, eq. 5).

    Exact with `group`.
    """
    squares, tokens = summed(listed(routings), lambda logits, by: logits.logsumexp(-1).square())
    return weighted(squares / tokens.clamp(min=1), tokens, group)


def sequence_loss(
    routings: Routings,
    *,
    cu_seqlens: Tensor | None = None,
    batch_size: int | None = None,
    score: Score | None = None,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Return the mean over sequences of the `switch_loss` of each one.

    The balance loss of DeepSeek-V2 (arXiv:2405.04434, equations 23 to 25) and V3 (arXiv:2412.19437, equations 17 to 20,
    of sigmoids), which are on this scale. Choices are those that were made; V3 writes them without its correction bias,
    and uses them as here. Sequences without a choice of a token that counts are left out of the mean. Several routings
    are more sequences.

    Args:
        routings: one routing, or several of the same sequences.
        cu_seqlens: `[sequences + 1]` int32 or int64, the tokens at which sequences begin, and the end; tokens beyond it
            count as padding. Nothing is read on the host.
        batch_size: in its place, the number of sequences, all equally long.
        score: as in `switch_loss`.
        group: weigh ranks by their sequences; then exact.

    Raises:
        InputError: neither or both of `cu_seqlens` and `batch_size`, or a `batch_size` that does not divide the tokens.
    """
    given = listed(routings)
    parts = [_of_sequences(routing, cu_seqlens, batch_size, score) for routing in given]
    device = parts[0][0].device
    loss = torch.stack([part.to(device) for part, _ in parts]).sum(0)
    sequences = torch.stack([number.to(device) for _, number in parts]).sum(0)
    return weighted(loss / sequences.clamp(min=1), sequences, group)


class GlobalLoad:
    """Counts choices over the ranks of a group and over micro-batches, for `global_batch_loss`.

    Args:
        group: ranks that hold different tokens of the same batch; None is this rank alone.

    Raises:
        InputError: its counts are read before any are made.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self._counts: Tensor | None = None

    @property
    def asked(self) -> Tensor:
        """`[num_experts]` int64, choices of each expert since the last reset."""
        if self._counts is None:
            raise InputError("GlobalLoad: nothing is counted yet: call global_batch_loss or add first")
        return self._counts[:-1]

    def add(self, routings: Routings) -> Tensor:
        """Count the choices of routings on every rank, by one all-reduce of `num_experts + 1` numbers.

        What activation checkpointing repeats in backward is not counted again.

        Returns:
            0-d int64, the tokens that count in these routings, of all ranks.

        Raises:
            InputError: the routings are of another number of experts than those before.
        """
        given = listed(routings)
        parts = [torch.cat((routing.asked_per_expert(), routing.counted_tokens().view(1))) for routing in given]
        counts = torch.stack([part.to(parts[0].device) for part in parts]).sum(0)
        if self._counts is not None and self._counts.shape != counts.shape:
            raise InputError(
                f"GlobalLoad: counts {self._counts.numel() - 1} experts; got a routing of {counts.numel() - 1}: use "
                "one GlobalLoad for each kind of layer"
            )
        if self.group is not None:
            dist.all_reduce(counts, group=self.group)
        if not in_recomputation():
            self._counts = counts if self._counts is None else self._counts + counts
        return counts[-1]

    def reset(self) -> None:
        """Forget what was counted: for after each step of the optimizer."""
        self._counts = None


def _balance(
    given: Sequence[Routing], asked: Sequence[Tensor], score: Score | None, group: dist.ProcessGroup | None
) -> Tensor:
    """The loss of routings by the choices `[num_experts]` that count in each."""
    probability, tokens = summed(given, probabilities, score)
    together = torch.stack([count.to(tokens.device) for count in asked]).sum(0)
    return weighted(_product(together, probability / tokens.clamp(min=1)), tokens, group)


def _product(asked: Tensor, probability: Tensor) -> Tensor:
    share = asked.to(probability.dtype) / asked.sum().clamp(min=1)
    return asked.numel() * (share * probability).sum()


def _entropy(probability: Tensor) -> Tensor:
    # The derivative of p log p at 0 is -inf, and would be NaN times the softmax's zero.
    return -(probability * probability.clamp(min=torch.finfo(probability.dtype).tiny).log()).sum(-1)


def _of_sequences(
    routing: Routing, cu_seqlens: Tensor | None, batch_size: int | None, score: Score | None
) -> tuple[Tensor, Tensor]:
    """The sum of the losses of the sequences that have tokens, and how many those are."""
    sequence, sequences = _sequence_of_tokens(routing, cu_seqlens, batch_size)
    experts, of_token = routing.num_experts, sequence.unsqueeze(1)
    probability = probabilities(without_padding(routing.logits, sequence < sequences), score or routing.score)
    # The last row is of tokens that belong to no sequence.
    total = probability.new_zeros(sequences + 1, experts).index_add(0, sequence, probability)[:sequences]
    length = probability.new_zeros(sequences + 1).index_add(0, sequence, torch.ones_like(probability[:, 0]))[:sequences]
    asked = routing.asked()
    of_row = of_token if routing.token is None else of_token[routing.token]
    cell = torch.where(asked < experts, of_row * experts + asked, sequences * experts).reshape(-1)
    counts = probability.new_zeros((sequences + 1) * experts).index_add(0, cell, probability.new_ones(cell.shape))
    counts = counts[: sequences * experts].view(sequences, experts)
    choices = counts.sum(1)
    each = (counts * total).sum(1) / (choices * length).clamp(min=1)
    return experts * each.sum(), (choices > 0).sum()


def _sequence_of_tokens(routing: Routing, cu_seqlens: Tensor | None, batch_size: int | None) -> tuple[Tensor, int]:
    """`[tokens]` int64, the sequence of each token, their number for padding; and that number."""
    tokens, device = routing.logits.shape[0], routing.logits.device
    if (cu_seqlens is None) == (batch_size is None):
        raise InputError("sequence_loss: give either cu_seqlens or batch_size, to say which tokens are a sequence")
    if cu_seqlens is not None:
        require_sequences("sequence_loss", cu_seqlens, tokens)
        sequences = cu_seqlens.numel() - 1
        positions = torch.arange(tokens, dtype=cu_seqlens.dtype, device=device)
        sequence = torch.searchsorted(cu_seqlens[1:].to(device), positions, right=True)
    else:
        assert batch_size is not None
        require_size("sequence_loss", "batch_size", batch_size)
        if tokens % batch_size:
            raise InputError(
                f"sequence_loss: {tokens} tokens are not {batch_size} sequences of one length: give cu_seqlens"
            )
        sequences = batch_size
        sequence = torch.arange(tokens, device=device) // max(tokens // batch_size, 1)
    return sequence if routing.mask is None else torch.where(routing.mask, sequence, sequences), sequences
