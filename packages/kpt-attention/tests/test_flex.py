"""`flex_attention` beside torch's own: functions of scores, masks by functions and by blocks, outputs and gradients."""

import functools
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._higher_order_ops.flex_attention import math_attention
from torch.nn.attention.flex_attention import BlockMask, _identity, create_block_mask
from torch.nn.attention.flex_attention import flex_attention as theirs

from kpt_attention import FlexAttention, causal, flex_attention, predicate
from kpt_attention.flex import _of_torch
from kpt_core import InputError

Function = Callable[..., Tensor]


def draw(batch: int, heads: int, kv_heads: int, queries: int, keys: int, dtype: torch.dtype) -> list[Tensor]:
    shapes = (heads, queries, 4), (kv_heads, keys, 4), (kv_heads, keys, 6)
    return [torch.randn(batch, *shape, dtype=dtype, requires_grad=True) for shape in shapes]


def mask_mods(batch: int, heads: int, queries: int, keys: int) -> dict[str, Function]:
    ids, by_head = torch.randint(0, 3, (batch, max(queries, keys))), torch.randint(1, 9, (heads,))
    return {
        "causal": lambda b, h, q, k: q >= k,
        "causal, aligned at the end": lambda b, h, q, k: q + keys - queries >= k,
        "documents of each sequence": lambda b, h, q, k: ids[b, q] == ids[b, k],
        "windows of each head": lambda b, h, q, k: (q - k).abs() < by_head[h],
        "both": lambda b, h, q, k: (ids[b, q] <= ids[b, k]) & (k <= q + by_head[h]),
        "rows that see nothing": lambda b, h, q, k: (q % 3 > 0) & (k % 5 != b + h),
        "numbers": lambda b, h, q, k: (q * 7 + k * k + 3 * h + 5 * b) % 4 > 1,
        "nothing": lambda b, h, q, k: q < 0,
    }


