"""Faults that kernels of attention have: in masks, borders, dead rows, statistics, what is added, randomness, reuse."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kpt_attention.dropout import kept, seed_of

from .mutant import Mutant

MUTANTS: list[Mutant] = []
_OP = "attention.dense"


class Attention:
    """A right kernel of `attention.dense`, of all scores at once, step by step."""

    def wide(self, call: Any) -> torch.dtype:
        return torch.float64 if call.q.dtype is torch.float64 else torch.float32

    def places(self, call: Any) -> tuple[Tensor, Tensor]:
        return torch.arange(call.q.shape[2])[:, None] + call.position, torch.arange(call.k.shape[2])

    def causal(self, call: Any, rows: Tensor, columns: Tensor) -> Tensor:
        return columns <= rows

    def intervals(self, call: Any, columns: Tensor) -> Tensor:
        begins, ends = call.intervals.unsqueeze(-1).unbind(-2)
        return ((columns >= begins) & (columns < ends)).any(-2)

    def bits(self, call: Any) -> Tensor:
        return (call.block_bits.unsqueeze(-1) >> torch.arange(8)) & 1

    def blocks(self, call: Any) -> Tensor:
        known = torch.cat((torch.zeros(1, 128, 128), torch.ones(1, 128, 128), self.bits(call).flatten(-2))).bool()
        every = known[call.blocks.long()].transpose(3, 4).flatten(4).flatten(2, 3)
        return every[:, :, : call.q.shape[2], : call.k.shape[2]]

    def allowed(self, call: Any) -> Tensor:
        rows, columns = self.places(call)
        found = torch.ones(*call.q.shape[:3], call.k.shape[2], dtype=torch.bool)
        if call.causal:
            found = found & self.causal(call, rows, columns)
        if call.intervals is not None:
            found = found & self.intervals(call, columns)
        return found if call.blocks is None else found & self.blocks(call)

    def heads(self, call: Any, keys: Tensor) -> Tensor:
        return keys.repeat_interleave(call.q.shape[1] // keys.shape[1], 1)

    def of_keys(self, call: Any, grad: Tensor) -> Tensor:
        return grad.unflatten(1, (call.k.shape[1], -1)).sum(2)

    def read(self, call: Any, allowed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (each.detach().to(self.wide(call)) for each in (call.q, call.k, call.v))
        k, v = self.heads(call, k), self.heads(call, v)
        hidden = self.hidden(allowed)
        return q.masked_fill(~allowed.any(-1, keepdim=True), 0), k.masked_fill(hidden, 0), v.masked_fill(hidden, 0)

    def hidden(self, allowed: Tensor) -> Tensor:
        return ~allowed.any(-2).unsqueeze(-1)

    def scale(self, call: Any) -> float:
        return call.scale if call.scale is not None else call.q.shape[3] ** -0.5

    def products(self, call: Any, q: Tensor, k: Tensor) -> Tensor:
        return (q * self.scale(call)) @ k.mT

    def capped(self, call: Any, scores: Tensor) -> Tensor:
        return call.softcap * (scores / call.softcap).tanh() if call.softcap else scores

    def slope(self, call: Any, products: Tensor) -> Tensor | float:
        return 1 - (products / call.softcap).tanh().square() if call.softcap else 1.0

    def distance(self, call: Any) -> Tensor:
        rows, columns = self.places(call)
        return columns - rows

    def steps(self, call: Any) -> Tensor:
        return self.distance(call).abs()

    def table(self, call: Any) -> Tensor:
        far = call.relative_bias.shape[1] // 2
        return self.distance(call).clamp(-far, far) + far

    def bias(self, call: Any) -> Tensor:
        return call.bias.detach().to(self.wide(call))

    def added(self, call: Any, scores: Tensor) -> Tensor:
        if call.alibi_slopes is not None:
            scores = scores - call.alibi_slopes.detach().to(scores.dtype)[:, None, None] * self.steps(call)
        if call.relative_bias is not None:
            scores = scores + call.relative_bias.detach().to(scores.dtype)[:, self.table(call)]
        return scores if call.bias is None else scores + self.bias(call)

    def masked(self, scores: Tensor, allowed: Tensor) -> Tensor:
        return scores.masked_fill(~allowed, -math.inf)

    def scores(self, call: Any, products: Tensor, allowed: Tensor) -> Tensor:
        return self.masked(self.added(call, self.capped(call, products)), allowed)

    def sink(self, call: Any, scores: Tensor) -> Tensor:
        if call.sinks is None:
            return scores.new_full((*scores.shape[:3], 1), -math.inf)
        return call.sinks.detach().to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)

    def largest(self, every: Tensor) -> Tensor:
        return every.amax(-1, keepdim=True).clamp(min=torch.finfo(every.dtype).min)

    def total(self, exponentials: Tensor) -> Tensor:
        total = exponentials.sum(-1, keepdim=True)
        return total.masked_fill(total == 0, 1)

    def lse(self, call: Any, every: Tensor, largest: Tensor, total: Tensor) -> Tensor:
        return (largest + total.log()).masked_fill(every.isneginf().all(-1, keepdim=True), -math.inf)

    def kept(self, call: Any) -> Tensor | float:
        if not call.dropout:
            return 1.0
        batch, heads, queries = call.q.shape[:3]
        rows = torch.arange(batch * heads * queries).view(batch, heads, queries, 1)
        return self.drawn(call, rows, torch.arange(call.k.shape[2])).to(self.wide(call)) * self.refund(call)

    def drawn(self, call: Any, rows: Tensor, columns: Tensor) -> Tensor:
        return kept(call.dropout, seed_of(call), call.offset, rows, columns)

    def refund(self, call: Any) -> float:
        return 1 / (1 - call.dropout)

    def forward(self, call: Any) -> Any:
        allowed = self.allowed(call)
        q, k, v = self.read(call, allowed)
        scores = self.scores(call, self.products(call, q, k), allowed)
        every = torch.cat((scores, self.sink(call, scores)), -1)
        largest = self.largest(every)
        exponentials = (every - largest).exp()
        total = self.total(exponentials)
        weights = (exponentials / total)[..., :-1] * self.kept(call)
        out = (weights @ v).to(call.q.dtype)
        lse = self.lse(call, every, largest, total).squeeze(-1).contiguous()
        saved = (out, largest.squeeze(-1), total.squeeze(-1)) if call.needs else ()
        return (out, lse if call.return_lse else None), saved

    def common(self, weights: Tensor, change: Tensor) -> Tensor:
        return (weights * change).sum(-1, keepdim=True)

    def of_lse(self, grad: Tensor | None) -> Tensor | float:
        return 0.0 if grad is None else grad.unsqueeze(-1)

    def of_values(self, weights: Tensor, drop: Tensor | float, given: Tensor) -> Tensor:
        return (weights * drop).mT @ given

    def of_sinks(self, weights: Tensor, lost: Tensor) -> Tensor:
        return -(weights * lost).sum((0, 2, 3))

    def backward(self, call: Any, saved: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> dict[str, Tensor]:
        allowed = self.allowed(call)
        q, k, v = self.read(call, allowed)
        _, largest, total = (each.unsqueeze(-1) for each in saved)
        products = self.products(call, q, k)
        scores = self.scores(call, products, allowed)
        weights = (scores - largest).exp() / total
        given = torch.zeros_like(q[..., :1] * v[:, :, :1, :].sum(2, keepdim=True)) if grad_out is None else grad_out
        given = given.to(q.dtype).masked_fill(~allowed.any(-1, keepdim=True), 0)
        drop = self.kept(call)
        change = (given @ v.mT) * drop
        lost = self.common(weights, change) - self.of_lse(grad_lse)
        change = (weights * (change - lost)).masked_fill(~allowed, 0)
        sinks = lambda: self.of_sinks((self.sink(call, scores) - largest).exp() / total, lost)  # noqa: E731
        of_products = change * self.slope(call, products)
        made: dict[str, Callable[[], Tensor]] = {
            "q": lambda: of_products @ k * self.scale(call),
            "k": lambda: self.of_keys(call, of_products.mT @ q) * self.scale(call),
            "v": lambda: self.of_keys(call, self.of_values(weights, drop, given)),
            "bias": lambda: self.of_bias(call, change),
            "alibi_slopes": lambda: -(change * self.steps(call)).sum((0, 2, 3)),
            "relative_bias": lambda: self.of_table(call, change),
            "sinks": sinks,
        }
        return {name: made[name]().to(getattr(call, name).dtype).contiguous() for name in call.needs}

    def of_bias(self, call: Any, change: Tensor) -> Tensor:
        return change.sum_to_size(call.bias.shape)

    def of_table(self, call: Any, change: Tensor) -> Tensor:
        grad = change.new_zeros(call.relative_bias.shape)
        return grad.index_add_(1, self.table(call).flatten(), change.sum(0).flatten(1))


def right() -> tuple[Any, ...]:
    """A kernel without a fault."""
    kernel = Attention()
    return kernel.forward, kernel.backward


def fault(name: str, found_by: str = "values", at: str = "small", **offer: Any) -> Callable[[type], None]:
    """Enter a mutant: the decorated class. `at` may be a part of a case's name."""

    def enter(cls: type) -> None:
        def make() -> tuple[Any, ...]:
            kernel = cls()
            return kernel.forward, kernel.backward

        MUTANTS.append(Mutant(name, _OP, found_by, make, offer, lambda trial: at in trial.case.name))

    return enter


