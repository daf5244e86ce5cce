import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kpt_core import InputError, UnknownNameError
from kpt_moe import Routing, experts
from kpt_moe.placement import Placement, contiguous_placement, plan_placement
from oracle import make_inputs

#: Expert 1 in three slots, expert 3 in two, one slot empty; the second layer in order.
SLOTS = [[1, 0, 1, 3, 1, 2, 3, -1], [0, 1, 2, 3, -1, -1, -1, -1]]


def placed() -> Placement:
    return Placement(
        ("a", "b"), 4, torch.tensor(SLOTS), torch.tensor([[2.0, 9.0, 4.0, 6.0], [1.0, 1.0, 1.0, 0.0]]).double()
    )


def test_what_it_says_of_each_layer() -> None:
    placement = placed()
    assert (placement.num_experts, placement.slots, placement.slots_per_rank) == (4, 8, 2)
    assert placement.slots_of_experts("a") == [[1], [0, 2, 4], [5], [3, 6]]
    assert placement.slots_of_experts(1) == [[0], [1], [2], [3]]
    assert placement.copies.tolist() == [[1, 3, 1, 2], [1, 1, 1, 1]]
    assert placement.rank_loads().tolist() == [[5, 6, 7, 3], [2, 1, 0, 0]]
    assert placement.imbalance() == (7 / 5.25, 2 / 0.75)
    assert placement.imbalance_before() == (9 / 5.25, 1 / 0.75)


def test_an_idle_layer_is_balanced() -> None:
    assert contiguous_placement(torch.zeros(1, 4), 2).imbalance() == (1.0,)


def test_experts_in_order_leave_the_last_ranks_slots_empty() -> None:
    placement = contiguous_placement(torch.ones(1, 5), 3, ["only"])
    assert placement.expert_of_slot.tolist() == [[0, 1, 2, 3, 4, -1]]
    assert placement.layers == ("only",)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_replicas_take_turns_and_ids_keep_their_meaning(dtype: torch.dtype) -> None:
    index = torch.tensor([[1, 3], [1, 0], [1, 3], [1, 4], [~1, ~0], [9, 2]], dtype=dtype)
    physical = placed().physical_index("a", index)
    assert physical.dtype is dtype
    assert physical.tolist() == [[0, 3], [2, 1], [4, 3], [0, 8], [~2, ~1], [8, 5]]
    later = placed().physical_index("a", index[:2], token=torch.tensor([4, 5]))
    assert later.tolist() == [[2, 3], [4, 1]]


def test_replicas_get_equal_parts_of_consecutive_tokens() -> None:
    physical = placed().physical_index(0, torch.full((31, 1), 1))
    assert torch.bincount(physical.flatten()).tolist() == [11, 0, 10, 0, 10]


def test_no_rows_are_no_slots() -> None:
    assert placed().physical_index(0, torch.empty(0, 3, dtype=torch.int64)).shape == (0, 3)


def test_refused_choices_still_count_as_asked() -> None:
    routing = Routing(torch.tensor([[1, ~3]]), torch.tensor([[1.0, 0.0]]), torch.empty(0, 4))
    index = placed().physical_index("a", routing.index)
    physical = Routing(index, routing.weights, torch.empty(0, 8))
    assert physical.asked().tolist() == [[0, 3]]
    assert int(physical.dropped()) == 1
    assert physical.tokens_per_expert().sum() == 1


def test_it_compiles_without_reading_values() -> None:
    placement, index = placed(), torch.randint(-5, 6, (7, 2))

    def physical(index: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return placement.physical_index(0, index), placement.permute_weights(0, weight)

    weight = torch.randn(4, 3)
    compiled = torch.compile(physical, backend="aot_eager", fullgraph=True)(index, weight)
    for got, expected in zip(compiled, physical(index, weight), strict=True):
        assert torch.equal(got, expected)


def test_tables_move_and_ids_elsewhere_are_refused() -> None:
    with torch.device("meta"):
        index = torch.zeros(2, 2, dtype=torch.int64)
    with pytest.raises(InputError, match=r"placement\.to\(device\)"):
        placed().physical_index(0, index)
    # What is on the host stays there whatever the default device is.
    with torch.device("meta"):
        assert plan_placement(torch.ones(1, 4, device="cpu"), 2).expert_of_slot.device.type == "cpu"


def test_weights_follow_their_experts_and_empty_slots_are_zero() -> None:
    weight = torch.arange(1.0, 9.0).view(4, 2)
    permuted = placed().permute_weights("a", weight)
    assert torch.equal(permuted[:7], weight[torch.tensor(SLOTS[0][:7])])
    assert torch.equal(permuted[7], torch.zeros(2))


@given(
    index=st.lists(st.lists(st.integers(-5, 6), min_size=2, max_size=2), max_size=12),
    slots=st.permutations([0, 1, 2, 3, 0, 1, 1, -1]),
)
def test_each_choice_goes_to_a_slot_of_its_expert(index: list[list[int]], slots: list[int]) -> None:
    placement = Placement(("x",), 4, torch.tensor([slots]), torch.ones(1, 4).double())
    physical = placement.physical_index("x", torch.tensor(index, dtype=torch.int64).view(-1, 2)).tolist()
    for row, chosen in zip(physical, index, strict=True):
        for slot, expert in zip(row, chosen, strict=True):
            assert (slot < 0) == (expert < 0)
            slot, expert = (~slot, ~expert) if expert < 0 else (slot, expert)
            assert slots[slot] == expert if expert < 4 else slot == 8


@pytest.mark.parametrize("sentinels", [False, True])
def test_a_placed_layer_computes_what_the_original_does(path: str, sentinels: bool) -> None:
    given = make_inputs(tokens=40, num_experts=4, top_k=2, bias=True, sentinels=sentinels)
    tensors = [given.x, given.weights, given.up, given.down, given.up_bias, given.down_bias]
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    x, weights, *parameters = leaves
    expected = experts(x, given.index, weights, *parameters)
    weight = torch.randn_like(expected)
    gradients = torch.autograd.grad(expected, leaves, weight)

    placement = placed()
    physical = placement.physical_index("a", given.index)
    replicated = [placement.permute_weights("a", parameter) for parameter in parameters]
    out = experts(x, physical, weights, *replicated)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.autograd.grad(out, leaves, weight), gradients, rtol=1e-11, atol=1e-11)

    own = [parameter.detach().requires_grad_() for parameter in replicated]
    out = experts(x, physical, weights, *own)
    for gradient, whole in zip(torch.autograd.grad(out, own, weight), gradients[2:], strict=True):
        torch.testing.assert_close(placement.sum_replicas("a", gradient), whole, rtol=1e-11, atol=1e-11)


