"""Layout of parameters."""

import copy

import pytest
import torch
from torch import nn

from kpt_core import InputError
from kpt_optimize.memory import optimize_layout


def transposed(rows, columns):
    module = nn.Linear(columns, rows)
    module.weight = nn.Parameter(torch.randn(columns, rows).t())
    return module


def misaligned():
    module = nn.Linear(8, 8)
    module.weight = nn.Parameter(torch.randn(65)[1:].view(8, 8))
    return module


@pytest.mark.parametrize(
    ("module", "shape", "memory_format"),
    [
        (nn.Conv2d(4, 8, 3), (2, 4, 9, 9), torch.channels_last),
        (nn.ConvTranspose2d(4, 8, 3), (2, 4, 9, 9), torch.channels_last),
        (nn.Conv3d(4, 8, 3), (2, 4, 5, 5, 5), torch.channels_last_3d),
    ],
)
def test_convolutions_become_channels_last_and_compute_the_same(module, shape, memory_format):
    x, weight = torch.randn(shape), module.weight
    expected, values = module(x), weight.detach().clone()
    report = optimize_layout(module)
    assert set(report.changes) == {"weight"}
    assert module.weight is weight
    assert weight.is_contiguous(memory_format=memory_format)
    assert not weight.is_contiguous()
    assert torch.equal(weight, values)
    torch.testing.assert_close(module(x), expected)
    assert module(x).is_contiguous(memory_format=memory_format)


@pytest.mark.parametrize(
    ("module", "reason"), [(transposed(8, 16), "was not contiguous"), (misaligned(), "began 4 bytes after")]
)
def test_scattered_and_misaligned_parameters_are_laid_out_anew(module, reason):
    x = torch.randn(3, module.in_features)
    weight, expected = module.weight, module(x)
    report = optimize_layout(module)
    assert reason in report.changes["weight"]
    assert module.weight is weight
    assert weight.is_contiguous()
    assert weight.data_ptr() % 16 == 0
    torch.testing.assert_close(module(x), expected)
    assert not optimize_layout(module).changes


def test_a_misaligned_view_no_longer_keeps_the_larger_storage():
    module = misaligned()
    report = optimize_layout(module)
    assert report.bytes_before - report.bytes_after == 4


def test_an_optimiser_goes_on_with_the_parameters():
    module = nn.Conv2d(3, 8, 3)
    twin = copy.deepcopy(module)
    results = []
    for model in (module, twin):
        optimizer = torch.optim.AdamW(model.parameters())
        if model is module:
            optimize_layout(model)
        model(torch.ones(1, 3, 5, 5)).square().sum().backward()
        optimizer.step()
        results.append(model.weight.detach())
    torch.testing.assert_close(results[0], results[1])
    assert results[0].is_contiguous(memory_format=torch.channels_last)


def test_parameters_that_share_memory_stay_together():
    model = nn.Module()
    flat = torch.randn(33)
    model.first, model.second = nn.Parameter(flat[1:17].view(4, 4)), nn.Parameter(flat[17:].view(4, 4).t())
    assert not optimize_layout(model).changes
    assert model.first.untyped_storage()._cdata == flat.untyped_storage()._cdata


def test_tied_parameters_stay_tied():
    model = nn.ModuleDict({"a": transposed(8, 8), "b": nn.Linear(8, 8)})
    model["b"].weight = model["a"].weight
    optimize_layout(model)
    assert model["b"].weight is model["a"].weight
    assert model["a"].weight.is_contiguous()


def test_an_expanded_parameter_is_not_blown_up():
    model = nn.Module()
    model.scale = nn.Parameter(torch.ones(1, 16).expand(64, 16))
    report = optimize_layout(model)
    assert not report.changes
    assert report.bytes_after == report.bytes_before == 64


@pytest.mark.parametrize("model", [None, torch.ones(3)])
def test_no_module_is_refused(model):
    with pytest.raises(InputError, match=r"model must be a torch\.nn\.Module; got"):
        optimize_layout(model)
