import math
import time
from collections import defaultdict
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kpt_core import InputError, UnknownNameError
from kpt_moe import ExpertChoiceRouter, Routing
from kpt_moe.placement import ExpertCost, LayerReport, Links, Placement, contiguous_placement, plan_placement, simulate
from kpt_moe.routing_trace import RoutingTrace

LINKS = Links(
    ranks=4, ranks_per_node=2, intra_bandwidth=100.0, inter_bandwidth=10.0, intra_latency=0.5, inter_latency=3.0
)
COST = ExpertCost(flops_per_row=6.0, flops_per_second=2.0, row_bytes=40.0, answer_bytes=20.0)
NO_LIMIT = {"intra_bandwidth": math.inf, "inter_bandwidth": math.inf, "intra_latency": 0.0, "inter_latency": 0.0}


def trace_of(index: list[list[int]], num_experts: int, **parts: torch.Tensor) -> RoutingTrace:
    chosen = torch.tensor(index)
    return RoutingTrace({"0": [Routing(chosen, torch.ones(chosen.shape), torch.empty(0, num_experts), **parts)]})


def naive(
    rows: list[tuple[int, int, list[int]]], placement: Placement, links: Links, cost: ExpertCost, chunks: int, two: bool
) -> dict[str, float]:
    """The same from the definitions: rows of (token, source rank, experts) one by one, ranks one by one."""
    holders = placement.slots_of_experts(0)
    node = lambda rank: rank // links.ranks_per_node  # noqa: E731
    stages = []
    total = {"intra_bytes": 0.0, "inter_bytes": 0.0, "dispatch": 0.0, "compute": 0.0, "combine": 0.0}
    ranks_rows = [0] * links.ranks
    own = defaultdict(list)
    for row in rows:
        own[row[1]].append(row)
    for chunk in range(chunks):
        levels: list[dict[tuple[int, int], int]] = [defaultdict(int), defaultdict(int)]
        by_slot = [0] * placement.slots
        for source, of_rank in own.items():
            n = len(of_rank)
            for token, _, chosen in of_rank[n * chunk // chunks : n * (chunk + 1) // chunks]:
                slots = [holders[e][token % len(holders[e])] for e in chosen if 0 <= e < placement.num_experts]
                for slot in slots:
                    by_slot[slot] += 1
                    ranks_rows[slot // placement.slots_per_rank] += 1
                ranks = {slot // placement.slots_per_rank for slot in slots}
                if not two:
                    for rank in ranks:
                        levels[0][source, rank] += 1
                    continue
                via = {node(rank): node(rank) * links.ranks_per_node + source % links.ranks_per_node for rank in ranks}
                for peer in via.values():
                    levels[0][source, peer] += 1
                for rank in ranks:
                    levels[1][via[node(rank)], rank] += 1
        seconds = []
        for level in levels:
            for row_bytes in (cost.row_bytes, cost.answer_bytes):
                spent = defaultdict(float)
                for (source, rank), count in level.items():
                    if source == rank:
                        continue
                    near = node(source) == node(rank)
                    beta = links.intra_bandwidth if near else links.inter_bandwidth
                    alpha = links.intra_latency if near else links.inter_latency
                    spent[source, near, "sends"] += alpha + count * row_bytes / beta
                    spent[rank, near, "receives"] += alpha + count * row_bytes / beta
                    total["intra_bytes" if near else "inter_bytes"] += count * row_bytes
                seconds.append(max(spent.values(), default=0.0))
        busy = [0.0] * links.ranks
        for slot, count in enumerate(by_slot):
            if count:
                products = count * cost.flops_per_row / cost.flops_per_second
                busy[slot // placement.slots_per_rank] += max(products, cost.weight_bytes / cost.memory_bandwidth)
        out, back, inner_out, inner_back = seconds
        stages.append((out, inner_out + max(busy) + inner_back, back))
        total["dispatch"] += out + inner_out
        total["compute"] += max(busy)
        total["combine"] += back + inner_back
    total["imbalance"] = max(ranks_rows) * links.ranks / max(sum(ranks_rows), 1)
    # One thing at a time on the network, in the order D0 D1 R0 D2 R1 ... and each after what it needs.
    free = done = 0.0
    arrived = [0.0] * chunks
    computed = [0.0] * chunks
    for kind, i in [("D", 0)] + [(k, i + (k == "D")) for i in range(chunks) for k in "DR"]:
        if kind == "D" and i < chunks:
            # Sent when the part before begins to be computed.
            begin = max(arrived[i - 1], computed[i - 2] if i > 1 else 0.0) if i else 0.0
            free = arrived[i] = max(free, begin) + stages[i][0]
        elif kind == "R":
            computed[i] = max(arrived[i], computed[i - 1] if i else 0.0) + stages[i][1]
            free = done = max(free, computed[i]) + stages[i][2]
    return {**total, "seconds": done}


def told(report: LayerReport) -> dict[str, float]:
    names = ("intra_bytes", "inter_bytes", "dispatch", "compute", "combine", "imbalance", "seconds")
    return {name: getattr(report, name) for name in names}


def test_a_case_computed_by_hand() -> None:
    # Two tokens on each of four ranks, an expert on each. Rank 0: token 0 to ranks 0 and 1, token 1 to ranks 1 and 2.
    # Rank 1: both to rank 0 only. Rank 2: one to 3. Rank 3: both to 0 and to 3.
    index = [[0, 1], [1, 2], [0, 4], [0, ~3], [3, 4], [4, 4], [0, 3], [3, 0]]
    (layer,) = simulate(trace_of(index, 4), contiguous_placement(torch.ones(1, 4), 4), LINKS, COST).layers
    # Rank 3 sends two rows to rank 0 between nodes: 3 s + 80 / 10. Answers take 3 s + 40 / 10.
    assert layer.dispatch == 11
    assert layer.combine == 7
    # Rank 0 computes five of eleven rows at three seconds.
    assert layer.compute == 15
    assert layer.seconds == 33
    assert layer.imbalance == 5 / (11 / 4)
    # Near: two rows from 0 to 1, two from 1 to 0, one from 2 to 3. Far: one from 0 to 2, two from 3 to 0.
    assert layer.intra_bytes == 5 * 60
    assert layer.inter_bytes == 3 * 60


def test_two_levels_send_a_row_to_a_node_once() -> None:
    # Rank 0 has the only token that wants anything, of both ranks of the other node.
    index = [[2, 3], [4, 4], [4, 4], [4, 4]]
    placement = contiguous_placement(torch.ones(1, 4), 4)
    (flat,) = simulate(trace_of(index, 4), placement, LINKS, COST).layers
    (two,) = simulate(trace_of(index, 4), placement, LINKS, COST, hierarchical=True).layers
    assert (flat.inter_bytes, flat.intra_bytes) == (120, 0)
    assert (two.inter_bytes, two.intra_bytes) == (60, 60)
    assert flat.dispatch == 2 * (3 + 4)
    assert two.dispatch == (3 + 4) + (0.5 + 0.4)


def test_chunks_hide_what_can_be_hidden() -> None:
    # Two rows from rank 0 to rank 2, nothing else: 7 s there, 3 s of compute and 5 s back for each.
    index = [[2], [2], [4], [4], [4], [4], [4], [4]]
    placement = contiguous_placement(torch.ones(1, 4), 4)
    (layer,) = simulate(trace_of(index, 4), placement, LINKS, COST, chunks=2).layers
    # 0 to 7 sends, 7 to 14 sends while 7 to 10 computes, 14 to 19 answers while 14 to 17 computes, 19 to 24 answers.
    assert (layer.dispatch, layer.compute, layer.combine, layer.seconds) == (14, 6, 10, 24)


@given(
    index=st.lists(st.lists(st.integers(-6, 7), min_size=2, max_size=2), min_size=1, max_size=20),
    slots=st.permutations([0, 1, 2, 3, 4, 5, 0, 3, 3, 1, -1, -1]),
    chunks=st.integers(1, 4),
    two=st.booleans(),
    weight_bytes=st.sampled_from([0.0, 30.0]),
)
def test_a_trace_is_counted_as_it_would_be_sent(
    index: list[list[int]], slots: list[int], chunks: int, two: bool, weight_bytes: float
) -> None:
    placement = Placement(("0",), 4, torch.tensor([slots]), torch.ones(1, 6).double())
    cost = replace(COST, weight_bytes=weight_bytes, memory_bandwidth=4.0)
    bounds = [len(index) * rank // 4 for rank in range(5)]
    rows = [(t, rank, index[t]) for rank in range(4) for t in range(bounds[rank], bounds[rank + 1])]
    (layer,) = simulate(trace_of(index, 6), placement, LINKS, cost, chunks=chunks, hierarchical=two).layers
    expected = naive(rows, placement, LINKS, cost, chunks, two)
    if not any(0 <= e < 6 for row in index for e in row):
        expected["imbalance"] = 1.0
    assert told(layer) == pytest.approx(expected, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("two", [False, True])
def test_rows_of_experts_that_choose_come_from_their_tokens_rank(two: bool) -> None:
    routing = ExpertChoiceRouter(8, 4, 2)(torch.randn(10, 8)).detach()
    assert routing.token is not None
    placement = Placement(("0",), 4, torch.tensor([[0, 1, 2, 3, 0, -1, 1, -1]]), torch.ones(1, 4).double())
    (layer,) = simulate(RoutingTrace({"0": [routing]}), placement, LINKS, COST, chunks=2, hierarchical=two).layers
    source = {t: rank for rank in range(4) for t in range(10 * rank // 4, 10 * (rank + 1) // 4)}
    pairs = zip(routing.token.tolist(), routing.index.tolist(), strict=True)
    rows = [(token, source[token], chosen) for token, chosen in pairs]
    assert told(layer) == pytest.approx(naive(rows, placement, LINKS, COST, 2, two), rel=1e-12)


def test_calls_are_summed_and_layers_apart() -> None:
    one = trace_of([[0, 1], [1, 2], [3, 0], [0, 2]], 4).calls["0"][0]
    other = trace_of([[3, 3], [3, 2], [3, 0], [3, 2]], 4).calls["0"][0]
    placement = contiguous_placement(torch.ones(3, 4), 4, ["a", "b", "idle"])
    report = simulate(RoutingTrace({"b": [one, other], "a": [one], "idle": []}), placement, LINKS, COST)
    both, first = report.layers
    (second,) = simulate(RoutingTrace({"a": [other]}), placement, LINKS, COST).layers
    assert (both.name, both.calls, first.name, first.calls) == ("b", 2, "a", 1)
    for name in ("seconds", "dispatch", "compute", "combine", "intra_bytes", "inter_bytes"):
        assert getattr(both, name) == pytest.approx(getattr(first, name) + getattr(second, name))
    assert report.seconds == pytest.approx(both.seconds + first.seconds)
    assert both.imbalance == pytest.approx((first.imbalance + second.imbalance) / 2)


@pytest.mark.parametrize("two", [False, True])
@pytest.mark.parametrize("chunks", [1, 2])
def test_expected_rows_are_the_mean_of_many_traces(two: bool, chunks: int) -> None:
    placement = Placement(("0",), 4, torch.tensor([[0, 1, 2, 3, 4, 5, 0, -1]]), torch.ones(1, 6).double())
    share = torch.tensor([0.9, 0.5, 0.3, 0.2, 0.1, 0.6], dtype=torch.float64)
    tokens, links = 40_000, replace(LINKS, intra_latency=0.0, inter_latency=0.0)
    chosen = torch.rand(tokens, 6, dtype=torch.float64) < share
    trace = trace_of(torch.where(chosen, torch.arange(6), 6).tolist(), 6)
    (drawn,) = simulate(trace, placement, links, COST, chunks=chunks, hierarchical=two).layers
    loads = (share * tokens).unsqueeze(0)
    (mean,) = simulate(loads, placement, links, COST, tokens=tokens, chunks=chunks, hierarchical=two).layers
    assert told(drawn) == pytest.approx(told(mean), rel=0.03)


@pytest.mark.parametrize("two", [False, True])
def test_expected_messages_are_the_mean_of_many_small_traces(two: bool) -> None:
    # One token for each rank; only the first has a message to pay, so that the greatest over ranks is one rank's.
    placement = contiguous_placement(torch.ones(1, 8), 8)
    links = Links(ranks=8, ranks_per_node=4, **{**NO_LIMIT, "intra_latency": 1.0})
    loads = torch.tensor([[3.0, 0, 0, 0, 0, 0, 0, 0]])
    (mean,) = simulate(loads, placement, links, COST, tokens=8, hierarchical=two).layers
    # Rank 0 hears of its three neighbours with a chance of 3/8 each; passing on, each speaks for two tokens.
    assert mean.dispatch == pytest.approx(3 * (1 - (5 / 8) ** (2 if two else 1)))


@pytest.mark.parametrize("two", [False, True])
@given(extra=st.lists(st.floats(0, 1), min_size=2, max_size=2), hot=st.integers(0, 7), chunks=st.integers(1, 3))
def test_more_imbalance_is_never_faster(two: bool, extra: list[float], hot: int, chunks: int) -> None:
    seconds = []
    for part in sorted(extra):
        # 64 tokens with two choices: from equal parts to all tokens choosing one expert.
        other = (128 - (16 + part * 48)) / 7
        loads = torch.full((1, 8), other, dtype=torch.float64)
        loads[0, hot] = 16 + part * 48
        placement = contiguous_placement(loads, 4)
        links = replace(LINKS, inter_latency=0.0, intra_latency=0.0)
        seconds.append(simulate(loads, placement, links, COST, tokens=64, chunks=chunks, hierarchical=two).seconds)
    assert seconds[0] <= seconds[1] * (1 + 1e-9)


@pytest.mark.parametrize("two", [False, True])
@pytest.mark.parametrize("chunks", [1, 3])
def test_without_limits_of_links_only_the_most_loaded_rank_counts(two: bool, chunks: int) -> None:
    loads = torch.tensor([[9.0, 3.0, 1.0, 1.0, 7.0, 0.0, 0.0, 2.0]])
    placement = contiguous_placement(loads, 4)
    links = replace(LINKS, **NO_LIMIT)
    report = simulate(loads, placement, links, COST, tokens=20, chunks=chunks, hierarchical=two)
    assert report.seconds == pytest.approx(12 * 3)
    assert report.layers[0].imbalance == pytest.approx(12 / (23 / 4))


@pytest.mark.parametrize("two", [False, True])
def test_one_rank_sends_nothing(two: bool) -> None:
    links = replace(LINKS, ranks=1, ranks_per_node=1)
    placement = contiguous_placement(torch.ones(1, 4), 1)
    for load, tokens in ((trace_of([[0, 1], [2, 3]], 4), None), (torch.ones(1, 4), 2)):
        (layer,) = simulate(load, placement, links, COST, tokens=tokens, hierarchical=two).layers
        nothing = dict.fromkeys(("intra_bytes", "inter_bytes", "dispatch", "combine"), 0)
        assert told(layer) == {**nothing, "compute": 12, "seconds": 12, "imbalance": 1}


@given(loads=st.lists(st.integers(0, 32), min_size=8, max_size=8), chunks=st.integers(2, 5))
def test_chunks_never_cost_time_where_messages_and_weights_are_free(loads: list[float], chunks: int) -> None:
    links = replace(LINKS, intra_latency=0.0, inter_latency=0.0)
    load = torch.tensor([loads])
    placement = contiguous_placement(load, 4)
    (whole,) = simulate(load, placement, links, COST, tokens=32).layers
    (parts,) = simulate(load, placement, links, COST, tokens=32, chunks=chunks).layers
    assert parts.seconds <= whole.seconds * (1 + 1e-9)
    assert parts.seconds >= max(whole.compute, whole.dispatch + whole.combine) * (1 - 1e-9)


def test_chunks_read_weights_again() -> None:
    cost = replace(COST, weight_bytes=40.0, memory_bandwidth=1.0)
    links = replace(LINKS, **NO_LIMIT)
    load = torch.full((1, 4), 8)
    placement = contiguous_placement(load, 4)
    assert simulate(load, placement, links, cost, tokens=8).seconds == 40
    assert simulate(load, placement, links, cost, tokens=8, chunks=2).seconds == 80


def test_a_plan_is_predicted_to_be_faster() -> None:
    loads = torch.tensor([[60, 50, 1, 1, 1, 1, 1, 13]])
    planned = plan_placement(loads, 4, replicas=4)
    before = simulate(loads, contiguous_placement(loads, 4), LINKS, COST, tokens=64)
    after = simulate(loads, planned, LINKS, COST, tokens=64)
    assert after.seconds < 0.6 * before.seconds


@pytest.mark.parametrize("chunks", [1, 4])
def test_a_thousand_ranks_take_seconds(chunks: int) -> None:
    tokens, top_k, num_experts, ranks = 32_768, 8, 256, 1024
    index = torch.multinomial(torch.rand(num_experts).square().expand(tokens, -1), top_k)
    trace = RoutingTrace({"layer": [Routing(index, torch.ones(index.shape), torch.empty(0, num_experts))]})
    links = Links(ranks=ranks, ranks_per_node=8, intra_bandwidth=3e11, inter_bandwidth=4e10)
    cost = ExpertCost.feed_forward(7168, 2048, top_k=top_k, flops_per_second=4e14)
    begin = time.perf_counter()
    planned = plan_placement(trace.loads(), ranks, replicas=ranks - num_experts)
    (layer,) = simulate(trace, planned, links, cost, chunks=chunks, hierarchical=True).layers
    assert time.perf_counter() - begin < 20
    (before,) = simulate(
        trace, contiguous_placement(planned.loads, ranks, ["layer"]), links, cost, chunks=chunks
    ).layers
    assert layer.imbalance < before.imbalance / 2
    assert layer.compute < before.compute


def test_costs_of_a_feed_forward_expert() -> None:
    cost = ExpertCost.feed_forward(16, 8, top_k=2, flops_per_second=1.0)
    assert cost == ExpertCost(
        flops_per_row=768, flops_per_second=1, row_bytes=32 + 24, answer_bytes=32, weight_bytes=768
    )
    plain = ExpertCost.feed_forward(16, 8, top_k=2, flops_per_second=1.0, gated=False, bytes_per_element=4)
    assert (plain.flops_per_row, plain.weight_bytes, plain.row_bytes) == (512, 1024, 64 + 24)


@pytest.mark.parametrize(
    ("kind", "change", "says"),
    [
        (Links, {"ranks": 0}, "ranks must be a positive integer"),
        (Links, {"ranks_per_node": 3}, "must divide ranks"),
        (Links, {"ranks_per_node": 8}, "must not exceed"),
        (Links, {"intra_bandwidth": 0.0}, "intra_bandwidth must be above 0"),
        (Links, {"inter_bandwidth": math.nan}, "inter_bandwidth must be above 0"),
        (Links, {"inter_latency": -1.0}, "inter_latency must be finite"),
        (ExpertCost, {"flops_per_second": -1.0}, "flops_per_second must be above 0"),
        (ExpertCost, {"memory_bandwidth": 0.0}, "memory_bandwidth must be above 0"),
        (ExpertCost, {"row_bytes": math.inf}, "row_bytes must be finite"),
    ],
)
def test_impossible_clusters_are_told(kind: type, change: dict[str, float], says: str) -> None:
    with pytest.raises(InputError, match=f"{kind.__name__}: {says}|{kind.__name__}: .*{says}"):
        replace(LINKS if kind is Links else COST, **change)


def test_what_does_not_fit_is_told() -> None:
    load = torch.ones(1, 4)
    placement, trace = contiguous_placement(load, 4), trace_of([[0], [1]], 4)
    with pytest.raises(InputError, match="for 4 ranks, the links for 2"):
        simulate(load, placement, replace(LINKS, ranks=2), COST, tokens=4)
    with pytest.raises(InputError, match="give tokens"):
        simulate(load, placement, LINKS, COST)
    with pytest.raises(InputError, match="leave tokens out"):
        simulate(trace, placement, LINKS, COST, tokens=2)
    with pytest.raises(InputError, match=r"loads must be \[1, 4\]"):
        simulate(torch.ones(2, 4), placement, LINKS, COST, tokens=4)
    with pytest.raises(InputError, match="not negative"):
        simulate(-load, placement, LINKS, COST, tokens=4)
    with pytest.raises(InputError, match="5 rows of 4 tokens"):
        simulate(load * 5, placement, LINKS, COST, tokens=4)
    with pytest.raises(InputError, match="chunks must be"):
        simulate(load, placement, LINKS, COST, tokens=4, chunks=0)
    with pytest.raises(InputError, match="recorded with 6 experts"):
        simulate(trace_of([[0]], 6), placement, LINKS, COST)
    with pytest.raises(UnknownNameError, match="'other'"):
        simulate(RoutingTrace({"other": trace.calls["0"]}), placement, LINKS, COST)
