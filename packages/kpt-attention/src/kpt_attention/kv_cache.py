"""`PagedCache`: keys and values of many sequences in pages, which sequences that begin alike share.

It serves layers that see alike; a model with windows in some layers has one for these and one for the others.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kpt_core import InputError, KptError

from .arguments import integer
from .dense import DTYPES
from .paged import FP8, paged, update_cache

#: A page that a sequence needs no more: everything in it lies before the window.
_GONE = -1


class CacheFullError(KptError):
    """Say that a step needs more pages than are free; nothing was changed."""


@dataclass(slots=True)
class _Sequence:
    """Hold what is known of a sequence.

    Attributes:
        pages: which hold its keys, in order.
        length: keys that are written.
        tokens: their ids as far as they are known from the first on; of what follows nothing is shared.
        digests: of full pages whose tokens are known: each stands for all tokens up to the end of the page.
    """

    pages: list[int] = field(default_factory=list)
    length: int = 0
    tokens: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)

    def copy(self) -> "_Sequence":
        return _Sequence([*self.pages], self.length, [*self.tokens], [*self.digests])


@dataclass(frozen=True, slots=True)
class CacheUsage:
    """Count pages; each is one of the first three.

    Attributes:
        free: hold nothing.
        kept: belong to no sequence, but hold what one may begin with; given up, the oldest first, when none is free.
        used: belong to sequences.
        shared: of these, to more than one.
    """

    free: int
    kept: int
    used: int
    shared: int


@dataclass(frozen=True, slots=True)
class Step:
    """Hold what a model's layers need to write new tokens and to attend, for the sequences in their given order.

    Attributes:
        cache: the cache.
        positions: int64 `[tokens]`: of the new tokens, in their sequences.
        slots: int64 `[tokens]`: where they are written.
        block_table: int32 `[sequences, pages]`.
        lengths: int32 `[sequences]`: keys, the new ones included.
        cu_seqlens_q: int32 `[sequences + 1]`: where each sequence's new tokens end.
        most_queries: new tokens of a sequence, at most.
    """

    cache: "PagedCache"
    positions: Tensor
    slots: Tensor
    block_table: Tensor
    lengths: Tensor
    cu_seqlens_q: Tensor
    most_queries: int

    def update(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Write the keys `[tokens, Hkv, D]` and values `[tokens, Hkv, Dv]` of new tokens (`attention.update_cache`)."""
        cache = self.cache
        update_cache(cache.k[layer], cache.v[layer], k, v, self.slots, *cache.scales(layer))

    def attend(self, layer: int, q: Tensor, **options: Any) -> Any:
        """Attend with the queries `[tokens, Hq, D]` of the new tokens, whose keys are written, by `attention.paged`.

        Args:
            layer: of the cache.
            q: the queries.
            **options: `sinks`, `alibi_slopes`, `bias`, `mask`, `return_lse`, `scale` and `softcap`, as
                `attention.paged` takes them.

        Returns:
            The output `[tokens, Hq, Dv]`; with `return_lse` the log-sum-exp `[tokens, Hq]` beside it.
        """
        cache, plain = self.cache, self.most_queries == 1 and len(q) == len(self.lengths)
        k_scale, v_scale = cache.scales(layer)
        out, lse = paged(
            q, cache.k[layer], cache.v[layer], self.block_table, self.lengths, None if plain else self.cu_seqlens_q,
            options.pop("sinks", None), k_scale, v_scale, window=cache.window, first=cache.first, **options,
        )  # fmt: skip
        return out if lse is None else (out, lse)

    def tree(self, parents: Sequence[Sequence[int] | Tensor]) -> tuple[Tensor, Tensor]:
        """Return the mask of new tokens that are trees, for `attend`, and their positions in place of `positions`.

        A token sees what was cached before, its ancestors and itself, and stands one position after its parent. Such
        tokens are given to the step as counts: with ids, their pages would be shared as if they were a text.

        Args:
            parents: of each sequence, the places of its new tokens' parents among these, which come before them; -1
                for a token that follows what was cached.

        Returns:
            bool `[tokens, most_queries]`; and int64 `[tokens]`.

        Raises:
            InputError: a sequence has more or fewer new tokens, or a parent does not come before its token.
        """
        counts, device = self.cu_seqlens_q.diff().tolist(), self.positions.device
        trees = [torch.as_tensor(each, dtype=torch.int64).tolist() for each in parents]
        if [len(each) for each in trees] != counts:
            raise InputError(
                f"Step.tree: parents must be of {counts} new tokens, by sequence; got {[len(each) for each in trees]}"
            )
        masks = []
        for each in trees:
            mask = torch.ones((len(each), self.most_queries), dtype=torch.bool)
            own = mask[:, self.most_queries - len(each) :]
            own.copy_(torch.eye(len(each), dtype=torch.bool))
            for token, parent in enumerate(each):
                if not -1 <= parent < token:
                    raise InputError(
                        f"Step.tree: the parent of token {token} must come before it, or be -1; got {parent}"
                    )
                if parent >= 0:
                    own[token] |= own[parent]
            masks.append(mask)
        found = torch.cat(masks or [torch.ones((0, 0), dtype=torch.bool)]).to(device)
        own_length = self.lengths.long().repeat_interleave(self.cu_seqlens_q.diff().long())
        return found, own_length - self.most_queries + found.sum(-1) - 1


