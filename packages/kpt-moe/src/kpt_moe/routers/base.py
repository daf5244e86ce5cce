"""The contract of every router."""

import inspect
from abc import ABC, abstractmethod
from typing import Any, ClassVar, TypedDict, Unpack

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F

from kpt_core import InputError
from kpt_core.autocast import without_autocast
from kpt_moe._checks import (
    described,
    require_bools,
    require_known,
    require_number,
    require_same_tokens,
    require_size,
    require_tokens,
)
from kpt_moe._dtypes import wide_dtype
from kpt_moe.batch_invariant import MODE, elementwise, linear
from kpt_moe.capacity import PRIORITIES, Priority, expert_capacity, limit_capacity
from kpt_moe.routing import Routing

#: Ids `[rows, K]` as in `Routing.index`, and the token of each row, None if row `t` is token `t`.
Choices = tuple[Tensor, Tensor | None]


class RouterOptions(TypedDict, total=False):
    """Arguments that most routers take."""

    jitter: float
    capacity_factor: float | None
    eval_capacity_factor: float | None
    priority: Priority


class LinearOptions(RouterOptions, total=False):
    """Arguments that most routers with a linear gate take."""

    bias: bool
    device: torch.device | str | None
    dtype: torch.dtype | None


class Router(nn.Module, ABC):
    """Decide which experts tokens go to, in float32 (float64 for float64 tokens) whatever the model is.

    A routing decided in bfloat16 differs between devices, so autocast does not reach inside either.

    A token with NaN or infinity changes nobody else's routing: where tokens compete, it counts as padding does for the
    others, and its own choices take no place. Its weights are NaN, and so is what it gets.

    A subclass says what the logits are (`gate`), which experts they choose (`choose`) and what those weigh (`weigh`).
    The rest is the same for all: padding, jitter, capacity, replay.

    Args:
        hidden_size: size of a token.
        num_experts: number of experts.
        top_k: experts per token.
        jitter: in training, tokens are multiplied by uniform random numbers of `[1 - jitter, 1 + jitter]` before the
            gate (Switch Transformer, arXiv:2101.03961).
        capacity_factor: an expert takes at most this many times the average number of tokens; None is no limit.
        eval_capacity_factor: the same outside of training; None is `capacity_factor`.
        priority: which choices a full expert refuses, see `kpt_moe.capacity`.

    Attributes:
        unavailable: `[num_experts]` bool, experts that no token may choose; None if all may. Their logits are the
            lowest finite number, and a choice of one that is made all the same is refused.
        dropped: likewise, in training alone.
        score_function: by what experts are scored, as in `Routing.score`.

    Raises:
        InputError: a size is not positive, `top_k` exceeds `num_experts`, a factor or jitter is out of range.
        UnknownNameError: no such `priority`.
    """

    #: Whether `choose` may give ids of `num_experts`, for no choice.
    partial: ClassVar[bool] = False

    #: The score of no choice: it adds nothing to the sum by which weights are normalised.
    score_of_none: float = 0.0

    score_function: str = "softmax"
    unavailable: Tensor | None
    dropped: Tensor | None

    def __init__(
        self,
        hidden_size: int,
        *,
        num_experts: int,
        top_k: int,
        jitter: float = 0.0,
        capacity_factor: float | None = None,
        eval_capacity_factor: float | None = None,
        priority: Priority = "position",
    ) -> None:
        super().__init__()
        name = type(self).__name__
        require_size(name, "hidden_size", hidden_size)
        require_size(name, "num_experts", num_experts)
        require_size(name, "top_k", top_k, num_experts, "num_experts")
        require_number(name, "jitter", jitter, "at least 0 and below 1")
        for what, factor in (("capacity_factor", capacity_factor), ("eval_capacity_factor", eval_capacity_factor)):
            if factor is not None:
                require_number(name, what, factor, "a positive number")
        require_known("priority", priority, PRIORITIES)
        self.hidden_size = hidden_size
        self.num_experts = num_experts
        self.top_k = top_k
        self.jitter = jitter
        self.capacity_factor = capacity_factor
        self.eval_capacity_factor = eval_capacity_factor
        self.priority: Priority = priority
        self.register_buffer("unavailable", None, persistent=False)
        self.register_buffer("dropped", None, persistent=False)

    def _renormalizes(self, asked: bool | None) -> bool:
        """Whether weights are made to sum to one; None does so unless `top_k` is 1."""
        if asked is not None:
            require_bools(type(self).__name__, renormalize=asked)
        return self.top_k > 1 if asked is None else asked

    @abstractmethod
    def gate(self, x: Tensor) -> Tensor:
        """The logits `[tokens, num_experts]` of tokens `[tokens, hidden_size]` that are float32 or float64."""

    def score(self, logits: Tensor) -> Tensor:
        """What experts are chosen and weighed by, `[tokens, num_experts]`; a softmax unless a router says otherwise."""
        return logits.softmax(-1)

    @abstractmethod
    def choose(self, logits: Tensor, scores: Tensor, mask: Tensor | None, token_ids: Tensor | None) -> Choices:
        """The experts that are chosen, from logits and scores without gradients.

        Where tokens compete for a capacity, the mask also leaves out those that hold NaN or infinity.
        """

    def weigh(self, scores: Tensor, index: Tensor) -> Tensor:
        """How much choices `[rows, K]` count, differentiable in the scores of their tokens.

        No id is negative. Where some may be `num_experts`, for no choice, the scores have a last column for it, of
        `score_of_none`.
        """
        return scores.gather(1, index)

    @property
    def limited(self) -> bool:
        """Whether experts have a capacity in the module's present mode."""
        return self.capacity_factor is not None or (not self.training and self.eval_capacity_factor is not None)

    @property
    def _factor(self) -> float | None:
        other = not self.training and self.eval_capacity_factor is not None
        return self.eval_capacity_factor if other else self.capacity_factor

    def capacity(self, scores: Tensor, mask: Tensor | None) -> int | Tensor:
        """Tokens that each expert takes at most, if `limited`; a number, or a tensor on the device of the scores."""
        assert self._factor is not None
        tokens: int | Tensor = scores.shape[0] if mask is None else mask.sum()
        return expert_capacity(tokens, top_k=self.top_k, num_experts=self.num_experts, factor=self._factor)

    def forward(
        self, x: Tensor, *, mask: Tensor | None = None, token_ids: Tensor | None = None, replay: Routing | None = None
    ) -> Routing:
        """Route tokens.

        Args:
            x: `[tokens, hidden_size]`.
            mask: `[tokens]` bool, False for padding, which takes no expert's place and no weight.
            token_ids: `[tokens]` integers, the vocabulary's ids, for routers that go by them.
            replay: take the choices of this routing instead of making any; their weights are this router's own and
                carry gradients (Rollout Routing Replay, arXiv:2510.11370).

        Raises:
            InputError: a shape or dtype does not fit.
        """
        self._check(x, mask, token_ids, replay)
        with without_autocast(x.device.type):
            # Padding may hold anything, and 0 * NaN would spoil the gate's gradient.
            tokens = x if mask is None else torch.where(mask.unsqueeze(1), x, 0)
            if self.training and self.jitter:
                wide = tokens.to(wide_dtype(x.dtype))
                tokens = wide * torch.empty_like(wide).uniform_(1 - self.jitter, 1 + self.jitter)
            logits = self.logits(tokens)
            closed = self._closed() if replay is None else None
            if closed is not None:
                # Not -inf, which would make 0 * -inf of an entropy.
                lowest = torch.finfo(logits.dtype).min
                logits = logits.masked_fill(closed, lowest)
            scores = elementwise(self.score, logits)
            rivals, limited = mask, self.limited
            if replay is None and limited:
                finite = logits.detach().amax(-1).isfinite()
                rivals = finite if mask is None else finite & mask
            if replay is not None:
                index, token = replay.index, replay.token
            else:
                open_scores = scores.detach() if closed is None else scores.detach().masked_fill(closed, lowest)
                index, token = self.choose(logits.detach(), open_scores, rivals, token_ids)
                if closed is not None:
                    index = self._refused(index, closed[index.clamp(0, self.num_experts - 1)])
            plain = token is None and replay is None and not self.partial and closed is None
            of_rows, asked = scores if token is None else scores[token], index
            if not plain:
                of_rows, asked = F.pad(of_rows, (0, 1), value=self.score_of_none), _asked(index, self.num_experts)
            weights = self.weigh(of_rows, asked)
            if mask is not None:
                index = self._refused(index, ~(mask if token is None else mask[token]).unsqueeze(1))
            if token is None and replay is None and limited:
                assert rivals is not None
                # Tokens that are no rivals keep their choices, and take no place.
                counts = rivals.unsqueeze(1)
                kept = limit_capacity(
                    torch.where(counts, index, self.num_experts),
                    weights,
                    num_experts=self.num_experts,
                    capacity=self.capacity(scores.detach(), rivals),
                    priority=self.priority,
                )
                index = torch.where(counts, kept, index)
            if not plain or mask is not None or limited:
                weights = torch.where((index >= 0) & (index < self.num_experts), weights, 0)
        return Routing(index, weights, logits, mask, token, self.score_function)

    def logits(self, x: Tensor) -> Tensor:
        """What `gate` gives for tokens that may be of a narrower dtype."""
        return self.gate(x.to(wide_dtype(x.dtype)))

    def _closed(self) -> Tensor | None:
        """`[num_experts]` bool: experts that can't be chosen in the module's present mode; None if all can."""
        if self.dropped is None or not self.training:
            return self.unavailable
        return self.dropped if self.unavailable is None else self.dropped | self.unavailable

    def _refused(self, index: Tensor, where: Tensor) -> Tensor:
        """The choices, those refused where it says so; what was refused or none already stays."""
        return torch.where(where & (index >= 0) & (index < self.num_experts), ~index, index)

    def _check(self, x: Tensor, mask: Tensor | None, token_ids: Tensor | None, replay: Routing | None) -> None:
        name = type(self).__name__
        if type(x) is not Tensor or x.dim() != 2 or x.shape[1] != self.hidden_size:
            require_tokens(name, x, self.hidden_size)
        if mask is not None or token_ids is not None:
            require_same_tokens(name, x.shape[:1], mask, token_ids)
        if replay is not None and not isinstance(replay, Routing):
            raise InputError(f"{name}: replay must be a Routing; got {described(replay)}")
        if replay is not None and (replay.num_tokens, replay.num_experts) != (x.shape[0], self.num_experts):
            raise InputError(
                f"{name}: the replayed routing is of {replay.num_tokens} tokens and {replay.num_experts} experts, x "
                f"of {x.shape[0]} and the router of {self.num_experts}: replay a call with the batch and the model "
                "that it was recorded with"
            )

    def extra_repr(self) -> str:
        """For `print(module)`: arguments of its constructor and of those above that are not their defaults there."""
        shown = {}
        for kind in (kind for kind in reversed(type(self).__mro__) if issubclass(kind, Router)):
            for name, argument in inspect.signature(kind.__init__).parameters.items():
                value = getattr(self, "score_function" if name == "score" else name, argument.default)
                # Of a tensor it is enough to know that it is there; an activation has a name.
                value = isinstance(value, Tensor) or getattr(value, "name", value)
                value = bool(value) if argument.default is False else value
                if value != argument.default and name != "hidden_size":
                    shown[name] = value
        return ", ".join([str(self.hidden_size), *(f"{name}={value!r}" for name, value in shown.items())])


