"""Compiled and exported: how many graphs lengths take, and on which shapes an exported program goes on."""

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim, export
from torch.nn.functional import scaled_dot_product_attention

from kpt_attention import (
    Attention,
    CrossAttention,
    FlexAttention,
    attention,
    causal,
    padding,
    predicate,
    sliding_window,
)
from kpt_attention.dense import dense
from kpt_attention.intervals import complement, intersect, tidy, unite

LENGTHS, BATCHES = (5, 17, 40, 129, 300), (1, 2, 3, 2, 3)


class Sdpa(nn.Module):
    """PyTorch's own, with numbers of the module as KPT's have: compilers ask about such a number once."""

    scale = 0.5
    dropout = 0.0

    def forward(self, x: Tensor) -> Tensor:
        return scaled_dot_product_attention(x, x, x, dropout_p=self.dropout, is_causal=True, scale=self.scale)


class Op(nn.Module):
    """The op under a mask that is lowered inside the graph."""

    def __init__(self, mask):
        super().__init__()
        self.mask = mask

    def forward(self, x: Tensor) -> Tensor:
        return attention(x, x, x, self.mask)


class Padded(nn.Module):
    """The op under a mask that was lowered to tensors outside."""

    def forward(self, x: Tensor, intervals: Tensor) -> Tensor:
        return dense(x, x, x, intervals, return_lse=False)[0]


def graphs(module: nn.Module, size: tuple[int, ...], dynamic: bool | None, training: bool) -> int:
    """Return how many graphs all lengths and batches take; outputs and gradients must be those of eager mode."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, backend=counter, fullgraph=True, dynamic=dynamic)
    for tokens, batch in zip(LENGTHS, BATCHES, strict=True):
        shape = (batch, tokens, *size) if len(size) == 1 else (batch, size[0], tokens, size[1])
        found = []
        for run in (compiled, module):
            torch.manual_seed(0)
            x = torch.randn(shape, requires_grad=training)
            given = [x]
            if isinstance(module, Padded):
                shown = torch.arange(tokens) < torch.tensor([tokens, 3, 4])[:batch, None]
                given.append(padding(shown).plan(tokens, batch=batch).intervals)
            with torch.set_grad_enabled(training):
                out = run(*given)
            leaves = (x, *module.parameters()) if training else ()
            found.append((out, *(torch.autograd.grad(out.square().sum(), leaves) if training else ())))
        for got, wanted in zip(*found, strict=True):
            torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)
    return counter.frame_count


@pytest.fixture(scope="module")
def of_sdpa():
    """Give how many PyTorch's own attention takes."""
    return {
        (dynamic, training): graphs(Sdpa(), (4, 8), dynamic, training)
        for dynamic in (True, None)
        for training in (False, True)
    }


