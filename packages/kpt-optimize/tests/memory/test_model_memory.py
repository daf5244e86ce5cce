"""A model made smaller: bytes fall, outputs and gradients stay."""

import copy

import pytest
import torch
from torch import nn

from kpt_core import InputError
from kpt_optimize.memory import DeviceMemoryManager, estimate, optimize_model_memory


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.Dropout(0.3)

    def forward(self, x):
        return x + self.drop(self.down(torch.nn.functional.gelu(self.up(x))))


class Stack(nn.Module):
    def __init__(self, width=16, depth=4):
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def saved_bytes(model, x):
    """Bytes that autograd holds for the backward pass beside parameters and input."""
    own = {t.untyped_storage().data_ptr() for t in [x, *model.parameters()]}
    saved = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(x)
    assert output.requires_grad
    return sum(saved.values())


def test_gradients_are_released():
    model = nn.Linear(32, 8)
    model(torch.ones(2, 32)).sum().backward()
    report = DeviceMemoryManager().optimize_model_memory(model)
    assert model.weight.grad is None
    assert model.bias.grad is None
    assert report.changes == {"weight": "lost a gradient", "bias": "lost a gradient"}
    assert (report.bytes_before, report.bytes_after) == (2 * (32 * 8 + 8) * 4, (32 * 8 + 8) * 4)


def test_a_small_view_no_longer_keeps_a_large_storage():
    whole = torch.randn(1000, 8)
    model = nn.Embedding(10, 8)
    model.weight = nn.Parameter(whole[20:30])
    model.register_buffer("positions", torch.arange(4000)[:4])
    weight, expected = model.weight, whole[20:30].clone()
    report = optimize_model_memory(model)
    assert set(report.changes) == {"weight", "positions"}
    assert report.bytes_before == 1000 * 8 * 4 + 4000 * 8
    assert report.bytes_after == 10 * 8 * 4 + 4 * 8
    assert model.weight is weight
    assert torch.equal(model(torch.arange(10)), expected)
    assert model.positions.tolist() == [0, 1, 2, 3]


def test_views_that_fill_their_storage_or_overlap_stay():
    flat = torch.randn(32)
    model = nn.Module()
    model.first, model.second = nn.Parameter(flat[:16]), nn.Parameter(flat[16:])
    large = torch.randn(100)
    model.register_buffer("window", large[:20])
    model.register_buffer("shifted", large[10:30])
    report = optimize_model_memory(model)
    assert report.bytes_after == report.bytes_before == 32 * 4 + 100 * 4
    large[15] = 7
    assert model.window[15] == model.shifted[5] == 7


def test_a_transposed_view_keeps_its_strides():
    model = nn.Module()
    model.weight = nn.Parameter(torch.randn(100, 4)[:8].t())
    values = model.weight.detach().clone()
    assert optimize_model_memory(model).bytes_after == 8 * 4 * 4
    assert model.weight.stride() == (1, 4)
    assert torch.equal(model.weight, values)


def test_an_expanded_buffer_is_not_blown_up():
    model = nn.Module()
    model.register_buffer("mask", torch.ones(2)[:1].expand(1000))
    assert optimize_model_memory(model).bytes_after == 8


def test_tied_parameters_stay_tied_and_count_once():
    model = nn.ModuleDict({"a": nn.Linear(8, 8, bias=False), "b": nn.Linear(8, 8, bias=False)})
    model["a"].weight = nn.Parameter(torch.randn(100, 8)[:8])
    model["b"].weight = model["a"].weight
    report = optimize_model_memory(model)
    assert (report.bytes_before, report.bytes_after) == (3200, 256)
    assert model["b"].weight is model["a"].weight


@pytest.mark.parametrize("checkpoint", [True, (Block,)])
def test_checkpointing_saves_activations_and_keeps_outputs_gradients_and_names(checkpoint):
    model = Stack()
    twin = copy.deepcopy(model)
    x = torch.randn(32, 16, requires_grad=True)
    x_twin = x.detach().clone().requires_grad_()
    report = optimize_model_memory(model, checkpoint=checkpoint)
    assert report.changes == {f"layers.{i}": "recomputed in the backward pass" for i in range(4)}

    before, after = saved_bytes(twin, x), saved_bytes(model, x)
    # Each block keeps its input alone; the first one's is the model's.
    assert after == 3 * 32 * 16 * 4 < before / 4
    assert estimate(model, x).activations < estimate(twin, x).activations / 4

    torch.manual_seed(1)
    output = model(x)
    torch.manual_seed(1)
    expected = twin(x_twin)
    assert torch.equal(output, expected)
    output.square().sum().backward()
    expected.square().sum().backward()
    assert torch.equal(x.grad, x_twin.grad)
    for (name, parameter), (twin_name, other) in zip(model.named_parameters(), twin.named_parameters(), strict=True):
        assert name == twin_name
        assert torch.equal(parameter.grad, other.grad)
    assert list(model.state_dict()) == list(twin.state_dict())
    assert "4 recomputed in the backward pass: layers.0, layers.1" in str(report)


def test_blocks_inside_of_blocks_are_not_checkpointed_twice():
    model = Stack(depth=2)
    model.layers[0].drop = nn.Sequential(nn.ModuleList([nn.Identity()])[0], Block(16))
    assert tuple(optimize_model_memory(copy.deepcopy(model), checkpoint=(Block,)).changes) == ("layers.0", "layers.1")
    model.layers[0].inner = nn.ModuleList([Block(16)])
    assert tuple(optimize_model_memory(model, checkpoint=True).changes) == ("layers.0", "layers.1")
    assert tuple(optimize_model_memory(Block(16), checkpoint=(Block,)).changes) == ("",)


def test_checkpointing_twice_is_checkpointing_once():
    model = Stack()
    optimize_model_memory(model, checkpoint=True)
    forward = model.layers[0].forward
    assert tuple(optimize_model_memory(model, checkpoint=True).changes) == ()
    assert model.layers[0].forward is forward


def test_a_copy_of_a_checkpointed_model_uses_its_own_parameters():
    model = Stack(depth=1)
    optimize_model_memory(model, checkpoint=True)
    twin = copy.deepcopy(model).eval()
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    x = torch.randn(3, 16)
    assert torch.equal(twin(x), x)
    assert not torch.equal(model.eval()(x), x)


@pytest.mark.parametrize(
    ("model", "arguments", "message"),
    [
        (None, {}, "model must be a torch.nn.Module; got None"),
        (nn.Linear(3, 3), {"checkpoint": True}, "no nn.ModuleList"),
        (nn.Linear(3, 3), {"checkpoint": (Block,)}, "none of its modules is a Block"),
        (nn.Linear(3, 3), {"checkpoint": ("Block",)}, "'Block'"),
    ],
)
def test_bad_arguments_are_refused_before_anything_changes(model, arguments, message):
    if model is not None:
        model(torch.ones(1, 3)).sum().backward()
    with pytest.raises(InputError, match=message):
        optimize_model_memory(model, **arguments)
    assert model is None or model.weight.grad is not None
