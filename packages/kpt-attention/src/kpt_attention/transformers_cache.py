"""`PagedKVCache`: the cache of Hugging Face's `generate`, in pages, of 8 bits where that is asked for.

    cache = PagedKVCache(model.config, dtype=torch.float8_e4m3fn)
    model.generate(ids, past_key_values=cache)

Until sequences share pages, as beams do, those of each lie in their order, and any attention reads them there: what a
model's `update` gets back is a view. Else, and of 8 bits or where a layer has a window, it is not there: `PagedStates`
stand for keys and values in the pages, and KPT's attention reads those where they lie (`attention.paged`). Whoever else
computes with them gets them dense, so that any implementation works, with a copy at each step.

`kpt_attention.kv_cache.PagedCache` is for servers: sequences of many lengths, in a number of pages that is fixed. Here
all sequences of a batch are as long, and each layer takes pages as it needs them.
"""

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedConfig  # noqa: TID253  whoever imports this has a model of theirs
from transformers.cache_utils import (  # noqa: TID253
    DYNAMIC_LAYER_TYPE_MAPPING,
    Cache,
    CacheLayerMixin,
    get_layer_types_and_kwargs,
)

from kpt_core import InputError, KptWarning
from kpt_core.errors import warn_caller

from .dense import DTYPES
from .model_masks import ModelMask
from .paged import FP8, paged, update_cache

__all__ = ["PagedKVCache", "PagedLayer", "PagedStates", "attend_pages"]

_NAME = "PagedKVCache"
#: Queries of a sequence from which on bringing its pages together costs less than reading them for a few at a time.
FEW = 16
#: Numbers of 8 bits that the largest of the first keys becomes, as a part of the largest there is: later ones may grow.
_ROOM = 8
#: Kinds of layers, as configurations name them, whose keys and values are these layers' own.
_SERVED = ("full_attention", "sliding_attention", "chunked_attention")
#: What tells of states without looking into them.
_OUTSIDE = frozenset(
    getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "is_cuda", "requires_grad")
) | {Tensor.size, Tensor.dim, Tensor.numel}


class PagedLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """Keep one layer's keys and values in pages.

    Each row has `room` pages in their order, as long as nothing is of 8 bits, has a window, or is shared. After that a
    row of the table has a sequence's pages in order; several sequences may have the same ones, as beams do. A page
    that is in no row is free. A layer with a window drops the columns that nobody will see.

    Args:
        page_size: tokens of a page.
        dtype: of 8 bits, or None for that of the keys.
        sliding_window: how many keys a query sees at most, its own included; 0 for all.
        told: the set that the layers of a cache share; it holds what has been warned of.

    Attributes:
        k: `[pages, page_size, Hkv, D]`.
        v: `[pages, page_size, Hkv, Dv]`.
        table: int32 `[B, pages of a sequence]`.
        scales: float32 `[Hkv]` of keys and of values, for 8 bits; else None.
        length: columns that were written.
        gone: pages that each row had before the first of the table.
        room: pages that each row has, in their order; 0 where they lie anywhere.
    """

    is_compileable = False
    is_croppable = True
    # Scales of 8 bits come from the first keys.
    supports_early_init = False

    k: Tensor
    v: Tensor
    table: Tensor
    scales: tuple[Tensor, Tensor] | tuple[None, None]

    def __init__(
        self, page_size: int, dtype: torch.dtype | None, sliding_window: int = 0, told: set[str] | None = None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.page_size, self.stored, self.window = page_size, dtype, sliding_window
        self.is_sliding = sliding_window > 0
        self.record_past = False
        self.length = self.gone = 0
        self._told = set() if told is None else told
        self.room = 0
        #: Whether a row's last page may be another one's, too.
        self._shares = False
        #: A table, and where its columns lie.
        self._known: tuple[Tensor | None, Tensor | None] = None, None
        #: The pages of keys, and keys and values as views of rows.
        self._viewed: tuple[Tensor | None, tuple[Tensor, Tensor] | None] = None, None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take dtype, device and shapes from the first keys and values."""
        self.device, batch = key_states.device, key_states.shape[0]
        self._dtypes = key_states.dtype, value_states.dtype
        self.k, self.v = (
            torch.empty(
                (0, self.page_size, each.shape[1], each.shape[3]), dtype=self.stored or each.dtype, device=self.device
            )
            for each in (key_states, value_states)
        )
        self.table = torch.zeros((batch, 0), dtype=torch.int32, device=self.device)
        self.scales = None, None
        if self.stored is not None:
            self.scales = _scale(key_states, self.stored), _scale(value_states, self.stored)
        elif not self.window:
            self._make_room(batch, 1)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write new keys `[B, Hkv, S, D]` and values `[B, Hkv, S, Dv]`.

        Returns:
            Of the first ones themselves; of later ones all that a query may see, views or `PagedStates`.

        Raises:
            InputError: shapes are not those of before, or gradients are asked for.
        """
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            raise InputError(
                f"{_NAME}: keys that need gradients, which pages do not keep: call the model under torch.no_grad(), or "
                "use transformers' DynamicCache"
            )
        before, new = self.length, key_states.shape[2]
        if not self.is_initialized:
            if new == 0:
                return key_states, value_states
            self.lazy_initialization(key_states, value_states)
        self._check(key_states, value_states)
        # Most steps, each layer of them.
        if before and self.room and before + new <= self.table.shape[1] * self.page_size:
            self.length = before + new
            keys, values = self._rows()
            keys.narrow(2, before, new).copy_(key_states)
            values.narrow(2, before, new).copy_(value_states)
            return keys.narrow(2, 0, self.length), values.narrow(2, 0, self.length)
        first = max(before + 1 - self.window, 0) if self.window else 0
        # Of first keys only those are written that a later query sees.
        skipped = 0
        if before == 0 and self.window and not self.record_past:
            self.gone = max(new + 1 - self.window, 0) // self.page_size
            skipped = self.gone * self.page_size
        elif not self.record_past:
            self._drop()
        self._write(key_states[:, :, skipped:], value_states[:, :, skipped:], before + skipped)
        self.length = before + new
        if before == 0:
            return key_states, value_states
        if self.room:
            keys, values = (each.narrow(2, 0, self.length) for each in self._rows())
            return keys, values
        return self._states(key_states.dtype, first, True), self._states(value_states.dtype, first, False)

    @property
    def keys(self) -> Tensor | None:
        """Return all keys that a query may see: encoder-decoders read those of the encoder's output here."""
        return self._all(True)

    @keys.setter
    def keys(self, value: Tensor | None) -> None:
        """Do nothing: transformers' constructor says so that there are none."""

    @property
    def values(self) -> Tensor | None:
        """Return all values that a query may see."""
        return self._all(False)

    @values.setter
    def values(self, value: Tensor | None) -> None:
        """Do nothing, likewise."""

    def _all(self, keys: bool) -> Tensor | None:
        """Return what was written, as a view or `PagedStates`; None before anything was."""
        if not self.length:
            return None
        if self.room:
            return self._rows()[0 if keys else 1].narrow(2, 0, self.length)
        return self._states(self._dtypes[0 if keys else 1], self.get_mask_sizes(0)[1], keys)

    def _check(self, keys: Tensor, values: Tensor) -> None:
        rows, (batch, heads, _, dim), (batch_of_v, heads_of_v, _, value_dim) = len(self.table), keys.shape, values.shape
        found = [(batch, heads, dim), (batch_of_v, heads_of_v, value_dim)]
        want = [(rows, *self.k.shape[2:]), (rows, *self.v.shape[2:])]
        if found != want:
            raise InputError(
                f"{_NAME}: keys and values of (sequences, heads, dim) {found[0]} and {found[1]}; the cache holds "
                f"{want[0]} and {want[1]}: call reset() before another batch, and give each model a cache of its own"
            )

    def _states(self, dtype: torch.dtype, first: int, keys: bool) -> Tensor:
        _, _, heads, dim = (self.k if keys else self.v).shape
        shape = len(self.table), heads, self.length - first, dim
        made = Tensor._make_wrapper_subclass(PagedStates, shape, dtype=dtype, device=self.device)
        made.layer, made.first, made.past, made.keys, made._made = self, first, self.length, keys, None
        return made

    def _rows(self) -> tuple[Tensor, Tensor]:
        """Return keys and values as `[B, Hkv, room * page_size, dim]`; steps of decoding ask for them often."""
        of, known = self._viewed
        if of is not self.k or known is None:
            size = self.room * self.page_size
            k, v = (each.view(-1, size, *each.shape[2:]).transpose(1, 2) for each in (self.k, self.v))
            self._viewed = self.k, (k, v)
            return k, v
        return known

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy is made of: views, which would become tensors of their own, are left out."""
        return vars(self) | {"_viewed": (None, None)}

    def _make_room(self, batch: int, pages: int) -> None:
        """Give each row so many pages, which lie in their order."""
        before = self._rows() if self.room else ()
        self.room = pages
        self.k, self.v = (each.new_empty((batch * pages, *each.shape[1:])) for each in (self.k, self.v))
        for old, new in zip(before, self._rows(), strict=False):
            new[:, :, : self.length] = old[:, :, : self.length]

    def _write(self, keys: Tensor, values: Tensor, begin: int) -> None:
        size, (batch, _, new, _) = self.page_size, keys.shape
        if self.room:
            pages = -(-(begin + new) // size)
            if pages > self.room:
                self._make_room(batch, pages + pages // 8)
            for rows, states in zip(self._rows(), (keys, values), strict=True):
                rows[:, :, begin : begin + new] = states.detach()
            if pages > self.table.shape[1]:
                firsts = torch.arange(0, batch * self.room, self.room, dtype=torch.int32, device=self.device)
                self.table = firsts[:, None] + torch.arange(pages, dtype=torch.int32, device=self.device)
            return
        base = self.gone * size
        if (begin - base) % size and self._shares:
            self._own_last_pages()
        missing = -(-(begin + new - base) // size) - self.table.shape[1]
        if missing > 0:
            self.table = torch.cat((self.table, self._take(batch * missing).view(batch, missing)), 1)
        slots = self._columns()[:, begin - base : begin - base + new]
        k, v = (each.detach().transpose(1, 2).flatten(0, 1) for each in (keys, values))
        update_cache(self.k, self.v, k, v, slots.flatten(), *self.scales)

    def slots(self, columns: Tensor) -> Tensor:
        """Return where columns `[B, n]` of the table lie, int64 `[B, n]`: `page * page_size + place`."""
        return self._columns().gather(1, columns)

    def _columns(self) -> Tensor:
        """Return where every column of the table lies, int64; steps of decoding ask for it until a page is full."""
        table, of_table, known = self.table, *self._known
        if known is None or of_table is not table:
            places = torch.arange(self.page_size, device=self.device)
            known = (table.long().unsqueeze(2) * self.page_size + places).flatten(1)
            self._known = table, known
        return known

    def _take(self, count: int) -> Tensor:
        """Return free pages, int32 `[count]`; where there are too few, the layer gets more, and an eighth beside."""
        have = self.k.shape[0]
        unused = torch.ones(have, dtype=torch.bool, device=self.device)
        unused[self.table.long().flatten()] = False
        free = unused.nonzero().flatten()
        if len(free) < count:
            total = have + count - len(free) + have // 8
            self.k, self.v = _longer(self.k, total), _longer(self.v, total)
            free = torch.cat((free, torch.arange(have, total, device=self.device)))
        return free[:count].int()

    def _own_last_pages(self) -> None:
        """Give each row but one a copy of its last page, where that is another one's too."""
        self._shares = False
        last = self.table[:, -1]
        rows = (last[:, None] == last).tril(-1).any(1).nonzero().flatten()
        if len(rows) == 0:
            return
        old, made = last[rows].long(), self._take(len(rows))
        for part in (self.k, self.v):  # as bytes: not every device copies numbers of 8 bits
            bits = part.view(torch.uint8)
            bits[made.long()] = bits[old]
        self.table = self.table.clone()
        self.table[rows, -1] = made

    def _drop(self) -> None:
        """Drop the pages that lie before what the next query sees."""
        if self.window:
            gone = max(self.length + 1 - self.window, 0) // self.page_size
            self.table, self.gone = self.table[:, gone - self.gone :], gone

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many keys a mask of so many new queries has, and the position of the first."""
        first = max(self.length + 1 - self.window, 0) if self.window else 0
        return self.length + query_length - first, first

    def get_seq_length(self) -> int:
        """Return how many columns were written."""
        return self.length

    def get_max_length(self) -> int:
        """Return the window, or -1: there is no limit."""
        return self.window or -1

    def activate_past_recording(self) -> None:
        """Keep what lies before the window until `crop` is called, as assisted decoding asks for."""
        self.record_past = True

    def reset(self) -> None:
        """Forget everything, and free the memory."""
        if self.is_initialized:
            del self.k, self.v, self.table, self.scales
        self.is_initialized = self._shares = False
        self._known = self._viewed = None, None
        self.length = self.gone = self.room = 0

    def _share(self, table: Tensor) -> None:
        """Take a table whose rows may have pages in common, which lie anywhere."""
        self.table, self._shares, self.room, self._viewed = table, True, 0, (None, None)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let each sequence continue that of an index; only pages that are written to are copied, and then."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Let each sequence be there so many times; they share their pages."""
        if self.is_initialized:
            self._share(self.table.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the sequences of these indices."""
        if self.is_initialized:
            self._share(self.table[indices.to(self.device)])

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens, given as a negative number.

        Raises:
            InputError: the number is positive, or keys that are seen from there are dropped already.
        """
        if tokens_to_remove > 0:
            raise InputError(
                f"{_NAME}: crop takes how many tokens to remove, as a negative number or 0; got {tokens_to_remove}"
            )
        if not self.is_initialized:
            return
        length = max(self.length + tokens_to_remove, 0)
        base = self.gone * self.page_size
        if self.gone and base > max(length + 1 - self.window, 0):
            raise InputError(
                f"{_NAME}: {self.length} tokens can't be cut to {length}: of those in the window of {self.window} "
                f"before only those from {base} on are kept; call activate_past_recording() before they are written"
            )
        self.table, self.length = self.table[:, : -(-(length - base) // self.page_size)], length
        self._shares = True
        self._drop()

    def offload(self) -> None:
        """Do nothing: pages stay where they are."""

    def prefetch(self) -> None:
        """Do nothing: pages stay where they are."""


class PagedStates(Tensor):
    """Stand for the keys or values `[B, Hkv, K, D]` of a layer's pages; whoever computes with them gets them dense.

    Attributes:
        layer: whose they are.
        first: position of the first of them.
        past: position after the last.
        keys: whether they are keys.
    """

    layer: PagedLayer
    first: int
    past: int
    keys: bool
    _made: Tensor | None

    def whole(self) -> Tensor:
        """Return them dense, in the dtype that they were written from: a copy, made once."""
        if self._made is None:
            self._check_is_new()
            layer, batch = self.layer, self.shape[0]
            base = layer.gone * layer.page_size
            columns = torch.arange(self.first - base, self.past - base, device=layer.device)
            cache = layer.k if self.keys else layer.v
            rows = cache.flatten(0, 1)
            slots = layer.slots(columns.expand(batch, -1))
            # Not every device copies numbers of 8 bits.
            found = rows.view(torch.uint8)[slots].view(rows.dtype) if rows.dtype in FP8 else rows[slots]
            found = found.to(self.dtype)
            scale = layer.scales[0 if self.keys else 1]
            if scale is not None:
                found = (found * scale[:, None]).to(self.dtype)
            self._made = found.transpose(1, 2)
        return self._made

    def _check_is_new(self) -> None:
        if self.past != self.layer.length:
            raise InputError(
                f"{_NAME}: states of {self.past} tokens are used where the cache has {self.layer.length}: what update "
                "returns is good until the cache changes"
            )

    def _seen_elsewhere(self) -> Tensor:
        told = self.layer._told
        if "dense" not in told and self._made is None:
            told.add("dense")
            warn_caller(
                f"{_NAME}: what does not know pages gets a dense copy of them at each step, which is slow: load the "
                "model with attn_implementation='kpt', or use DynamicCache for one that expands its keys itself",
                KptWarning,
            )
        return self.whole()

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in _OUTSIDE:
            return super().__torch_function__(function, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        args, kwargs = tree_map_only(PagedStates, PagedStates._seen_elsewhere, (args, kwargs or {}))
        return function(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(f"kpt: {function} met keys that are in pages; use transformers' DynamicCache")


@dataclass(frozen=True, slots=True)
class _Seen:
    """Say which keys a few queries see.

    Attributes:
        window: of causal queries, 0 for none.
        columns: int64 `[B, n]`: the keys of the one query of each sequence, where no window says it.
        lengths: int32 `[B]`: how many of the columns count.
    """

    window: int = 0
    columns: Tensor | None = None
    lengths: Tensor | None = None


def attend_pages(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
    *,
    scale: float | None,
    softcap: float,
) -> Tensor | None:
    """Attend with a few queries to keys and values in pages, by `attention.paged`.

    Args:
        query: `[B, Hq, Q, D]`.
        key: `PagedStates` of keys, `[B, Hkv, K, D]`.
        value: those of the same layer's values.
        mask: `[B or 1, 1, Q or 1, K]`, bool or 0 and the dtype's least number, or None.
        sinks: `[Hq]`.
        scale: of the scores.
        softcap: of the scores, 0 for none.

    Returns:
        The output `[B, Q, Hq, Dv]`; None for what the op does not do: many queries, padding before several queries,
        masks that heads do not share, other numbers to add.
    """
    if type(key) is not PagedStates or type(value) is not PagedStates or key.layer is not value.layer:
        return None
    layer, (batch, heads, queries, dim) = key.layer, query.shape
    if not 0 < queries < FEW or batch != key.shape[0] or heads % key.shape[1] or query.dtype not in DTYPES:
        return None
    if layer.k.dtype not in (query.dtype, *FP8):
        return None
    key._check_is_new()
    seen = _seen(mask, batch, queries, key.shape[2])
    offset = key.first - layer.gone * layer.page_size
    if seen is None or (queries > 1 and offset and not 0 < seen.window <= key.shape[2] - queries + 1):
        return None
    rows, ends, window = query.transpose(1, 2).reshape(batch * queries, heads, dim), None, seen.window
    k, v, table, lengths = layer.k, layer.v, layer.table, seen.lengths
    if seen.columns is not None:
        # Pages of one key: which, may then be said for each.
        k, v, table = k.flatten(0, 1).unsqueeze(1), v.flatten(0, 1).unsqueeze(1), layer.slots(seen.columns + offset)
    else:
        lengths = torch.full((batch,), offset + key.shape[2], dtype=torch.int32, device=rows.device)
        window = window or (key.shape[2] if offset else 0)
        if queries > 1:
            ends = torch.arange(0, len(rows) + 1, queries, dtype=torch.int32, device=rows.device)
    out, _ = paged(
        rows, k, v, table.int(), cast(Tensor, lengths), ends, sinks, *layer.scales, window=window, scale=scale,
        softcap=softcap,
    )  # fmt: skip
    found: Tensor = out.unflatten(0, (batch, queries))
    return found


def _seen(mask: Tensor | None, batch: int, queries: int, keys: int) -> _Seen | None:
    """Return what a mask says, found once for the layers that share it; None where `attention.paged` can't say it."""
    if mask is None:
        return _Seen() if queries == 1 else None
    if isinstance(mask, ModelMask):
        if mask._made is None and mask.shape[2:] == (queries, keys):
            plain = mask._mask.plain()
            if (plain == "all" and queries == 1) or (plain == "causal" and mask._offset == keys - queries):
                return _Seen()
        mask = mask.whole()
    if mask.dim() != 4 or mask.shape[1] != 1 or mask.shape[3] < keys:
        return None
    # Tensors of inference mode count no changes.
    state = None if mask.is_inference() else (mask._version, batch, queries, keys)
    known = getattr(mask, "_kpt_seen_keys", None)
    if known is not None and state is not None and known[0] == state:
        return cast("_Seen | None", known[1])
    shown = mask[:, 0, :, :keys].expand(batch, queries, keys)
    found = _read(shown) if mask.dtype is torch.bool else _read_of_numbers(shown)
    mask._kpt_seen_keys = state, found  # type: ignore[attr-defined]
    return found


def _read_of_numbers(added: Tensor) -> _Seen | None:
    """Return what a mask to add says, where it says which keys are seen and nothing else."""
    shown, least = added == 0, torch.finfo(added.dtype).min
    # A query that sees nothing averages all values there.
    return _read(shown) if bool((shown | (added <= least)).all() & shown.any(-1).all()) else None


def _read(shown: Tensor) -> _Seen | None:
    """Return what a mask `[B, Q, K]` says."""
    queries, keys = shown.shape[1:]
    places = torch.arange(keys, device=shown.device)
    positions = places[keys - queries :, None]
    most = int(shown[0, -1].sum())
    window = most if most < keys else 0
    causal = places <= positions
    if window:
        causal = causal & (places > positions - window)
    if bool((shown == causal).all()):
        return _Seen(window)
    if queries > 1:
        return None
    lengths = shown.sum(-1, dtype=torch.int32).flatten()
    columns = shown[:, 0].int().argsort(dim=-1, descending=True, stable=True)
    return _Seen(0, columns[:, : int(lengths.max())], lengths)


class PagedKVCache(Cache):
    """Keep the keys and values of `generate` in pages, of 8 bits where that is asked for.

    Steps of decoding of any implementation read the pages where they lie, until beams share them. With
    `attn_implementation="kpt"` they do then too, and of 8 bits and in layers with windows; other implementations get a
    dense copy at each step there. Prompts attend to their keys as they are.

    Of 8 bits each layer and head has a scale, from the first keys and values: later ones may be 8 times as large.

    Args:
        config: of the model.
        dtype: float8_e4m3fn or float8_e5m2; None for that of the keys.
        page_size: tokens of a page.

    Raises:
        InputError: a dtype or size is none of these, or the model keeps something else than keys and values.

    Examples:
        >>> cache = PagedKVCache(model.config, dtype=torch.float8_e4m3fn)
        >>> model.generate(ids, past_key_values=cache, max_new_tokens=64)
    """

    layers: list[Any]

    def __init__(self, config: PreTrainedConfig, *, dtype: torch.dtype | None = None, page_size: int = 16) -> None:
        if not isinstance(config, PreTrainedConfig):
            raise InputError(f"{_NAME}: config must be a model's, as model.config; got {type(config).__name__}")
        if dtype is not None and dtype not in FP8:
            raise InputError(
                f"{_NAME}: dtype must be float8_e4m3fn or float8_e5m2, which attention.paged reads, or None for that "
                f"of the model; got {dtype}"
            )
        if page_size < 1:
            raise InputError(f"{_NAME}: page_size must be at least 1; got {page_size}")
        kinds, settings = get_layer_types_and_kwargs(config.get_text_config(decoder=True))
        told: set[str] = set()
        layers: list[Any] = []
        for kind, told_of in zip(kinds, settings, strict=True):
            other = DYNAMIC_LAYER_TYPE_MAPPING.get(kind)
            if kind in _SERVED:
                layers.append(PagedLayer(page_size, dtype, told_of.get("sliding_window") or 0, told))
            elif other is not None and not issubclass(other, CacheLayerMixin):  # it has no keys
                layers.append(other(**told_of))
            else:
                raise InputError(
                    f"{_NAME}: {type(config).__name__} has layers of kind {kind!r}; those that are served are "
                    f"{', '.join(_SERVED)}, and what has no keys: use transformers' DynamicCache"
                )
        super().__init__(layers=layers)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the new keys and values of a layer, and return what its queries attend to: `PagedLayer.update`."""
        if layer_idx >= len(self.layers):
            raise InputError(
                f"{_NAME}: layer {layer_idx} of a model writes to a cache of {len(self.layers)} layers: make it from "
                "this model's config"
            )
        found: tuple[Tensor, Tensor] = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return found

    @property
    def nbytes(self) -> int:
        """Return how many bytes the pages take, those that are free included."""
        own = [each for each in self.layers if isinstance(each, PagedLayer) and each.is_initialized]
        return sum(part.nbytes for each in own for part in (each.k, each.v))


def _scale(states: Tensor, dtype: torch.dtype) -> Tensor:
    """Return each head's scale, float32 `[Hkv]`."""
    largest = states.detach().abs().amax((0, 2, 3)).float()
    scale = (largest * (_ROOM / torch.finfo(dtype).max)).clamp(min=1e-12)
    # Zeros, as padding that stands alone in the first part of a prompt may give, tell nothing of what follows.
    return torch.where(largest == 0, 1.0, scale)


def _longer(cache: Tensor, pages: int) -> Tensor:
    made = cache.new_empty((pages, *cache.shape[1:]))
    made[: len(cache)].view(torch.uint8).copy_(cache.view(torch.uint8))
    return made
