"""Cases of the ops on paged caches, for the entry-point group `kpt.cases`."""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kpt_attention.cases import _case, _normal, _wrong
from kpt_attention.paged import FP8, paged, spans, visible
from kpt_core import InputError
from kpt_optimize.cases import Arguments, CaseTable, Domain, Sizes

_CACHES = (None, *FP8)


def _caches(
    generator: torch.Generator, pages: int, page_size: int, kv_heads: int, dims: tuple[int, int], dtype: Any
) -> dict[str, Tensor]:
    found = {}
    for name, dim in zip(("k_cache", "v_cache"), dims, strict=True):
        cache = _normal(generator, pages, page_size, kv_heads, dim)
        found[name] = cache if dtype is None else cache.float().to(dtype)
    return found


def _scales(generator: torch.Generator, kv_heads: int) -> dict[str, Tensor]:
    return {name: torch.rand(kv_heads, generator=generator) + 0.5 for name in ("k_scale", "v_scale")}


def _build(
    generator: torch.Generator,
    sequences: int = 3,
    kv_heads: int = 2,
    groups: int = 1,
    page_size: int = 4,
    most_pages: int = 5,
    queries: int = 1,
    head_dim: int = 8,
    value_dim: int = 8,
    lengths: str = "any",
    cache: torch.dtype | None = None,
    scales: bool = False,
    sinks: bool = False,
    alibi: str | None = None,
    bias: str | None = None,
    mask: str | None = None,
    **settings: Any,
) -> Arguments:
    most = page_size * most_pages
    pages = sequences * most_pages + 1
    made = torch.full((sequences,), most, dtype=torch.int32)
    if lengths == "any":
        made = torch.randint(0, most + 1, (sequences,), generator=generator, dtype=torch.int32)
    table = torch.randperm(pages, generator=generator)[: sequences * most_pages].view(sequences, most_pages).int()
    if most_pages and sequences > 1:
        table[1:, 0] = table[0, 0]  # what begins alike is there once
    used = -(-made // page_size)
    table = table.masked_fill(torch.arange(most_pages) >= used[:, None], -1)
    given: Arguments = {}
    tokens, heads = sequences, kv_heads * groups
    each = torch.ones(sequences, dtype=torch.int64)
    if queries > 1:
        # As many in all whatever is drawn; the order varies.
        each = (queries - torch.arange(sequences) * 7) % (queries + 1)
        each = each[torch.randperm(sequences, generator=generator)]
        given["cu_seqlens_q"] = torch.cat((torch.zeros(1, dtype=torch.int64), each.cumsum(0))).int()
        tokens = int(each.sum())
    if scales:
        given |= _scales(generator, kv_heads)
    if sinks:
        given["sinks"] = _normal(generator, heads)
    if alibi is not None:
        shape = (sequences, heads) if alibi == "by sequence" else (heads,)
        given["alibi_slopes"] = torch.rand(shape, generator=generator, dtype=torch.float64) / 4
    if bias is not None:
        keys = int(made.max()) if sequences else 0
        rows = {"whole": (heads, tokens, keys), "of keys": (1, 1, keys + 3), "of queries": (1, tokens, keys)}
        given["bias"] = _normal(generator, *rows[bias])
    if mask is not None:
        given["mask"] = _masks(generator, mask, each.tolist(), queries)
    return {
        "q": _normal(generator, tokens, heads, head_dim),
        **_caches(generator, pages, page_size, kv_heads, (head_dim, value_dim), cache),
        "block_table": table,
        "lengths": made,
        **given,
        **settings,
    }


def _masks(generator: torch.Generator, kind: str, counts: list[int], most: int) -> Tensor:
    """Return trees of each sequence's queries, or anything, over more keys than there are queries."""
    if kind == "any":
        return torch.rand(sum(counts), most + 2, generator=generator) < 0.6
    found = torch.ones(sum(counts), most, dtype=torch.bool)
    row = 0
    for count in counts:
        tree = torch.eye(count, dtype=torch.bool)
        for token in range(1, count):
            tree[token] |= tree[int(torch.randint(0, token, (), generator=generator))]
        found[row : row + count, most - count :] = tree
        row += count
    return found


def _unseen(arguments: Arguments) -> Mapping[str, Tensor]:
    """Mark the places of the caches that no query sees."""
    call = paged.bind(**arguments)
    pages, size = call.k_cache.shape[:2]
    sequence, _, _ = spans(call)
    seen = torch.zeros(pages * size, dtype=torch.bool)
    for table, row in zip(
        call.block_table[sequence], visible(call, torch.arange(call.block_table.shape[1] * size)), strict=True
    ):
        keys = row.nonzero().flatten()
        seen[table[keys // size].long() * size + keys % size] = True
    return dict.fromkeys(("k_cache", "v_cache"), ~seen.view(pages, size, 1, 1))


def _specified(arguments: Arguments) -> bool:
    """Return False where the op refuses, or numbers that are not finite are seen: kernels may spread them."""
    try:
        paged.check(paged.bind(**arguments))  # type: ignore[misc]
    except InputError:
        return False
    finite = (arguments[name].to(torch.float32).isfinite() | unseen for name, unseen in _unseen(arguments).items())
    return all(bool(each.all()) for each in finite)


def _affordable(values: Mapping[str, Any]) -> bool:
    """Return whether the reference, which repeats keys for each query and head, needs no more than megabytes."""
    some = ("sequences", "queries", "page_size", "most_pages", "kv_heads", "groups")
    dim = max(values.get("head_dim", 1), values.get("value_dim", 1))
    return bool(math.prod(values.get(name, 1) for name in some) * dim <= 4_000_000)


_LLAMA: dict[str, Any] = {"kv_heads": 8, "groups": 4, "page_size": 16, "head_dim": 64, "value_dim": 64}


def _family(most_pages: int, dims: int = 64, **sizes: Any) -> dict[str, Any]:
    usual = {"sequences": 2, "kv_heads": 1, "page_size": 16, "head_dim": dims, "value_dim": dims, "lengths": "all"}
    return {**usual, "most_pages": most_pages, **sizes}


#: One layer of each, of few heads; scales and windows are the models' own.
_FAMILIES: dict[str, dict[str, Any]] = {
    "Gemma 2": _family(14, 256, groups=2, window=130, softcap=50.0, scale=256**-0.5),
    "Gemma 3": _family(40, 256, groups=2, window=512, scale=256**-0.5),
    "Gemma 3, a prefill": _family(10, 256, groups=2, window=130, scale=256**-0.5, queries=9, lengths="any"),
    "gpt-oss": _family(20, groups=8, window=128, sinks=True),
    "gpt-oss, a step of everything": _family(90, groups=8, sinks=True, sequences=1),
    "Qwen3-MoE": _family(90, 128, groups=8),
    "Qwen3-MoE, 8 bits": _family(20, 128, groups=8, cache=torch.float8_e4m3fn, scales=True),
    "Llama 4": _family(20, 128, groups=5, lengths="any"),
    "GraniteMoe": _family(20, groups=3, scale=0.015625),
    "MPT": _family(20, kv_heads=4, alibi="by head"),
    "StreamingLLM": _family(90, groups=4, window=130, first=4),
    "a draft model's tree": _family(90, groups=4, mask="tree", queries=8),
}
_paged, _update = (partial(_wrong, f"attention.{name}") for name in ("paged", "update_cache"))

# fmt: off
PAGED = CaseTable(
    op="attention.paged",
    build=_build,
    cases=(
        _case("a step"),
        _case("a step, with the log-sum-exp", return_lse=True, groups=3),
        _case("no sequences", sequences=0),
        _case("no pages", most_pages=0, return_lse=True),
        _case("one token", sequences=1, page_size=1, most_pages=1, lengths="all"),
        _case("63 keys, odd sizes", sequences=1, page_size=7, most_pages=9, lengths="all", head_dim=5, value_dim=7),
        _case("several queries", queries=4, return_lse=True, groups=2),
        _case("more queries than keys", queries=30, most_pages=2, return_lse=True),
        _case("prefills", queries=23, most_pages=9, groups=2),
        _case("a window", window=5, most_pages=9),
        _case("a window of one", window=1, queries=3),
        _case("a window over prefills", window=6, queries=20, most_pages=9, return_lse=True),
        _case("not causal", causal=False, queries=3),
        _case("a window and the first keys", window=5, first=3, most_pages=9, return_lse=True),
        _case("a window and the first keys, prefills", window=6, first=5, queries=20, most_pages=9, groups=2),
        _case("a window that reaches the first keys", window=3, first=30, queries=3),
        _case("alibi", alibi="by head", groups=2, return_lse=True),
        _case("alibi by sequence, prefills", alibi="by sequence", queries=11, most_pages=9),
        _case("alibi, a window and the first keys", alibi="by head", window=4, first=2, queries=4, most_pages=9),
        _case("a bias", bias="whole", groups=3, return_lse=True),
        _case("a bias of keys, prefills", bias="of keys", queries=9, most_pages=9, softcap=2.0),
        _case("a bias, a window and the first keys", bias="of queries", window=4, first=2, queries=4, most_pages=9),
        _case("a tree", mask="tree", queries=6, groups=2, return_lse=True),
        _case("a tree behind a window and the first keys", mask="tree", queries=6, window=9, first=3, most_pages=9),
        _case("a tree with a bias and alibi", mask="tree", queries=6, bias="whole", alibi="by head"),
        _case("a mask of any kind", mask="any", queries=5, most_pages=3, return_lse=True, sinks=True),
        _case("more queries than keys under a mask", mask="tree", queries=30, most_pages=2),
        _case("sinks", sinks=True, return_lse=True, groups=2),
        _case("softcap", softcap=1.5, scale=0.4),
        _case("e4m3", cache=torch.float8_e4m3fn, scales=True, groups=2, queries=2),
        _case("e5m2", cache=torch.float8_e5m2),
        _case("scales of the caches' own dtype", scales=True, return_lse=True),
        _case("past a split of keys", sequences=2, page_size=64, most_pages=20, kv_heads=1, groups=5, head_dim=16,
            value_dim=24, lengths="all"),
        _case("llama-3.2-1b, a step of 4", sequences=4, most_pages=20, **_LLAMA, model=True),
        _case("llama-3.2-1b, a step of 4, 8 bits", sequences=4, most_pages=20, cache=torch.float8_e4m3fn, scales=True,
            **_LLAMA, model=True),
    ),
    wrong=(
        _paged("a batch", r"q must be .*\[tokens, heads, head_dim\]; got torch\.float32 \[1, 3, 2, 8\]",
            q=lambda t: t[None]),
        _paged("another head_dim", r"q needs caches of head_dim 7 and 8; got k_cache \[16, 4, 2, 8\]",
            q=lambda t: t[..., 1:]),
        _paged("fewer pages of values", r"caches must be \[pages, page_size, heads, head_dim\], as many",
            v_cache=lambda t: t[1:]),
        _paged("caches of another dtype", r"caches must both have q's dtype torch\.float32, or float8",
            k_cache=Tensor.double, v_cache=Tensor.double),
        _paged("heads that do not divide", r"heads of the caches \(2\) must divide those of q \(3\)",
            q=lambda t: t[:, :1].repeat(1, 3, 1)),
        _paged("a table of int64", r"block_table must be int32 \[sequences, pages\].*got torch\.int64",
            block_table=Tensor.long),
        _paged("lengths of fewer", r"block_table has 3 sequences, lengths \[2\]", lengths=lambda t: t[1:]),
        _paged("a query more", r"without cu_seqlens_q each sequence has one query; got 4 queries of 3",
            q=lambda t: torch.cat((t, t[:1]))),
        _paged("a page that is not there", r"block_table says page 99 at \[0, 0\], which query 0 sees; .* 16 pages",
            block_table=lambda t: t.masked_fill(t == t[0, 0], 99), lengths=lambda t: t.clamp(min=1)),
        _paged("a page that was given back", r"block_table says page -1 at \[0, 4\]",
            block_table=lambda t: torch.cat((t[:, :4].clamp(min=0), torch.full_like(t[:, 4:], -1)), 1),
            lengths=lambda t: torch.full_like(t, 20)),
        _paged("a length past the table", r"lengths must be between 0 and 20, .*got 21 to 21",
            lengths=lambda t: torch.full_like(t, 21)),
        _paged("ends of other sequences", r"cu_seqlens_q must be int32 \[4\]; got torch\.int32 \[3\]",
            cu_seqlens_q=lambda _: torch.zeros(3, dtype=torch.int32)),
        _paged("ends that fall", r"cu_seqlens_q must rise from 0 to 3; got \[0, 2, 1, 3\]",
            cu_seqlens_q=lambda _: torch.tensor([0, 2, 1, 3], dtype=torch.int32)),
        _paged("a negative window", r"window must be positive, of causal attention, or 0 for none; got -1",
            window=lambda _: -1),
        _paged("a window of full attention", r"window must be positive, of causal attention, .*causal=False",
            window=lambda _: 3, causal=lambda _: False),
        _paged("negative first keys", r"first must be positive, beside a window, or 0 for none; got -1 with window=3",
            window=lambda _: 3, first=lambda _: -1),
        _paged("first keys without a window", r"first must be positive, beside a window, .*got 2 with window=0",
            first=lambda _: 2),
        _paged("slopes of other heads", r"alibi_slopes must be floating \[2\] or \[3, 2\]; got torch\.float32 \[3\]",
            alibi_slopes=lambda _: torch.ones(3)),
        _paged("a bias of other queries", r"bias must be floating \[2 or 1, 3 or 1, keys\]; got torch\.float32 "
            r"\[2, 4, 20\]", bias=lambda _: torch.ones(2, 4, 20)),
        _paged("a bias of too few keys", r"bias must be for 7 keys, as the longest sequence has, or more; got "
            r"\[1, 1, 6\]", bias=lambda _: torch.ones(1, 1, 6), lengths=lambda t: t.clamp(max=0) + 7,
            block_table=lambda t: t.clamp(min=0)),
        _paged("a mask of floats", r"mask must be bool \[3, n\], .*; got torch\.float32 \[3, 1\]",
            mask=lambda _: torch.ones(3, 1)),
        _paged("a mask of other queries", r"mask must be bool \[3, n\], .*; got torch\.bool \[2, 1\]",
            mask=lambda _: torch.ones(2, 1, dtype=torch.bool)),
        _paged("a scale too many", r"k_scale must be float32 \[2\], one for each head",
            k_scale=lambda _: torch.ones(3)),
        _paged("sinks of other heads", r"sinks must be floating \[2\]", sinks=lambda _: torch.ones(3)),
        _paged("a negative softcap", r"softcap must be positive, or 0 for none; got -1\.0", softcap=lambda _: -1.0),
        _paged("two devices", r"all tensors must be on one device; got q on cpu and lengths on meta",
            lengths=lambda t: t.to("meta")),
    ),
    gradients=("q",),
    padding=_unseen,
    specified=_specified,
    reduction=lambda arguments: max(
        arguments["block_table"].shape[1] * arguments["k_cache"].shape[1], arguments["q"].shape[2]
    ),
    rare=(torch.float64,),
    domain=Domain(
        sizes={
            "sequences": Sizes(), "kv_heads": Sizes(1, usual=(8,)), "groups": Sizes(1, usual=(4, 7)),
            "page_size": Sizes(1, usual=(16,)), "most_pages": Sizes(usual=(3, 129)), "queries": Sizes(1, usual=(2, 17)),
            "head_dim": Sizes(1, usual=(64, 128)), "value_dim": Sizes(1, usual=(64, 128)),
        },
        options={
            "lengths": ("any", "all"),
            "cache": _CACHES,
            "scales": (False, True),
            "sinks": (False, True),
            "return_lse": (False, True),
            "causal": (True, False),
            "window": (0, 3, 40),
            "first": (0, 2, 50),
            "alibi": (None, "by head", "by sequence"),
            "bias": (None, "whole", "of keys", "of queries"),
            "mask": (None, "tree", "any"),
            "softcap": (0.0, 2.0),
            "scale": (None, 0.2),
        },
        families=_FAMILIES,
        allowed=lambda values: _affordable(values)
        and (values["causal"] or not values["window"])
        and (values["window"] > 0 or not values["first"]),
    ),
)


def _build_update(
    generator: torch.Generator,
    tokens: int = 5,
    pages: int = 3,
    page_size: int = 4,
    kv_heads: int = 2,
    head_dim: int = 8,
    value_dim: int = 8,
    cache: torch.dtype | None = None,
    scales: bool = False,
    left_out: bool = True,
) -> Arguments:
    slots = torch.randperm(max(pages * page_size, tokens), generator=generator)[:tokens]
    slots = slots.masked_fill(slots >= pages * page_size, -1)
    if left_out and tokens:
        slots[0] = -1
    return {
        **_caches(generator, pages, page_size, kv_heads, (head_dim, value_dim), cache),
        "k": _normal(generator, tokens, kv_heads, head_dim),
        "v": _normal(generator, tokens, kv_heads, value_dim),
        "slots": slots,
        **(_scales(generator, kv_heads) if scales else {}),
    }


UPDATE_CACHE = CaseTable(
    op="attention.update_cache",
    build=_build_update,
    cases=(
        _case("some rows"),
        _case("no rows", tokens=0),
        _case("no pages", pages=0),
        _case("one row of one", tokens=1, pages=1, page_size=1, left_out=False),
        _case("63 rows", tokens=63, pages=20, head_dim=5, value_dim=7),
        _case("e4m3", cache=torch.float8_e4m3fn, scales=True),
        _case("e5m2", cache=torch.float8_e5m2),
        _case("scaled", scales=True),
        _case("llama-3.2-1b, a prefill of 64", tokens=64, pages=9, page_size=16, kv_heads=8, head_dim=64, value_dim=64,
            model=True),
    ),
    wrong=(
        _update("rows of other heads", r"k has 3 heads, the caches 2",
            k=lambda t: t[:, :1].repeat(1, 3, 1), v=lambda t: t[:, :1].repeat(1, 3, 1)),
        _update("fewer values", r"k and v must be \[tokens, heads, head_dim\] of one dtype", v=lambda t: t[1:]),
        _update("slots of fewer rows", r"slots must be int64 \[5\]; got torch\.int64 \[4\]", slots=lambda t: t[1:]),
        _update("a slot that is not there", r"slot 12; the caches have 12, in pages of 4",
            slots=lambda t: t.index_fill(0, torch.tensor([3]), 12)),
        _update("caches of another dtype", r"caches must both have k's dtype torch\.float32",
            k_cache=Tensor.half, v_cache=Tensor.half),
    ),
    exact=True,
    rare=(torch.float64,),
    domain=Domain(
        sizes={
            "tokens": Sizes(many=5_001, usual=(1, 2_049)), "pages": Sizes(), "page_size": Sizes(1, usual=(16, 256)),
            "kv_heads": Sizes(1, usual=(8,)), "head_dim": Sizes(1, usual=(64, 128)),
            "value_dim": Sizes(1, usual=(64, 128)),
        },
        options={"cache": _CACHES, "scales": (False, True), "left_out": (True, False)},
        allowed=lambda values: math.prod(values.get(name, 1) for name in ("tokens", "kv_heads"))
        * max(values.get("head_dim", 1), values.get("value_dim", 1)) <= 2_500_000,
    ),
)
# fmt: on

TABLES = (PAGED, UPDATE_CACHE)