def test_a_file_gives_the_placement_back(tmp_path: object) -> None:
    path = f"{tmp_path}/placement.json"
    placement = placed()
    placement.save(path)
    loaded = Placement.load(path)
    assert (loaded.layers, loaded.ranks) == (placement.layers, placement.ranks)
    assert torch.equal(loaded.expert_of_slot, placement.expert_of_slot)
    assert torch.equal(loaded.loads, placement.loads)
    with open(path) as file:
        layer = json.load(file)["layers"][0]
    assert layer["slots_of_expert"] == [[1], [0, 2, 4], [5], [3, 6]]
    assert (layer["imbalance_before"], layer["imbalance"]) == (9 / 5.25, 7 / 5.25)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"format": "other"}, "holds no kpt.placement"),
        ({"version": 7}, "of version 7"),
        ({"ranks": 3}, "is damaged"),
        ({"ranks": "many"}, "is damaged"),
        ({"layers": 3}, "is damaged"),
        ({"layers": []}, "is damaged"),
        ({"layers": [{"name": "a"}]}, "is damaged"),
        ({"layers": [{"name": "a", "expert_of_slot": [0, 1, 1, -1], "load": [1, 1, 1]}]}, "expert 2 of layer 'a'"),
        ({"layers": [{"name": "a", "expert_of_slot": [0, 0, 0, 5], "load": [1]}]}, "experts from 0 to 0"),
        ({"layers": [{"name": "a", "expert_of_slot": [0, 0, 0, 0], "load": [-1]}]}, "not negative"),
        (
            {"layers": [{"name": "a", "expert_of_slot": [1, 0, 0, 0], "load": [1, 1], "slots_of_expert": [[0], [1]]}]},
            "contradict",
        ),
    ],
)
def test_a_damaged_file_is_told(tmp_path: object, change: dict[str, object], says: str) -> None:
    path = f"{tmp_path}/placement.json"
    with open(path, "w") as file:
        json.dump({**placed().as_json(), **change}, file)
    with pytest.raises(InputError, match=says):
        Placement.load(path)


def test_no_file_and_no_json_are_told(tmp_path: object) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        Placement.load(f"{tmp_path}/none.json")
    with open(f"{tmp_path}/half.json", "w") as file:
        file.write('{"format": ')
    with pytest.raises(InputError, match="is no JSON file"):
        Placement.load(f"{tmp_path}/half.json")


def test_what_does_not_fit_is_told() -> None:
    placement = placed()
    with pytest.raises(UnknownNameError, match="'c'"):
        placement.row("c")
    with pytest.raises(InputError, match="0 to 1"):
        placement.row(2)
    with pytest.raises(InputError, match="rows, K"):
        placement.physical_index(0, torch.zeros(3, 2))
    with pytest.raises(InputError, match=r"token must be \[3\]"):
        placement.physical_index(0, torch.zeros(3, 2, dtype=torch.int64), token=torch.zeros(2))
    with pytest.raises(InputError, match="must begin with 4"):
        placement.permute_weights(0, torch.zeros(8, 2))
    with pytest.raises(InputError, match="must begin with 8"):
        placement.sum_replicas(0, torch.zeros(4, 2))
    with pytest.raises(InputError, match="names that differ"):
        Placement(("a", "a"), 4, placement.expert_of_slot, placement.loads)
    with pytest.raises(InputError, match="int64"):
        Placement(("a", "b"), 4, placement.expert_of_slot.int(), placement.loads)
    with pytest.raises(InputError, match="float64"):
        Placement(("a", "b"), 4, placement.expert_of_slot, placement.loads.float())
