"""Norms that compute by `norm.rms`."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from kpt_core import Backend, InputError, Kernel
from kpt_optimize.norm import RMSNorm, eps_of, rms_norm, serve_norms

CALLS = []


def forward(call):
    CALLS.append(tuple(call.x.shape))
    return F.rms_norm(call.x, call.weight.shape, call.weight, call.eps)


class Counting(Backend):
    name, device_types = "counting", ("cpu",)

    def kernels(self):
        return (Kernel("norm.rms", forward=f"{__name__}:forward"),)


class LlamaRMSNorm(nn.Module):
    """As transformers has it."""

    def __init__(self, size, eps=1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size))
        self.variance_epsilon = eps

    def forward(self, hidden_states):
        wide = hidden_states.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * wide.to(hidden_states.dtype)


class GemmaRMSNorm(LlamaRMSNorm):
    def forward(self, hidden_states):
        return super().forward(hidden_states) / self.weight * (1 + self.weight)


class GatedRMSNorm(LlamaRMSNorm):
    def forward(self, hidden_states, gate=None):
        return super().forward(hidden_states if gate is None else hidden_states * gate)


class HiddenEpsRMSNorm(LlamaRMSNorm):
    def forward(self, hidden_states):
        return super().forward(hidden_states * 100)


def biased():
    made = LlamaRMSNorm(24)
    made.bias = nn.Parameter(torch.zeros(24))
    return made


def hooked():
    made = LlamaRMSNorm(24)
    made.register_forward_hook(lambda module, given, out: out * 2)
    return made


def backward_hooked():
    made = LlamaRMSNorm(24)
    made.register_full_backward_hook(lambda module, given, out: None)
    return made


class ThreeDimensionsRMSNorm(LlamaRMSNorm):
    def forward(self, hidden_states):
        batch, length, width = hidden_states.shape
        return super().forward(hidden_states.view(batch, length, width))


@pytest.fixture(autouse=True)
def _counted(add):
    add(Counting())
    CALLS.clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_s_norms_compute_by_the_op_and_share_their_weights(dtype):
    shared = LlamaRMSNorm(24)
    model = nn.Sequential(shared, nn.Linear(24, 24), nn.Sequential(nn.RMSNorm(24, eps=1e-3), shared)).to(dtype).eval()
    before, keys = copy.deepcopy(model), list(model.state_dict())
    weight = shared.weight
    assert serve_norms(model) == ["0", "2.0"]
    assert serve_norms(model) == []
    assert model[0] is model[2][1]
    assert model[0].weight is weight
    assert list(model.state_dict()) == keys
    assert not model[0].training
    x = torch.randn(2, 3, 24).to(dtype)
    with torch.no_grad():
        # Each rounds in other places, three times in a row.
        bounds = {"rtol": 1e-5, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 2**-6, "atol": 2**-3}
        torch.testing.assert_close(model(x), before(x), **bounds)
        twin = pickle.loads(pickle.dumps(model))
        assert torch.equal(copy.deepcopy(model)(x), twin(x))
    assert CALLS == [(2, 3, 24)] * 9


def test_where_gradients_are_wanted_or_a_graph_is_made_it_is_torch_s_own():
    norm = RMSNorm.from_norm(LlamaRMSNorm(24))
    norm(torch.randn(2, 24)).sum().backward()
    assert norm.weight.grad is not None
    with torch.no_grad():
        torch.compile(norm, backend="eager")(torch.randn(2, 24))
    assert CALLS == []


@pytest.mark.parametrize(
    "make",
    [lambda: GemmaRMSNorm(24), lambda: GatedRMSNorm(24), lambda: HiddenEpsRMSNorm(24), biased, hooked,
     backward_hooked, lambda: ThreeDimensionsRMSNorm(24), lambda: nn.LayerNorm(24),
     lambda: nn.RMSNorm((2, 24), eps=1e-6), lambda: nn.RMSNorm(24, elementwise_affine=False),
     lambda: LlamaRMSNorm(24).to("meta")],
    ids=["1 + weight", "a gate", "another eps", "a bias", "a hook", "a backward hook", "three dimensions alone",
         "LayerNorm", "two dimensions", "no weight", "meta"],
)  # fmt: skip
def test_what_computes_something_else_stays(make):
    module = make()
    assert eps_of(module) is None
    model = nn.Sequential(module)
    assert serve_norms(model) == []
    assert model[0] is module
    with pytest.raises(InputError, match="something else than a root mean square norm"):
        RMSNorm.from_norm(module)


def test_a_norm_is_replaced_under_both_names_of_one_parent():
    model = nn.Module()
    model.first = model.second = LlamaRMSNorm(24)
    assert serve_norms(model) == ["first"]
    assert model.first is model.second


def test_the_op_has_gradients():
    x, weight = (torch.randn(*size, dtype=torch.float64, requires_grad=True) for size in ((3, 8), (8,)))
    assert torch.autograd.gradcheck(lambda *given: rms_norm(*given, eps=0.1), (x, weight))
