"""Sorting (token, choice) pairs by expert, by counting and without atomics: results never depend on scheduling.

Grids depend on shapes alone and nothing is read on the host, so a call can be captured in a CUDA graph.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kpt_triton.aot import NO_SPILLS, Program
from kpt_triton.chips import INTEL

#: More experts than this would not fit a program's registers, and more pairs not 32 bits.
MAX_EXPERTS, MAX_PAIRS = 4096, 2**30
#: Up to so many pairs each is compared with all others, in one launch.
_FEW = 4096
#: Queries of a program, and keys that it looks at at a time, where pairs are few.
_QUERIES, _KEYS = 32, 128
#: Pairs that are ranked among themselves where pairs are many, and how many at a time.
_CHUNK, _PIECE = 256, 32
#: Chunks and experts that are counted up at a time.
_SCAN_CHUNKS, _SCAN_EXPERTS = 256, 16


class SortedPairs(NamedTuple):
    """The pairs of a routing, sorted by expert.

    Attributes:
        order: `[T * K]` int32; sorted row `j` is pair `order[j]`, of token `order[j] // K`. Stable.
        position: `[T * K]` int32, the inverse: pair `p` is sorted row `position[p]`.
        offsets: `[E]` int32; expert `e` owns the sorted rows from `offsets[e - 1]` to `offsets[e]`. Rows at and past
            `offsets[-1]` belong to no expert here.
    """

    order: Tensor
    position: Tensor
    offsets: Tensor


@triton.jit
def _load_ids(index, places, pairs, num_experts):
    """Expert ids, `num_experts` for those of no expert here."""
    ids = tl.load(index + places, mask=places < pairs, other=0)
    return tl.where((ids < 0) | (ids > num_experts), num_experts, ids).to(tl.int32)


@triton.jit(do_not_specialize=["pairs"])
def _few_kernel(
    index, order, position, offsets, pairs, num_experts,
    QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """A key for each pair, all distinct: a pair's row, and an expert's end, is the number of keys below its own."""
    queries = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    is_pair = queries < pairs
    of_pair = _load_ids(index, queries, pairs, num_experts) * pairs + queries
    wanted = tl.where(is_pair, of_pair, (queries - pairs + 1) * pairs)
    below = tl.zeros((QUERIES, KEYS), tl.int32)
    for start in range(0, pairs, KEYS):
        places = start + tl.arange(0, KEYS)
        keys = _load_ids(index, places, pairs, num_experts) * pairs + places
        below += ((keys[None, :] < wanted[:, None]) & (places[None, :] < pairs)).to(tl.int32)
    row = tl.sum(below, 1)
    tl.store(position + queries, row, mask=is_pair)
    tl.store(order + row, queries, mask=is_pair)
    tl.store(offsets + (queries - pairs), row, mask=(queries >= pairs) & (queries < pairs + num_experts))


@triton.jit(do_not_specialize=["pairs"])
def _rank_kernel(
    index, position, counts, pairs, num_experts,
    CHUNK: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """Each pair's rank among those of its chunk and expert, and how many pairs of a chunk an expert has."""
    chunk = tl.program_id(0)
    start = chunk * CHUNK
    places = start + tl.arange(0, CHUNK)
    ids = _load_ids(index, places, pairs, num_experts)
    before = tl.zeros((CHUNK, PIECE), tl.int32)
    after = tl.zeros((CHUNK, PIECE), tl.int32)
    for piece in range(0, CHUNK, PIECE):
        others = start + piece + tl.arange(0, PIECE)
        same = (_load_ids(index, others, pairs, num_experts)[None, :] == ids[:, None]) & (others[None, :] < pairs)
        before += (same & (others[None, :] < places[:, None])).to(tl.int32)
        after += (same & (others[None, :] > places[:, None])).to(tl.int32)
    rank = tl.sum(before, 1)
    tl.store(position + places, rank, mask=places < pairs)
    # The last of them knows their number; experts without pairs keep the zero that was there.
    of_chunk = counts + chunk.to(tl.int64) * (num_experts + 1)
    tl.store(of_chunk + ids, rank + 1, mask=(places < pairs) & (tl.sum(after, 1) == 0))


