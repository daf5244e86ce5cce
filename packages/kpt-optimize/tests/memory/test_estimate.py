"""Estimates against what a real step on the CPU takes."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from kpt_core import InputError, UnknownNameError
from kpt_optimize.memory import DeviceMemoryManager, estimate
from kpt_optimize.memory.estimate import OPTIMIZERS


def perceptron():
    layers = nn.Sequential(nn.Linear(24, 96), nn.GELU(), nn.Dropout(0.1), nn.Linear(96, 24), nn.LayerNorm(24))
    return layers, torch.randn(64, 24)


def convolutions():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return model, torch.randn(4, 3, 12, 12)


def encoder():
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, activation="gelu")
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), torch.randn(2, 10, 32)


MODELS = pytest.mark.parametrize("make", [perceptron, convolutions, encoder])


def really_alive(model, x):
    """Storages that a real forward pass leaves: what autograd saves, and the output."""
    own = {t.untyped_storage().data_ptr() for t in [x, *model.parameters(), *model.buffers()]}
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        output = model(x)
    alive = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in [*saved, output]}
    return sum(nbytes for pointer, nbytes in alive.items() if pointer not in own)


@MODELS
def test_activations_are_those_of_a_real_forward_pass(make):
    model, x = make()
    assert estimate(model.eval(), x).activations == really_alive(model.train(), x)


@MODELS
def test_parameters_buffers_and_gradients_are_the_model_s(make):
    model, x = make()
    result = estimate(model, x)
    model(x).sum().backward()
    assert result.parameters == sum(p.numel() * 4 for p in model.parameters())
    assert result.gradients == sum(p.grad.nbytes for p in model.parameters())
    assert result.buffers == sum(b.nbytes for b in model.buffers())
    assert result.inputs == x.nbytes


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_optimiser_s_state_is_that_of_a_real_step(name):
    model, x = perceptron()
    result = estimate(model, x, optimizer=name)
    optimizer = OPTIMIZERS[name](model.parameters())
    model(x).sum().backward()
    optimizer.step()
    state = [value for values in optimizer.state.values() for value in values.values()]
    assert result.optimizer_state == sum(value.nbytes for value in state if isinstance(value, torch.Tensor))
    assert (result.optimizer_state > 0) is (name != "sgd")


def test_an_optimiser_of_one_s_own_is_taken():
    model, x = perceptron()
    amsgrad = estimate(model, x, optimizer=lambda p: torch.optim.Adam(p, amsgrad=True)).optimizer_state
    assert amsgrad > 1.4 * estimate(model, x, optimizer="adam").optimizer_state
    assert estimate(model, x, optimizer=None).optimizer_state == 0


def test_frozen_parameters_take_neither_gradient_nor_state():
    model, x = perceptron()
    model[0].requires_grad_(False)
    result = estimate(model, x, optimizer="rmsprop")
    trained = [p for p in model.parameters() if p.requires_grad]
    assert result.gradients == sum(p.nbytes for p in trained)
    assert result.optimizer_state == sum(p.nbytes + 4 for p in trained)


def test_tied_parameters_count_once():
    model = nn.Sequential(nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False))
    model[1].weight = model[0].weight
    result = estimate(model, torch.randn(2, 16), optimizer="sgd_momentum")
    assert result.parameters == result.gradients == result.optimizer_state == 16 * 16 * 4


def test_inference_peaks_at_the_widest_pair_of_tensors():
    model = nn.Sequential(nn.Linear(8, 100, bias=False), nn.Linear(100, 300, bias=False), nn.Linear(300, 4, bias=False))
    x = torch.randn(10, 8)
    result = estimate(model, x, training=False)
    assert result.gradients == result.optimizer_state == 0
    assert result.activations == 10 * 4 * 4  # the output
    assert result.peak == result.parameters + result.inputs + 10 * (100 + 300) * 4


def test_the_peak_of_training_lies_between_its_parts_and_their_double():
    model, x = perceptron()
    result = estimate(model, x)
    fixed = result.parameters + result.inputs + result.optimizer_state
    assert fixed + max(result.gradients, result.activations) < result.peak
    assert result.peak < fixed + 2 * (result.gradients + result.activations)


def test_more_tokens_take_proportionally_more_activations():
    model, x = perceptron()
    assert estimate(model, torch.cat([x] * 4)).activations == 4 * estimate(model, x).activations


def test_nothing_is_computed_and_nothing_changes():
    model, x = convolutions()
    model.eval()
    model[1].train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random_state = torch.get_rng_state()
    estimate(model, x)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert [module.training for module in model] == [False, True, False, False, False]
    assert torch.equal(torch.get_rng_state(), random_state)


def test_a_model_that_would_not_fit_is_estimated_on_meta():
    model = nn.Linear(2**20, 2**20, bias=False, device="meta")
    result = estimate(model, torch.empty(1, 2**20, device="meta"), optimizer="adamw")
    assert result.parameters == result.gradients == 4 * 2**40
    assert result.optimizer_state == 8 * 2**40 + 4


@pytest.mark.parametrize(
    "inputs", [(torch.ones(2, 3), torch.ones(2, 3)), {"x": torch.ones(2, 3), "y": torch.ones(2, 3)}]
)
def test_arguments_come_as_tuple_or_by_name(inputs):
    class Sum(nn.Module):
        def forward(self, x, y):
            return x + y

    assert DeviceMemoryManager().estimate(Sum(), inputs, training=False).activations == 24


def test_a_model_that_reads_values_is_refused_with_what_to_do():
    class Reads(nn.Module):
        def forward(self, x):
            return x * 2 if x.sum().item() > 0 else x

    with pytest.raises(InputError, match=r"Reads calls aten._local_scalar_dense.*measure a step"):
        estimate(Reads(), torch.ones(3))


def test_outputs_without_a_gradient_are_refused_for_training():
    class Wrapped:
        def __init__(self, tensor):
            self.tensor = tensor

    class Hides(nn.Linear):
        def forward(self, x):
            return Wrapped(super().forward(x))

    with pytest.raises(InputError, match=r"Hides returned no tensor with a gradient \(Wrapped\)"):
        estimate(Hides(3, 3), torch.ones(3))
    assert estimate(Hides(3, 3), torch.ones(3), training=False).activations == 12


def test_bad_arguments_are_refused():
    with pytest.raises(InputError, match=r"model must be a torch\.nn\.Module; got None"):
        estimate(None, torch.ones(3))
    with pytest.raises(UnknownNameError, match="adamw"):
        estimate(nn.Linear(3, 3), torch.ones(3), optimizer="adamm")
    with pytest.raises(InputError, match="Adafactor reads values in its step"):
        estimate(nn.Linear(3, 3), torch.ones(3), optimizer=torch.optim.Adafactor)


def test_the_estimate_prints_every_part():
    model, x = perceptron()
    text = str(estimate(model, x))
    assert [line.split("  ")[0] for line in text.splitlines()] == [
        "parameters", "buffers", "inputs", "gradients", "optimizer state", "activations", "peak",
    ]  # fmt: skip


def test_an_operator_that_fake_tensors_refuse_is_told_with_a_way_out():
    class Picky(nn.Module):
        def forward(self, x):
            if isinstance(x, FakeTensor):
                raise RuntimeError("Expected inputs of BF16 type")
            return x

    with pytest.raises(InputError, match=r"Picky failed on fake tensors.*BF16.*experts_implementation"):
        estimate(Picky(), torch.ones(2), training=False)
