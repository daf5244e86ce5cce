"""Linear layers that compute few rows by `linear.dense`."""

import copy

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.nn.utils import prune
from torch.testing._internal.two_tensor import TwoTensor

import kpt_core
from kpt_core import Backend, InputError, Kernel
from kpt_optimize import few_rows
from kpt_optimize.few_rows import LONG, MOST_BF16_ROWS, MOST_LONG_ROWS, MOST_ROWS, FewRowsLinear, serve_few_rows
from kpt_optimize.linear import OPS

CALLS = []


def forward(call):
    CALLS.append(tuple(call.x.shape))
    return torch.nn.functional.linear(call.x, call.weight, call.bias)


class Counting(Backend):
    name, device_types = "counting", ("cpu",)

    def __init__(self, dtypes=frozenset({"float32"})):
        self.dtypes = dtypes

    def kernels(self):
        return (Kernel("linear.dense", forward=f"{__name__}:forward", dtypes=self.dtypes),)


@pytest.fixture
def layer(add):
    assert OPS  # the op is defined
    add(Counting())
    CALLS.clear()
    return FewRowsLinear.from_linear(nn.Linear(24, 10)).eval()


@pytest.mark.parametrize("shape", [(1, 24), (2, 3, 24), (MOST_ROWS, 24), (24,)])
def test_few_rows_go_to_the_op(layer, shape):
    x = torch.randn(shape)
    with torch.no_grad():
        assert torch.equal(layer(x), nn.functional.linear(x, layer.weight, layer.bias))
    assert [shape if len(shape) > 1 else (1, *shape)] == CALLS


@pytest.mark.parametrize("shape", [(2, 24), (1, 1, 24)])
def test_a_graph_of_few_rows_has_the_op_and_one_of_any_number_guards_none(layer, shape):
    with torch.no_grad():
        x = torch.randn(shape)
        counter = CompileCounter()
        compiled = torch.compile(layer, backend=counter, fullgraph=True)
        assert torch.equal(compiled(x), nn.functional.linear(x, layer.weight, layer.bias))
        assert [shape] == CALLS
        torch._dynamo.reset()
        compiled, several = torch.compile(layer, backend=counter, fullgraph=True, dynamic=True), torch.randn(5, 24)
        torch._dynamo.mark_dynamic(several, 0)
        compiled(several)
        compiled(torch.randn(50, 24))
    assert counter.frame_count == 2


@pytest.mark.parametrize(
    "call",
    [
        lambda layer: layer(torch.randn(2, 24)),  # a gradient is wanted
        lambda layer: torch.no_grad()(layer)(torch.randn(MOST_ROWS + 1, 24)),
        lambda layer: torch.no_grad()(layer)(torch.randn(0, 24)),
        lambda layer: torch.no_grad()(torch.compile(layer, backend="eager"))(torch.randn(MOST_ROWS + 1, 24)),
    ],
    ids=["training", "many rows", "no rows", "many rows, compiled"],
)
def test_the_rest_is_torch_s_own(layer, call):
    assert call(layer).shape[-1] == 10
    assert CALLS == []


@pytest.mark.parametrize("amx", [True, False])
def test_bfloat16_goes_to_the_op_in_more_rows_where_there_is_amx(add, monkeypatch, amx):
    monkeypatch.setattr(few_rows, "_AMX", amx)
    add(Counting(frozenset({"bfloat16"})))
    CALLS.clear()
    sizes = [(24, MOST_BF16_ROWS), (LONG, MOST_LONG_ROWS)] if amx else [(24, MOST_ROWS), (LONG, MOST_ROWS)]
    with torch.no_grad():
        for size, most in sizes:
            layer = FewRowsLinear.from_linear(nn.Linear(size, 10)).eval().bfloat16()
            for rows in (most, most + 1):
                layer(torch.randn(rows, size).bfloat16())
    assert [(most, size) for size, most in sizes] == CALLS


def test_numbers_of_another_size_are_refused_as_by_torch(layer):
    for x in (torch.randn(2, 12), torch.randn(1, 2, 12)):  # as many as a row of 24
        with torch.no_grad(), pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            layer(x)
    assert CALLS == []


def test_a_pruned_weight_is_the_one_that_is_used(layer):
    prune.l1_unstructured(layer, "weight", amount=100)  # the weight is an attribute then, and no parameter
    x = torch.randn(2, 24)
    with torch.no_grad():
        assert torch.equal(layer(x), nn.functional.linear(x, layer.weight, layer.bias))
    assert CALLS == [(2, 24)]


@pytest.mark.parametrize(
    "change",
    [lambda weight: TwoTensor(weight, weight.clone()), lambda weight: weight.to(torch.complex64),
     lambda weight: weight.to(torch.int32)],
    ids=["a tensor with rules of its own", "complex", "integer"],
)  # fmt: skip
@pytest.mark.parametrize("compiled", [False, True])
def test_weights_that_no_kernel_knows_stay_torch_s(layer, change, compiled):
    weight = change(torch.randint(-5, 5, (10, 24)).float())
    layer.weight, layer.bias = nn.Parameter(weight, requires_grad=False), None
    x = torch.randint(-5, 5, (2, 24)).to(weight.dtype)
    with torch.no_grad():
        found = (torch.compile(layer, backend="eager") if compiled else layer)(x)
        assert torch.equal(found, nn.functional.linear(x, weight))
    assert CALLS == []


def test_a_twin_and_its_layer_stay_one_in_hooks_and_parameters():
    layer, seen = nn.Linear(8, 8), []
    handle = layer.register_forward_hook(lambda *_: seen.append(1))
    twin = FewRowsLinear.from_linear(layer)
    handle.remove()
    twin.load_state_dict({name: torch.ones_like(value) for name, value in layer.state_dict().items()}, assign=True)
    x = torch.randn(2, 8)
    assert torch.equal(twin(x), layer(x))
    assert seen == []


def test_gradients_are_those_of_the_layer(layer):
    x = torch.randn(3, 24, requires_grad=True)
    layer(x).sum().backward()
    assert torch.equal(layer.weight.grad, x.detach().sum(0).expand(10, -1))


def test_a_model_keeps_parameters_names_and_hooks(add):
    add(Counting())
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8)), nn.ReLU()).eval()
    model[1][0].weight = model[0].weight
    before, seen = copy.deepcopy(model.state_dict()), []
    model[0].register_forward_hook(lambda *_: seen.append(1))
    assert serve_few_rows(model) == ["0", "1.0"]
    assert serve_few_rows(model) == []
    with torch.no_grad():
        model(torch.randn(2, 8))
    assert seen == [1]
    assert model[1][0].weight is model[0].weight
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_what_is_no_plain_layer_is_refused():
    with pytest.raises(InputError, match=r"expected an nn\.Linear; got Bilinear"):
        FewRowsLinear.from_linear(nn.Bilinear(2, 2, 2))


def test_the_reference_serves_without_a_kernel():
    op = kpt_core.get_op("linear.dense")
    x, weight = torch.randn(3, 8), torch.randn(5, 8)
    torch.testing.assert_close(op(x, weight), x @ weight.t())