MODULES = {
    "causal": (lambda: Op(causal()), (4, 8)),
    "window": (lambda: Op(causal() & sliding_window(5)), (4, 8)),
    "padding": (Padded, (4, 8)),
    "layer": (lambda: Attention(32, 4, causal=True, window=5, rotary_base=100.0), (32,)),
    "dropout": (lambda: Attention(32, 4, causal=True, dropout=0.5), (32,)),
    "blocks": (lambda: FlexAttention(32, 4, "dilated", {"size": 3, "step": 2}), (32,)),
    "cross": (lambda: Crossed(), (32,)),
    "documents": (lambda: Op(predicate(lambda b, h, q, k: q // 7 == k // 7)), (4, 8)),
}


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("dynamic", [True, None], ids=["dynamic", "automatic"])
def test_all_lengths_take_no_more_graphs_than_pytorchs_own(of_sdpa, name, training, dynamic):
    make, size = MODULES[name]
    torch.manual_seed(0)
    assert graphs(make(), size, dynamic, training) <= of_sdpa[dynamic, training]


def test_compiled_dropout_draws_anew_in_each_step():
    layer = Attention(32, 4, dropout=0.5)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x = torch.randn(2, 12, 32)
    assert not torch.equal(compiled(x), compiled(x))
    torch.manual_seed(1)
    wanted = layer(x)
    torch.manual_seed(1)
    torch.testing.assert_close(compiled(x), wanted)


def test_a_drawn_seed_is_added_to_the_seed():
    q = torch.randn(1, 2, 9, 4)
    wanted = dense(q, q, q, dropout=0.5, seed=7)[0]
    assert torch.equal(dense(q, q, q, dropout=0.5, seed=3, drawn_seed=torch.tensor(4))[0], wanted)
    assert not torch.equal(dense(q, q, q, dropout=0.5, seed=3)[0], wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_what_is_saved_has_the_shapes_that_compilers_are_told(dtype):
    call = dense.bind(*(torch.randn(2, heads, 5, size, dtype=dtype) for heads, size in ((4, 8), (2, 8), (2, 3))))
    for told, saved in zip(dense.fake_saves(call), dense.saves(call), strict=True):
        assert (told.shape, told.dtype, told.stride()) == (saved.shape, saved.dtype, saved.contiguous().stride())


class Shown(Attention):
    """A layer under a mask of padding, made in the graph."""

    def __init__(self) -> None:
        super().__init__(32, 4, causal=True)

    def forward(self, x: Tensor) -> Tensor:
        shown = torch.arange(x.shape[1], device=x.device) >= 2 * torch.arange(x.shape[0], device=x.device)[:, None]
        return super().forward(x, shown)


class Crossed(CrossAttention):
    """A layer that attends to other tokens, of another length."""

    def __init__(self) -> None:
        super().__init__(32, 4, num_kv_heads=2, kv_dim=16)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x, torch.cat((x, x), 1)[:, 1:, :16])


LAYERS = {
    "cross": lambda: Crossed(),
    "full": lambda: Attention(32, 4),
    "causal": lambda: Attention(32, 4, causal=True, rotary_base=100.0, dropout=0.5),
    "window": lambda: Attention(32, 4, causal=True, window=5),
    "pattern of a window": lambda: FlexAttention(32, 4, "sliding_window", {"size": 5}),
    "prefix": lambda: FlexAttention(32, 4, "prefix_lm", {"length": 3}),
    "blocks": lambda: FlexAttention(32, 4, "dilated", {"size": 3, "step": 2}),
    "function": lambda: FlexAttention(32, 4, lambda b, h, q, k: (q - k) % (h + 2) == 0),
    "padding": lambda: Shown(),
    "two intervals": lambda: FlexAttention(32, 4, "global_tokens", {"size": 3, "count": 2}),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("strict", [False, True], ids=["not strict", "strict"])
def test_an_exported_layer_serves_any_batch_and_length(name, strict):
    torch.manual_seed(0)
    layer = LAYERS[name]().eval()
    sizes = {0: Dim("batch", min=1), 1: Dim("tokens", min=1)}
    with torch.no_grad():
        program = export(layer, (torch.randn(2, 12, 32),), dynamic_shapes=(sizes,), strict=strict).module()
        for batch, tokens in ((2, 12), (1, 1), (1, 40), (3, 1), (5, 200)):
            x = torch.randn(batch, tokens, 32)
            torch.testing.assert_close(program(x), layer(x))


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_gives_shapes_where_no_value_can_be_read(name):
    for training in (True, False):
        layer = LAYERS[name]().train(training)
        with FakeTensorMode(allow_non_fake_inputs=True):
            assert layer(torch.empty(3, 7, 32)).shape == (3, 7, 32)
        x = torch.empty(3, 7, 32, device="meta", requires_grad=True)
        out = layer.to("meta")(x)
        assert out.shape == (3, 7, 32)
        assert out.is_meta
        out.sum().backward()
        assert x.grad.shape == x.shape


def test_intervals_in_a_graph_are_those_of_eager_mode_and_empty_ones():
    generator = torch.Generator().manual_seed(0)
    one, other = (tidy(*torch.randint(0, 30, (2, 40, 3), generator=generator).sort(0).values) for _ in range(2))
    for work in (intersect, unite, lambda one, other: complement(unite(one, other), 30)):
        wanted = work(one, other)
        found = torch.compile(work, backend="aot_eager", fullgraph=True)(one, other)
        assert torch.equal(found[..., : wanted.shape[-2], :], wanted)
        assert not found[..., wanted.shape[-2] :, :].any()
        assert found.shape[-2] <= one.shape[-2] + other.shape[-2] + 1
