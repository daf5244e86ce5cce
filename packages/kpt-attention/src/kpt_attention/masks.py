"""The masks that there are: which keys a query sees. `kpt_attention.mask_algebra` composes and lowers them."""

# Methods of masks do what `Mask` says.
# ruff: noqa: D102

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kpt_core import InputError

from .arguments import check_tensor, integer
from .intervals import readable, rows_of, runs, tidy
from .mask_algebra import MOST_INTERVALS, Extent, Mask


@dataclass(frozen=True, slots=True)
class Everything(Mask):
    """Let every query see every key."""

    def plain(self) -> str | None:
        return "all"

    def allows(self, extent: Extent, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q == q) & (k == k)

    def intervals(self, extent: Extent) -> Tensor | None:
        rows = rows_of(extent.positions()[..., None])
        rows[..., 1] = extent.keys
        return rows


@dataclass(frozen=True, slots=True)
class Window(Mask):
    """Let a query see the keys from `left` before its position to `right` after it; None for no limit."""

    left: int | None
    right: int | None

    def allows(self, extent: Extent, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        found = (q == q) & (k == k)
        if self.left is not None:
            found = found & (k >= q - self.left)
        return found if self.right is None else found & (k <= q + self.right)

    def intervals(self, extent: Extent) -> Tensor | None:
        at = extent.positions()
        begins = torch.zeros_like(at) if self.left is None else at - self.left
        ends = torch.full_like(at, extent.keys) if self.right is None else at + self.right + 1
        return tidy(begins.clamp(0, extent.keys)[..., None], ends.clamp(0, extent.keys)[..., None])


@dataclass(frozen=True, slots=True)
class Causal(Window):
    """Let a query see the keys up to its own position."""

    left: int | None = None
    right: int | None = 0

    def plain(self) -> str | None:
        return "causal"


@dataclass(frozen=True, slots=True, eq=False)
class Document(Mask):
    """Let a query see the keys of its own document: those of the same id at its position."""

    ids: Tensor

    def _ids(self, extent: Extent) -> Tensor:
        return self.ids.to(extent.device)

    def allows(self, extent: Extent, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        ids = self._ids(extent)
        b = b if len(ids) > 1 else torch.zeros_like(b)
        return ids[b, q] == ids[b, k]

    def intervals(self, extent: Extent) -> Tensor | None:
        ids = self._ids(extent)
        if not ids.shape[1]:
            return rows_of(extent.positions()[..., None])
        new = torch.ones_like(ids, dtype=torch.bool)
        new[:, 1:] = ids[:, 1:] != ids[:, :-1]
        firsts = ids.masked_fill(~new, torch.iinfo(ids.dtype).max).sort(-1).values
        if not readable(ids):
            return None
        # An id that comes back later has more than one run.
        if bool(((firsts[:, 1:] == firsts[:, :-1]) & (firsts[:, 1:] != torch.iinfo(ids.dtype).max)).any()):
            return None
        places = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        begins = places.masked_fill(~new, 0).cummax(-1).values
        last = torch.ones_like(new)
        last[:, :-1] = new[:, 1:]
        ends = places.masked_fill(~last, ids.shape[1]).flip(-1).cummin(-1).values.flip(-1) + 1
        rows = torch.stack((begins, ends), -1)[:, None, :, None]
        return rows[:, :, extent.offset : extent.offset + extent.queries]

    def spread(self) -> tuple[bool, bool]:
        return len(self.ids) > 1, False

    def check(self, extent: Extent) -> None:
        if self.ids.shape[1] != extent.keys or len(self.ids) not in (1, extent.batch):
            raise InputError(
                f"document: ids are [{self.ids.shape[0]}, {self.ids.shape[1]}]; expected one for each of {extent.keys} "
                f"keys, of 1 or {extent.batch} sequences"
            )
        if not 0 <= extent.offset <= extent.keys - extent.queries:
            raise InputError(
                f"document: {extent.queries} queries from position {extent.offset} on are not among {extent.keys} keys"
            )


@dataclass(frozen=True, slots=True, eq=False)
class PrefixLM(Mask):
    """Let every query see the first keys, and those up to its own position."""

    length: Tensor

    def allows(self, extent: Extent, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        length = self.length.to(extent.device)
        return (k <= q) | (k < (length[b] if len(length) > 1 else length))

    def intervals(self, extent: Extent) -> Tensor | None:
        ends = torch.maximum(extent.positions() + 1, self.length.to(extent.device)[:, None, None])
        ends = ends.clamp(0, extent.keys)[..., None]
        return tidy(torch.zeros_like(ends), ends)

    def spread(self) -> tuple[bool, bool]:
        return len(self.length) > 1, False

    def check(self, extent: Extent) -> None:
        if len(self.length) not in (1, extent.batch):
            raise InputError(
                f"prefix_lm: {len(self.length)} lengths; expected 1 or one for each of {extent.batch} sequences"
            )


@dataclass(frozen=True, slots=True)
class GlobalTokens(Mask):
    """Let every query see the first keys, and the first queries see every key."""

    count: int

    def allows(self, extent: Extent, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k < self.count) | (q < self.count)

    def intervals(self, extent: Extent) -> Tensor | None:
        at = extent.positions()[..., None]
        ends = torch.where(at < self.count, extent.keys, min(self.count, extent.keys))
        return tidy(torch.zeros_like(at), ends)


@dataclass(frozen=True, slots=True, eq=False)
class Dense(Mask):
    """Let a query see the keys that a tensor says; `[B or 1, H or 1, Q or 1, K]` bool."""

    mask: Tensor

    def allows(self, extent: Extent, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        mask = self.mask.to(extent.device)
        sizes = mask.shape
        b, h = (each if size > 1 else torch.zeros_like(each) for each, size in zip((b, h), sizes[:2], strict=True))
        return mask[b, h, q - extent.offset if sizes[2] > 1 else torch.zeros_like(q), k]

    def intervals(self, extent: Extent) -> Tensor | None:
        mask = self.mask.to(extent.device)
        found = runs(mask, MOST_INTERVALS)
        if found is None:
            return None
        return found.expand(*found.shape[:2], extent.queries, *found.shape[3:]) if mask.shape[2] == 1 else found

    def spread(self) -> tuple[bool, bool]:
        return self.mask.shape[0] > 1, self.mask.shape[1] > 1

    def check(self, extent: Extent) -> None:
        wanted = (extent.batch, extent.heads, extent.queries)
        fits = all(have in (1, want) for have, want in zip(self.mask.shape[:3], wanted, strict=True))
        if not fits or self.mask.shape[3] != extent.keys:
            raise InputError(
                f"a mask of shape {list(self.mask.shape)} does not fit; expected [{extent.batch} or 1, "
                f"{extent.heads} or 1, {extent.queries} or 1, {extent.keys}]"
            )


@dataclass(frozen=True, slots=True, eq=False)
class Predicate(Mask):
    """Let a query see the keys for which a function says so."""

    function: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    per_batch: bool = False
    per_head: bool = False
    fits: Callable[[Extent], None] | None = None

    def allows(self, extent: Extent, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return self.function(b, h, q, k)

    def spread(self) -> tuple[bool, bool]:
        return self.per_batch, self.per_head

    def check(self, extent: Extent) -> None:
        if self.fits is not None:
            self.fits(extent)


def _check_places(owner: str, extent: Extent, first: int, past: int) -> None:
    """Raise unless all queries stand from a position on and before another one."""
    if extent.queries and not first <= extent.offset <= past - extent.queries:
        raise InputError(
            f"{owner}: {extent.queries} queries from position {extent.offset} on; expected them from {first} on and "
            f"before {past}"
        )


def everything() -> Mask:
    """Return the mask that hides nothing."""
    return Everything()


def causal() -> Mask:
    """Return the mask under which a query sees the keys up to its own position, itself included."""
    return Causal()


def window(left: int | None = None, right: int | None = None) -> Mask:
    """Return the mask of keys from `left` before a query's position to `right` after it; None is without limit."""
    sides = (("left", left), ("right", right))
    return Window(*(None if side is None else integer("window", name, side, 0) for name, side in sides))


def sliding_window(size: int) -> Mask:
    """Return the mask of the last `size` keys up to a query's own position, itself included: causal.

    transformers' `sliding_window` counts in the same way; flash-attention's `window_size` is `(size - 1, 0)`.
    """
    return Window(integer("sliding_window", "size", size, 1) - 1, 0)


def prefix_lm(length: int | Tensor) -> Mask:
    """Return the mask under which everybody sees the first `length` keys, and the rest is causal.

    Args:
        length: one for all sequences, or `[B]` integers.
    """
    if not isinstance(length, Tensor):
        return PrefixLM(torch.tensor([integer("prefix_lm", "length", length, 0)]))
    if not _is_integral(length) or length.dim() > 1 or (length.numel() and int(length.min()) < 0):
        raise InputError(f"prefix_lm: length must hold integers of at least 0, one or [batch]; got {length}")
    return PrefixLM(length.reshape(-1).long())


def _is_integral(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool)


def document(ids: Tensor | None = None, *, cu_seqlens: Tensor | None = None) -> Mask:
    """Return the mask under which a query sees its own document alone: packed sequences don't see one another.

    Args:
        ids: `[keys]` or `[B, keys]` integers: of each position's document.
        cu_seqlens: in place of them, `[documents + 1]` ends of documents, from 0 to the number of keys.

    Raises:
        InputError: not exactly one of them is given, or it is not of that form.
    """
    if (ids is None) == (cu_seqlens is None):
        raise InputError("document: give ids or cu_seqlens, one of them")
    if cu_seqlens is not None:
        check_tensor("document", "cu_seqlens", cu_seqlens)
        ends = cu_seqlens.flatten().long()
        whole = _is_integral(cu_seqlens) and cu_seqlens.dim() == 1 and len(ends) > 1
        if not whole or int(ends[0]) != 0 or bool((ends.diff() < 0).any()):
            raise InputError(f"document: cu_seqlens must rise from 0; got {cu_seqlens.tolist()}")
        places = torch.arange(int(ends[-1]), device=ends.device)
        ids = torch.searchsorted(ends[1:], places, right=True)
    check_tensor("document", "ids", ids)
    assert ids is not None
    if ids.dim() not in (1, 2) or ids.is_floating_point() or ids.is_complex():
        raise InputError(f"document: ids must be [keys] or [batch, keys] integers; got {ids.dtype} {list(ids.shape)}")
    return Document((ids if ids.dim() == 2 else ids[None]).long())


def global_tokens(count: int) -> Mask:
    """Return the mask under which everybody sees the first keys, and the first queries see everything."""
    return GlobalTokens(integer("global_tokens", "count", count, 0))


def padding(attention_mask: Tensor) -> Mask:
    """Return the mask that hides keys of padding: `[B, keys]` bool or integers, 0 for padding."""
    check_tensor("padding", "attention_mask", attention_mask)
    if attention_mask.dim() != 2 or attention_mask.is_floating_point():
        raise InputError(
            f"padding: attention_mask must be [batch, keys] bool or integers; got {attention_mask.dtype} "
            f"{list(attention_mask.shape)}"
        )
    return Dense(attention_mask.bool()[:, None, None])


def dense_mask(mask: Tensor) -> Mask:
    """Return the mask that a tensor `[B or 1, H or 1, Q, K]` (or `[Q, K]`) bool says, True where a key is seen."""
    check_tensor("dense_mask", "mask", mask)
    if mask.dtype is not torch.bool or mask.dim() not in (2, 4):
        raise InputError(
            f"dense_mask: mask must be bool of shape [Q, K] or [B or 1, H or 1, Q, K]; got {mask.dtype} "
            f"{list(mask.shape)}: an additive mask of floats is the argument bias"
        )
    return Dense(mask if mask.dim() == 4 else mask[None, None])


def predicate(
    function: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
    *,
    per_batch: bool | None = None,
    per_head: bool | None = None,
) -> Mask:
    """Return the mask that a function says, which is evaluated a row of blocks at a time.

    Args:
        function: takes sequences, heads, positions of queries, and keys, int64 tensors that broadcast; gives bool. As
            the `mask_mod` of torch's FlexAttention.
        per_batch: whether it looks at the sequence. If None it is called once, for one query and key, and the shape of
            what it gives tells; where that call fails, it is taken to look.
        per_head: whether it looks at the head; likewise.
    """
    if not callable(function):
        raise InputError(f"predicate: expected a function of (b, h, q, k); got {function!r}")
    for name, value in (("per_batch", per_batch), ("per_head", per_head)):
        if value is not None and not isinstance(value, bool):
            raise InputError(f"predicate: {name} must be True, False, or None to look for it; got {value!r}")
    if per_batch is None or per_head is None:
        by_batch, by_head = _looks_at(function)
        per_batch, per_head = (
            own if told is None else told for own, told in ((by_batch, per_batch), (by_head, per_head))
        )
    return Predicate(function, per_batch, per_head)


def _looks_at(function: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]) -> tuple[bool, bool]:
    """Return whether a function looks at the sequence, and at the head: what it gives then has their dimension."""
    try:  # the first sequence twice and the first head thrice: no index that a call may lack
        b, h, q, k = (torch.zeros(shape, dtype=torch.int64) for shape in ((2, 1, 1, 1), (3, 1, 1), (1, 1), (1,)))
        shape = (1, 1, 1, 1, *function(b, h, q, k).shape)
    except Exception:  # for real sizes it may work, or say what is wrong
        return True, True
    return shape[-4] != 1, shape[-3] != 1


def dilated(size: int, step: int) -> Mask:
    """Return the mask of each `step`-th of the last `size * step` keys, from a query's own position backwards."""
    size, step = integer("dilated", "size", size, 1), integer("dilated", "step", step, 1)
    return Predicate(partial(_in_steps, step)) & Window((size - 1) * step, 0)


# Functions of modules, unlike those within others, can be pickled, as layers that hold a mask are.
def _in_steps(step: int, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q - k) % step == 0


def block_sparse(layout: Tensor, block: int) -> Mask:
    """Return the mask of blocks: `[Q blocks, K blocks]` (or with heads before) bool, blocks of `block` by `block`."""
    block = integer("block_sparse", "block", block, 1)
    check_tensor("block_sparse", "layout", layout)
    if layout.dtype is not torch.bool or layout.dim() not in (2, 3):
        raise InputError(
            f"block_sparse: layout must be [Q blocks, K blocks] or [heads, Q blocks, K blocks] bool; got "
            f"{layout.dtype} {list(layout.shape)}"
        )
    table = layout if layout.dim() == 3 else layout[None]
    return Predicate(
        partial(_in_layout, table, block), per_head=len(table) > 1, fits=partial(_fits_layout, table, block)
    )


def _in_layout(table: Tensor, block: int, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    here = table.to(q.device)
    rows, columns = q // block, k // block
    inside = (rows < here.shape[1]) & (columns < here.shape[2])
    rows, columns = rows.clamp(max=here.shape[1] - 1), columns.clamp(max=here.shape[2] - 1)
    return here[h if len(here) > 1 else torch.zeros_like(h), rows, columns] & inside


def _fits_layout(table: Tensor, block: int, extent: Extent) -> None:
    heads, rows, columns = table.shape
    if heads not in (1, extent.heads) or extent.keys > columns * block:
        raise InputError(
            f"block_sparse: the layout has {heads} heads and {columns * block} keys; got {extent.heads} heads and "
            f"{extent.keys} keys"
        )
    _check_places("block_sparse", extent, 0, rows * block)


def natten(height: int, width: int, kernel: int) -> Mask:
    """Return the mask of a picture's neighbourhoods (NATTEN, arXiv:2204.07143): `kernel` by `kernel` pixels each.

    At an edge the neighbourhood is shifted inwards, so that it has as many pixels everywhere.
    """
    sizes = (("height", height), ("width", width), ("kernel", kernel))
    height, width, kernel = (integer("natten", name, size, 1) for name, size in sizes)
    if kernel > min(height, width):
        raise InputError(f"natten: kernel ({kernel}) must not exceed height ({height}) and width ({width})")
    return Predicate(partial(_is_neighbour, height, width, kernel), fits=partial(_fits_picture, height, width))


def _is_neighbour(height: int, width: int, kernel: int, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    found = (q >= 0) & (k >= 0)
    for of_q, of_k, size in ((q // width, k // width, height), (q % width, k % width, width)):
        first = (of_q - kernel // 2).clamp(0, size - kernel)
        found = found & (of_k >= first) & (of_k < first + kernel)
    return found


def _fits_picture(height: int, width: int, extent: Extent) -> None:
    if extent.keys != height * width:
        raise InputError(
            f"natten: a picture of {height} by {width} has {height * width} pixels; got {extent.keys} keys"
        )
    _check_places("natten", extent, 0, height * width)


def tree(parents: Tensor, prefix: int = 0) -> Mask:
    """Return the mask of a tree of tokens, as speculative decoding has: each sees its ancestors and itself.

    Args:
        parents: `[tokens]` integers: the place of each token's parent, which comes before it; -1 for a root.
        prefix: keys before the tree, as a cache holds them, which every token of it sees.
    """
    prefix = integer("tree", "prefix", prefix, 0)
    check_tensor("tree", "parents", parents)
    if parents.dim() != 1 or not _is_integral(parents):
        raise InputError(f"tree: parents must be [tokens] integers; got {parents.dtype} {list(parents.shape)}")
    places = parents.tolist()
    seen = torch.eye(len(places), dtype=torch.bool)
    for token, parent in enumerate(places):
        if not -1 <= parent < token:
            raise InputError(f"tree: the parent of token {token} is {parent}; expected -1 or a token before it")
        if parent >= 0:
            seen[token] |= seen[parent]
    return Predicate(partial(_is_ancestor, seen, prefix), fits=partial(_fits_tree, len(places), prefix))


def _is_ancestor(seen: Tensor, prefix: int, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    if not len(seen):
        return (q == q) & (k < prefix)
    return (k < prefix) | seen.to(q.device)[(q - prefix).clamp(min=0), (k - prefix).clamp(min=0)]


def _fits_tree(tokens: int, prefix: int, extent: Extent) -> None:
    if extent.keys != prefix + tokens:
        raise InputError(f"tree: {tokens} tokens behind {prefix} keys are {prefix + tokens} keys; got {extent.keys}")
    _check_places("tree", extent, prefix, extent.keys)
