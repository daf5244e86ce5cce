"""Exported and compiled layers and models: one program for every number of tokens, whatever kernels are chosen for."""

import contextlib

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import kpt_core
from families import FAMILIES, VOCABULARY
from kpt_moe import MoEConfig, MoELayer
from kpt_moe.transformers import NAME

#: The same again with another setting, for `nox -s full`.
slow = pytest.mark.slow

#: On both sides of every number of tokens at which kernels give way to others.
TOKENS = (5, 40, 64, 65, 200, 500, 1000)
SAMPLES = (3, 5, 500)


class Logits(nn.Module):
    """A model as a function of its tokens."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens, use_cache=False).logits


@pytest.fixture(scope="module")
def mixtral() -> Logits:
    model = FAMILIES["mixtral"].build()
    model.set_experts_implementation(NAME)
    return Logits(model)


def prompt(tokens: int) -> Tensor:
    return torch.randint(3, VOCABULARY, (1, tokens), generator=torch.Generator().manual_seed(tokens))


# transformers 5.23: its models note in a variable of a module what they collect.
@pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects:UserWarning")
@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("sample", [SAMPLES[0], *(pytest.param(each, marks=slow) for each in SAMPLES[1:])])
def test_a_model_exports_with_any_number_of_tokens(mixtral, sample, strict, training):
    with contextlib.nullcontext() if training else torch.no_grad():
        shapes = {"tokens": {1: torch.export.Dim("s", min=2, max=8192)}}
        program = torch.export.export(mixtral, (prompt(sample),), dynamic_shapes=shapes, strict=strict)
        assert [str(node.target) for node in program.graph.nodes].count("kpt.moe_experts.default") == 2
        module = program.module()
        for tokens in (2, 63, 300):
            with kpt_core.record() as log:
                have = module(prompt(tokens))
            assert {selection.op for selection in log} == {"moe.experts"}
            torch.testing.assert_close(have, mixtral(prompt(tokens)), rtol=1e-4, atol=1e-5)


def layer(dtype: torch.dtype) -> MoELayer:
    config = MoEConfig(hidden_size=32, num_experts=6, top_k=2, intermediate_size=48)
    return MoELayer(config, dtype=dtype)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_one_dynamic_graph_serves_every_number_of_tokens(dtype, training):
    graphs = []

    def backend(graph: torch.fx.GraphModule, example: list[Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    made = layer(dtype).train(training)
    compiled = torch.compile(made, fullgraph=True, backend=backend)
    for tokens in TOKENS:
        x = torch.randn(tokens, 32, dtype=dtype, requires_grad=training)
        with torch.set_grad_enabled(training), kpt_core.record() as log:
            have, want = compiled(x), made(x)
        # Where no kernel is for it, the gating is traced through, so that the compiler may fuse it.
        assert "moe.experts" in {selection.op for selection in log}
        torch.testing.assert_close(have, want)
        if training:
            wanted = [x, *made.parameters()]
            grads = (torch.autograd.grad(out.square().sum(), wanted) for out in (have, want))
            torch.testing.assert_close(*grads)
    assert len(graphs) <= 2, "one for the first size, one for all others"
