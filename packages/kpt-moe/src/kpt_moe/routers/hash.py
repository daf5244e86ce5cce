"""Experts by the token's vocabulary id, through a fixed table."""

import heapq
from typing import ClassVar, Literal, Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kpt_core import InputError, UnknownNameError
from kpt_moe._checks import require_size
from kpt_moe.batch_invariant import linear

from .base import Router, RouterOptions

#: How the table is made: drawn at random, or so that experts are equally busy at given frequencies of tokens.
Table = Literal["random", "balanced"]
TABLES: tuple[Table, ...] = ("random", "balanced")
#: How learned logits become scores.
HASH_SCORES = ("softmax", "sigmoid", "sqrtsoftplus")

# Rows of the table that are drawn at once: bounds the memory of a large vocabulary with many experts.
_ROWS = 8192


class HashRouter(Router):
    """Choose experts by the token's vocabulary id, through a table that never changes.

    Hash layers (arXiv:2106.04426) balance themselves and train no router. The table is the buffer `table`
    `[vocab_size, top_k]` int64, distinct experts for each id; it is part of the state dict. An expert counts
    `1 / top_k`, or, with `learned_weights`, what a linear gate gives it, as in the first layers of DeepSeek-V4. Without
    a gate there are no parameters, and logits are zero.

    Ids are taken modulo `vocab_size`. Values aren't read on the host, so nothing can be raised for an id that is out of
    range, and an assertion on the device would end the process (CUDA) or not exist (others). The modulus is the
    identity for every valid id, spreads those of a vocabulary that grew, and makes any id of padding harmless, such as
    -100.

    Args:
        hidden_size: size of a token.
        num_experts: number of experts.
        top_k: experts per token.
        vocab_size: number of vocabulary ids.
        table: `random`, or `balanced`: the most frequent ids first, each to the experts with the least to do (section
            3.1 of the paper); ids of frequency zero are spread evenly.
        frequencies: `[vocab_size]`, how often each id occurs, in any unit; for `balanced`. Read on the host, once.
        seed: of the table; the same seed gives the same table on every device. Give layers different ones.
        learned_weights: weigh the experts by a linear gate.
        score: how the gate's logits become scores: `softmax` over all experts, `sigmoid`, or `sqrtsoftplus`
            (DeepSeek-V4).
        renormalize: divide learned weights by their sum; all stay zero where every score underflowed.
        scale: what learned weights are multiplied by in the end.
        device: of the parameters and the table.
        dtype: of the parameters.
        shared: `jitter`, `capacity_factor`, `eval_capacity_factor`, `priority`, as in `Router`.

    Raises:
        InputError: a size is not positive, `top_k` exceeds `num_experts`, or the frequencies don't fit the table.
        UnknownNameError: no such `table` or `score`.
    """

    table: Tensor
    fixed_top_k: ClassVar[bool] = True

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int = 1,
        *,
        vocab_size: int,
        table: Table = "random",
        frequencies: Tensor | None = None,
        seed: int = 0,
        learned_weights: bool = False,
        score: str = "softmax",
        renormalize: bool = True,
        scale: float = 1.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **shared: Unpack[RouterOptions],
    ) -> None:
        super().__init__(hidden_size, num_experts, top_k, **shared)
        require_size(type(self).__name__, "vocab_size", vocab_size)
        if table not in TABLES:
            raise UnknownNameError("table", table, TABLES)
        if score not in HASH_SCORES:
            raise UnknownNameError("score", score, HASH_SCORES)
        self.vocab_size = vocab_size
        self.table_kind = table
        self.seed = seed
        self.learned_weights = learned_weights
        self.score_function = score
        self.renormalize = renormalize
        self.scale = scale
        # No tensor, so that it survives the meta device, from which `reset_parameters` makes the table.
        self._frequencies = self._read(frequencies)
        self.register_buffer("table", torch.empty(vocab_size, top_k, dtype=torch.int64, device=device))
        weight = torch.empty(num_experts, hidden_size, device=device, dtype=dtype) if learned_weights else None
        self.weight = nn.Parameter(weight) if weight is not None else None
        self.reset_parameters()

    def _read(self, frequencies: Tensor | None) -> tuple[float, ...]:
        name = type(self).__name__
        if (frequencies is not None) != (self.table_kind == "balanced"):
            raise InputError(
                f"{name}: frequencies [{self.vocab_size}] belong to table='balanced' and to no other; got "
                f"table={self.table_kind!r} and {'no' if frequencies is None else 'some'} frequencies"
            )
        if frequencies is None:
            return ()
        if frequencies.shape != (self.vocab_size,):
            raise InputError(f"{name}: frequencies must be [{self.vocab_size}]; got {list(frequencies.shape)}")
        values = tuple(float(value) for value in frequencies.tolist())
        if not all(0 <= value < float("inf") for value in values):
            raise InputError(f"{name}: frequencies must be finite and not negative; got {min(values)} to {max(values)}")
        return values

    def reset_parameters(self) -> None:
        """Make the table anew, the same as before; the gate as that of `LinearRouter`."""
        if not self.table.is_meta:
            with torch.no_grad():
                self.table.copy_(self._random() if self.table_kind == "random" else self._balanced())
        if self.weight is not None:
            nn.init.normal_(self.weight, std=self.hidden_size**-0.5)

    def _generator(self) -> torch.Generator:
        return torch.Generator("cpu").manual_seed(self.seed)

    def _random(self) -> Tensor:
        generator = self._generator()
        drawn = []
        for start in range(0, self.vocab_size, _ROWS):
            size = (min(_ROWS, self.vocab_size - start), self.num_experts)
            drawn.append(torch.rand(size, generator=generator, device="cpu").topk(self.top_k, dim=-1).indices)
        return torch.cat(drawn)

    def _balanced(self) -> Tensor:
        # Among experts with equally much to do, the seed decides.
        experts = torch.randperm(self.num_experts, generator=self._generator(), device="cpu").tolist()
        order = sorted(range(self.vocab_size), key=lambda token: -self._frequencies[token])
        table: list[list[int]] = [[]] * self.vocab_size
        seen = [token for token in order if self._frequencies[token]]
        for tokens in (seen, order[len(seen) :]):
            load = [(0.0, turn, expert) for turn, expert in enumerate(experts)]
            for token in tokens:
                least = [heapq.heappop(load) for _ in range(self.top_k)]
                table[token] = [expert for _, _, expert in least]
                for busy, turn, expert in least:
                    heapq.heappush(load, (busy + (self._frequencies[token] or 1.0), turn, expert))
        return torch.tensor(table, dtype=torch.int64, device="cpu")

    def gate(self, x: Tensor) -> Tensor:
        """`[tokens, num_experts]` of x's dtype; zeros without a learned gate."""
        if self.weight is None:
            return x.new_zeros(x.shape[0], self.num_experts)
        return linear(x, self.weight.to(x.dtype))

    def score(self, logits: Tensor) -> Tensor:
        """As `score` of the constructor says."""
        if self.weight is None:
            return logits
        if self.score_function == "sqrtsoftplus":
            # Where softplus underflows, the root would have no gradient.
            return F.softplus(logits).clamp_min(torch.finfo(logits.dtype).tiny).sqrt()
        return logits.sigmoid() if self.score_function == "sigmoid" else logits.softmax(-1)

    def choose(
        self, logits: Tensor, scores: Tensor, mask: Tensor | None, token_ids: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """The table's experts.

        Raises:
            InputError: there are no `token_ids`.
        """
        if token_ids is None:
            raise InputError(
                f"{type(self).__name__}: experts are chosen by vocabulary ids, and there are none; got token_ids=None, "
                f"expected integers [{logits.shape[0]}]: pass token_ids=input_ids to the layer or the router"
            )
        return self.table[token_ids.long().remainder(self.vocab_size)], None

    def weigh(self, scores: Tensor, index: Tensor) -> Tensor:
        """Equal weights, or the gate's."""
        if self.weight is None:
            return scores.new_full(index.shape, 1 / index.shape[1])
        weights = scores.gather(1, index)
        if self.renormalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights if self.scale == 1 else weights * self.scale

    def extra_repr(self) -> str:
        """For `print(module)`."""
        shown = [super().extra_repr(), f"vocab_size={self.vocab_size}", f"table={self.table_kind!r}"]
        if self.seed:
            shown.append(f"seed={self.seed}")
        if self.learned_weights:
            shown.append(f"learned_weights=True, score={self.score_function!r}, renormalize={self.renormalize}")
            shown += [f"scale={self.scale}"] * (self.scale != 1)
        return ", ".join(shown)
