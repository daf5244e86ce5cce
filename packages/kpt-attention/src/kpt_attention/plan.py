"""A mask as tensors and numbers, which every kernel takes: nothing, causality, intervals of keys, or live blocks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kpt_core import Call, InputError

from .arguments import integer

#: Rows and columns of a block whose bits are kept.
BLOCK = 128
#: What is known of a block.
DEAD, PARTIAL, FULL = 0, 1, 2


class Growing:
    """Lower a mask anew for the lengths of each call, and keep the last plan.

    Args:
        lower: gives the plan for queries and keys on a device, the last query at the last key.
        device: where plans are made.
    """

    def __init__(self, lower: Callable[..., "Plan"], device: torch.device | str) -> None:
        self._lower, self._device = lower, device
        self._last: Plan | None = None

    def plan(self, queries: int, keys: int) -> "Plan":
        """Return the plan for these lengths."""
        last = self._last
        if last is None or (last.queries, last.keys) != (queries, keys):
            last = self._lower(queries, keys, device=self._device)
            if not torch.compiler.is_compiling():  # a graph's sizes are no numbers to keep
                self._last = last
        return last

    def to(self, device: torch.device | str) -> "Growing":
        """Return the same on a device."""
        return Growing(self._lower, device)


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """Arguments of `attention.dense` that say which keys a query may see; all that are given must allow a key.

    Attributes:
        causal: query `i` sees the keys up to `i + position`.
        position: place of the first query among the keys.
        intervals: `[B or 1, H or 1, Q, n, 2]` int32: sorted begins and ends of the keys that each query sees.
        blocks: `[B or 1, H or 1, Q blocks, K blocks]` int32: 0 for a block of 128 by 128 that is dead, 1 for one that
            is full, else 2 more than its place in `block_bits`.
        block_bits: `[n, 128, 16]` uint8: the bits of blocks that are partly live, the lowest first.
        queries: of each sequence, which it was lowered for; None if it holds for any, as one made by hand does.
        keys: likewise.
        batch: sequences that it was lowered for, where they differ; None where they do not.
        heads: likewise.
        growing: lowers it anew for other lengths; None for a plan of its own lengths alone.
    """

    causal: bool = False
    position: int = 0
    intervals: Tensor | None = None
    blocks: Tensor | None = None
    block_bits: Tensor | None = None
    queries: int | None = None
    keys: int | None = None
    batch: int | None = None
    heads: int | None = None
    growing: Growing | None = None

    def fitted(self, queries: int, keys: int, batch: int | None = None, heads: int | None = None) -> "Plan":
        """Return the plan for a call of these sizes: itself, or one that is lowered anew if it is a growing one.

        Args:
            queries: of each sequence of the call.
            keys: likewise.
            batch: sequences of the call; not looked at if None.
            heads: of its queries; likewise.

        Raises:
            InputError: the plan is for other sizes.
        """
        for name, own, asked in (("sequences", self.batch, batch), ("heads", self.heads, heads)):
            if own is not None and asked is not None and own != asked:
                raise InputError(
                    f"the plan is for {own} {name}, which differ under its mask; got {asked}: give mask.plan the batch "
                    "and heads of the call"
                )
        if (self.queries is None or self.queries == queries) and (self.keys is None or self.keys == keys):
            return self
        if self.growing is not None:
            return self.growing.plan(queries, keys)
        raise InputError(
            f"the plan is for {self.queries} queries and {self.keys} keys; got {queries} and {keys}: make one of these "
            f"lengths, mask.plan({queries}, {keys}), or one for any, mask.plan({queries}, {keys}, growing=True)"
        )

    def arguments(self, queries: int, keys: int, batch: int | None = None, heads: int | None = None) -> dict[str, Any]:
        """Return what the op takes for a call of these sizes, by the names of its parameters.

        Args:
            queries: of each sequence of the call.
            keys: likewise.
            batch: sequences of the call; not looked at if None.
            heads: of its queries; likewise.

        Raises:
            InputError: the plan is for other sizes.
        """
        plan = self.fitted(queries, keys, batch, heads)
        return {
            "intervals": plan.intervals,
            "blocks": plan.blocks,
            "block_bits": plan.block_bits,
            "causal": plan.causal,
            "position": plan.position,
        }

    def to(self, device: torch.device | str) -> "Plan":
        """Return the plan on a device."""
        moved: dict[str, Any] = {
            name: None if (value := getattr(self, name)) is None else value.to(device)
            for name in ("intervals", "blocks", "block_bits", "growing")
        }
        return replace(self, **moved)


def _table(mask: Tensor) -> tuple[int, int]:
    """Return rows and columns of a mask's blocks, one more each: of one block compilers make another graph."""
    rows, columns = (1 - (-size // BLOCK) for size in mask.shape[2:])
    return rows, columns


@torch.library.custom_op("kpt::attention_all_blocks", mutates_args=())
def _all_blocks(mask: Tensor) -> tuple[Tensor, Tensor]:
    rows, columns = _table(mask)
    pads = (0, columns * BLOCK - mask.shape[3], 0, rows * BLOCK - mask.shape[2])

    def blocked(value: bool) -> Tensor:
        padded = torch.nn.functional.pad(mask, pads, value=value)
        found: Tensor = padded.unflatten(3, (columns, BLOCK)).unflatten(2, (rows, BLOCK)).transpose(3, 4)
        return found

    bits = blocked(False)
    live, full = bits.flatten(4).any(-1), blocked(True).flatten(4).all(-1)
    places = torch.arange(live.numel(), device=mask.device).view(live.shape) + 2
    blocks = torch.where(full & live, 1, torch.where(live, places, 0)).int()
    weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=mask.device)
    packed = (bits.unflatten(-1, (BLOCK // 8, 8)).to(torch.uint8) * weights).sum(-1, dtype=torch.uint8)
    return blocks, packed.flatten(0, 3).contiguous()


@_all_blocks.register_fake
def _(mask: Tensor) -> tuple[Tensor, Tensor]:
    batch, heads = mask.shape[:2]
    shape = (batch, heads, *_table(mask))
    count = shape[0] * shape[1] * shape[2] * shape[3]
    return mask.new_empty(shape, dtype=torch.int32), mask.new_empty((count, BLOCK, BLOCK // 8), dtype=torch.uint8)


def all_blocks(mask: Tensor) -> dict[str, Any]:
    """Return `blocks` and `block_bits` of a mask without a look at its values, as compilers want it.

    Every block has bits, also those that are dead or full, and there may be more than needed. It is one torch op, so
    that no graph depends on how many blocks there are.

    Args:
        mask: `[B or 1, H or 1, Q, K]` bool.
    """
    blocks, bits = _all_blocks(mask)
    return {"blocks": blocks, "block_bits": bits}


def live_blocks(
    plan: Plan | Call,
    queries: int,
    keys: int,
    block_q: int = BLOCK,
    block_k: int = BLOCK,
    device: torch.device | None = None,
) -> Tensor:
    """Return what is known of each block of queries by keys: `[B or 1, H or 1, Q blocks, K blocks]` int8.

    Args:
        plan: the plan, or a call of the op.
        queries: of each sequence.
        keys: likewise.
        block_q: rows of a block; 128 where the plan has blocks.
        block_k: columns of a block; likewise.
        device: where it is made; None for that of the plan's tensors or the call's, the CPU where there are none.

    Returns:
        0 for dead blocks, 1 for partly live ones, 2 for full ones. It is exact: no live block is called dead, no dead
        one live, where the plan has one of causality, intervals and blocks.

    Raises:
        InputError: the plan is for other lengths, or has other blocks.
    """
    if not hasattr(plan, "block_bits"):
        raise InputError(f"live_blocks: plan must be a Plan, as mask.plan gives; got {type(plan).__name__}")
    queries, keys = integer("live_blocks", "queries", queries, 0), integer("live_blocks", "keys", keys, 0)
    block_q, block_k = integer("live_blocks", "block_q", block_q, 1), integer("live_blocks", "block_k", block_k, 1)
    plan = plan.fitted(queries, keys) if isinstance(plan, Plan) else plan
    rows, columns = -(-queries // block_q), -(-keys // block_k)
    given = [each for each in (plan.intervals, plan.blocks) if each is not None]
    if device is None:
        device = given[0].device if given else getattr(getattr(plan, "q", None), "device", torch.device("cpu"))
    state = torch.full((1, 1, rows, columns), FULL, dtype=torch.int8, device=device)
    if plan.causal:
        first = torch.arange(rows, device=device)[:, None] * block_q + plan.position
        last = torch.clamp(first + block_q, max=queries + plan.position) - 1
        begin = torch.arange(columns, device=device) * block_k
        end = torch.clamp(begin + block_k, max=keys) - 1
        state = torch.minimum(state, (begin <= last).to(torch.int8) + (end <= first).to(torch.int8))
    if plan.intervals is not None:
        state = torch.minimum(state, _of_intervals(plan.intervals, keys, block_q, block_k))
    if plan.blocks is not None:
        if (block_q, block_k) != (BLOCK, BLOCK):
            raise InputError(f"live_blocks: the plan has blocks of {BLOCK}; got block_q={block_q}, block_k={block_k}")
        blocks = plan.blocks[:, :, :rows, :columns]
        state = torch.minimum(state, (blocks > 0).to(torch.int8) + (blocks == 1).to(torch.int8))
    return state


def _of_intervals(intervals: Tensor, keys: int, block_q: int, block_k: int) -> Tensor:
    batch, heads, queries, _, _ = intervals.shape
    rows, columns = -(-queries // block_q), -(-keys // block_k)
    begins, ends = intervals.long().unbind(-1)
    tile = torch.arange(queries, device=intervals.device).div(block_q, rounding_mode="floor")
    tile = tile[:, None].expand_as(begins)

    def covered(first: Tensor, past: Tensor) -> Tensor:
        """Return for each block how many intervals cover it, from the first block to the one before `past`."""
        some = (past > first).to(torch.int32)
        steps = torch.zeros((batch, heads, rows * (columns + 1)), dtype=torch.int32, device=intervals.device)
        for place, sign in ((first, 1), (past, -1)):
            where = (tile * (columns + 1) + place.clamp(0, columns)).flatten(2)
            steps.scatter_add_(2, where, (some * sign).flatten(2))
        found: Tensor = steps.unflatten(2, (rows, columns + 1)).cumsum(-1)[..., :-1]
        return found

    empty = begins >= ends
    live = covered((begins // block_k).masked_fill(empty, 0), ((ends - 1) // block_k + 1).masked_fill(empty, 0)) > 0
    whole = torch.where(ends == keys, columns, ends // block_k)
    each = covered((-(-begins // block_k)).masked_fill(empty, 0), whole.masked_fill(empty, 0))
    height = torch.full((rows,), block_q, device=intervals.device)
    if rows:
        height[-1] = queries - (rows - 1) * block_q
    full = each == height[:, None]
    return live.to(torch.int8) + full.to(torch.int8)


def allowed_keys(plan: Plan | Call, queries: range, keys: range, device: torch.device) -> Tensor | None:
    """Return which keys of a part queries of a part may see, `[B or 1, H or 1, queries, keys]` bool; None for all.

    With blocks, both ranges must begin where a block does.

    Raises:
        InputError: the plan is of fewer queries or keys.
    """
    if isinstance(plan, Plan):
        of = (queries.stop if plan.queries is None else plan.queries, keys.stop if plan.keys is None else plan.keys)
        if queries.stop > of[0] or keys.stop > of[1]:
            raise InputError(
                f"allowed_keys: the plan is for {of[0]} queries and {of[1]} keys; got those up to {queries.stop} and "
                f"{keys.stop}: make one of these lengths (mask.plan, or plan.fitted of a growing plan)"
            )
    found: Tensor | None = None
    columns = torch.arange(keys.start, keys.stop, device=device)
    if plan.causal:
        rows = torch.arange(queries.start, queries.stop, device=device) + plan.position
        found = (columns <= rows[:, None])[None, None]
    if plan.intervals is not None:
        begins, ends = plan.intervals[:, :, queries.start : queries.stop].unbind(-1)
        inside = _inside(begins, ends, columns)
        found = inside if found is None else found & inside
    if plan.blocks is not None:
        assert plan.block_bits is not None
        inside = _bits_of(plan.blocks, plan.block_bits, queries, keys)
        found = inside if found is None else found & inside
    return found


def _inside(begins: Tensor, ends: Tensor, columns: Tensor) -> Tensor:
    found = torch.zeros((*begins.shape[:-1], len(columns)), dtype=torch.bool, device=columns.device)
    for place in range(begins.shape[-1]):  # few, and no tensor of all of them at once
        begin, end = begins[..., place, None], ends[..., place, None]
        found = found | ((columns >= begin) & (columns < end))
    return found


def _bits_of(blocks: Tensor, block_bits: Tensor, queries: range, keys: range) -> Tensor:
    table = blocks[
        :, :, queries.start // BLOCK : -(-queries.stop // BLOCK), keys.start // BLOCK : -(-keys.stop // BLOCK)
    ]
    places = torch.arange(8, device=block_bits.device, dtype=torch.uint8)
    partial = table >= 2
    which = table.clamp(min=2).long() - 2
    if block_bits.shape[0] == 0:
        bits = torch.zeros((*table.shape, BLOCK, BLOCK), dtype=torch.bool, device=table.device)
    else:
        bits = ((block_bits[which].unsqueeze(-1) >> places) & 1).bool().flatten(-2)
    whole = torch.where(partial[..., None, None], bits, (table == 1)[..., None, None])
    return whole.transpose(3, 4).flatten(4, 5).flatten(2, 3)[..., : len(queries), : len(keys)]


def to_block_mask(plan: Plan, queries: int, keys: int, device: torch.device | None = None) -> Any:
    """Return the mask of torch's FlexAttention: the same live blocks, and a `mask_mod` for those that are partly live.

    It is made of the plan's blocks, never of all queries by all keys, as `create_block_mask` does.

    Args:
        plan: the plan.
        queries: of each sequence.
        keys: likewise.
        device: where it is made; None for that of the plan's tensors, the CPU where it has none.

    Raises:
        InputError: the plan is for other lengths.
    """
    plan = plan.fitted(queries, keys)
    return block_mask_of(plan, block_lists(plan, queries, keys, device), queries, keys)


def block_lists(plan: Plan, queries: int, keys: int, device: torch.device | None = None) -> list[Tensor]:
    """Return the lists of a mask of FlexAttention, for queries then for keys; arguments as of `to_block_mask`.

    Of each line of blocks how many are partly live, int32 `[B or 1, H or 1, lines]`, and which, `[..., blocks]`; and
    likewise of those that are live as a whole.
    """
    states, found = live_blocks(plan, queries, keys, device=device), []
    for lines in (states, states.mT.contiguous()):
        for state in (PARTIAL, FULL):
            chosen = lines == state
            order = (~chosen).int().sort(dim=-1, stable=True).indices.int()
            found += [chosen.sum(-1, dtype=torch.int32), order]
    return found


def block_mask_of(plan: Plan, lists: Sequence[Tensor], queries: int, keys: int) -> Any:
    """Return the mask of FlexAttention of a plan and its `block_lists`."""
    from torch.nn.attention.flex_attention import BlockMask

    block_bits = plan.block_bits
    if block_bits is not None and block_bits.shape[0] == 0:  # made by hand: the function reads some in dead blocks, too
        block_bits = block_bits.new_zeros((1, *block_bits.shape[1:]))

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        found = (q == q) & (k == k)
        if plan.causal:
            found = found & (k <= q + plan.position)
        if plan.intervals is not None:
            row = _at(b, plan.intervals, 0), _at(h, plan.intervals, 1), q
            inside = found & False
            for place in range(plan.intervals.shape[3]):  # compilers take no reduction here
                inside = inside | ((k >= plan.intervals[(*row, place, 0)]) & (k < plan.intervals[(*row, place, 1)]))
            found = found & inside
        if plan.blocks is not None:
            assert block_bits is not None
            places = plan.blocks[_at(b, plan.blocks, 0), _at(h, plan.blocks, 1), q // BLOCK, k // BLOCK]
            byte = block_bits[(places - 2).clamp(min=0), q % BLOCK, k % BLOCK // 8]
            found = found & ((places == 1) | ((places > 1) & ((byte >> (k % 8)) & 1).bool()))
        return found

    made: Any = BlockMask  # of whose arguments newer torches have more
    return made((queries, keys), *lists, BLOCK_SIZE=(BLOCK, BLOCK), mask_mod=mask_mod)


def _at(index: Tensor, of: Tensor, dim: int) -> Tensor:
    return index if of.shape[dim] > 1 else torch.zeros_like(index)
