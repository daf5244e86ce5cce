"""Context parallelism: each rank has some rows of a sequence; attention under any mask by `torch.distributed`."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import and_
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from kpt_core import InputError

from .dense import dense, wide_dtype
from .dropout import _FIRST, _INCREMENT, _SECOND
from .intervals import tidy
from .mask_algebra import Extent, Mask, _Both, _parts
from .merge import merge
from .plan import BLOCK, FULL, Plan, live_blocks

_NAME = "context parallel attention"
#: Blocks of rows that each rank gets at least, where the sequence has as many rows: fewer could not be balanced.
_BLOCKS_PER_RANK = 16


def contiguous(tokens: int, ranks: int) -> list[Tensor]:
    """Return the rows of each rank: one run, sizes differing by one at most."""
    return list(torch.arange(tokens).tensor_split(ranks))


def zigzag(tokens: int, ranks: int) -> list[Tensor]:
    """Return the rows of each rank: a run from the front and the one as far from the end, which suits causal masks."""
    runs = torch.arange(tokens).tensor_split(2 * ranks)
    return [torch.cat((runs[rank], runs[-1 - rank])) for rank in range(ranks)]


def balanced(work: Tensor, ranks: int, block: int | None = None) -> list[Tensor]:
    """Return the rows of each rank: blocks of about the same work together, none with more than its share of blocks.

    Args:
        work: `[tokens]`: of each row, as `work_of_rows` counts it.
        ranks: how many.
        block: rows that stay together; 128 if None, fewer where a rank would get less than 16 blocks.
    """
    if block is None:
        block = min(BLOCK, max(1, len(work) // (_BLOCKS_PER_RANK * ranks)))
    blocks = torch.arange(len(work)).split(block)
    costs = torch.stack([work[rows].sum() for rows in blocks]).double()
    chosen: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0.0] * ranks
    for each in costs.argsort(descending=True, stable=True).tolist():
        free = [rank for rank in range(ranks) if len(chosen[rank]) < -(-len(blocks) // ranks)]
        rank = min(free, key=lambda rank: (loads[rank], len(chosen[rank])))
        chosen[rank].append(each)
        loads[rank] += float(costs[each])
    return [torch.cat([blocks[each] for each in sorted(mine)] or [torch.arange(0)]) for mine in chosen]


def work_of_rows(
    mask: Mask, tokens: int, *, batch: int = 1, heads: int = 1, device: torch.device | str = "cpu"
) -> Tensor:
    """Return how many keys each row sees, `[tokens]` int64, summed over sequences and heads that differ.

    Where a mask has no intervals of keys, all keys of its live blocks of 128 by 128 count.
    """
    plan = mask.plan(tokens, batch=batch, heads=heads, device=device)
    if plan.intervals is not None:
        return plan.intervals.long().diff(dim=-1).sum((0, 1, 3, 4)).cpu()
    if plan.blocks is not None:
        return ((plan.blocks > 0).sum((0, 1, 3)) * BLOCK).repeat_interleave(BLOCK)[:tokens].cpu()
    return torch.arange(1, tokens + 1) if plan.causal else torch.full((tokens,), tokens)


@dataclass(frozen=True, slots=True, eq=False)
class _Pair(Mask):
    """Let some rows of a sequence see some of its keys, both ascending, as a mask of the whole sequence says.

    Attributes:
        mask: of the whole sequence.
        whole: its sizes.
        rows: positions of the queries.
        keys: positions of the keys.
        found: the mask's intervals of these rows, of keys of the whole sequence; None where it has none.
    """

    mask: Mask
    whole: Extent
    rows: Tensor
    keys: Tensor
    found: Tensor | None

    def allows(self, extent: Extent, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return self.mask.allows(self.whole, b, h, self.rows[q], self.keys[k])

    def intervals(self, extent: Extent) -> Tensor | None:
        if self.found is None:
            return None
        # Keys ascend, so what lies in an interval of all keys is an interval of these.
        begins, ends = torch.searchsorted(self.keys, self.found).unbind(-1)
        return tidy(begins, ends)

    def spread(self) -> tuple[bool, bool]:
        return self.mask.spread()


class ContextParallel:
    """Attend over a sequence whose rows are spread over ranks, under any mask; make it once for all layers of a model.

    All ranks make it with the same arguments, and call `attention` and `unshard` in the same order, with gradients or
    without. Gradients are those of the sum of all ranks' losses; for what all ranks hold alike, as weights and
    `sinks`, add up what the ranks get.

    With `method="ring"` keys and values go round: at step `s` a rank computes with those of the rank `s` before it,
    while the next ones are on their way. They come from their owner, so that where two ranks' rows see nothing of each
    other, nothing is computed and nothing is sent. With `method="ulysses"` all-to-all gives each rank all rows of some
    heads, which it computes as one process would.

    Args:
        mask: of the whole sequence: its documents, padding and tensors are of all rows.
        tokens: rows of the whole sequence.
        group: the ranks: a process group, a mesh of one dimension, or None for all.
        batch: sequences, where the mask tells them apart.
        heads: of the queries, likewise.
        method: `ring` or `ulysses`.
        layout: `balanced` (of even work under this mask), `zigzag`, `contiguous`, or a list of the ascending rows of
            each rank. If None, `balanced` for the ring, `contiguous` for Ulysses.
        device: of the tensors.
        upcast: whether the ring computes bfloat16 and float16 in float32. If not, the result of each pair of ranks is
            rounded to their dtype before it is merged in float32.

    Attributes:
        rows: positions of this rank's rows, int64: the position ids of what it computes.
        layout: those of each rank.

    Raises:
        InputError: there is no process group, the mask or the layout does not fit, or ranks disagree.

    Examples:
        >>> cp = ContextParallel(causal() & document(ids), tokens=8192)
        >>> x = cp.shard(x, dim=1)  # [batch, tokens, hidden]
        >>> out = cp.attention(q, k, v)  # [batch, heads, rows, head_dim]
    """

    def __init__(
        self,
        mask: Mask,
        tokens: int,
        group: dist.ProcessGroup | DeviceMesh | None = None,
        *,
        batch: int = 1,
        heads: int = 1,
        method: str = "ring",
        layout: str | list[Tensor] | None = None,
        device: torch.device | str = "cpu",
        upcast: bool = True,
    ) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise InputError(
                "ContextParallel: there is no process group; start the program with torchrun and call "
                "torch.distributed.init_process_group() first"
            )
        if isinstance(group, DeviceMesh):
            if group.ndim != 1:
                raise InputError(f"ContextParallel: the mesh must have one dimension, as mesh['cp'] has; got {group}")
            group = group.get_group()
        if method not in ("ring", "ulysses"):
            raise InputError(f"ContextParallel: method must be 'ring' or 'ulysses'; got {method!r}")
        self.group, self.rank, self.ranks = group, dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise InputError(f"ContextParallel: rank {dist.get_rank()} is not in the group that it was given")
        self.method, self.tokens, self.upcast = method, tokens, upcast
        extent = Extent(batch, heads, tokens, tokens, 0, torch.device(device))
        mask.check(extent)
        layout = ("balanced" if method == "ring" else "contiguous") if layout is None else layout
        self.layout = [rows.to(device) for rows in _rows_of_ranks(layout, mask, extent, self.ranks)]
        self.rows = self.layout[self.rank]
        self._sizes = [len(rows) for rows in self.layout]
        self._order = torch.cat(self.layout)  # of the rows as they arrive, rank after rank
        self._places = self._order.argsort()
        self._plans: list[Plan | None]
        if method == "ring":
            self._plans = self._pairs(mask, extent)
        else:
            self._plans = [mask.plan(tokens, batch=batch, heads=heads, device=device)] * self.ranks
        self._live = self._agreed([plan is not None for plan in self._plans])

    def _pairs(self, mask: Mask, extent: Extent) -> list[Plan | None]:
        """Return the plan of this rank's queries and each rank's keys; None where they see nothing."""
        known = [(each, each.intervals(extent)) for each in _parts(mask, _Both)]
        known = [(each, None if whole is None else whole.index_select(2, self.rows)) for each, whole in known]
        sizes: dict[str, Any] = {"batch": extent.batch, "heads": extent.heads, "device": extent.device}
        plans: list[Plan | None] = []
        for rank, keys in enumerate(self.layout):
            if not len(keys) or not len(self.rows):
                plans.append(None)
                continue
            parts: list[Mask] = [_Pair(each, extent, self.rows, keys, found) for each, found in known]
            plan = reduce(and_, parts).plan(len(self.rows), len(keys), offset=0, **sizes)
            states = live_blocks(plan, len(self.rows), len(keys))
            if (states == FULL).all():
                plan = Plan()
            elif rank == self.rank and mask.plain() == "causal":
                plan = Plan(causal=True)
            plans.append(plan if states.any() else None)
        return plans

    def _agreed(self, live: list[bool]) -> list[list[bool]]:
        """Return for each rank whose keys its queries see; raise if ranks have other layouts."""
        told = [*self._order.tolist(), *self._sizes, self.method == "ring"]
        mark = sum(place * each for place, each in enumerate(told, 1)) % (1 << 61)
        mine = torch.tensor([mark, *live], device=self.rows.device)
        each_rank = [torch.empty_like(mine) for _ in live]
        dist.all_gather(each_rank, mine, group=self.group)
        found = [each.tolist() for each in each_rank]
        if any(each[0] != mark for each in found):
            raise InputError(
                f"ContextParallel: the ranks disagree on who has which rows (rank {self.rank} was told of "
                f"{self.tokens} tokens); give all of them the same mask, tokens, method and layout"
            )
        return [[bool(each) for each in row[1:]] for row in found]

    def shard(self, x: Tensor, dim: int = 2) -> Tensor:
        """Return this rank's rows of a tensor of all rows, `[B, H, S, D]` unless `dim` says where they are."""
        if x.shape[dim] != self.tokens:
            raise InputError(f"shard: dim {dim} must hold all {self.tokens} rows; got {list(x.shape)}")
        return x.index_select(dim, self.rows)

    def unshard(self, x: Tensor, dim: int = 2) -> Tensor:
        """Return all rows in order, on every rank, from what each rank has of them; differentiable."""
        self._check_rows("unshard: x", x, dim)
        shapes = [list(x.shape) for _ in self._sizes]
        for shape, size in zip(shapes, self._sizes, strict=True):
            shape[dim] = size
        return torch.cat(self._swap([x] * self.ranks, shapes), dim).index_select(dim, self._places)

    def _check_rows(self, name: str, x: Tensor, dim: int) -> None:
        if x.shape[dim] != len(self.rows):
            raise InputError(
                f"{name} must hold the {len(self.rows)} rows of rank {self.rank} (of {self.tokens}, on {self.ranks} "
                f"ranks) in dim {dim}, as shard gives them; got {list(x.shape)}"
            )

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # messages are no part of a graph
    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float | None = None,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        relative_bias: Tensor | None = None,
        bias: Tensor | None = None,
        dropout: float = 0.0,
        seed: int | None = None,
        offset: int = 0,
        return_lse: bool = False,
    ) -> Any:  # a tensor or two
        """Attend with this rank's queries to the keys of all ranks; arguments are those of `kpt_attention.attention`.

        Args:
            q: `[B, Hq, rows, D]`, as k and v of this rank's rows.
            k: `[B, Hkv, rows, D]`.
            v: `[B, Hkv, rows, Dv]`.
            scale: of the scores.
            softcap: of the scores.
            sinks: `[Hq]`, the same on all ranks.
            alibi_slopes: `[Hq]`, likewise; Ulysses alone, as the next.
            relative_bias: `[Hq, 2 R + 1]`.
            bias: broadcasts to `[B, Hq, rows, tokens]`: the rows of this rank's queries, as `shard` gives them, over
                all keys in the order of the whole sequence. One with one row for all queries is the same on all ranks,
                which add up its gradients.
            dropout: rate at which probabilities are dropped; Ulysses alone. It drops what one process drops.
            seed: of dropout, which needs one, the same on all ranks.
            offset: of dropout: another one draws other numbers.
            return_lse: whether to return the log-sum-exp `[B, Hq, rows]`, too.

        Returns:
            The output `[B, Hq, rows, Dv]` in q's dtype; with `return_lse` the log-sum-exp beside it.

        Raises:
            InputError: a tensor has other rows than this rank, or heads do not divide by ranks.
        """
        for name, x in (("q", q), ("k", k), ("v", v)):
            if x.dim() != 4 or x.dtype != q.dtype:
                raise InputError(
                    f"{_NAME}: {name} must be [batch, heads, rows, head_dim] of q's dtype, {q.dtype}; got {x.dtype} "
                    f"{list(x.shape)}"
                )
            self._check_rows(f"{_NAME}: {name}", x, 2)
        if sinks is not None and sinks.shape != q.shape[1:2]:
            raise InputError(f"{_NAME}: sinks must be [{q.shape[1]}], one for each head of q; got {list(sinks.shape)}")
        if bias is not None:
            wanted = (*q.shape[:3], self.tokens)
            fits = bias.dim() == 4 and all(have in (1, want) for have, want in zip(bias.shape, wanted, strict=True))
            if not (fits and bias.is_floating_point()):
                raise InputError(
                    f"{_NAME}: bias must be floating and broadcast to {list(wanted)}, this rank's rows over all keys; "
                    f"got {bias.dtype} {list(bias.shape)}: cp.shard(bias) gives the rows of one of all rows"
                )
        options: dict[str, Any] = {"scale": scale, "softcap": softcap}
        if self.method == "ulysses":
            if dropout:
                if type(seed) is not int:
                    raise InputError(
                        f"{_NAME}: dropout={dropout} needs a seed, an int that all ranks share; got {seed!r}"
                    )
                options |= {"dropout": dropout, "seed": seed, "offset": offset}
            learned = {"sinks": sinks, "alibi_slopes": alibi_slopes, "relative_bias": relative_bias}
            out, lse = self._ulysses(q, k, v, bias, learned, options)
            return (out, lse) if return_lse else out
        if alibi_slopes is not None or relative_bias is not None:
            raise InputError(
                f"{_NAME}: the ring takes no alibi_slopes and no relative_bias, since a rank's rows may lie far "
                "apart; use method='ulysses'"
            )
        if dropout:
            raise InputError(
                f"{_NAME}: the ring takes no dropout (got {dropout}), since a pair of ranks cannot draw by places in "
                "the whole sequence; use method='ulysses'"
            )
        out, lse = _Ring.apply(self, options, bias, q, k, v)  # type: ignore[no-untyped-call]
        if sinks is not None:  # once, after all keys
            out, lse = merge(out, lse, torch.zeros_like(out), sinks.to(lse.dtype)[:, None].expand_as(lse))
        out = out.to(q.dtype)
        return (out, lse) if return_lse else out

    def _exchange(self, step: int, sent: Tensor | None, like: Tensor, back: bool) -> Callable[[], Tensor | None]:
        """Start to send to one rank and to receive from another; what is returned waits, and gives what came.

        Keys and values go to the rank `step` after their own, gradients, `back`, to the rank `step` before; only where
        queries see keys. `like` has the dtype and, but for rows, the shape of what is received.
        """
        after, before = (self.rank + step) % self.ranks, (self.rank - step) % self.ranks
        forth, received = self._live[after][self.rank], self._live[self.rank][before]
        if step == 0:
            return lambda: sent if forth else None
        arriving: Tensor | None = None
        operations: list[dist.P2POp] = []
        if forth if back else received:
            peer, rows = (after, len(self.rows)) if back else (before, self._sizes[before])
            arriving = like.new_empty((*like.shape[:2], rows, like.shape[3]))
            operations.append(dist.P2POp(dist.irecv, arriving, group=self.group, group_peer=peer))
        if received if back else forth:
            assert sent is not None
            peer = before if back else after
            operations.append(dist.P2POp(dist.isend, sent, group=self.group, group_peer=peer))
        works = dist.batch_isend_irecv(operations) if operations else []

        def wait() -> Tensor | None:
            for work in works:
                work.wait()
            operations.clear()  # until then it holds what is sent
            return arriving

        return wait

    def _rounds(self, mine: Tensor) -> Iterator[tuple[int, Tensor | None]]:
        """Yield each step, and the keys and values of the rank so many before, None where nothing of them is seen.

        Those of the next step are on their way meanwhile.
        """
        arriving = self._exchange(0, mine, mine, False)
        for step in range(self.ranks):
            now = arriving()
            if step + 1 < self.ranks:
                arriving = self._exchange(step + 1, mine, mine, False)
            yield step, now

    def _keys(self, step: int) -> Tensor:
        """Return the positions of the keys of the rank `step` before."""
        return self.layout[(self.rank - step) % self.ranks]

    def _pair(
        self, step: int, options: dict[str, Any], bias: Tensor | None, q: Tensor, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the output and the log-sum-exp over the keys of the rank `step` before."""
        plan = self._plans[(self.rank - step) % self.ranks]
        assert plan is not None
        with torch.autocast(q.device.type, enabled=False):
            out, lse = dense(q, k, v, **plan.arguments(q.shape[2], k.shape[2]), bias=bias, **options)
        assert lse is not None
        return out, lse

    def _ulysses(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        learned: dict[str, Tensor | None],
        options: dict[str, Any],
    ) -> tuple[Tensor, Tensor]:
        heads, kv_heads, ranks, plan = q.shape[1], k.shape[1], self.ranks, self._plans[0]
        assert plan is not None
        if heads % ranks or (kv_heads % ranks and ranks % kv_heads):
            raise InputError(
                f"{_NAME}: {heads} heads of q and {kv_heads} of k and v do not divide by {ranks} ranks (k and v may "
                "also have a divisor of the ranks); use method='ring', which splits rows alone"
            )
        if kv_heads % ranks:  # each rank gets a copy of the one that its queries read
            k, v = (x.repeat_interleave(ranks // kv_heads, 1) for x in (k, v))
        mine = slice(self.rank * heads // ranks, (self.rank + 1) * heads // ranks)
        arguments = plan.arguments(self.tokens, self.tokens)
        arguments |= {name: None if x is None else x[mine] for name, x in learned.items()}
        for name in ("intervals", "blocks"):
            if (table := arguments[name]) is not None and table.shape[1] > 1:
                arguments[name] = table[:, mine]
        tensors: dict[str, Any] = {name: self._to_heads(x) for name, x in (("q", q), ("k", k), ("v", v))}
        if bias is not None:
            # All ranks must come to the same answer: where one has a single row, a bias of one row is not told apart.
            if bias.shape[2] > 1 or min(self._sizes) < 2:
                bias = bias.expand(-1, -1, len(self.rows), -1)
                bias = self.unshard(bias) if bias.shape[1] == 1 else self._to_heads(bias)
            elif bias.shape[1] > 1:
                bias = bias[:, mine]
            tensors["bias"] = bias
        if options.get("dropout"):
            out, lse = self._dropped(tensors, arguments, options, heads)
        else:
            out, lse = dense(**tensors, **arguments, **options)
        assert lse is not None
        return self._to_rows(out), self._to_rows(lse.unsqueeze(-1)).squeeze(-1)

    def _dropped(
        self, tensors: dict[str, Any], arguments: dict[str, Any], options: dict[str, Any], heads: int
    ) -> tuple[Tensor, Tensor | None]:
        """Attend with some heads of all rows, and draw for each what one process draws: sequence by sequence.

        The rows of one sequence's heads are a run of all rows of one process, those of two sequences are not.
        """
        found = []
        first_head = self.rank * heads // self.ranks
        batched = {name: arguments[name] for name in ("intervals", "blocks") if arguments[name] is not None} | tensors
        for each in range(len(tensors["q"])):
            own = {name: x[each : each + 1] if len(x) > 1 else x for name, x in batched.items()}
            first = (each * heads + first_head) * self.tokens
            at = options | {"offset": _offset_of(first, options["seed"], options["offset"])}
            found.append(dense(**{**arguments, **own, **at}))
        if not found:
            return dense(**tensors, **arguments, **options)
        outs, lses = zip(*found, strict=True)
        return torch.cat(outs), torch.cat(lses)

    def _to_heads(self, x: Tensor) -> Tensor:
        """Return some heads of all rows, in order, from all heads of this rank's rows."""
        batch, heads, _, dim = x.shape
        shapes = [[batch, heads // self.ranks, size, dim] for size in self._sizes]
        return torch.cat(self._swap(x.chunk(self.ranks, 1), shapes), 2)[:, :, self._places]

    def _to_rows(self, x: Tensor) -> Tensor:
        """Return all heads of this rank's rows from some heads of all rows."""
        shapes = [[*x.shape[:2], len(self.rows), x.shape[3]]] * self.ranks
        return torch.cat(self._swap(x[:, :, self._order].split(self._sizes, 2), shapes), 1)

    def _swap(self, parts: Sequence[Tensor], shapes: list[list[int]]) -> list[Tensor]:
        """Send a part to each rank; return what comes from each, of these shapes."""
        sends, receives = [part.numel() for part in parts], [math.prod(shape) for shape in shapes]
        flat = torch.cat([part.flatten() for part in parts])
        flat = _AllToAll.apply(self.group, sends, receives, flat)  # type: ignore[no-untyped-call]
        return [part.view(shape) for part, shape in zip(flat.split(receives), shapes, strict=True)]


def _rows_of_ranks(layout: str | list[Tensor], mask: Mask, extent: Extent, ranks: int) -> list[Tensor]:
    tokens = extent.queries
    if layout == "balanced":
        sizes: dict[str, Any] = {"batch": extent.batch, "heads": extent.heads, "device": extent.device}
        return balanced(work_of_rows(mask, tokens, **sizes), ranks)
    if layout in ("contiguous", "zigzag"):
        return contiguous(tokens, ranks) if layout == "contiguous" else zigzag(tokens, ranks)
    if isinstance(layout, str):
        raise InputError(f"ContextParallel: layout must be balanced, zigzag, contiguous or rows; got {layout!r}")
    if len(layout) != ranks:
        raise InputError(f"ContextParallel: the layout is for {len(layout)} ranks; the group has {ranks}")
    whole = torch.equal(torch.cat(layout).cpu().sort().values, torch.arange(tokens))
    if not whole or any(bool((rows.diff() <= 0).any()) for rows in layout):
        raise InputError(f"ContextParallel: the layout must give each of {tokens} rows to one rank, ascending in each")
    return layout


def _offset_of(first: int, seed: int, offset: int) -> int:
    """Return the offset under which row 0 draws what row `first` draws: `dropout.kept` begins at `mix(seed, offset)`.

    Rows add to that beginning, so it is moved by as many, and the mixing is undone (it is a bijection of 64 bits).
    """
    bits = (1 << 64) - 1
    x = (seed * _INCREMENT + offset) & bits
    for shift, factor in ((30, _FIRST), (27, _SECOND), (31, 1)):
        x = (x ^ x >> shift) * factor & bits
    x = (x + first * _INCREMENT) & bits
    for shift, factor in ((31, _SECOND), (27, _FIRST), (30, 1)):
        x = (x ^ x >> shift ^ x >> 2 * shift) * pow(factor, -1, 1 << 64) & bits
    x = (x - seed * _INCREMENT) & bits
    return x - (1 << 64) if x >> 63 else x


class _Ring(torch.autograd.Function):
    """Return the output, wide, and the log-sum-exp; only these and this rank's q, k and v are kept."""

    @staticmethod
    def forward(
        ctx: Any, cp: ContextParallel, options: dict[str, Any], bias: Tensor | None, q: Tensor, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor]:
        wide = wide_dtype(q.dtype)
        out = q.new_zeros((*q.shape[:3], v.shape[3]), dtype=wide)
        lse = q.new_full(q.shape[:3], -math.inf, dtype=wide)
        query = q.to(wide) if cp.upcast else q
        for step, kv in cp._rounds(torch.cat((k, v), -1)):
            if kv is not None:
                there = kv.to(query.dtype).split((k.shape[3], v.shape[3]), -1)
                part, part_lse = cp._pair(step, options, _columns(bias, cp._keys(step)), query, *there)
                out, lse = merge(out, lse, part.to(wide), part_lse)
        ctx.cp, ctx.options = cp, options
        ctx.save_for_backward(bias, q, k, v, out, lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
        cp: ContextParallel = ctx.cp
        bias, q, k, v, out, lse = ctx.saved_tensors
        wide, dims = out.dtype, (k.shape[3], v.shape[3])
        dead = lse == -math.inf
        grad_out, grad_lse = grad_out.masked_fill(dead.unsqueeze(-1), 0), grad_lse.masked_fill(dead, 0)
        query = (q.to(wide) if cp.upcast else q).detach().requires_grad_()
        grad_q, grad_kv = q.new_zeros(q.shape, dtype=wide), q.new_zeros((*k.shape[:3], sum(dims)), dtype=wide)
        grad_bias = torch.zeros_like(bias, dtype=wide) if ctx.needs_input_grad[2] else None

        def add(arrived: Tensor | None) -> None:
            if arrived is not None:
                grad_kv.add_(arrived)

        arriving: Callable[[], Tensor | None] = lambda: None  # noqa: E731
        for step, kv in cp._rounds(torch.cat((k, v), -1)):
            found = None
            if kv is not None:
                there = [x.detach().requires_grad_() for x in kv.to(query.dtype).split(dims, -1)]
                keys = cp._keys(step)
                added = _columns(bias, keys)
                wanted = [query, *there]
                if grad_bias is not None:
                    assert added is not None
                    added = added.detach().requires_grad_()
                    wanted.append(added)
                with torch.enable_grad():
                    part, part_lse = cp._pair(step, ctx.options, added, query, *there)
                unseen = part_lse == -math.inf
                # The part's share of a row, and what the row's output and log-sum-exp change with the part's.
                share = (part_lse.detach() - lse).exp().masked_fill(unseen, 0)
                of_part = (share.unsqueeze(-1) * grad_out).to(part.dtype)
                of_lse = share * ((grad_out * (part.detach() - out)).sum(-1) + grad_lse)
                of_q, of_k, of_v, *of_bias = torch.autograd.grad(
                    (part, part_lse), wanted, (of_part, of_lse.masked_fill(unseen, 0))
                )
                grad_q += of_q
                found = torch.cat((of_k, of_v), -1).to(wide)
                if grad_bias is not None:
                    _columns_add(grad_bias, keys, of_bias[0])
            add(arriving())
            arriving = cp._exchange(step, found, grad_kv, True)
        add(arriving())
        of_k, of_v = grad_kv.split(dims, -1)
        return (
            None,
            None,
            None if grad_bias is None else grad_bias.to(bias.dtype),
            grad_q.to(q.dtype),
            of_k.to(k.dtype),
            of_v.to(v.dtype),
        )


def _columns(bias: Tensor | None, keys: Tensor) -> Tensor | None:
    """Return a bias over some of its keys; as it is where it has one column for all."""
    return bias if bias is None or bias.shape[3] == 1 else bias.index_select(3, keys)


def _columns_add(total: Tensor, keys: Tensor, part: Tensor) -> None:
    if total.shape[3] == 1:
        total += part
    else:
        total.index_add_(3, keys, part.to(total.dtype))


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Any, sends: list[int], receives: list[int], x: Tensor) -> Tensor:
        ctx.group, ctx.sends, ctx.receives = group, sends, receives
        out = x.new_empty(sum(receives))
        dist.all_to_all_single(out, x.contiguous(), receives, sends, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, _AllToAll.apply(ctx.group, ctx.receives, ctx.sends, grad)  # type: ignore[no-untyped-call]
