"""How many rows go from each rank to each other, and to each slot: counted from routings, or expected from loads."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kpt_core import InputError
from kpt_moe.routing import Routing
from kpt_moe.routing_files import num_tokens

from .links import Links
from .placement import Placement


@dataclass(frozen=True, slots=True)
class Flow:
    """Rows on their way.

    Attributes:
        rows: `[from, to]` float64.
        messages: `[from, to]` float64, the probability that there is any row.
    """

    rows: Tensor
    messages: Tensor


@dataclass(frozen=True, slots=True)
class Part:
    """What one chunk of one call moves and computes.

    Attributes:
        flows: between any two ranks; or, with two levels, to the rank of the same place in each node, once per node,
            and from there to the ranks of the node.
        slots: `[slots]` float64, rows that each slot computes.
    """

    flows: tuple[Flow, ...]
    slots: Tensor


def counted(
    routing: Routing, placement: Placement, layer: str, links: Links, chunks: int, two_levels: bool
) -> list[Part]:
    """The parts of a call whose tokens are split contiguously over the ranks.

    Raises:
        InputError: the routing is of another number of experts.
        UnknownNameError: the placement has no such layer.
    """
    if routing.num_experts != placement.num_experts:
        raise InputError(
            f"simulate: {layer!r} was recorded with {routing.num_experts} experts, and the placement has "
            f"{placement.num_experts}"
        )
    ranks, tokens = links.ranks, num_tokens(routing)
    token = torch.arange(len(routing.index), device="cpu") if routing.token is None else routing.token
    slot = placement.physical_index(layer, routing.index, token=token)
    source = ((token + 1) * ranks - 1) // max(tokens, 1)
    part = _chunk(source, ranks, chunks)
    meant = (slot >= 0) & (slot < placement.slots)
    rank = torch.where(meant, slot // placement.slots_per_rank, ranks)
    slots = _tally(part.unsqueeze(1).expand_as(slot)[meant], slot[meant], chunks, placement.slots)
    direct = _pairs(part, source, rank, chunks, ranks, ranks)
    if not two_levels:
        return [Part((_sure(rows),), own) for rows, own in zip(direct, slots, strict=True)]
    to_node = _pairs(part, source, rank // links.ranks_per_node, chunks, ranks, links.nodes)
    return [
        Part((_sure(_to_peers(nodes, links)), _sure(_passed_on(rows, links))), own)
        for rows, nodes, own in zip(direct, to_node, slots, strict=True)
    ]


def expected(
    load: Tensor, tokens: int, placement: Placement, layer: str, links: Links, chunks: int, two_levels: bool
) -> list[Part]:
    """The equal parts of a call, if tokens choose each expert independently of the others.

    Raises:
        InputError: an expert has more rows than there are tokens.
    """
    if bool((load > tokens).any()):
        raise InputError(
            f"simulate: an expert of layer {layer!r} has {float(load.max()):g} rows of {tokens} tokens; tokens must "
            "count all that the loads are of"
        )
    row = placement.row(layer)
    placed = placement.expert_of_slot[row]
    slots = (load / placement.copies[row])[placed.clamp(min=0)] * (placed >= 0)
    to_rank = 1 - (1 - slots / tokens).view(links.ranks, -1).prod(1)
    own = tokens / links.ranks / chunks
    direct = _alike(to_rank, own, links.ranks)
    if not two_levels:
        return [Part((direct,), slots / chunks)] * chunks
    to_node = _alike(1 - (1 - to_rank).view(links.nodes, -1).prod(1), own, links.ranks)
    between = Flow(_to_peers(to_node.rows, links), _to_peers(to_node.messages, links))
    # A rank passes on what one rank of each node sent it: no message only if none of those had a row.
    messages = _alike(to_rank, own * links.nodes, links.ranks).messages
    within = Flow(_passed_on(direct.rows, links), _within_node(messages, links))
    return [Part((between, within), slots / chunks)] * chunks


def _chunk(source: Tensor, ranks: int, chunks: int) -> Tensor:
    """Which chunk each row is in: of a rank's `n` rows, those from `n * i // chunks` on are chunk `i`."""
    sizes = torch.bincount(source, minlength=ranks)
    order = source.argsort(stable=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device="cpu") - (sizes.cumsum(0) - sizes)[source[order]]
    return ((place + 1) * chunks - 1) // sizes[source].clamp(min=1)


def _pairs(part: Tensor, source: Tensor, to: Tensor, chunks: int, ranks: int, ends: int) -> Tensor:
    """`[chunks, ranks, ends]` float64: rows from each rank to each end, one per row and end; `ends` is nowhere."""
    to = to.sort(1).values
    first = to < ends
    first[:, 1:] &= to[:, 1:] != to[:, :-1]
    start = (part * ranks + source).unsqueeze(1).expand_as(to)
    return _tally(start[first], to[first], chunks * ranks, ends).view(chunks, ranks, ends)


def _tally(row: Tensor, column: Tensor, rows: int, columns: int) -> Tensor:
    return torch.bincount(row * columns + column, minlength=rows * columns).view(rows, columns).double()


def _alike(share: Tensor, tokens: float, ranks: int) -> Flow:
    """Every rank has so many tokens, each of which goes to each end with the probability `share`."""
    return Flow((share * tokens).expand(ranks, -1), (1 - (1 - share) ** tokens).expand(ranks, -1))


def _to_peers(to_node: Tensor, links: Links) -> Tensor:
    """`[ranks, ranks]` from `[ranks, nodes]`: what goes to a node goes to the rank of the same place in it."""
    place = torch.arange(links.ranks, device="cpu") % links.ranks_per_node
    peers = torch.arange(links.nodes, device="cpu") * links.ranks_per_node + place.unsqueeze(1)
    return to_node.new_zeros(links.ranks, links.ranks).scatter(1, peers, to_node)


def _passed_on(direct: Tensor, links: Links) -> Tensor:
    """`[ranks, ranks]`: what a rank passes on within its node of what all ranks of its place meant for that."""
    by_place = direct.reshape(links.nodes, links.ranks_per_node, links.ranks).sum(0)
    return _within_node(by_place.repeat(links.nodes, 1), links)


def _within_node(pairs: Tensor, links: Links) -> Tensor:
    node = torch.arange(links.ranks, device="cpu") // links.ranks_per_node
    return pairs * (node.unsqueeze(1) == node)


def _sure(rows: Tensor) -> Flow:
    return Flow(rows, (rows > 0).double())
