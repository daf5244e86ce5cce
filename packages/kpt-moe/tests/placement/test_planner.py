import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kpt_core import InputError
from kpt_moe import Routing
from kpt_moe.placement import plan_placement
from kpt_moe.placement.planner import _pack
from kpt_moe.routing_trace import RoutingTrace


def least_greatest(loads: list[float], ranks: int, slots: int) -> float:
    """The optimum without replicas, by trying everything."""
    loads, best = sorted(loads, reverse=True), float("inf")
    total, held = [0.0] * ranks, [0] * ranks

    def put(item: int) -> None:
        nonlocal best
        if max(total) >= best:
            return
        if item == len(loads):
            best = max(total)
            return
        for rank in range(ranks):
            if held[rank] < slots:
                before = total[rank]
                total[rank], held[rank] = before + loads[item], held[rank] + 1
                put(item + 1)
                total[rank], held[rank] = before, held[rank] - 1

    put(0)
    return best


loads_of = st.lists(st.one_of(st.integers(0, 20), st.sampled_from([0, 1, 100])), min_size=1, max_size=12)


@given(loads=st.lists(st.integers(0, 30), min_size=1, max_size=8), ranks=st.integers(1, 4), room=st.integers(0, 1))
def test_the_greatest_load_is_near_the_least_possible(loads: list[float], ranks: int, room: int) -> None:
    slots = -(-len(loads) // ranks) + room
    planned = plan_placement(torch.tensor([loads]), ranks, slots_per_rank=slots)
    assert float(planned.rank_loads().max()) <= 4 / 3 * least_greatest(loads, ranks, slots) + 1e-9


@given(loads=loads_of, ranks=st.integers(1, 5), replicas=st.integers(0, 12), room=st.integers(0, 2))
def test_what_holds_for_every_plan(loads: list[float], ranks: int, replicas: int, room: int) -> None:
    slots = -(-(len(loads) + replicas) // ranks) + room
    planned = plan_placement(torch.tensor([loads]), ranks, slots_per_rank=slots, replicas=replicas)
    by_rank = planned.expert_of_slot.view(ranks, slots).tolist()
    placed = [expert for held in by_rank for expert in held if expert >= 0]
    assert set(placed) == set(range(len(loads)))
    assert len(placed) <= len(loads) + replicas
    for held in by_rank:
        experts = [expert for expert in held if expert >= 0]
        assert len(set(experts)) == len(experts)
        assert held == sorted(experts) + [-1] * (slots - len(experts))
    assert planned.imbalance()[0] <= planned.imbalance_before()[0] * (1 + 1e-9)


@given(loads=st.lists(st.integers(0, 50), min_size=12, max_size=12), replicas=st.integers(0, 6))
def test_groups_stay_in_their_node(loads: list[float], replicas: int) -> None:
    planned = plan_placement(torch.tensor([loads]), 4, replicas=replicas, nodes=2, groups=4)
    nodes = planned.expert_of_slot.view(2, -1).tolist()
    for group in range(4):
        homes = [node for node, held in enumerate(nodes) if {3 * group, 3 * group + 1, 3 * group + 2} & set(held)]
        assert len(homes) == 1
    assert [len({expert // 3 for expert in held if expert >= 0}) for held in nodes] == [2, 2]
    assert planned.imbalance()[0] <= planned.imbalance_before()[0] * (1 + 1e-9)


def test_a_hot_expert_is_split_until_ranks_are_equal() -> None:
    planned = plan_placement(torch.tensor([[90, 10, 10, 10]]), 4, replicas=4)
    assert planned.copies[0, 0] == 4
    assert planned.imbalance()[0] <= 32.5 / 30
    assert planned.imbalance_before() == (3.0,)


def test_replicas_that_do_not_help_are_not_made() -> None:
    # One more copy of either would put one and a half on a rank.
    planned = plan_placement(torch.tensor([[1, 1]]), 2, replicas=1)
    assert planned.expert_of_slot.tolist() == [[0, -1, 1, -1]]
    assert plan_placement(torch.zeros(1, 3), 3, replicas=3).copies.tolist() == [[1, 1, 1]]


def test_copies_that_would_meet_on_a_rank_make_others_move() -> None:
    # The second rank is full with three light ones when the last comes, whose copies the first would have both.
    placed = _pack(torch.tensor([10.0, 1, 1, 1, 0.5]), torch.tensor([1, 1, 1, 1, 2]), 2, 3)
    assert placed.sort(1).values.tolist() == [[0, 1, 4], [2, 3, 4]]


def test_swaps_mend_what_packing_by_falling_load_spoils() -> None:
    # Packing gives 3 + 2 + 2 and 3 + 2.
    assert plan_placement(torch.tensor([[3, 3, 2, 2, 2]]), 2).imbalance() == (1.0,)


def test_a_good_order_is_kept() -> None:
    # Packing gives 5 + 2 to one rank, and no single swap mends it.
    assert plan_placement(torch.tensor([[5, 1, 0, 3, 3, 0, 2, 2, 2]]), 3).imbalance() == (1.0,)


def test_layers_are_planned_apart_and_calls_are_summed() -> None:
    first, second = torch.tensor([[9, 0, 1, 0], [0, 9, 0, 1]]), torch.tensor([[1, 5, 5, 1]])
    planned = plan_placement({"a": first, "b": second}, 2)
    assert planned.layers == ("a", "b")
    assert planned.loads.tolist() == [[9, 9, 1, 1], [1, 5, 5, 1]]
    assert planned.rank_loads().tolist() == [[10, 10], [6, 6]]
    alone = plan_placement(second, 2)
    assert torch.equal(alone.expert_of_slot[0], planned.expert_of_slot[1])
    assert alone.layers == ("0",)


def test_a_trace_tells_its_loads() -> None:
    index = torch.tensor([[0], [0], [1], [2], [3], [~3]])
    trace = RoutingTrace({"layer": [Routing(index, torch.ones(6, 1), torch.empty(0, 4))], "silent": []})
    planned = plan_placement(trace.loads(), 2, replicas=2)
    assert planned.layers == ("layer",)
    assert planned.loads.tolist() == [[2, 1, 1, 1]]
    assert planned.imbalance() == (1.0,)


def test_more_slots_give_more_freedom() -> None:
    loads = torch.tensor([[9, 1, 1, 1, 1, 1]])
    assert plan_placement(loads, 2).imbalance() == (11 / 7,)
    assert plan_placement(loads, 2, slots_per_rank=5).imbalance() == (9 / 7,)


def test_a_plan_for_many_ranks_is_near_equal() -> None:
    loads = torch.distributions.LogNormal(0.0, 1.0).sample((2, 256))
    planned = plan_placement(loads, 64, replicas=64)
    assert max(planned.imbalance()) < 1.02 < min(planned.imbalance_before())


@pytest.mark.parametrize(
    ("loads", "options", "says"),
    [
        (torch.ones(1, 4), {"slots_per_rank": 1}, "raise slots_per_rank"),
        (torch.ones(1, 4), {"replicas": 3, "slots_per_rank": 3}, "fewer replicas"),
        (torch.ones(1, 4), {"replicas": -1}, "replicas must be"),
        (torch.ones(1, 4), {"ranks": 0}, "ranks must be a positive integer"),
        (torch.ones(1, 4), {"nodes": 3}, "3 nodes must divide"),
        (torch.ones(1, 4), {"groups": 3}, "3 groups must divide"),
        (torch.ones(4), {}, "as many experts in every layer"),
        (torch.ones(0, 4), {}, "as many experts in every layer"),
        ({"a": torch.ones(1, 4), "b": torch.ones(1, 6)}, {}, "plan layers that differ apart"),
        (torch.tensor([[1.0, -1.0]]), {}, "not negative"),
        (torch.tensor([[1.0, float("nan")]]), {}, "finite"),
    ],
)
def test_what_does_not_fit_is_told(loads: torch.Tensor, options: dict[str, int], says: str) -> None:
    with pytest.raises(InputError, match=says):
        plan_placement(loads, **{"ranks": 2, **options})