class LinearRouter(Router):
    """A router whose logits are a linear function of the token.

    Args:
        bias: give the gate a bias.
        dtype: of the parameters; they are raised to the tokens' float32 or float64 where they are used.
        shared: `jitter`, `capacity_factor`, `eval_capacity_factor`, `priority`, as in `Router`.

    Raises:
        TypeError: an option is among `refused`.
    """

    #: Options of `Router` that would have no effect.
    refused: ClassVar[tuple[str, ...]] = ()
    _own_gate: ClassVar[bool] = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls._own_gate = cls.gate is not LinearRouter.gate

    def __init__(
        self,
        hidden_size: int,
        *,
        num_experts: int,
        top_k: int,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **shared: Unpack[RouterOptions],
    ) -> None:
        for name in self.refused:
            if name in shared:
                raise TypeError(f"{type(self).__name__} got an unexpected keyword argument {name!r}")
        super().__init__(hidden_size, num_experts=num_experts, top_k=top_k, **shared)
        require_bools(type(self).__name__, bias=bias)
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(num_experts, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal with deviation `hidden_size ** -0.5`, so that logits of normalised tokens have unit variance."""
        nn.init.normal_(self.weight, std=self.weight.shape[1] ** -0.5)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def gate(self, x: Tensor) -> Tensor:
        """`[tokens, num_experts]` of x's dtype."""
        return linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))

    def logits(self, x: Tensor) -> Tensor:
        """As in `Router`."""
        return super().logits(x) if self._own_gate or MODE.on else self._linear_logits(x)

    def _linear_logits(self, x: Tensor) -> Tensor:
        """Apply the linear gate outside of `batch_invariant()`; in training, save tokens in their own dtype."""
        wide, bias = wide_dtype(x.dtype), self.bias
        learns = wide is not x.dtype and torch.is_grad_enabled() and self.weight.requires_grad
        # torch gives a function of one's own no forward mode beside a rule for vmap.
        if not learns or forward_ad._current_level >= 0:
            return F.linear(x.to(wide), self.weight.to(wide), None if bias is None else bias.to(wide))
        logits: Tensor = _WideLinear.apply(x, self.weight)  # type: ignore[no-untyped-call]
        return logits if bias is None else logits + bias.to(wide)


class _WideLinear(torch.autograd.Function):
    """A linear function in float32 that saves its input as it came, which the experts save anyway."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x.float(), weight.float())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        of_x, of_weight = ctx.needs_input_grad
        grad_x = (grads[0] @ weight.float()).to(x.dtype) if of_x else None
        return grad_x, (grads[0].t() @ x.float()).to(weight.dtype) if of_weight else None


def _asked(index: Tensor, num_experts: int) -> Tensor:
    """Of refused choices what they asked for, and `num_experts` for every choice that is none."""
    return torch.where(index < 0, ~index, index).clamp(max=num_experts)
