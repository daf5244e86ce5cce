"""Layers and `flex_attention`: beside PyTorch's own attention, with and without caches."""

import math
import pickle

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, export
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask
from torch.nn.attention.flex_attention import flex_attention as torch_flex
from torch.nn.functional import scaled_dot_product_attention
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import kpt_core
from kpt_attention import (
    Attention,
    CrossAttention,
    FlashAttention3,
    FlexAttention,
    PagedCache,
    causal,
    flex_attention,
    padding,
    prefix_lm,
)
from kpt_attention.dense import dense
from kpt_attention.modules import PATTERNS
from kpt_core import InputError

X = torch.randn(2, 12, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def expected(layer: Attention, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return what PyTorch makes of the layer's parameters, and the probabilities."""
    q, k, v = (
        each(x).unflatten(-1, (-1, layer.head_dim)).transpose(1, 2)
        for each in (layer.q_proj, layer.k_proj, layer.v_proj)
    )
    if layer.rotary_base is not None:
        rates = layer.rotary_base ** -(torch.arange(0, layer.head_dim, 2, dtype=x.dtype) / layer.head_dim)
        angles = (torch.arange(x.shape[1])[:, None] * rates).repeat(1, 2)[None]
        q, k = apply_rotary_pos_emb(q, k, angles.cos(), angles.sin())
    k, v = (each.repeat_interleave(layer.num_heads // layer.num_kv_heads, 1) for each in (k, v))
    identity = torch.eye(x.shape[1], dtype=x.dtype).expand(*q.shape[:2], -1, -1)
    out, weights = (scaled_dot_product_attention(q, k, each, mask) for each in (v, identity))
    return layer.out_proj(out.transpose(1, 2).flatten(2)), weights


@pytest.mark.parametrize(
    "settings",
    [{}, {"causal": True}, {"causal": True, "window": 4}, {"num_kv_heads": 2}, {"rotary_base": 100.0, "causal": True}],
    ids=str,
)
@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_a_layer_is_what_pytorch_makes_of_its_parameters(settings, backend):
    torch.manual_seed(0)
    layer = FlashAttention3(32, 4, **settings, dtype=torch.float64)
    places = torch.arange(12)
    back = places[:, None] - places
    mask = (back >= 0) & (back < (layer.window or 99)) if layer.causal else None
    with kpt_core.use("torch") if backend == "torch" else kpt_core.use():
        out, weights = layer(X, need_weights=True)
    wanted, probabilities = expected(layer, X, mask)
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(weights, probabilities)
    assert torch.equal(layer(X), out)
    padding = torch.ones(2, 12, dtype=torch.bool)
    padding[1, 8:] = False
    hidden = padding[:, None, None] if mask is None else padding[:, None, None] & mask
    torch.testing.assert_close(layer(X, padding), expected(layer, X, hidden)[0])
    torch.testing.assert_close(layer(X, prefix_lm(12)), wanted)  # which hides nothing


def test_dropout_is_drawn_in_training_alone():
    layer = FlashAttention3(32, 4, dropout=0.5, dtype=torch.float64)
    torch.manual_seed(1)
    one, two = layer(X), layer(X)
    torch.manual_seed(1)
    assert torch.equal(layer(X), one)
    assert not torch.equal(one, two)
    torch.testing.assert_close(layer.eval()(X), expected(layer, X, None)[0])


@pytest.mark.parametrize("settings", [{}, {"window": 5}, {"softcap": 2.0, "sinks": True, "num_kv_heads": 1}], ids=str)
def test_a_cache_gives_what_the_whole_sequence_gives(settings):
    torch.manual_seed(0)
    layer = Attention(32, 4, causal=True, rotary_base=100.0, **settings, dtype=torch.float64)
    if layer.sinks is not None:
        nn.init.normal_(layer.sinks)
    cache = PagedCache(
        layers=2, pages=12, kv_heads=layer.num_kv_heads, head_dim=8, page_size=3, window=layer.window,
        dtype=torch.float64,
    )  # fmt: skip
    wanted = layer(X)
    found = [[], []]
    one, two = cache.add(), cache.add()
    with torch.no_grad():
        for first, second in ((7, 2), (1, 9), (1, 1), (3, 0)):
            starts = cache.length(one), cache.length(two)
            rows = torch.cat((X[0, starts[0] :][:first], X[1, starts[1] :][:second]))
            with cache.step({one: first, two: second}) as step:
                out = layer(rows, step=step, layer=1)
            for own, part in zip(found, out.split((first, second)), strict=True):
                own.append(part)
    for own, whole in zip(found, wanted, strict=True):
        torch.testing.assert_close(torch.cat(own), whole)


def test_a_tree_over_pages_gives_what_each_of_its_paths_gives():
    torch.manual_seed(0)
    layer = Attention(32, 4, num_kv_heads=2, causal=True, rotary_base=100.0, dtype=torch.float64)
    cache = PagedCache(layers=1, pages=12, kv_heads=2, head_dim=8, page_size=3, dtype=torch.float64)
    one, two = cache.add(), cache.add()
    texts, new = (X[0, :5], X[1, :2]), (X[0, 5:10], X[1, 5:7])
    paths = [[0], [0, 1], [0, 2], [0, 1, 3], [4]], [[0], [0, 1]]
    with torch.no_grad():
        with cache.step({one: 5, two: 2}) as step:
            layer(torch.cat(texts), step=step)
        with cache.step({one: 5, two: 2}) as step:
            mask, positions = step.tree([[-1, 0, 0, 1, -1], [-1, 0]])
            with pytest.raises(InputError, match=r"mask, positions = step\.tree\(parents\); got positions=None"):
                layer(torch.cat(new), mask, step=step)
            with pytest.raises(InputError, match=r"\[new tokens, n\] of step\.tree; got Causal"):
                layer(torch.cat(new), causal(), step=step)
            out = layer(torch.cat(new), mask, positions=positions, step=step)
        wanted = [
            layer(torch.cat((text, tokens[path]))[None])[0, -1]
            for text, tokens, own in zip(texts, new, paths, strict=True)
            for path in own
        ]
    torch.testing.assert_close(out, torch.stack(wanted))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("hidden", ["nothing", "padding", "keys of queries"])
def test_cross_attention_is_that_of_pytorch_with_the_same_weights(bias, hidden):
    torch.manual_seed(0)
    layer = CrossAttention(32, 4, kv_dim=20, bias=bias, dtype=torch.float64)
    wanted = nn.MultiheadAttention(32, 4, bias=bias, kdim=20, vdim=20, batch_first=True, dtype=torch.float64)
    own = layer.q_proj, layer.k_proj, layer.v_proj
    with torch.no_grad():
        for each, weight in zip(own, (wanted.q_proj_weight, wanted.k_proj_weight, wanted.v_proj_weight), strict=True):
            weight.copy_(each.weight)
        wanted.out_proj.load_state_dict(layer.out_proj.state_dict())
        if bias:
            wanted.in_proj_bias.copy_(torch.cat([each.bias for each in own]))
    context, pull = torch.randn(2, 15, 20, dtype=torch.float64), torch.randn_like(X)
    seen = torch.arange(15) < torch.tensor([[15], [6]])
    square = torch.rand(12, 15) < 0.6
    given, theirs = {
        "nothing": (None, {}),
        "padding": (seen, {"key_padding_mask": ~seen}),
        "keys of queries": (square, {"attn_mask": ~square}),
    }[hidden]
    inputs = [X.clone().requires_grad_(), context.requires_grad_()]
    out, weights = layer(*inputs, given, need_weights=True)
    expected_out, expected_weights = wanted(inputs[0], context, context, average_attn_weights=False, **theirs)
    torch.testing.assert_close(out, expected_out)
    torch.testing.assert_close(weights, expected_weights)
    got = torch.autograd.grad((out * pull).sum(), (*inputs, *(each.weight for each in own), layer.out_proj.weight))
    parameters = wanted.q_proj_weight, wanted.k_proj_weight, wanted.v_proj_weight, wanted.out_proj.weight
    torch.testing.assert_close(got, torch.autograd.grad((expected_out * pull).sum(), (*inputs, *parameters)))
    assert torch.equal(layer(X, kv=layer.project(context), mask=given), layer(X, context, given))


def test_cross_attention_shares_heads_and_drops_and_takes_plans():
    torch.manual_seed(0)
    layer = CrossAttention(32, 4, num_kv_heads=2, head_dim=6, softcap=2.0, sinks=True, dtype=torch.float64)
    other = CrossAttention(32, 4, head_dim=6, softcap=2.0, sinks=True, dtype=torch.float64)
    repeated = {
        name: value.unflatten(0, (2, 6)).repeat_interleave(2, 0).flatten(0, 1) if name[0] in "kv" else value
        for name, value in layer.state_dict().items()
    }
    other.load_state_dict(repeated)
    context = X[:, :7]
    torch.testing.assert_close(layer(X, context), other(X, context))
    plan = causal().plan(12, 7)
    torch.testing.assert_close(layer(X, context, plan), layer(X, context, causal()))
    torch.testing.assert_close(layer(X, context, plan), layer(X, context, torch.ones(12, 7).tril(-5).bool()))
    assert layer(X[:, :0], context).shape == (2, 0, 32)
    assert layer(X, context[:, :0]).shape == X.shape
    assert layer.to("meta")(X.to("meta"), context.to("meta")).is_meta
    layer = CrossAttention(32, 4, dropout=0.5, dtype=torch.float64)
    assert not torch.equal(layer(X, X), layer(X, X))
    assert torch.equal(layer.eval()(X, X), layer(X, X))


def test_compiled_and_exported_cross_attention_serves_any_sizes():
    torch.manual_seed(0)
    layer = CrossAttention(32, 4, kv_dim=20, num_kv_heads=2)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
    batch, tokens, keys = (Dim(name, min=1) for name in ("batch", "tokens", "keys"))
    sizes = {"x": {0: batch, 1: tokens}, "context": {0: batch, 1: keys}, "mask": {0: batch, 1: keys}}

    def given(batch: int, tokens: int, keys: int) -> tuple[Tensor, Tensor, Tensor]:
        seen = torch.arange(keys) <= torch.arange(batch)[:, None]
        return torch.randn(batch, tokens, 32), torch.randn(batch, keys, 20), seen

    exported = export(layer.eval(), given(2, 12, 9), dynamic_shapes=sizes).module()
    for each in ((2, 12, 9), (1, 1, 1), (3, 1, 40), (5, 200, 7)):
        inputs = given(*each)
        wanted = layer(*inputs)
        torch.testing.assert_close(exported(*inputs), wanted)
        torch.testing.assert_close(compiled(*inputs), wanted)


SETTINGS = {
    "sliding_window": {"size": 4}, "prefix_lm": {"length": 3}, "document": {"ids": torch.arange(12) // 5},
    "dilated": {"size": 3, "step": 2}, "global_tokens": {"size": 2, "count": 1},
    "block_sparse": {"layout": torch.eye(3, dtype=torch.bool), "block": 4},
    "natten": {"height": 3, "width": 4, "kernel": 3}, "tree": {"parents": (torch.arange(12) - 1) // 2},
}  # fmt: skip


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_hides_what_its_mask_says(pattern):
    layer = FlexAttention(32, 4, pattern, SETTINGS.get(pattern), dtype=torch.float64)
    mask = layer.pattern.dense(12)
    assert pattern == "full" or not mask.all()
    torch.testing.assert_close(layer(X), expected(layer, X, mask)[0])
    again = pickle.loads(pickle.dumps(layer))  # as torch.save does, and processes that are spawned
    assert torch.equal(again(X), layer(X))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_functions_of_scores_give_what_torchs_give_and_their_gradient():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, 140, 4, generator=generator, dtype=torch.float64) for heads in (4, 2, 2))
    slope = torch.rand(4, generator=generator, dtype=torch.float64)

    def bent(score, b, h, i, j):
        return torch.tanh(score) * 3 - slope[h] * (i - j).abs() + b

    def seen(b, h, i, j):
        return (i >= j) & (i - j < 50 + h)

    mask = create_block_mask(seen, None, 4, 140, 140, device="cpu")
    wanted, aux = torch_flex(q, k, v, bent, mask, enable_gqa=True, return_aux=AuxRequest(lse=True))
    for given in (seen, mask):
        out, lse = flex_attention(q, k, v, bent, given, return_lse=True)
        torch.testing.assert_close(out, wanted)
        torch.testing.assert_close(lse, aux.lse)
    torch.testing.assert_close(
        flex_attention(q, k, v, mask=causal()), flex_attention(q, k, v, lambda s, *_: s, causal())
    )
    leaves = [each[:1, :, :5].clone().requires_grad_() for each in (q, k, v)]

    def of_slopes(slopes, *tensors):
        return flex_attention(
            *tensors, lambda s, b, h, i, j: s - slopes[h] * (i - j).abs(), ~causal(), return_lse=False
        )

    assert torch.autograd.gradcheck(of_slopes, (slope.clone().requires_grad_(), *leaves))


Q = X.unflatten(-1, (4, 8)).transpose(1, 2)
SQUARE = torch.ones(12, 12, dtype=torch.bool).tril()
LAYER, ROTARY = (Attention(32, 4, rotary_base=base, dtype=X.dtype) for base in (None, 100.0))
CROSS = CrossAttention(32, 4, kv_dim=20, dtype=X.dtype)


def test_a_square_mask_is_taken_for_what_it_is_said_to_be():
    x = X[:1].expand(12, -1, -1) + torch.arange(12)[:, None, None]
    torch.testing.assert_close(LAYER(x, SQUARE[None, None]), expected(LAYER, x, SQUARE)[0])
    torch.testing.assert_close(LAYER(x, padding(SQUARE)), expected(LAYER, x, SQUARE[:, None, None])[0])
    torch.testing.assert_close(LAYER(X, SQUARE), expected(LAYER, X, SQUARE)[0])
    alone = torch.ones(1, 1, dtype=torch.bool)
    torch.testing.assert_close(LAYER(X[:1, :1], alone), LAYER(X[:1, :1]))


def test_positions_may_be_shared_by_the_sequences():
    shifted = torch.arange(12) + 3
    wanted = ROTARY(X, positions=shifted)
    for given in (shifted[None], shifted.expand(2, -1), shifted.int()):
        torch.testing.assert_close(ROTARY(X, positions=given), wanted)


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (lambda: FlashAttention3(30, 4), r"num_heads \(4\) must divide embed_dim \(30\)"),
        (lambda: Attention(32, 4, num_kv_heads=3), r"num_kv_heads \(3\) must divide num_heads \(4\)"),
        (lambda: Attention(12, 4, rotary_base=1e4), "a rotary embedding turns pairs; got head_dim 3"),
        (lambda: FlashAttention3(32, 4, dropout=1.0), r"dropout must be in \[0, 1\); got 1\.0"),
        (lambda: Attention(32, 4, window=3), "window is of causal attention; got 3 with causal=False"),
        (lambda: Attention(32, 4)(X[0]), r"x must be \[batch, tokens, 32\]; got \[12, 32\]"),
        (lambda: LAYER(X, X[0]), r"a tensor as mask must be bool, .*; got torch\.float64 \[12, 32\]: pass mask\.bool"),
        (lambda: LAYER(X, SQUARE[0]), r"a tensor as mask must be bool, .*; got torch\.bool \[12\]"),
        (lambda: LAYER(X, SQUARE.tolist()), r"mask must be a Mask, a Plan or a bool tensor; got list \[\[True"),
        (lambda: LAYER(X, SQUARE.numpy()), "mask must be a Mask, a Plan or a bool tensor; got ndarray array"),
        (lambda: LAYER(X, max), "got builtin_function_or_method .*predicate"),
        (lambda: LAYER(X, causal().plan(11)), "the plan is for 11 queries and 11 keys; got 12 and 12"),
        (
            lambda: LAYER(X[:1].expand(12, -1, -1), SQUARE),
            r"a mask of \[12, 12\] for 12 sequences of as many tokens may be padding or say .*: pass kpt_attention\.p",
        ),
        (
            lambda: LAYER(X[:1].expand(4, -1, -1), SQUARE.expand(4, -1, -1)),
            r"a mask of \[4, 12, 12\] for 4 sequences and as many heads may have .*: pass mask\[:, None\] for sequen",
        ),
        (lambda: ROTARY(X, positions=list(range(12))), r"positions must be a tensor of integers on cpu; got \[0, 1"),
        (lambda: ROTARY(X, positions=X[:, :, 0]), "positions must be a tensor of integers on cpu; got torch.float64"),
        (
            lambda: ROTARY(X, positions=torch.arange(12, device="meta")),
            "positions must be a tensor of integers on cpu; got torch.int64 on meta",
        ),
        (lambda: ROTARY(X, positions=torch.arange(11)), r"positions must be \[12\], or \[2, 12\] as x; got \[11\]"),
        (lambda: ROTARY(X, positions=torch.ones(3, 12).int()), r"or \[2, 12\] as x; got \[3, 12\]"),
        (lambda: ROTARY(X, positions=torch.tensor(3)), r"or \[2, 12\] as x; got \[\]"),
        (lambda: Attention(32, 4, softcap=math.nan), "softcap must be positive, or 0 for none; got nan"),
        (lambda: Attention(32, 4, softcap=-1.0), r"softcap must be positive, or 0 for none; got -1\.0"),
        (lambda: Attention(32, 4, dropout=math.nan), r"dropout must be in \[0, 1\); got nan"),
        (lambda: Attention(32, 4, rotary_base=0.0), r"rotary_base must be positive and finite, .*; got 0\.0"),
        (lambda: Attention(np.int64(32), 4), r"embed_dim must be an int of at least 1; got (np\.int64\()?32"),
        (lambda: Attention(32, 4, num_kv_heads=0), "num_kv_heads must be an int of at least 1; got 0"),
        (lambda: Attention(32, 4, head_dim=8.0), r"head_dim must be an int of at least 1; got 8\.0"),
        (lambda: Attention(32, True), "num_heads must be an int of at least 1; got True"),
        (lambda: Attention(32, 4, causal=True, window=-3), "window must be an int of at least 0; got -3"),
        (lambda: CrossAttention(32, 4, kv_dim=0), "CrossAttention: kv_dim must be an int of at least 1; got 0"),
        (lambda: CROSS(X[0], X), r"x must be \[batch, tokens, 32\]; got \[12, 32\]"),
        (lambda: CROSS(X, X), r"context must be \[batch, keys, 20\]; got \[2, 12, 32\]"),
        (lambda: CROSS(X), r"give one of context and kv; got neither: layer\(x, context\), or"),
        (lambda: CROSS(X, X[..., :20], kv=CROSS.project(X[..., :20])), "one of context and kv; got both"),
        (lambda: CROSS(X, X[:1, :, :20]), r"must be \[2, 4, keys, 8\], of as many sequences as x; got \[1, 4, 12, 8\]"),
        (lambda: CROSS(X, kv=(Q[:, :2], Q[:, :2])), r"must be \[2, 4, keys, 8\], .*; got \[2, 2, 12, 8\]: layer\.proj"),
        (lambda: CROSS(X, X[..., :20], X[0]), r"must be bool, \[batch, keys\] or .*; got torch\.float64 \[12, 32\]"),
        (
            lambda: CROSS(X[:, :2], X[..., :20], SQUARE[:2]),
            r"a mask of \[2, 12\] for 2 sequences of as many tokens may be padding or say .*: pass kpt_attention\.p",
        ),
        (lambda: dense(Q, Q, Q, softcap=math.nan), "softcap must be positive, or 0 for none; got nan"),
        (lambda: dense(Q, Q, Q, softcap=math.inf), "softcap must be positive, or 0 for none; got inf"),
        (lambda: dense(Q, Q, Q, scale=math.nan), r"scale must be finite, or None for .*; got nan"),
        (lambda: dense(Q, Q, Q, position=1.0), r"position must be an int; got 1\.0"),
        (lambda: dense(Q, Q, Q, seed=np.int64(3)), r"seed must be an int; got (np\.int64\()?3"),
        (lambda: dense(Q, Q, Q, drawn_seed=torch.ones(1)), r"drawn_seed must be int64 \[\]; got torch\.float32 \[1\]"),
        (lambda: FlexAttention(32, 4, "striped"), "pattern must be one of full, causal, .*; got 'striped'"),
        (lambda: FlexAttention(32, 4, "dilated", {"size": 2}), "settings of 'dilated' do not fit: .*'step'"),
        (lambda: flex_attention(X, X, X, lambda s, *_: s), r"q, k and v must be \[batch, heads, tokens, head_dim\]"),
        (
            lambda: flex_attention(X[None], X[None], X[None], mask=3),
            "mask must be a Mask, a Plan, a BlockMask or a func",
        ),
        (
            lambda: flex_attention(X[None], X[None], X[None], lambda s, *_: s[0]),
            r"score_mod must give \[1, 2, 12, 12\]",
        ),
    ],
)
def test_wrong_use_is_a_sentence(action, message):
    with pytest.raises(InputError, match=message):
        action()