@fault("a query does not see itself", at="causal")
class _(Attention):
    def causal(self, call, rows, columns):
        return columns < rows


@fault("causality is of the first keys, whatever the position", at="decode")
class _(Attention):
    def causal(self, call, rows, columns):
        return columns <= rows - call.position


class FewQueries(Attention):
    """A kernel that has a path of its own for few queries of few keys, where no gradient is wanted."""

    def few(self, call: Any) -> bool:
        return not call.needs and call.q.shape[2] < 16 and call.k.shape[2] < 256


@fault("few queries of few keys see them all", "without_gradients", at="few keys")
class _(FewQueries):
    def causal(self, call, rows, columns):
        return columns >= 0 * rows if self.few(call) else columns <= rows


@fault("few queries of few keys stand at the first of them", "without_gradients", at="few keys")
class _(FewQueries):
    def causal(self, call, rows, columns):
        return super().causal(call, rows - call.position if self.few(call) else rows, columns)


@fault("few queries of few keys stand at the last of them", "without_gradients", at="few keys from the start")
class _(FewQueries):
    def causal(self, call, rows, columns):
        end = call.k.shape[2] - call.q.shape[2] - call.position
        return super().causal(call, rows + end if self.few(call) else rows, columns)


def _decoding(call: Any) -> str | None:
    """Refuse gradients of few queries, as kernels do that read each key once."""
    return "few queries with a gradient" if call.needs and call.q.shape[2] < 16 else None


