"""How long expert parallelism would take: a prediction from loads or a recorded routing, a placement and costs."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from kpt_core import InputError
from kpt_moe._checks import require_size
from kpt_moe.routing_trace import RoutingTrace

from .links import ExpertCost, Links
from .placement import Placement
from .traffic import Flow, Part, counted, expected


@dataclass(frozen=True, slots=True)
class LayerReport:
    """What is predicted for one layer, summed over its calls.

    Attributes:
        name: of the layer.
        calls: of the layer.
        seconds: from the first row's leaving to the last answer's arrival.
        dispatch: seconds in which rows travel; what compute hides is counted here too.
        compute: seconds in which the most loaded rank computes.
        combine: seconds in which answers travel.
        imbalance: the greatest over the mean load of the ranks, call by call, weighted by the calls' loads; 1 without
            load.
        intra_bytes: sent within nodes, both ways.
        inter_bytes: sent between nodes, both ways.
    """

    name: str
    calls: int
    seconds: float
    dispatch: float
    compute: float
    combine: float
    imbalance: float
    intra_bytes: float
    inter_bytes: float


@dataclass(frozen=True, slots=True)
class Report:
    """Predictions, layer by layer. They were not compared with any real cluster.

    Attributes:
        layers: one entry each.
    """

    layers: tuple[LayerReport, ...]

    @property
    def seconds(self) -> float:
        """Of all layers, one after the other."""
        return sum(layer.seconds for layer in self.layers)

    def as_json(self) -> dict[str, Any]:
        """As plain numbers."""
        return {"seconds": self.seconds, "layers": [asdict(layer) for layer in self.layers]}


def simulate(
    load: RoutingTrace | Tensor,
    placement: Placement,
    links: Links,
    cost: ExpertCost,
    *,
    tokens: int | None = None,
    chunks: int = 1,
    hierarchical: bool = False,
) -> Report:
    """Predict the forward pass of every layer's experts under a placement.

    A call is an exchange of rows, compute and an exchange of answers; each phase ends when its slowest rank does. With
    chunks, the next rows and the last answers travel while a chunk is computed, in the order in which
    `kpt_moe.parallel.dispatch` sends them. See `Links` and `ExpertCost` for the formulas and what they leave out.
    The predictions were not compared with any real cluster. It runs on the CPU.

    A trace gives exact counts: its tokens are split contiguously over the ranks, a row is sent once to every rank that
    holds any of its experts, and replicas take turns by token. Loads alone give expected counts, for tokens that choose
    every expert independently of the others.

    Args:
        load: a trace whose paths are layers of the placement; or `[layers, num_experts]` rows per expert, one call of
            each layer.
        placement: of the experts.
        links: of as many ranks.
        cost: of an expert.
        tokens: that the loads are of, on all ranks; for loads only.
        chunks: parts that a rank's rows are sent and computed in.
        hierarchical: send rows once to every node that needs them, and on from there within it.

    Raises:
        InputError: the arguments do not fit together.
        UnknownNameError: the trace has calls of a layer that the placement has not.
    """
    require_size("simulate", "chunks", chunks)
    if placement.ranks != links.ranks:
        raise InputError(f"simulate: the placement is for {placement.ranks} ranks, the links for {links.ranks}")
    placement, setting = placement.to("cpu"), (links, chunks, hierarchical)
    if isinstance(load, RoutingTrace):
        if tokens is not None:
            raise InputError("simulate: a trace knows its tokens; leave tokens out")
        return Report(
            tuple(
                _layer(name, (counted(routing, placement, name, *setting) for routing in routings), links, cost)
                for name, routings in load.to("cpu").calls.items()
                if routings
            )
        )
    if tokens is None:
        raise InputError("simulate: loads alone do not tell how many tokens they are of; give tokens")
    require_size("simulate", "tokens", tokens)
    rows = _checked(load, placement)
    return Report(
        tuple(
            _layer(name, [expected(row, tokens, placement, name, *setting)], links, cost)
            for name, row in zip(placement.layers, rows, strict=True)
        )
    )


def _checked(load: Tensor, placement: Placement) -> Tensor:
    """Float64 on the CPU."""
    shape = [len(placement.layers), placement.num_experts]
    if list(load.shape) != shape:
        raise InputError(f"simulate: loads must be {shape}, as the placement; got {list(load.shape)}")
    load = load.detach().to("cpu", torch.float64)
    if not bool(((load >= 0) & load.isfinite()).all()):
        raise InputError("simulate: loads must be finite and not negative")
    return load


@dataclass(frozen=True, slots=True)
class _Times:
    """Seconds of one part: of rows and answers on the outermost level, of those within nodes, of compute."""

    dispatch: float
    combine: float
    inner_dispatch: float
    inner_combine: float
    compute: float


def _layer(name: str, calls: Iterable[list[Part]], links: Links, cost: ExpertCost) -> LayerReport:
    seconds = dispatch = compute = combine = intra = inter = most = mean = 0.0
    count = 0
    for parts in calls:
        count += 1
        times = []
        for part in parts:
            carried = [_Carried.of(flow, links) for flow in part.flows]
            out = [c.seconds(cost.row_bytes, links) for c in carried]
            back = [c.seconds(cost.answer_bytes, links) for c in carried]
            times.append(_Times(out[0], back[0], sum(out[1:]), sum(back[1:]), _compute(part.slots, links, cost)))
            intra += sum(float(c.near[0].sum()) for c in carried) * (cost.row_bytes + cost.answer_bytes)
            inter += sum(float(c.far[0].sum()) for c in carried) * (cost.row_bytes + cost.answer_bytes)
        seconds += _pipelined(times)
        dispatch += sum(t.dispatch + t.inner_dispatch for t in times)
        compute += sum(t.compute for t in times)
        combine += sum(t.combine + t.inner_combine for t in times)
        loads = torch.stack([part.slots for part in parts]).sum(0).view(links.ranks, -1).sum(1)
        most, mean = most + float(loads.max()), mean + float(loads.mean())
    return LayerReport(name, count, seconds, dispatch, compute, combine, most / mean if mean else 1.0, intra, inter)


@dataclass(frozen=True, slots=True)
class _Carried:
    """Rows and messages `[2, ranks]` that each rank sends (0) and receives (1), within its node and to others."""

    near: Tensor
    far: Tensor
    near_messages: Tensor
    far_messages: Tensor

    @staticmethod
    def of(flow: Flow, links: Links) -> "_Carried":
        near, far = _by_class(flow.rows, links)
        near_messages, far_messages = _by_class(flow.messages, links)
        return _Carried(near, far, near_messages, far_messages)

    def seconds(self, row_bytes: float, links: Links) -> float:
        """Of the slowest rank; answers take the way back, where sending and receiving change places."""
        near = self.near * row_bytes / links.intra_bandwidth + self.near_messages * links.intra_latency
        far = self.far * row_bytes / links.inter_bandwidth + self.far_messages * links.inter_latency
        return float(torch.maximum(near, far).max())


def _by_class(pairs: Tensor, links: Links) -> tuple[Tensor, Tensor]:
    """`[2, ranks]` sums of `[ranks, ranks]` over what is within a node but not to oneself, and what is not."""
    pairs = pairs.clone()
    pairs.fill_diagonal_(0)
    blocks = pairs.view(links.nodes, links.ranks_per_node, links.nodes, links.ranks_per_node)
    within = blocks.diagonal(dim1=0, dim2=2)
    near = torch.stack([within.sum(dim).T.reshape(-1) for dim in (1, 0)])
    within.zero_()
    return near, torch.stack([pairs.sum(1), pairs.sum(0)])


def _compute(slots: Tensor, links: Links, cost: ExpertCost) -> float:
    """Of the slowest rank."""
    products = slots * (cost.flops_per_row / cost.flops_per_second)
    # An expected number of rows below one is about the probability that the weights are read at all.
    reading = slots.clamp(max=1) * (cost.weight_bytes / cost.memory_bandwidth)
    return float(torch.maximum(products, reading).view(links.ranks, -1).sum(1).max())


def _pipelined(times: Sequence[_Times]) -> float:
    """When the last answer is there: one exchange at a time, one part computed at a time, in the order of dispatch."""
    network = times[0].dispatch
    arrived, computed = network, 0.0
    for i, part in enumerate(times):
        start = max(arrived, computed)
        if i + 1 < len(times):
            arrived = network = network + times[i + 1].dispatch
        computed = start + part.inner_dispatch + part.compute + part.inner_combine
        network = max(network, computed) + part.combine
    return network
