"""The loss of the balance between experts within each sequence."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kpt_core import InputError
from kpt_moe.routing import Routing

from .base import Routings, Score, listed, probabilities, weighted, without_padding

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def sequence_loss(
    routings: Routings,
    *,
    cu_seqlens: Tensor | None = None,
    batch_size: int | None = None,
    score: Score = "softmax",
    group: "ProcessGroup | None" = None,
) -> Tensor:
    """The mean over sequences of `sum_e f_e P_e`, each of one sequence, with `f_e` of mean 1 over the experts.

    The balance loss of DeepSeek-V2 (arXiv:2405.04434, equations 23 to 25) and V3 (arXiv:2412.19437, equations 17 to 20,
    with `score="sigmoid"`): `f_e = num_experts / (top_k * T) * choices of e`, so that 1 is balance, where `switch_loss`
    has `top_k`. Choices are those that were made; V3 writes them without its correction bias, and uses them as here.
    Sequences without tokens that count are left out of the mean. Several routings are more sequences. Where experts
    choose tokens, `top_k` counts as 1: balance is then the number of choices per token.

    Args:
        routings: one routing, or several of the same sequences.
        cu_seqlens: `[sequences + 1]` int32 or int64, the tokens at which sequences begin, and the end; tokens beyond it
            count as padding. Nothing is read on the host.
        batch_size: in its place, the number of sequences, all equally long.
        score: how logits become probabilities.
        group: weigh ranks by their sequences; then exact.

    Raises:
        InputError: no routing, routings of different numbers of experts, neither or both of `cu_seqlens` and
            `batch_size`, or a `batch_size` that does not divide the tokens.
        UnknownNameError: no such `score`.
    """
    given = listed(routings)
    parts = [_of_sequences(routing, cu_seqlens, batch_size, score) for routing in given]
    device = parts[0][0].device
    loss = torch.stack([part.to(device) for part, _ in parts]).sum(0)
    sequences = torch.stack([number.to(device) for _, number in parts]).sum(0)
    return weighted(loss / sequences.clamp(min=1), sequences, group)


def _of_sequences(
    routing: Routing, cu_seqlens: Tensor | None, batch_size: int | None, score: Score
) -> tuple[Tensor, Tensor]:
    """The sum of the losses of the sequences that have tokens, and how many those are."""
    sequence, sequences = _sequence_of_tokens(routing, cu_seqlens, batch_size)
    experts, of_token = routing.num_experts, sequence.unsqueeze(1)
    probability = probabilities(without_padding(routing.logits, sequence < sequences), score)
    # The last row is of tokens that belong to no sequence.
    total = probability.new_zeros(sequences + 1, experts).index_add(0, sequence, probability)[:sequences]
    length = probability.new_zeros(sequences + 1).index_add(0, sequence, torch.ones_like(probability[:, 0]))[:sequences]
    asked = routing.asked()
    of_row = of_token if routing.token is None else of_token[routing.token]
    cell = torch.where(asked < experts, of_row * experts + asked, sequences * experts).reshape(-1)
    counts = probability.new_zeros((sequences + 1) * experts).index_add(0, cell, probability.new_ones(cell.shape))
    mean = 1 / length.clamp(min=1).unsqueeze(1)
    each = (counts[: sequences * experts].view(sequences, experts) * mean) * (total * mean)
    return each.sum() * (experts / routing.top_k), (length > 0).sum()


def _sequence_of_tokens(routing: Routing, cu_seqlens: Tensor | None, batch_size: int | None) -> tuple[Tensor, int]:
    """`[tokens]` int64, the sequence of each token, their number for padding; and that number."""
    tokens, device = routing.logits.shape[0], routing.logits.device
    if (cu_seqlens is None) == (batch_size is None):
        raise InputError("sequence_loss: give either cu_seqlens or batch_size, to say which tokens are a sequence")
    if cu_seqlens is not None:
        sequences = cu_seqlens.numel() - 1
        positions = torch.arange(tokens, dtype=cu_seqlens.dtype, device=device)
        sequence = torch.searchsorted(cu_seqlens[1:].to(device), positions, right=True)
    else:
        assert batch_size is not None
        if batch_size < 1 or tokens % batch_size:
            raise InputError(
                f"sequence_loss: {tokens} tokens are not {batch_size} sequences of one length: give cu_seqlens"
            )
        sequences = batch_size
        sequence = torch.arange(tokens, device=device) // max(tokens // batch_size, 1)
    return sequence if routing.mask is None else torch.where(routing.mask, sequence, sequences), sequences
