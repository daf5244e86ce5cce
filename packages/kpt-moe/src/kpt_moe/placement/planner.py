"""Where to put experts, and which to replicate, so that the ranks have equal work."""

import heapq
from collections.abc import Mapping

import torch
from torch import Tensor

from kpt_core import InputError
from kpt_moe._checks import require_size

from .placement import Placement


def plan_placement(
    loads: Tensor | Mapping[str, Tensor],
    ranks: int,
    *,
    slots_per_rank: int | None = None,
    replicas: int = 0,
    nodes: int = 1,
    groups: int | None = None,
) -> Placement:
    """Give experts to ranks so that the greatest load of a rank is small, layer by layer.

    Each further replica goes to the expert with the greatest load per copy. Then experts are packed by falling load,
    each onto the least loaded ranks with free slots (longest processing time first: Graham, SIAM J. Appl. Math. 17,
    1969), and moves and swaps with the most loaded rank follow while they help. The result is a heuristic's, not proven
    least; it is never worse than experts in their order (for `nodes` above 1: where that order keeps groups in nodes).

    With several nodes, groups of experts are first packed into nodes, as many in each; replicas and ranks are then
    chosen within each node. That is the hierarchical policy of DeepSeek's EPLB (arXiv:2412.19437, section 3.4), for
    routers that limit a token to few groups.

    The plan is as good as tomorrow's loads are like these. It counts rows: where experts have so few that reading their
    weights takes longer (generation), replicas can cost time, which `simulate` tells. It runs on the CPU.

    Args:
        loads: `[layers, num_experts]` rows per expert, or `[calls, num_experts]` by layer, summed over the calls, as
            `RoutingTrace.loads()` gives them.
        ranks: that share the experts.
        slots_per_rank: experts that a rank has memory for; None takes as few as all experts and replicas need.
        replicas: copies beyond the first, at most so many in a layer. Fewer are made where more do not help; slots that
            are left stay empty.
        nodes: that the ranks are on; 1 leaves nodes out of account.
        groups: runs of experts that stay in one node, a multiple of `nodes`; None lets each expert go by itself.

    Raises:
        InputError: sizes do not fit together, or loads are negative, not finite, or of layers that differ in experts.
    """
    names, table = _table(loads)
    num_experts = table.shape[1]
    for name, size in (("ranks", ranks), ("nodes", nodes)):
        require_size("plan_placement", name, size)
    if replicas < 0:
        raise InputError(f"plan_placement: replicas must be an integer of 0 or more; got {replicas!r}")
    if slots_per_rank is None:
        slots_per_rank = -(-(num_experts + replicas) // ranks)
    require_size("plan_placement", "slots_per_rank", slots_per_rank)
    if num_experts + replicas > ranks * slots_per_rank:
        raise InputError(
            f"plan_placement: {num_experts} experts and {replicas} replicas need more than {slots_per_rank} slots on "
            f"each of {ranks} ranks; raise slots_per_rank or ask for fewer replicas"
        )
    groups = num_experts if groups is None else groups
    require_size("plan_placement", "groups", groups, num_experts, "the number of experts")
    if num_experts % groups or groups % nodes or ranks % nodes:
        raise InputError(
            f"plan_placement: {groups} groups must divide {num_experts} experts, and {nodes} nodes must divide both "
            f"the groups and {ranks} ranks"
        )
    planned = [_plan_layer(row, ranks, slots_per_rank, replicas, nodes, groups) for row in table]
    return Placement(names, ranks, torch.stack(planned), table)


def _table(loads: Tensor | Mapping[str, Tensor]) -> tuple[tuple[str, ...], Tensor]:
    """Names of layers and `[layers, num_experts]` float64 on the CPU."""
    if isinstance(loads, Tensor):
        rows, names = list(loads) if loads.dim() == 2 else [], tuple(map(str, range(len(loads))))
    else:
        rows, names = [calls.sum(0) for calls in loads.values() if calls.dim() == 2], tuple(loads)
    if not rows or len(rows) != len(names) or len({row.shape for row in rows}) != 1 or not len(rows[0]):
        raise InputError(
            "plan_placement: loads must be [layers, num_experts], or [calls, num_experts] by layer, with as many "
            "experts in every layer; plan layers that differ apart"
        )
    table = torch.stack([row.detach().to("cpu", torch.float64) for row in rows])
    if not bool(((table >= 0) & table.isfinite()).all()):
        raise InputError("plan_placement: loads must be finite and not negative")
    return names, table


def _plan_layer(loads: Tensor, ranks: int, capacity: int, replicas: int, nodes: int, groups: int) -> Tensor:
    """`[slots]`: the expert of each slot."""
    if nodes == 1:
        return _sorted(_best(loads, ranks, capacity, replicas))
    members = torch.arange(len(loads), device="cpu").view(groups, -1)
    packed = _best(loads[members].sum(1), nodes, groups // nodes, 0)
    ids = members[packed].reshape(nodes, -1)
    each, more = divmod(replicas, nodes)
    hottest = set(loads[ids].sum(1).argsort(descending=True)[:more].tolist())
    placed = []
    for node, experts in enumerate(ids.sort(1).values):
        local = _best(loads[experts], ranks // nodes, capacity, each + (node in hottest))
        placed.append(torch.where(local < 0, -1, experts[local.clamp(min=0)]))
    plan = torch.cat(placed)
    start = _contiguous(len(loads), ranks, capacity)
    home = torch.empty(len(loads), dtype=torch.int64, device="cpu")
    home[start[start >= 0]] = ((start >= 0).nonzero()[:, 0]) // (ranks // nodes)
    kept = bool((home[members] == home[members][:, :1]).all())
    one = torch.ones_like(members.view(-1))
    better = kept and _greatest(start, loads, one) < _greatest(plan, loads, _count(plan, len(loads)))
    return _sorted(start if better else plan)


def _best(loads: Tensor, bins: int, capacity: int, replicas: int) -> Tensor:
    """`[bins, capacity]` items, -1 in empty places: the best of several starts, then of fewer replicas."""
    one = torch.ones(len(loads), dtype=torch.int64, device="cpu")
    starts = [(_contiguous(len(loads), bins, capacity), one)]
    extra = {replicas >> shift for shift in range(replicas.bit_length() + 1)}
    for copies in (_copies(loads, count, bins) for count in sorted(extra)):
        starts.append((_pack(loads / copies, copies, bins, capacity), copies))
    plans = [(_improve(plan, loads / copies), copies) for plan, copies in starts]
    return min(plans, key=lambda plan: _greatest(plan[0], loads, plan[1]))[0]


def _copies(loads: Tensor, replicas: int, most: int) -> Tensor:
    """Copies of each item: every further one to the greatest load per copy, up to `most` of an item."""
    values = loads.tolist()
    copies = [1] * len(values)
    heap = [(-load, item) for item, load in enumerate(values)] if most > 1 else []
    heapq.heapify(heap)
    for _ in range(replicas):
        # A further copy of what is idle helps nobody.
        if not heap or not heap[0][0]:
            break
        item = heapq.heappop(heap)[1]
        copies[item] += 1
        if copies[item] < most:
            heapq.heappush(heap, (-values[item] / copies[item], item))
    return torch.tensor(copies, device="cpu")


def _contiguous(items: int, bins: int, capacity: int) -> Tensor:
    held = -(-items // bins)
    ids = torch.arange(held * bins, device="cpu").view(bins, held)
    placed = torch.full((bins, capacity), -1, device="cpu")
    placed[:, :held] = torch.where(ids < items, ids, -1)
    return placed


def _pack(weights: Tensor, copies: Tensor, bins: int, capacity: int) -> Tensor:
    """Items by falling weight, their copies into the lightest bins with room, no two into one."""
    weight, count = weights.tolist(), copies.tolist()
    held: list[list[int]] = [[] for _ in range(bins)]
    total = [0.0] * bins
    open_bins = [(0.0, b) for b in range(bins)]

    def put(item: int, b: int) -> None:
        held[b].append(item)
        total[b] += weight[item]
        if len(held[b]) < capacity:
            heapq.heappush(open_bins, (total[b], b))

    for item in sorted(range(len(weight)), key=lambda item: (-weight[item], item)):
        lightest = [heapq.heappop(open_bins)[1] for _ in range(min(count[item], len(open_bins)))]
        for b in lightest:
            put(item, b)
        for _ in range(count[item] - len(lightest)):
            # All bins with room have it. One of those takes something from a full bin, which has more kinds than it.
            room = heapq.heappop(open_bins)[1]
            full = min((b for b in range(bins) if item not in held[b]), key=total.__getitem__)
            moved = next(other for other in held[full] if other not in held[room])
            held[full].remove(moved)
            held[full].append(item)
            total[full] += weight[item] - weight[moved]
            put(moved, room)
    placed = torch.full((bins, capacity), -1, device="cpu")
    for b, items in enumerate(held):
        placed[b, : len(items)] = torch.tensor(items, dtype=torch.int64, device="cpu")
    return placed


def _improve(placed: Tensor, weights: Tensor) -> Tensor:
    """Swap with, or move from, the heaviest bin while both bins of a swap end up lighter than it was."""
    bins, capacity = placed.shape
    nothing = len(weights)
    items = torch.where(placed < 0, nothing, placed)
    weight = torch.cat((weights, weights.new_zeros(1)))
    held = torch.zeros(bins, nothing + 1, dtype=torch.bool, device="cpu").scatter_(1, items, True)
    held[:, nothing] = False
    bin_of = torch.arange(bins, device="cpu").repeat_interleave(capacity)
    # Each swap lowers the sum of squares, so that this ends; the limit is for its time.
    for _ in range(100 + 2 * bins):
        totals = weight[items].sum(1)
        heaviest = totals.argmax()
        mine, others = items[heaviest], items.view(-1)
        shift = weight[mine].unsqueeze(1) - weight[others]
        after = torch.maximum(totals[heaviest] - shift, totals[bin_of] + shift)
        twice = held.T[mine][:, bin_of] | held[heaviest][others]
        best = after.masked_fill_(twice, torch.inf).argmin()
        if after.view(-1)[best] >= totals[heaviest] * (1 - 1e-12):
            break
        here, there = best // len(others), best % len(others)
        given, taken, other = mine[here].clone(), others[there].clone(), bin_of[there]
        items[heaviest, here], items.view(-1)[there] = taken, given
        held[heaviest, given], held[other, given] = False, True
        held[other, taken], held[heaviest, taken] = False, True
        held[:, nothing] = False
    return torch.where(items == nothing, -1, items)


def _count(placed: Tensor, items: int) -> Tensor:
    return torch.bincount(placed[placed >= 0], minlength=items)


def _greatest(placed: Tensor, loads: Tensor, copies: Tensor) -> float:
    each = (loads / copies)[placed.clamp(min=0)] * (placed >= 0)
    return float(each.sum(1).max())


def _sorted(placed: Tensor) -> Tensor:
    """Flat, by expert within each rank, empty slots last."""
    last = torch.iinfo(torch.int64).max
    ordered = torch.where(placed < 0, last, placed).sort(1).values
    return torch.where(ordered == last, -1, ordered).view(-1)