def score_mods(batch: int, heads: int, queries: int, keys: int, kind: dict[str, Any]) -> dict[str, Function | None]:
    slopes, bias = torch.rand(heads, **kind), torch.randn(batch, queries, keys, **kind)
    return {
        "none": None,
        "slopes": lambda s, b, h, q, k: s - slopes[h] * (q - k).abs(),
        "cap": lambda s, b, h, q, k: 2 * torch.tanh(s / 2),
        "bias": lambda s, b, h, q, k: s + bias[b, q, k],
        "places": lambda s, b, h, q, k: s * (1 + b) + torch.where(q >= k, q - k, -h),
        "hides": lambda s, b, h, q, k: torch.where(k % 4 == h % 4, s, -math.inf),
    }


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Run in one thread: tensors are small, and threads wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile", "ignore:return_lse is deprecated")
@pytest.mark.parametrize("seed", range(3))
def test_it_is_torchs(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # Else each case is traced; the kernels' arithmetic is the same.
    monkeypatch.setattr(torch.nn.attention.flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    random.seed(seed)
    torch.manual_seed(seed)
    seen: Counter[str] = Counter()
    for _ in range(100):
        batch, (heads, kv_heads) = random.choice([1, 2]), random.choice([(1, 1), (3, 3), (4, 2)])
        queries, keys = random.choice([(1, 7), (9, 9), (20, 33), (33, 20), (5, 40), (140, 12), (12, 140)])
        dtype = random.choice([torch.float32, torch.float64])
        q, k, v = draw(batch, heads, kv_heads, queries, keys, dtype)
        mask_name, mask_mod = random.choice(list(mask_mods(batch, heads, queries, keys).items()))
        score_name, score_mod = random.choice(
            list(score_mods(batch, heads, queries, keys, {"dtype": dtype, "requires_grad": False}).items())
        )
        size = random.choice([128, 8, (16, 4), (4, 16)])
        alike = mask_name.startswith("causal")
        sizes = (random.choice([batch, None]), None) if alike else (batch, heads)
        blocks = create_block_mask(mask_mod, *sizes, queries, keys, "cpu", size)
        given = random.choice([blocks, mask_mod])
        scale = random.choice([None, 0.3])
        leaves = [each.detach() for each in (q, k, v)]
        want, sums = theirs(*leaves, score_mod, blocks, scale, heads != kv_heads, return_lse=True)
        got, lse = flex_attention(q, k, v, score_mod, given, scale=scale, return_lse=True)
        told = f"{mask_name}, {score_name}, {queries} x {keys}, {size}, {type(given).__name__}"
        close = functools.partial(torch.testing.assert_close, rtol=0, msg=lambda said, told=told: f"{told}: {said}")
        # Scores reach 100 where places are added: a few roundings of that in float32.
        room = 1e-12 if dtype is torch.float64 else 1e-4
        close(got, want, atol=room)
        close(lse, sums.to(lse.dtype), atol=room)
        pull = torch.randn_like(want)
        # On CPUs torch has no gradient but through the body of its operation.
        factor = 1 / math.sqrt(4) if scale is None else scale
        whole, _, _ = math_attention(q, k, v, score_mod or _identity, blocks.as_tuple(), factor, {})
        grads = [torch.autograd.grad(out, (q, k, v), pull) for out in (got, whole)]
        for one, other in zip(*grads, strict=True):
            close(one, other.nan_to_num(), atol=10 * room)
        seen.update((mask_name, score_name, "Q < K" if queries < keys else "Q > K" if queries > keys else "Q = K"))
    assert len(seen) == 8 + 6 + 3, seen


def listed(blocks: list[list[int]], columns: int) -> tuple[Tensor, Tensor]:
    number = torch.tensor([len(row) for row in blocks], dtype=torch.int32)
    indices = torch.tensor([[*row, *[each for each in range(columns) if each not in row]] for row in blocks])
    return number[None, None], indices[None, None].int()


@pytest.mark.parametrize("dims", [4, 2])
def test_blocks_say_what_is_seen(dims: int) -> None:
    partial, full = [[0], [1, 3], []], [[2], [], [0, 1]]
    tables = *listed(partial, 4), *listed(full, 4)
    if dims == 2:
        tables = tuple(each[0, 0] for each in tables)
    q, k, v = draw(2, 4, 2, 20, 14, torch.float64)
    seen = torch.zeros(20, 14, dtype=torch.bool)
    for mask_mod in (None, lambda b, h, q, k: q >= k):
        blocks = BlockMask.from_kv_blocks(*tables, BLOCK_SIZE=(8, 4), mask_mod=mask_mod, seq_lengths=(20, 14))
        seen[:] = False
        for row in range(3):
            for block in partial[row] + full[row]:
                where = slice(row * 8, row * 8 + 8), slice(block * 4, block * 4 + 4)
                inside = mask_mod is None or block in full[row]
                seen[where] = True if inside else torch.ones(20, 14).tril().bool()[where]
        want = flex_attention(q, k, v, mask=lambda b, h, q, k, seen=seen: seen[q, k])
        torch.testing.assert_close(flex_attention(q, k, v, mask=blocks), want)
        torch.testing.assert_close(flex_attention(q, k, v, lambda s, b, h, i, j: s, blocks), want)
        assert want.any()


def test_blocks_differ_by_sequence_and_head() -> None:
    number = torch.randint(1, 5, (2, 4, 3), dtype=torch.int32)
    indices = torch.rand(2, 4, 3, 4).argsort(-1).int()
    blocks = BlockMask.from_kv_blocks(number, indices, BLOCK_SIZE=8)
    q, k, v = draw(2, 4, 2, 24, 32, torch.float64)
    dense = blocks.to_dense().bool().repeat_interleave(8, 2).repeat_interleave(8, 3)
    want = flex_attention(q, k, v, mask=lambda b, h, q, k: dense[b, h, q, k])
    torch.testing.assert_close(flex_attention(q, k, v, mask=blocks), want)
    with pytest.raises(
        InputError, match=r"a sliced BlockMask has lost its mask_mod.*: set mask_mod to that of the whole"
    ):
        flex_attention(q[:1], k[:1], v[:1], mask=blocks[:1])


def test_a_function_counts_from_the_first_query_and_a_mask_to_the_last_key() -> None:
    q, k, v = draw(1, 2, 2, 5, 40, torch.float64)
    by_blocks = create_block_mask(lambda b, h, i, j: j <= i + 35, None, None, 5, 40, "cpu")
    want = flex_attention(q, k, v, mask=causal())
    for mask in (by_blocks, lambda b, h, i, j: j <= i + 35):
        torch.testing.assert_close(flex_attention(q, k, v, mask=mask), want)
        torch.testing.assert_close(flex_attention(q, k, v, lambda s, b, h, i, j: s, mask), want)


def test_a_bare_function_is_asked_for_each_sequence_and_head() -> None:
    ids = torch.randint(0, 2, (3, 12))
    layer = FlexAttention(8, 2, lambda b, h, q, k: (ids[b, q] == ids[b, k]) & (k <= q + h), dtype=torch.float64)
    x = torch.randn(3, 12, 8, dtype=torch.float64)
    seen = torch.stack([torch.ones(12, 12).tril(h).bool() for h in (0, 1)])
    seen = seen & (ids[:, None, :, None] == ids[:, None, None])
    full = FlexAttention(8, 2, "full", dtype=torch.float64)
    full.load_state_dict(layer.state_dict())
    torch.testing.assert_close(layer(x), full(x, seen))


def test_a_function_that_looks_at_neither_is_evaluated_once() -> None:
    sizes = []

    def allows(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        found = q >= k
        sizes.append(tuple(found.shape))
        return found

    plan = predicate(allows).plan(200, batch=8, heads=16)
    assert max(math.prod(each) for each in sizes) == 128 * 200 - 128 * 72 + 72 * 128  # two rows of blocks
    assert plan.blocks is not None
    assert plan.blocks.shape[:2] == (1, 1)
    alike = predicate(lambda b, h, q, k: (q + 0 * h + 0 * b) >= k).plan(200, batch=2, heads=3)
    assert alike.blocks is not None
    assert alike.blocks.shape[:2] == (1, 1)
    assert (alike.batch, alike.heads, plan.batch, plan.heads) == (2, 3, None, None)


def test_a_block_mask_is_for_its_lengths() -> None:
    blocks = create_block_mask(lambda b, h, q, k: q >= k, 2, None, 30, 30, "cpu")
    q, k, v = draw(2, 2, 2, 20, 30, torch.float32)
    for score_mod in (None, lambda s, b, h, i, j: s):
        with pytest.raises(InputError, match="is for 30 queries and 30 keys; got 20 and 30: make one"):
            flex_attention(q, k, v, score_mod, blocks)
    with pytest.raises(InputError, match=r"blocks \[2, 1, 1, 1\]; expected \[1 or 1, 2 or 1, 1, 1\]"):
        flex_attention(*draw(1, 2, 2, 30, 30, torch.float32), mask=blocks)
    assert _of_torch(blocks).spread() == (True, False)


X = torch.ones(2, 2, 4, 8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": [1.0]}, r"flex_attention: q must be a tensor; got list \[1.0\]"),
        ({"k": X[:1], "v": X[:1]}, r"of one batch, .*; got \[2, 2, 4, 8\], \[1, 2, 4, 8\] and \[1, 2, 4, 8\]"),
        ({"v": X[:, :, :3]}, r"k and v of as many heads and tokens; got .* and \[2, 2, 3, 8\]"),
        ({"q": X[0]}, r"q, k and v must be \[batch, heads, tokens, head_dim\] of one batch.*; got \[2, 4, 8\]"),
        ({"k": X[..., :5]}, r"both have one head_dim of at least 1; got .*\[2, 2, 4, 5\]"),
        ({"q": X[:, :1]}, r"heads of k must divide those of q.*; got \[2, 1, 4, 8\]"),
        ({"v": X.double()}, r"q, k and v must have one dtype, of floats; got \[torch.float32, .*torch.float64\]"),
        ({"v": X.to("meta")}, r"q, k and v must have one device.*meta"),
        ({"scale": math.nan}, r"flex_attention: scale must be a finite number; got nan"),
        ({"score_mod": 3}, r"score_mod must be a function of \(score, b, h, q, k\) or None; got 3"),
        ({"score_mod": lambda s, b, h, i, j: s.sum()}, r"score_mod must give \[2, 2, 4, 4\].*; got \[\]"),
        ({"score_mod": lambda s, b, h, i, j: 3}, r"score_mod must give \[2, 2, 4, 4\].*; got int"),
        ({"mask": 3}, r"mask must be a Mask, a Plan, a BlockMask or a function of \(b, h, q, k\); got int"),
        ({"mask": lambda b, h, q, k: q - k}, r"a predicate must give a bool tensor; got torch.int64"),
    ],
)
def test_bad_input_is_a_sentence(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        flex_attention(**{"q": X, "k": X, "v": X, "score_mod": lambda s, b, h, i, j: s, **change})
    if "score_mod" not in change:
        with pytest.raises(InputError, match=message):
            flex_attention(**{"q": X, "k": X, "v": X, **change})
