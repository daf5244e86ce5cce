"""The MoE benchmark: experts served by KPT, by transformers, and a dense product of the same operations."""

import itertools
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from kpt_core import KptError
from kpt_optimize import gain_of, interleaved_times

#: Implementations of transformers that are measured beside KPT.
PEERS = ("eager", "grouped_mm")


@dataclass(frozen=True, slots=True)
class Shape:
    """One line of the benchmark.

    Attributes:
        name: what the line stands for.
        tokens: rows that enter the experts.
        hidden_size: size of a token.
        intermediate_size: inner width of an expert.
        num_experts: number of experts.
        top_k: experts per token.
        gated: SwiGLU experts of three matrices, else GELU experts of two.
    """

    name: str
    tokens: int
    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    gated: bool

    @property
    def flops(self) -> int:
        """Multiplications and additions of the matrix products."""
        matrices = 3 if self.gated else 2
        return 2 * matrices * self.tokens * self.top_k * self.hidden_size * self.intermediate_size


SHAPES = (
    Shape("prefill 32x128", 4096, 512, 2048, 8, 2, gated=False),
    Shape("prefill 32x128", 4096, 1024, 4096, 8, 2, gated=False),
    Shape("decode 1", 1, 2048, 1024, 64, 8, gated=True),
    Shape("decode 8", 8, 2048, 1024, 64, 8, gated=True),
)
QUICK_SHAPES = (
    replace(SHAPES[0], name="prefill 4x128", tokens=512),
    replace(SHAPES[2], hidden_size=512, intermediate_size=256),
)


@dataclass(frozen=True, slots=True)
class Result:
    """What one implementation did on one shape.

    Attributes:
        implementation: `kpt`, a name of `PEERS`, or `dense`.
        seconds: median time of a forward.
        tokens_per_second: tokens through the layer.
        gflops: billions of operations a second.
        gain: KPT's speed over this implementation's, the median of the rounds' ratios; 1 for `kpt` itself.
        noise: standard error of `gain`.
    """

    implementation: str
    seconds: float
    tokens_per_second: float
    gflops: float
    gain: float
    noise: float


@dataclass(frozen=True, slots=True)
class Line:
    """All results on one shape and dtype."""

    shape: Shape
    dtype: str
    results: tuple[Result, ...]

    @property
    def best_peer(self) -> Result:
        """The fastest of transformers' implementations."""
        return min((r for r in self.results if r.implementation in PEERS), key=lambda r: r.seconds)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "best_peer": self.best_peer.implementation, "gain": self.best_peer.gain}


class GateError(KptError):
    """The benchmark refuses to report, because KPT's result is not right."""


@dataclass(frozen=True, slots=True)
class Refused:
    """What stands in a line's place where a result is not right.

    Attributes:
        title: what was to be measured.
        dtype: in which dtype.
        reason: the sentence of the `GateError`.
        shape: of the experts, where the line has one.
    """

    title: str
    dtype: str
    reason: str
    shape: Shape | None = None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def run(
    shapes: tuple[Shape, ...], dtypes: tuple[torch.dtype, ...], seconds: float, seed: int
) -> Iterator[Line | Refused]:
    """Measure every shape in every dtype.

    Args:
        shapes: what to measure.
        dtypes: in which dtypes.
        seconds: about how long each line takes.
        seed: of weights, inputs and routings.

    Yields:
        A line as soon as it is measured, or `Refused` where KPT's error against float64 exceeds that of transformers'
        eager implementation.
    """
    for shape in shapes:
        for dtype in dtypes:
            generator = torch.Generator().manual_seed(seed)
            module = transformers_experts(shape, dtype, generator)
            try:
                yield _measure(shape, module, generator, seconds)
            except GateError as error:
                yield Refused(shape.name, str(dtype).removeprefix("torch."), str(error), shape)


def transformers_experts(shape: Shape, dtype: torch.dtype, generator: torch.Generator) -> Any:
    """An experts module of transformers, of Qwen3-MoE (gated) or of Nemotron-H (plain), with random weights."""
    from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    import kpt_moe.transformers  # noqa: F401  registers "kpt"

    config = SimpleNamespace(
        num_experts=shape.num_experts,
        num_local_experts=shape.num_experts,
        n_routed_experts=shape.num_experts,
        hidden_size=shape.hidden_size,
        moe_intermediate_size=shape.intermediate_size,
        moe_latent_size=None,
        hidden_act="silu",
        mlp_hidden_act="gelu",
        _experts_implementation="eager",
    )
    kind: Any = Qwen3MoeExperts if shape.gated else NemotronHExperts
    module = kind(config).to(dtype).eval().requires_grad_(False)
    for parameter in module.parameters():
        bound = (3 / parameter.shape[-1]) ** 0.5
        parameter.uniform_(-bound, bound, generator=generator)
    return module