@fault("few queries that may have no gradient stand at the first keys", "without_gradients", at="many keys",
       unsupported=_decoding)  # fmt: skip
class _(Attention):
    def causal(self, call, rows, columns):
        return super().causal(call, rows if call.q.shape[2] >= 16 else rows - call.position, columns)


@fault("an interval has its end", at="window")
class _(Attention):
    def intervals(self, call, columns):
        begins, ends = call.intervals.unsqueeze(-1).unbind(-2)
        return ((columns >= begins) & (columns <= ends) & (ends > begins)).any(-2)


@fault("the second interval is not read", at="two intervals")
class _(Attention):
    def intervals(self, call, columns):
        return super().intervals(call._replace(intervals=call.intervals[..., :1, :]), columns)


@fault("every sequence has the mask of the first", at="left padding")
class _(Attention):
    def intervals(self, call, columns):
        return super().intervals(call._replace(intervals=call.intervals[:1]), columns)


@fault("every head has the blocks of the first", at="blocks by head")
class _(Attention):
    def blocks(self, call):
        return super().blocks(call._replace(blocks=call.blocks[:, :1]))


@fault("bits are read from the highest", at="blocks")
class _(Attention):
    def bits(self, call):
        return super().bits(call).flip(-1)


@fault("a full block is taken for a dead one", at="blocks")
class _(Attention):
    def blocks(self, call):
        return super().blocks(call._replace(blocks=call.blocks.masked_fill(call.blocks == 1, 0)))


