"""A model from recommendation to service, measured on this machine: experts, inference and training."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kpt_backend_nvidia import NVIDIAOptimizer, OptimizerConfig
from kpt_core import InputError
from kpt_moe import MoEConfig, MoELayer

# torch 2.13: Dynamo itself instantiates the autograd function that it traces.
pytestmark = pytest.mark.filterwarnings("ignore:.*Function.* should not be instantiated:DeprecationWarning")

CONFIG = OptimizerConfig(compile_backend="aot_eager", seconds=0.1)


class Block(nn.Module):
    """Embedding, experts and head of a small language model."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(50, 32)
        self.experts = MoELayer(MoEConfig(hidden_size=32, intermediate_size=48, num_experts=4, top_k=2))
        self.head = nn.Linear(32, 50)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embedding(ids)
        experts = self.experts(hidden)
        return self.head(hidden + (experts[0] if isinstance(experts, tuple) else experts))  # type: ignore[no-any-return]


IDS = torch.randint(50, (2, 12), generator=torch.Generator().manual_seed(1))


def test_experts_run_end_to_end_as_the_float64_original_does() -> None:
    model = Block()
    optimizer = NVIDIAOptimizer("balanced", config=CONFIG)
    assert any(r.what == "compute in bfloat16" for r in optimizer.recommend(model, IDS))
    found = optimizer.optimize_for_inference(model, {"ids": IDS})
    exact = copy.deepcopy(model).double().eval()(IDS)
    assert ((found.model(ids=IDS).double() - exact).abs().max() / exact.abs().max()).item() < 2e-2
    assert found.report.seconds_before is not None
    assert found.report.seconds_before > 0
    tried = [outcome for outcome in found.report.outcomes if outcome.status != "not tried"]
    assert (
        {"mixed_precision", "compile", "padding"}
        >= {outcome.step for outcome in tried}
        >= {"mixed_precision", "compile"}
    )
    for outcome in tried:
        assert outcome.error is not None
        assert outcome.gain is not None or "exceeds the budget" in outcome.reason
    # Another number of tokens than the sample's.
    assert found.model(ids=IDS[:1, :5]).shape == (1, 5, 50)


def test_experts_for_memory_are_served_at_half_the_size() -> None:
    config = OptimizerConfig(objective="memory", seconds=0.1)
    found = NVIDIAOptimizer("aggressive", config=config).optimize_for_inference(Block(), IDS)
    assert found.report.bytes_after < 0.55 * found.report.bytes_before
    assert found.report.error is not None
    assert 0 < found.report.error < 1e-1


def test_experts_train_to_what_the_original_trains_to() -> None:
    model = Block()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    labels = IDS.roll(-1, 1)

    def loss(logits: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    # Same dtypes: five steps must end where the original's do.
    found = NVIDIAOptimizer("conservative", config=CONFIG).optimize_for_training(model, IDS, loss, optimizer)
    ours = [found.step(IDS).item() for _ in range(5)]
    theirs = []
    for _ in range(5):
        optimizer.zero_grad()
        value = loss(model(IDS))
        value.backward()
        optimizer.step()
        theirs.append(value.item())
    assert ours[-1] < 0.8 * ours[0]
    assert torch.allclose(torch.tensor(ours), torch.tensor(theirs), rtol=1e-3)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_device_that_is_not_there_is_refused_with_the_reason() -> None:
    with pytest.raises(InputError, match="device 'cuda' can't be used: "):
        NVIDIAOptimizer(device="cuda")