def random_routing(shape: Shape, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Experts of each token and their weights `[tokens, top_k]`."""
    scores = torch.rand(shape.tokens, shape.num_experts, generator=generator)
    index = scores.topk(shape.top_k, dim=-1).indices
    weights = torch.rand(shape.tokens, shape.top_k, generator=generator)
    return index, weights / weights.sum(-1, keepdim=True)


def require_right_output(shape: Shape, module: Any, x: Tensor, routings: list[tuple[Tensor, Tensor]]) -> None:
    """Refuse unless KPT is as close to float64 as eager is, on what is timed: 1.1x its mean error, 2x its largest."""
    rows = torch.linspace(0, shape.tokens - 1, min(shape.tokens, 64)).long()
    exact = torch.cat([_exact(shape, module, x[rows], *(t[rows] for t in routing)) for routing in routings])
    errors = {}
    for name in ("kpt", "eager"):
        module.config._experts_implementation = name
        difference = (torch.cat([module(x, *routing)[rows] for routing in routings]).double() - exact).abs()
        errors[name] = (difference.mean().item(), difference.max().item())
    (mean, largest), (peer_mean, peer_largest) = errors["kpt"], errors["eager"]
    floor = torch.finfo(torch.float64).eps * exact.abs().max().item()
    if not (mean <= 1.1 * peer_mean + floor and largest <= 2 * peer_largest + floor):
        raise GateError(
            f"no figures for {shape.name} in {x.dtype}: KPT's error against float64 is {mean:.2e} on average and "
            f"{largest:.2e} at most, transformers' eager has {peer_mean:.2e} and {peer_largest:.2e}"
        )


def exact_experts(
    x: Tensor,
    index: Tensor,
    weights: Tensor,
    up: Callable[[int], Tensor],
    down: Callable[[int], Tensor],
    *,
    gated: bool,
) -> Tensor:
    """The experts' output in float64, given what an expert's matrices `[outputs, inputs]` are in float64."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for expert in index.unique().tolist():
        token, choice = torch.where(index == expert)
        a = activate(F.linear(x[token].double(), up(expert)), gated=gated)
        out.index_add_(0, token, F.linear(a, down(expert)) * weights[token, choice, None].double())
    return out


def activate(h: Tensor, *, gated: bool) -> Tensor:
    """SwiGLU of two halves, or GELU."""
    return F.silu(h.chunk(2, -1)[0]) * h.chunk(2, -1)[1] if gated else F.gelu(h)


def _exact(shape: Shape, module: Any, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """The output of transformers' experts in float64."""
    up = module.gate_up_proj if shape.gated else module.up_proj
    return exact_experts(
        x, index, weights, lambda e: up[e].double(), lambda e: module.down_proj[e].double(), gated=shape.gated
    )


def _measure(shape: Shape, module: Any, generator: torch.Generator, seconds: float) -> Line:
    dtype = module.down_proj.dtype
    x = torch.randn(shape.tokens, shape.hidden_size, generator=generator).to(dtype)
    # A small call is measured on many routings in turn, so that weights come from memory as they do in a model.
    routings = [random_routing(shape, generator) for _ in range(16 if shape.tokens < 64 else 1)]

    def experts(implementation: str) -> Callable[[], object]:
        turns = iter(range(10**9))

        def call() -> object:
            module.config._experts_implementation = implementation
            return module(x, *routings[next(turns) % len(routings)])

        return call

    require_right_output(shape, module, x, routings)
    names = ("kpt", *PEERS, "dense")
    contest = [*(experts(name) for name in names[:-1]), _dense(shape, x, module)]
    with torch.inference_mode():
        times = interleaved_times(contest, x.device, seconds)
    results = []
    for name, taken in zip(names, times, strict=True):
        median = statistics.median(taken)
        gain, noise = gain_of(taken, times[0])
        results.append(Result(name, median, shape.tokens / median, shape.flops / median / 1e9, gain, noise))
    return Line(shape, str(dtype).removeprefix("torch."), tuple(results))


def dense_layers(shape: Shape, module: Any) -> list[tuple[Tensor, Tensor]]:
    """The experts' numbers as dense feed-forwards of as many operations, input and output matrix of each.

    A wide one of `top_k` experts for few tokens, an expert itself for many rows.
    """
    up = module.gate_up_proj if shape.gated else module.up_proj
    if shape.tokens >= shape.num_experts:
        return [(up[0], module.down_proj[0])]
    count = max(1, shape.num_experts // shape.top_k)
    experts = count * shape.top_k
    # The numbers of the down projection lie in another order than in the experts: it is one dense matrix of them.
    ups = up[:experts].view(count, -1, shape.hidden_size)
    downs = module.down_proj[:experts].reshape(count, shape.hidden_size, -1)
    return list(zip(ups, downs, strict=True))


def dense_inputs(shape: Shape, x: Tensor) -> Tensor:
    """What a dense feed-forward is called on."""
    return x if shape.tokens < shape.num_experts else x.repeat(shape.top_k, 1)


def dense_forward(x: Tensor, up: Tensor, down: Tensor, *, gated: bool) -> Tensor:
    """A dense feed-forward."""
    return F.linear(activate(F.linear(x, up), gated=gated), down)


def _dense(shape: Shape, x: Tensor, module: Any) -> Callable[[], object]:
    """A dense feed-forward of as many operations."""
    layers, inputs = dense_layers(shape, module), dense_inputs(shape, x)
    turns = itertools.cycle(layers)
    return lambda: dense_forward(inputs, *next(turns), gated=shape.gated)