@triton.jit(do_not_specialize=["chunks"])
def _scan_kernel(
    counts, totals, chunks, num_experts,
    CHUNKS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """Turn the counts of an expert into sums over the chunks before each, and total them."""
    experts = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    known = experts <= num_experts
    total = tl.zeros((EXPERTS,), tl.int32)
    for start in range(0, chunks, CHUNKS):
        rows = start + tl.arange(0, CHUNKS)
        tile = counts + rows.to(tl.int64)[:, None] * (num_experts + 1) + experts[None, :]
        inside = (rows[:, None] < chunks) & known[None, :]
        count = tl.load(tile, mask=inside, other=0)
        tl.store(tile, total[None, :] + tl.cumsum(count, 0) - count, mask=inside)
        total += tl.sum(count, 0)
    tl.store(totals + experts, total, mask=known)


@triton.jit(do_not_specialize=["pairs"])
def _place_kernel(
    index, counts, totals, order, position, offsets, pairs, num_experts,
    CHUNK: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """Expert's first row, pairs of it in chunks before, rank within the chunk: together a pair's row."""
    chunk = tl.program_id(0)
    places = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = places < pairs
    ids = _load_ids(index, places, pairs, num_experts)
    bins = tl.arange(0, BINS)
    total = tl.load(totals + bins, mask=bins <= num_experts, other=0)
    ends = tl.cumsum(total, 0)
    first = tl.gather(ends - total, ids, 0)
    before = tl.load(counts + chunk.to(tl.int64) * (num_experts + 1) + ids, mask=inside, other=0)
    row = first + before + tl.load(position + places, mask=inside, other=0)
    tl.store(position + places, row, mask=inside)
    tl.store(order + row, places, mask=inside)
    if chunk == 0:
        tl.store(offsets + bins, ends, mask=bins < num_experts)


def sort_pairs(top_k_index: Tensor, num_experts: int) -> SortedPairs:
    """Sort the pairs of a routing by expert, stably.

    Ids that are negative or at and above `num_experts` (experts of another rank, dropped pairs) sort to the end, in
    the order in which they come.

    Up to 4096 pairs, one launch compares each with all. Beyond, chunks of 256 pairs are ranked by comparison, counts
    of experts are summed over chunks, and pairs are placed: three launches, whose work is linear in the pairs and,
    but for counts, does not grow with the experts.

    Args:
        top_k_index: `[T, K]` int32 or int64, the expert of each choice; any strides, up to MAX_PAIRS.
        num_experts: experts here, up to MAX_EXPERTS.

    Returns:
        `order`, `position` and `offsets`.
    """
    index = top_k_index.contiguous()
    pairs = index.numel()
    order, position = (index.new_empty(pairs, dtype=torch.int32) for _ in range(2))
    offsets = index.new_empty(num_experts, dtype=torch.int32)
    if pairs == 0:
        offsets.zero_()
    elif pairs <= _FEW:
        grid = (triton.cdiv(pairs + num_experts, _QUERIES),)
        _few_kernel[grid](index, order, position, offsets, pairs, num_experts, **_FEW_LAUNCH)
    else:
        chunks = triton.cdiv(pairs, _CHUNK)
        counts = index.new_zeros((chunks, num_experts + 1), dtype=torch.int32)
        totals = index.new_empty(num_experts + 1, dtype=torch.int32)
        _rank_kernel[(chunks,)](index, position, counts, pairs, num_experts, **_RANK_LAUNCH)
        grid = (triton.cdiv(num_experts + 1, _SCAN_EXPERTS),)
        _scan_kernel[grid](counts, totals, chunks, num_experts, **_SCAN_LAUNCH)
        _place_kernel[(chunks,)](
            index,
            counts,
            totals,
            order,
            position,
            offsets,
            pairs,
            num_experts,
            **_place_launch(num_experts, index.is_xpu),
        )
    return SortedPairs(order, position, offsets)


def position_of(order: Tensor) -> Tensor:
    """The inverse of an order, as `SortedPairs` has it."""
    rows = torch.arange(order.shape[0], dtype=torch.int32, device=order.device)
    return torch.empty_like(rows).scatter_(0, order.long(), rows)


_OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}
_FEW_LAUNCH = {"QUERIES": _QUERIES, "KEYS": _KEYS, **_OPTIONS}
_RANK_LAUNCH = {"CHUNK": _CHUNK, "PIECE": _PIECE, **_OPTIONS, "num_warps": 8}
_SCAN_LAUNCH = {"CHUNKS": _SCAN_CHUNKS, "EXPERTS": _SCAN_EXPERTS, **_OPTIONS, "num_warps": 8}


def _place_launch(num_experts: int, intel: bool) -> dict[str, Any]:
    # Intel's Triton 3.3 fails where a gather is of fewer numbers than the chunk has.
    bins = max(triton.next_power_of_2(num_experts + 1), 256 if intel else 1)
    return {"CHUNK": _CHUNK, "BINS": bins, **_OPTIONS, "num_warps": 8 if bins > 2048 else 4}


def _placements(chip: str) -> Mapping[str, Mapping[str, Any]]:
    return {f"{experts} experts": _place_launch(experts, chip in INTEL) for experts in (8, 128, 256, MAX_EXPERTS)}


def _program(name: str, function: Any, pointers: str, numbers: str, launches: Any, ids: str = "") -> Program:
    signature = {"index": f"*{ids}:16"} if ids else {}
    signature |= dict.fromkeys(pointers.split(), "*i32:16") | dict.fromkeys(numbers.split(), "i32")
    name = f"{name} {ids}".strip()
    return Program(name=name, function=function, signature=signature, contracts=NO_SPILLS, launches=launches)


#: What is compiled ahead of time.
AOT = (
    *(
        program
        for ids in ("i64", "i32")
        for program in (
            _program(
                "few pairs",
                _few_kernel,
                "order position offsets",
                "pairs num_experts",
                lambda chip: {"default": _FEW_LAUNCH},
                ids,
            ),
            _program(
                "rank",
                _rank_kernel,
                "position counts",
                "pairs num_experts",
                lambda chip: {"default": _RANK_LAUNCH},
                ids,
            ),
            _program(
                "place",
                _place_kernel,
                "counts totals order position offsets",
                "pairs num_experts",
                _placements,
                ids,
            ),
        )
    ),
    _program("scan", _scan_kernel, "counts totals", "chunks num_experts", lambda chip: {"default": _SCAN_LAUNCH}),
)