class PagedCache:
    """Keep keys and values in pages: sequences grow without copies, share what they begin with, and fork for nothing.

    Args:
        layers: that write to it.
        pages: that it has.
        kv_heads: heads of keys and values.
        head_dim: of keys.
        value_dim: of values, as of keys if None.
        page_size: tokens of a page.
        window: how many keys a query sees, its own included, 0 for all; pages before it are given back.
        first: beside a window: how many keys at a sequence's begin every query sees as well; their pages stay.
        dtype: of what is stored: float32, bfloat16, float16, float64, float8_e4m3fn or float8_e5m2.
        device: where.
        k_scale: float32 `[layers, kv_heads]`: what stored keys are multiplied by, for 8 bits; ones if None.
        v_scale: likewise, of values.

    Raises:
        InputError: a size or dtype does not fit.

    Examples:
        >>> import torch
        >>> cache = PagedCache(layers=1, pages=8, kv_heads=2, head_dim=64)
        >>> one = cache.add()
        >>> with cache.step({one: 5}) as step:
        ...     step.update(0, torch.randn(5, 2, 64), torch.randn(5, 2, 64))
        ...     out = step.attend(0, torch.randn(5, 8, 64))
        >>> out.shape, cache.length(one)
        (torch.Size([5, 8, 64]), 5)
    """

    def __init__(
        self,
        *,
        layers: int,
        pages: int,
        kv_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        page_size: int = 16,
        window: int = 0,
        first: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
    ) -> None:
        sizes = {"layers": layers, "pages": pages, "kv_heads": kv_heads, "head_dim": head_dim, "page_size": page_size}
        for name, size in sizes.items():
            if size < 1:
                raise InputError(f"PagedCache: {name} must be at least 1; got {size}")
        if window < 0:
            raise InputError(f"PagedCache: window must be positive, or 0 for none; got {window}")
        if first < 0 or (first and not window):
            raise InputError(
                f"PagedCache: first must be positive, beside a window, or 0 for none; got {first} with window={window}"
            )
        if dtype not in (*DTYPES, *FP8):
            raise InputError(f"PagedCache: dtype must be float32, bfloat16, float16, float64 or of 8 bits; got {dtype}")
        for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
            if scale is not None and (tuple(scale.shape) != (layers, kv_heads) or scale.dtype is not torch.float32):
                raise InputError(
                    f"PagedCache: {name} must be float32 [{layers}, {kv_heads}]; got {scale.dtype} {list(scale.shape)}"
                )
        shape = (layers, pages, page_size, kv_heads)
        self.k = torch.empty((*shape, head_dim), dtype=dtype, device=device)
        self.v = torch.empty((*shape, head_dim if value_dim is None else value_dim), dtype=dtype, device=device)
        self.page_size, self.window, self.first = page_size, window, first
        self._scales = k_scale, v_scale
        self._free = list(range(pages - 1, -1, -1))
        self._holders = [0] * pages
        #: Digest of all tokens up to the end of a page -> the page; and the reverse.
        self._known: dict[bytes, int] = {}
        self._digest: dict[int, bytes] = {}
        #: Known pages that no sequence holds, the oldest first.
        self._kept: OrderedDict[int, None] = OrderedDict()
        self._sequences: dict[int, _Sequence] = {}
        self._next = 0
        self._in_step = False

    def __repr__(self) -> str:
        return (
            f"PagedCache({self.k.shape[1]} pages of {self.page_size}, {len(self._sequences)} sequences, {self.usage()})"
        )

    def scales(self, layer: int) -> tuple[Tensor | None, Tensor | None]:
        """Return the scales of a layer's keys and values, `[kv_heads]` each."""
        k_scale, v_scale = self._scales
        return None if k_scale is None else k_scale[layer], None if v_scale is None else v_scale[layer]

    def usage(self) -> CacheUsage:
        """Return how many pages are free, kept, used and shared."""
        used = sum(holders > 0 for holders in self._holders)
        return CacheUsage(len(self._free), len(self._kept), used, sum(holders > 1 for holders in self._holders))

    def length(self, sequence: int) -> int:
        """Return how many keys of a sequence are written."""
        return self._of(sequence).length

    def add(self, tokens: Sequence[int] = ()) -> int:
        """Add a sequence, and return its number; it holds the pages that are known of what it begins with.

        `length` then says how many tokens are there already: whole pages, at least one token less than all, since
        the last one's output is wanted. The first step has to give the rest, their ids as `tokens[length:]`.

        Args:
            tokens: ids that it begins with; nothing is shared without.
        """
        self._outside_of_steps("add")
        made, size = _Sequence(), self.page_size
        digests = list(_digests([], tokens, size))[: max(len(tokens) - 1, 0) // size]
        pages = [self._known.get(digest, _GONE) for digest in digests]
        count = len(pages)
        while count and self._lacks(pages[:count], count * size):
            count -= 1
        if count:
            gone = self._gone(count * size)
            made.pages = pages[: gone.start] + [_GONE] * len(gone) + pages[gone.stop : count]
            made.length, made.tokens, made.digests = count * size, list(tokens[: count * size]), digests[:count]
            self._hold(made.pages)
        return self._enter(made)

    def fork(self, sequence: int) -> int:
        """Add a sequence that continues another one; pages are copied when one of both writes into them."""
        self._outside_of_steps("fork")
        made = self._of(sequence).copy()
        self._hold(made.pages)
        return self._enter(made)

    def free(self, sequence: int) -> None:
        """Drop a sequence. Pages whose tokens are known are kept for others as long as there is room."""
        self._outside_of_steps("free")
        self._release(self._of(sequence).pages)
        del self._sequences[sequence]

    def truncate(self, sequence: int, length: int) -> None:
        """Forget the last keys of a sequence, as after tokens that were guessed wrongly.

        Raises:
            InputError: it has fewer, or keys that are seen from there are given back already.
        """
        own = self._cut(sequence, length)
        count = -(-length // self.page_size)
        self._release(own.pages[count:])
        own.pages, own.length = own.pages[:count], length
        own.tokens, own.digests = own.tokens[:length], own.digests[: length // self.page_size]

    def keep(self, sequence: int, length: int, places: Sequence[int]) -> None:
        """Forget the last keys of a sequence but some, which move together: the path of a tree that was right.

        Args:
            sequence: which.
            length: keys at its begin that stay as they are.
            places: of keys after these that are kept, in rising order; they become keys `length`, `length + 1`...

        Raises:
            InputError: the places don't rise, or there is no such key; keys that are seen from there are given back;
                keys would move into a page that another sequence holds; or the step was given their ids.
        """
        own, size, after = self._of(sequence), self.page_size, length + len(places)
        if length < 0 or any(
            one >= other for one, other in zip([length - 1, *places], [*places, own.length], strict=True)
        ):
            raise InputError(
                f"PagedCache: places must rise from {length} on, 0 at least, and be less than {own.length}; got "
                f"{[*places]}"
            )
        self._cut(sequence, after)
        moves = [(place, to) for to, place in enumerate(places, length) if place != to]
        if moves and len(own.tokens) > length:
            raise InputError(
                f"PagedCache: the ids of keys {length} to {len(own.tokens) - 1} of sequence {sequence} are known, and "
                "may not move: give steps the new tokens of trees as counts"
            )
        if any(self._is_shared(own.pages[to // size]) for _, to in moves):
            raise InputError(
                f"PagedCache: keys {moves[0][1]} to {after - 1} lie in a page that others hold: free forks of sequence "
                f"{sequence} first"
            )
        if moves:
            source, to = (torch.tensor([own.pages[place // size] * size + place % size for place in each])
                          for each in zip(*moves, strict=True))  # fmt: skip
            for part in (self.k, self.v):  # as bytes: not every device copies numbers of 8 bits
                bits = part.view(torch.uint8).flatten(1, 2)
                bits[:, to.to(bits.device)] = bits[:, source.to(bits.device)]
        self.truncate(sequence, after)

    def _cut(self, sequence: int, length: int) -> _Sequence:
        """Return a sequence that can be cut to a length."""
        self._outside_of_steps("truncate")
        own = self._of(sequence)
        if not 0 <= length <= own.length:
            raise InputError(f"PagedCache: sequence {sequence} has {own.length} keys; it can't be cut to {length}")
        if self._lacks(own.pages[: -(-length // self.page_size)], length):
            raise InputError(
                f"PagedCache: sequence {sequence} can't be cut to {length} keys: those in the window of {self.window} "
                "before are given back"
            )
        return own

    @contextmanager
    def step(self, new: Mapping[int, int | Sequence[int]]) -> Iterator[Step]:
        """Make room for new tokens; they belong to their sequences when the block ends, and not if it raises.

        Args:
            new: of each sequence that takes part how many tokens are new, or their ids: with ids of all tokens from
                the first on, pages can be shared.

        Raises:
            CacheFullError: there are too few pages; nothing was changed.
            InputError: a sequence is not there, or a count is negative.
        """
        self._outside_of_steps("step")
        new = {number: _count_or_ids(each) for number, each in new.items()}
        before = {number: self._of(number).copy() for number in new}
        counts = {number: each if isinstance(each, int) else len(each) for number, each in new.items()}
        if any(count < 0 for count in counts.values()):
            raise InputError(f"PagedCache: new tokens must be counts or lists of ids; got {dict(new)}")
        taken, replaced = self._make_room(counts)
        self._in_step = True
        try:
            yield self._described(counts)
        except BaseException:
            self._in_step = False
            for number, own in before.items():
                self._sequences[number] = own
            self._release(taken)
            raise
        self._in_step = False
        self._release(replaced)
        for number, each in new.items():
            self._commit(self._sequences[number], each)

    def _make_room(self, counts: Mapping[int, int]) -> tuple[list[int], list[int]]:
        """Give sequences pages for their new tokens; return the new pages, and those that they replace."""
        size = self.page_size
        copied: dict[int, int] = {}
        wanted = 0
        for number, count in counts.items():
            own = self._of(number)
            wanted += -(-(own.length + count) // size) - len(own.pages)
            if count and own.length % size and self._is_shared(own.pages[-1]):
                copied[number] = own.pages[-1]
        room = len(self._free) + len(self._kept)
        if wanted + len(copied) > room:
            raise CacheFullError(
                f"PagedCache: the step needs {wanted + len(copied)} pages of {size} tokens, and {room} of "
                f"{len(self._holders)} are free: free sequences, give fewer at a time, or make the cache larger"
            )
        taken = [self._take() for _ in range(wanted + len(copied))]
        left = iter(taken)
        for number, old in copied.items():
            page = next(left)
            for part in (self.k, self.v):  # as bytes: not every device copies numbers of 8 bits
                bits = part.view(torch.uint8)
                bits[:, page] = bits[:, old]
            self._sequences[number].pages[-1] = page
        for number, count in counts.items():
            own = self._sequences[number]
            own.pages.extend(next(left) for _ in range(-(-(own.length + count) // size) - len(own.pages)))
        return taken, list(copied.values())

    def _described(self, counts: Mapping[int, int]) -> Step:
        size, device = self.page_size, self.k.device
        positions: list[int] = []
        slots: list[int] = []
        for number, count in counts.items():
            own = self._sequences[number]
            places = range(own.length, own.length + count)
            positions.extend(places)
            slots.extend(own.pages[place // size] * size + place % size for place in places)
        own_pages = [self._sequences[number].pages for number in counts]
        width = max(map(len, own_pages), default=0)
        table = [pages + [_GONE] * (width - len(pages)) for pages in own_pages]
        lengths = [self._sequences[number].length + count for number, count in counts.items()]
        ends = torch.tensor([0, *counts.values()]).cumsum(0)
        return Step(
            self,
            torch.tensor(positions, dtype=torch.int64, device=device),
            torch.tensor(slots, dtype=torch.int64, device=device),
            torch.tensor(table, dtype=torch.int32, device=device).view(len(counts), width),
            torch.tensor(lengths, dtype=torch.int32, device=device),
            ends.to(device, torch.int32),
            max(counts.values(), default=0),
        )

    def _commit(self, own: _Sequence, new: int | Sequence[int]) -> None:
        """Count tokens as written; let others find full pages, and give back those before the window."""
        if not isinstance(new, int) and len(own.tokens) == own.length:
            own.tokens.extend(new)
        own.length += new if isinstance(new, int) else len(new)
        for digest in _digests(own.digests, own.tokens, self.page_size):
            page = own.pages[len(own.digests)]
            own.digests.append(digest)
            if page != _GONE and digest not in self._known and page not in self._digest:
                self._known[digest], self._digest[page] = page, digest
        for place in self._gone(own.length):
            if own.pages[place] != _GONE:
                self._release([own.pages[place]])
                own.pages[place] = _GONE

    def _gone(self, length: int) -> range:
        """Return which pages the token after `length` others sees nothing of."""
        past = max(length + 1 - self.window, 0) // self.page_size if self.window else 0
        return range(min(-(-self.first // self.page_size), past), past)

    def _lacks(self, pages: Sequence[int], length: int) -> bool:
        """Return whether a page that the token after `length` others sees is not there."""
        gone = self._gone(length)
        return _GONE in pages[: gone.start] or _GONE in pages[gone.stop :]

    def _is_shared(self, page: int) -> bool:
        return self._holders[page] > 1 or page in self._digest

    def _take(self) -> int:
        """Return a page that holds nothing, for one holder."""
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._kept.popitem(last=False)
            del self._known[self._digest.pop(page)]
        self._holders[page] = 1
        return page

    def _hold(self, pages: Iterable[int]) -> None:
        for page in pages:
            if page != _GONE:
                self._holders[page] += 1
                self._kept.pop(page, None)

    def _release(self, pages: Sequence[int]) -> None:
        for page in reversed(pages):  # the last first, so that what others begin with stays longest
            if page == _GONE:
                continue
            self._holders[page] -= 1
            if self._holders[page] == 0:
                if page in self._digest:
                    self._kept[page] = None
                else:
                    self._free.append(page)

    def _enter(self, sequence: _Sequence) -> int:
        self._next += 1
        self._sequences[self._next - 1] = sequence
        return self._next - 1

    def _of(self, sequence: int) -> _Sequence:
        if sequence not in self._sequences:
            raise InputError(f"PagedCache: there is no sequence {sequence}; there are {sorted(self._sequences)}")
        return self._sequences[sequence]

    def _outside_of_steps(self, action: str) -> None:
        if self._in_step:
            raise InputError(f"PagedCache: {action} inside of a step: end the step first")


def _count_or_ids(new: Any) -> int | Sequence[int]:
    """Return ids as they are, and a count as an int, of numpy and torch too."""
    try:
        len(new)
    except TypeError:
        return integer("PagedCache", "new tokens without ids", new)
    ids: Sequence[int] = new
    return ids


def _digests(known: Sequence[bytes], tokens: Sequence[int], page_size: int) -> Iterator[bytes]:
    """Give the digests of the full pages of tokens after those that are known."""
    before = known[-1] if known else b""
    for place in range(len(known), len(tokens) // page_size):
        own = array("q", tokens[place * page_size : (place + 1) * page_size]).tobytes()
        before = hashlib.sha256(before + own).digest()
        yield before