@fault("blocks beyond the keys are read, as if zeros lay there", at="blocks")
class _(Attention):
    def forward(self, call):
        beyond = 0 if call.blocks is None else call.blocks.shape[3] * 128 - call.k.shape[2]
        k, v = (torch.nn.functional.pad(each.detach(), (0, 0, 0, beyond)) for each in (call.k, call.v))
        return super().forward(call._replace(k=k, v=v))


@fault("a row of blocks is taken to be as long as the keys need", at="blocks")
class _(Attention):
    def blocks(self, call):
        rows, columns = (-(-tokens // 128) for tokens in (call.q.shape[2], call.k.shape[2]))
        table = call.blocks.flatten(2)[..., : rows * columns].unflatten(2, (rows, columns))
        return super().blocks(call._replace(blocks=table))


@fault("keys past the last whole tile of 64 are left out", at="63 tokens")
class _(Attention):
    def allowed(self, call):
        found = super().allowed(call)
        keys = found.shape[-1]
        return found if keys < 64 or keys % 64 == 0 else found & (torch.arange(keys) < keys // 64 * 64)


@fault("a row that sees nothing is NaN", at="nothing seen")
class _(Attention):
    def total(self, exponentials):
        return exponentials.sum(-1, keepdim=True)


@fault("a row that sees nothing gets the mean of all values", at="nothing seen")
class _(Attention):
    def masked(self, scores, allowed):
        return scores.masked_fill(~allowed, torch.finfo(scores.dtype).min / 2)


@fault("a hidden key's NaN reaches the values' product", "padding", at="left padding")
class _(Attention):
    def hidden(self, allowed):
        return torch.zeros_like(super().hidden(allowed))


@fault("the largest score is not taken off", "magnitudes")
class _(Attention):
    def largest(self, every):
        return torch.zeros_like(every[..., :1])


@fault("the largest score is that of the first tile", "magnitudes", at="causal")
class _(Attention):
    def largest(self, every):
        return super().largest(every[..., :8])


@fault("the log-sum-exp is of base two")
class _(Attention):
    def lse(self, call, every, largest, total):
        return super().lse(call, every, largest, total) / math.log(2)


@fault("the log-sum-exp leaves the sink out", at="sink")
class _(Attention):
    def lse(self, call, every, largest, total):
        return every[..., :-1].logsumexp(-1, keepdim=True)


@fault("scores are rounded to the arguments' dtype", "values", at="llama")
class _(Attention):
    def products(self, call, q, k):
        return super().products(call, q, k).to(call.q.dtype).to(q.dtype)


@fault("a given scale is not read", at="scaled")
class _(Attention):
    def scale(self, call):
        return call.q.shape[3] ** -0.5


@fault("the cap is put on after the biases", at="softcap and a bias")
class _(Attention):
    def added(self, call, scores):
        return scores

    def capped(self, call, scores):
        return super().capped(call, super().added(call, scores))


@fault("slopes count towards later keys with the other sign", at="alibi")
class _(Attention):
    def steps(self, call):
        return -self.distance(call)


@fault("what is far has no relative bias of its own", at="relative")
class _(Attention):
    def table(self, call):
        return (self.distance(call) + call.relative_bias.shape[1] // 2) % call.relative_bias.shape[1]


@fault("a bias for each head is that of the first", at="bias")
class _(Attention):
    def bias(self, call):
        return super().bias(call)[:, :1]


@fault("heads of queries go round the heads of keys", at="relative")
class _(Attention):
    def heads(self, call, keys):
        return keys.repeat(1, call.q.shape[1] // keys.shape[1], 1, 1)

    def of_keys(self, call, grad):
        return grad.unflatten(1, (-1, call.k.shape[1])).sum(1)


@fault("what dropout leaves is not raised", at="dropout")
class _(Attention):
    def refund(self, call):
        return 1.0


@fault("dropout draws from torch's generator", "replayed", at="dropout")
class _(Attention):
    def drawn(self, call, rows, columns):
        return torch.rand(*rows.shape[:3], len(columns)) >= call.dropout


@fault("dropout keeps the lower half of the seed", "replayed", at="dropout")
class _(Attention):
    def drawn(self, call, rows, columns):
        return kept(call.dropout, seed_of(call) & 0xFFFFFFFF, call.offset, rows, columns)


@fault("a drawn seed is not read", at="drawn seed")
class _(Attention):
    def drawn(self, call, rows, columns):
        return super().drawn(call._replace(drawn_seed=None), rows, columns)


@fault("a drawn seed takes the place of the given one", at="drawn seed")
class _(Attention):
    def drawn(self, call, rows, columns):
        return super().drawn(call if call.drawn_seed is None else call._replace(seed=0), rows, columns)


@fault("the drawn seed of an earlier call is kept", "changed_in_place", at="drawn seed")
class _(Attention):
    def __init__(self):
        self.known: dict[Any, int] = {}

    def drawn(self, call, rows, columns):
        if call.drawn_seed is not None:
            seed = self.known.setdefault(call.drawn_seed.data_ptr(), int(call.drawn_seed))
            call = call._replace(drawn_seed=torch.tensor(seed))
        return super().drawn(call, rows, columns)


@fault("dropout draws one number for all heads", at="dropout")
class _(Attention):
    def drawn(self, call, rows, columns):
        return super().drawn(call, rows % call.q.shape[2], columns)


@fault("the backward takes the cap for a line", at="softcap")
class _(Attention):
    def slope(self, call, products):
        return 1.0


@fault("the log-sum-exp has no gradient")
class _(Attention):
    def of_lse(self, grad):
        return 0.0


@fault("values get a gradient of what was dropped", at="dropout")
class _(Attention):
    def of_values(self, weights, drop, given):
        return weights.mT @ given


@fault("keys get the gradient of the last head of their group", at="relative")
class _(Attention):
    def of_keys(self, call, grad):
        return grad.unflatten(1, (call.k.shape[1], -1))[:, :, -1]


@fault("a bias of all queries gets the gradient of the first", at="bias of keys")
class _(Attention):
    def of_bias(self, call, change):
        return change[:, :, : call.bias.shape[2]].sum_to_size(call.bias.shape)


@fault("sinks get the gradient of the other sign", at="sinks")
class _(Attention):
    def of_sinks(self, weights, lost):
        return -super().of_sinks(weights, lost)


@fault("places of one distance overwrite each other's gradient", at="relative")
class _(Attention):
    def of_table(self, call, change):
        grad = change.new_zeros(call.relative_bias.shape)
        grad[:, self.table(call).flatten()] = change.sum(0).flatten(1)
        return grad


@fault("what is saved of a row keeps a dimension of one", "interchangeable")
class _(Attention):
    def forward(self, call):
        results, saved = super().forward(call)
        return results, (saved[:1] + tuple(each.unsqueeze(-1) for each in saved[1:]))

    def backward(self, call, saved, grad_out, grad_lse):
        saved = saved[:1] + tuple(each.view(call.q.shape[:3]) for each in saved[1:])
        return super().backward(call, saved, grad_out, grad_lse)


@fault("the sum of exponentials is saved as its logarithm", "interchangeable")
class _(Attention):
    def forward(self, call):
        results, saved = super().forward(call)
        return results, (*saved[:2], *(each.log() for each in saved[2:]))

    def backward(self, call, saved, grad_out, grad_lse):
        return super().backward(call, (*saved[:2], saved[2].exp()), grad_out, grad_lse)


@fault("the mask of the last call of these sizes is used again", "changed_in_place", at="window")
class _(Attention):
    def __init__(self):
        self.known: dict[Any, Tensor] = {}

    def allowed(self, call):
        return self.known.setdefault((call.q.shape, call.k.shape, call.causal), super().allowed(call))


@fault("queries are scaled in place", "inputs_unchanged")
class _(Attention):
    def products(self, call, q, k):
        call.q.data.mul_(1.5)
        return super().products(call, q, k)
