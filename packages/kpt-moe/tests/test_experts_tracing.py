"""`moe.experts` where no values are there yet: compiled, exported, fake, meta."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from kpt_core import record, refresh, registry
from kpt_moe.experts import experts
from oracle import CLAMPED, Inputs, gradients, make_inputs, naive_experts

#: The same again with another setting, for `nox -s full`.
slow = pytest.mark.slow

GPT_OSS = {**CLAMPED, "transposed": True, "interleaved": True}


def gpt_oss(tokens: int = 11, dtype: torch.dtype = torch.float64) -> Inputs:
    return make_inputs(tokens=tokens, transposed=True, bias=True, sentinels=True, dtype=dtype, seed=tokens)


class Layer(torch.nn.Module):
    """The op as a module, with all that gpt-oss asks for."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        inputs = gpt_oss(dtype=dtype)
        for name in ("up", "down", "up_bias", "down_bias"):
            self.register_parameter(name, torch.nn.Parameter(getattr(inputs, name)))

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return experts(x, index, weights, self.up, self.down, self.up_bias, self.down_bias, **GPT_OSS)


@pytest.mark.parametrize("dynamic", [pytest.param(False, marks=slow), True], ids=["static", "dynamic"])
@pytest.mark.usefixtures("path")
def test_compiles_without_a_break(dynamic):
    compiled = torch.compile(
        lambda *args: experts(*args, **GPT_OSS), fullgraph=True, dynamic=dynamic, backend="aot_eager"
    )
    for tokens in (11, 12):
        inputs = gpt_oss(tokens)
        grad = torch.randn(tokens, 8, dtype=torch.float64)
        have, have_grads = gradients(lambda i: compiled(*i.args), inputs, grad)
        want, want_grads = gradients(lambda i: naive_experts(i, **GPT_OSS), inputs, grad)
        torch.testing.assert_close(have, want)
        torch.testing.assert_close(have_grads, want_grads)
        with torch.no_grad():
            torch.testing.assert_close(compiled(*inputs.args), want)


@pytest.mark.usefixtures("path")
def test_one_dynamic_graph_serves_every_number_of_tokens():
    graphs = []

    def backend(graph: torch.fx.GraphModule, example: list[Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    compiled = torch.compile(lambda *args: experts(*args, **GPT_OSS), fullgraph=True, dynamic=True, backend=backend)
    for tokens in (11, 12, 40):
        inputs = gpt_oss(tokens)
        torch.testing.assert_close(compiled(*inputs.args), naive_experts(inputs, **GPT_OSS))
    assert len(graphs) == 1


@pytest.fixture
def no_loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As on an accelerator without a backend: grouped products are all that there is beside the reference."""
    others = {kernel.forward for _, kernel in registry.kernels("moe.experts")}
    monkeypatch.setenv("KPT_DISABLE", ",".join(others - {"kpt_moe.torch_kernels.experts_grouped:forward"}))
    refresh()
    yield
    monkeypatch.undo()
    refresh()


@pytest.mark.usefixtures("no_loop")
def test_a_compiler_may_look_into_grouped_products():
    graphs = []

    def backend(graph: torch.fx.GraphModule, example: list[Tensor]) -> torch.fx.GraphModule:
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return graph

    compiled = torch.compile(lambda *args: experts(*args, **GPT_OSS), fullgraph=True, dynamic=True, backend=backend)
    for tokens in (11, 12, 40):
        inputs = gpt_oss(tokens)
        torch.testing.assert_close(compiled(*inputs.args), naive_experts(inputs, **GPT_OSS))
    assert len(graphs) == 1
    assert [target for target in graphs[0] if target.startswith("kpt.")] == ["kpt.moe_grouped_mm.default"] * 2


@pytest.mark.slow
def test_compiles_with_inductor():
    layer = Layer(torch.float32)
    compiled = torch.compile(layer, fullgraph=True)
    inputs = gpt_oss(dtype=torch.float32)
    inputs.x.requires_grad_()
    out = compiled(inputs.x, inputs.index, inputs.weights)
    wanted = [inputs.x, *layer.parameters()]
    have = torch.autograd.grad(out.square().sum(), wanted)
    eager = layer(inputs.x, inputs.index, inputs.weights)
    torch.testing.assert_close(out, eager)
    torch.testing.assert_close(have, torch.autograd.grad(eager.square().sum(), wanted), rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("path")
def test_exports_with_any_number_of_tokens():
    def args(tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        return gpt_oss(tokens).args[:3]

    layer, any_size = Layer(), torch.export.Dim.DYNAMIC
    shapes = {name: {0: any_size} for name in ("x", "index", "weights")}
    program = torch.export.export(layer, args(11), dynamic_shapes=shapes).module()
    for tokens in (2, 63):
        torch.testing.assert_close(program(*args(tokens)), layer(*args(tokens)))


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.usefixtures("path")
def test_meta_has_shapes(grad):
    inputs = gpt_oss(dtype=torch.bfloat16)
    inputs = Inputs(inputs.x.to("meta"), inputs.index.to("meta"), *(tensor.to("meta") for tensor in inputs.args[2:]))
    inputs = inputs.leaves() if grad else inputs
    out = experts(*inputs.args, **GPT_OSS)
    assert (out.shape, out.dtype, out.device.type) == ((11, 8), torch.bfloat16, "meta")
    if grad:
        grads = torch.autograd.grad(out.sum(), inputs.floats)
        assert [(g.shape, g.dtype) for g in grads] == [(leaf.shape, leaf.dtype) for leaf in inputs.floats]


@pytest.mark.usefixtures("path")
def test_fake_tensors_have_shapes_and_strides():
    real = gpt_oss().leaves()
    want = experts(*real.args, **GPT_OSS)
    want_grads = torch.autograd.grad(want.sum(), real.floats)
    with FakeTensorMode() as mode:
        fake = Inputs(*map(mode.from_tensor, real.args))
        have = experts(*fake.args, **GPT_OSS)
        have_grads = torch.autograd.grad(have.sum(), fake.floats)
    for a, b in zip((have, *have_grads), (want, *want_grads), strict=True):
        assert (a.shape, a.stride(), a.dtype, a.device) == (b.shape, b.stride(), b.dtype, b.device)


def test_activation_checkpointing_gives_the_same():
    inputs = gpt_oss().leaves()
    plain = experts(*inputs.args, **GPT_OSS)
    again = torch.utils.checkpoint.checkpoint(lambda: experts(*inputs.args, **GPT_OSS), use_reentrant=False)
    assert torch.equal(again, plain)
    for a, b in zip(*(torch.autograd.grad(out.sum(), inputs.floats) for out in (again, plain)), strict=True):
        assert torch.equal(a, b)


def test_tracing_computes_nothing():
    inputs = gpt_oss()
    with record() as log, FakeTensorMode(allow_non_fake_inputs=True):
        out = experts(*inputs.args, **GPT_OSS)
    assert log == []
    assert isinstance(out, torch._subclasses.FakeTensor)


def test_floating_point_operations_are_counted():
    inputs = make_inputs().leaves()
    with FlopCounterMode(display=False) as counter:
        out = experts(*inputs.args)
        forward = counter.get_total_flops()
        out.sum().backward()
    assert forward == 2 * inputs.index.numel() * (8 * 12 + 6 * 8)
    assert counter.get_total_flops() == 3 * forward
