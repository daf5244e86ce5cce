"""`ModelOptimizer.recommend`: each recommendation has the figure that led to it, and none is made without cause."""

import pytest
import torch
from torch import Tensor, nn

from kpt_optimize.model import ModelOptimizer, Recommendation


def found(model: nn.Module, x: Tensor | None = None, **options: object) -> dict[str, Recommendation]:
    recommendations = ModelOptimizer().recommend(model, x, **options)  # type: ignore[arg-type]
    assert all(r.what and r.why and r.effect and r.how for r in recommendations)
    return {recommendation.what: recommendation for recommendation in recommendations}


def test_half_precision_is_recommended_by_the_share_of_float32() -> None:
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 192, bias=False).bfloat16())
    recommendation = found(model)["compute in bfloat16"]
    assert recommendation.why == "4,096 of 16,384 parameters (25%) are float32"
    assert "0.0 MiB" in recommendation.effect
    assert "compute in bfloat16" not in found(model.bfloat16())


def test_awkward_sizes_are_named() -> None:
    recommendation = found(nn.Sequential(nn.Linear(64, 37), nn.Linear(37, 64)))["pad awkward sizes"]
    assert recommendation.why.startswith("2 matrices")
    assert "0.weight (linear) is 37x64; 40x64" in recommendation.why
    assert "pad awkward sizes" not in found(nn.Sequential(nn.Linear(64, 40), nn.Linear(40, 64)))


@pytest.mark.parametrize(
    ("layer", "memory_format"),
    [(nn.Conv2d(4, 8, 3), torch.channels_last), (nn.Conv3d(4, 8, 3), torch.channels_last_3d)],
)
def test_channels_last_is_recommended_until_it_is_so(layer: nn.Module, memory_format: torch.memory_format) -> None:
    model = nn.Sequential(layer)
    assert found(model)["store convolutions channels last"].why == (
        "the weights of 1 convolution(s) are channels first"
    )
    assert "store convolutions channels last" not in found(model.to(memory_format=memory_format))


class Reading(nn.Linear):
    """Reads two values in each forward."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y * 2 if y.sum().item() > 0 else y * y.abs().max().item()


def test_reads_of_values_are_counted() -> None:
    torch.manual_seed(0)
    model = Reading(8, 8)
    recommendation = found(model, torch.ones(2, 8))["keep values on the device"]
    reads = 1 if nn.functional.linear(torch.ones(2, 8), model.weight, model.bias).sum() > 0 else 2
    assert f"on the host {reads} times (_local_scalar_dense {reads}x)" in recommendation.why
    assert "keep values on the device" not in found(nn.Linear(8, 8), torch.ones(2, 8))
    assert "keep values on the device" not in found(model)


def test_many_small_operators_are_counted() -> None:
    model = nn.Sequential(*(nn.Tanh() for _ in range(50)))
    recommendation = found(model, torch.ones(2))["launch fewer kernels"]
    assert recommendation.why.startswith("50 operators in ")
    assert "launch fewer kernels" not in found(nn.Linear(2048, 2048), torch.ones(512, 2048))


def test_a_fused_optimizer_is_recommended_by_the_number_of_tensors() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    recommendation = found(model, optimizer=torch.optim.AdamW(model.parameters()))["fuse the optimiser"]
    assert recommendation.why == "AdamW updates 4 tensors and is not fused"
    assert "fuse the optimiser" not in found(model, optimizer=torch.optim.AdamW(model.parameters(), fused=True))


def test_nothing_is_changed() -> None:
    model = nn.Sequential(nn.Linear(8, 37), nn.BatchNorm1d(37)).train()
    model[1].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = ModelOptimizer()
    optimizer.recommend(model, torch.randn(4, 8))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert model.training
    assert not model[1].training
    assert optimizer.report is None


def test_a_model_that_is_as_it_should_be_gets_none() -> None:
    assert found(nn.Linear(64, 64).bfloat16()) == {}
