"""The MoE benchmarks: experts served by KPT, by transformers, and a dense product of the same operations."""

import itertools
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from kpt_optimize import gain_of, interleaved_times
from kpt_optimize.measure import UNSTEADY, noise_share

from .contest import GateError, Refused, Result, require_accuracy, results_of, short_name
from .machine import memory_growth

EAGER = "transformers' eager"
PEERS = ("eager", "grouped_mm")  #: implementations of transformers that are measured beside KPT


@dataclass(frozen=True, slots=True)
class Shape:
    """One line of a benchmark."""

    name: str  # what the line stands for
    tokens: int  # rows that enter the experts
    hidden_size: int  # size of a token
    intermediate_size: int  # inner width of an expert
    num_experts: int  # number of experts
    top_k: int  # experts per token
    gated: bool  # SwiGLU experts of three matrices, else GELU experts of two

    @property
    def flops(self) -> int:
        """Count the multiplications and additions of the matrix products."""
        return 2 * (3 if self.gated else 2) * self.tokens * self.top_k * self.hidden_size * self.intermediate_size


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
TRAINING_SHAPES = (
    Shape("step 32x128", 4096, 512, 2048, 8, 2, gated=False),
    Shape("step 32x128", 4096, 512, 2048, 8, 2, gated=True),
    Shape("step 32x128", 4096, 1024, 4096, 8, 2, gated=False),
)
QUICK_TRAINING_SHAPES = (
    replace(TRAINING_SHAPES[1], name="step 4x128", tokens=512, hidden_size=256, intermediate_size=512),
)


@dataclass(frozen=True, slots=True)
class Forward(Result):
    """One implementation's forward on one shape."""

    gflops: float | None  # billions of operations of matrix products a second
    tokens_per_second: float | None  # through the layer


@dataclass(frozen=True, slots=True)
class Step(Result):
    """One implementation's training step on one shape."""

    gflops: float | None  # billions of operations of matrix products a second
    peak: int  # bytes by which resident memory grows in a step, gradients included, in a process of its own


@dataclass(frozen=True, slots=True)
class Line:
    """All results on one shape and dtype, KPT's first."""

    shape: Shape
    dtype: str
    results: tuple[Any, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        peers = [result for result in self.results if result.implementation in PEERS]
        if any(peer.gain is None for peer in peers):  # which one is best is not known
            return {**asdict(self), "best_peer": None, "gain": None}
        best = min(peers, key=lambda peer: peer.gain)
        return {**asdict(self), "best_peer": best.implementation, "gain": best.gain}


@dataclass(frozen=True, slots=True)
class TrainingLine(Line):
    """All results of a training step on one shape and dtype, KPT's first."""

    # time of the router and of sorting by expert, over that of a whole KPT layer, forward; None if it is too noisy
    routing_share: float | None

    def as_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        smallest = min(result.peak for result in self.results[1:])
        return Line.as_dict(self) | {"peak_over_best_peer": self.results[0].peak / max(smallest, 1)}


def run(
    shapes: Sequence[Shape], dtypes: Sequence[torch.dtype], seconds: float, seed: int, *, training: bool = False
) -> Iterator[Line | Refused]:
    """Measure every shape in every dtype, timing each for about so many seconds; yield lines as they come."""
    for shape, dtype in itertools.product(shapes, dtypes):
        generator = torch.Generator().manual_seed(seed)
        module = transformers_experts(shape, dtype, generator)
        try:
            if training:
                yield _steps(shape, module, generator, seconds, seed)
            else:
                yield _forwards(shape, module, generator, seconds)
        except GateError as error:
            yield Refused(shape.name, short_name(dtype), str(error), shape)


def transformers_experts(shape: Shape, dtype: torch.dtype, generator: torch.Generator) -> Any:
    """Make an experts module of transformers, Qwen3-MoE's (gated) or Nemotron-H's (plain), with random weights."""
    from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    import kpt_moe.transformers  # noqa: F401  registers "kpt"

    config = SimpleNamespace(
        **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), shape.num_experts),
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


def _tokens(shape: Shape, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    return torch.randn(shape.tokens, shape.hidden_size, generator=generator).to(dtype)


def _random_routing(shape: Shape, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return experts of each token and their weights `[tokens, top_k]`."""
    scores = torch.rand(shape.tokens, shape.num_experts, generator=generator)
    weights = torch.rand(shape.tokens, shape.top_k, generator=generator)
    return scores.topk(shape.top_k, dim=-1).indices, weights / weights.sum(-1, keepdim=True)


def _require_right_output(shape: Shape, module: Any, x: Tensor, routings: list[tuple[Tensor, Tensor]]) -> None:
    rows = torch.linspace(0, shape.tokens - 1, min(shape.tokens, 64)).long()

    def output(implementation: str) -> Tensor:
        module.config._experts_implementation = implementation
        return torch.cat([module(x, *routing)[rows] for routing in routings])

    exact = torch.cat([_exact(shape, module, x[rows], *(t[rows] for t in routing)) for routing in routings])
    sides = output("kpt"), output("eager"), exact
    require_accuracy(f"{shape.name} in {x.dtype}: KPT's error", EAGER, sides, 1.1, 2, torch.finfo(torch.float64).eps)


def _exact(shape: Shape, module: Any, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Return the output of transformers' experts in float64, one expert after the other: all of them may not fit."""
    up, down = module.gate_up_proj if shape.gated else module.up_proj, module.down_proj
    out = torch.zeros(x.shape, dtype=torch.float64)
    for expert in index.unique().tolist():
        token, choice = torch.where(index == expert)
        y = _dense_forward(x[token].double(), up[expert].double(), down[expert].double(), gated=shape.gated)
        out.index_add_(0, token, y * weights[token, choice, None].double())
    return out


def _dense_forward(x: Tensor, up: Tensor, down: Tensor, *, gated: bool) -> Tensor:
    """Return a feed-forward's output, with SwiGLU of two halves or with GELU."""
    h = F.linear(x, up)
    return F.linear(F.silu(h.chunk(2, -1)[0]) * h.chunk(2, -1)[1] if gated else F.gelu(h), down)


def _forwards(shape: Shape, module: Any, generator: torch.Generator, seconds: float) -> Line:
    dtype = module.down_proj.dtype
    x = _tokens(shape, dtype, generator)
    # A small call is measured on many routings in turn, so that weights come from memory as they do in a model.
    routings = [_random_routing(shape, generator) for _ in range(16 if shape.tokens < 64 else 1)]

    def experts(implementation: str) -> Callable[[], object]:
        turns = itertools.cycle(routings)

        def call() -> object:
            module.config._experts_implementation = implementation
            return module(x, *next(turns))

        return call

    _require_right_output(shape, module, x, routings)
    contest = [*map(experts, ("kpt", *PEERS)), _dense(shape, x, module)]
    with torch.inference_mode():
        times = interleaved_times(contest, x.device, seconds)
    results = []
    for result in results_of(("kpt", *PEERS, "dense"), times):
        rates = (
            None if result.seconds is None else count / result.seconds for count in (shape.flops / 1e9, shape.tokens)
        )
        results.append(Forward(result.implementation, result.seconds, result.gain, result.noise, result.times, *rates))
    return Line(shape, short_name(dtype), tuple(results))


def _dense(shape: Shape, x: Tensor, module: Any) -> Callable[[], object]:
    """Return a dense feed-forward of as many operations, with the experts' numbers.

    A wide one of `top_k` experts for few tokens, an expert itself for many rows.
    """
    up, down = module.gate_up_proj if shape.gated else module.up_proj, module.down_proj
    if shape.tokens >= shape.num_experts:
        x, layers = x.repeat(shape.top_k, 1), [(up[0], down[0])]
    else:
        count = max(1, shape.num_experts // shape.top_k)
        experts = count * shape.top_k
        # The numbers of the down projection lie in another order than in the experts: it is one dense matrix of them.
        ups = up[:experts].view(count, -1, shape.hidden_size)
        layers = list(zip(ups, down[:experts].reshape(count, shape.hidden_size, -1), strict=True))
    turns = itertools.cycle(layers)
    return lambda: _dense_forward(x, *next(turns), gated=shape.gated)


def _steps(shape: Shape, module: Any, generator: torch.Generator, seconds: float, seed: int) -> Line:
    dtype = module.down_proj.dtype
    _require_right_gradients(replace(shape, tokens=min(shape.tokens, 64)), module, generator)
    given = _step_inputs(shape, dtype, generator)
    names = ("kpt", *PEERS)
    times = interleaved_times([partial(_gradients, module, name, *given) for name in names], given[0].device, seconds)
    del module, given
    results = []
    for result in results_of(names, times):
        speed = None if result.seconds is None else 3 * shape.flops / result.seconds / 1e9
        most = _peak_of_step(shape, dtype, result.implementation, seed)
        results.append(
            Step(result.implementation, result.seconds, result.gain, result.noise, result.times, speed, most)
        )
    share = _routing_share(shape, dtype, seconds / 4)
    return TrainingLine(shape, short_name(dtype), tuple(results), share)


def _step_inputs(shape: Shape, dtype: torch.dtype, generator: torch.Generator) -> tuple[Tensor, ...]:
    """Return random tokens, gradients of the output, experts and their weights."""
    x, grad = (_tokens(shape, dtype, generator) for _ in range(2))
    return x, grad, *_random_routing(shape, generator)


def _gradients(
    module: Any, implementation: str, x: Tensor, grad: Tensor, index: Tensor, weights: Tensor
) -> list[Tensor]:
    """Run a training step of an experts module; return the gradients of tokens, routing weights and parameters."""
    module.config._experts_implementation = implementation
    parameters = [parameter.requires_grad_() for parameter in module.parameters()]
    x, weights = (tensor.detach().requires_grad_() for tensor in (x, weights))
    return list(torch.autograd.grad(module(x, index, weights), [x, weights, *parameters], grad))


def _require_right_gradients(shape: Shape, module: Any, generator: torch.Generator) -> None:
    """Refuse unless output and gradients are as near to float64 as eager's.

    Gradients may have 1.5x its mean error and 3x its largest: that of the routing weights is another sum here than
    autograd's, of which neither is always the nearer one.
    """
    dtype = module.down_proj.dtype
    x, grad, index, weights = _step_inputs(shape, dtype, generator)
    with torch.no_grad():
        _require_right_output(shape, module, x, [(index, weights)])
    mine, eager = (_gradients(module, name, x, grad, index, weights) for name in ("kpt", "eager"))
    exact = _gradients(module.double(), "eager", x.double(), grad.double(), index, weights.double())
    module.to(dtype)
    for number, sides in enumerate(zip(mine, eager, exact, strict=True)):
        what = f"{shape.name} in {dtype}: KPT's error of gradient {number}"
        require_accuracy(what, EAGER, sides, 1.5, 3, torch.finfo(torch.float32).eps)


def _peak_of_step(shape: Shape, dtype: torch.dtype, implementation: str, seed: int) -> int:
    """Return by how many bytes resident memory grows in a step, in a fresh process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_growth, shape, dtype, implementation, seed, torch.get_num_threads()).result()


def _growth(shape: Shape, dtype: torch.dtype, implementation: str, seed: int, threads: int) -> int:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what libraries say at import was said by the command's process
    torch.set_num_threads(threads)
    generator, grown = torch.Generator().manual_seed(seed), 0
    # What libraries keep after their first use is not the step's.
    for size in (replace(shape, tokens=2 * shape.num_experts, hidden_size=32, intermediate_size=32), shape):
        module, given = transformers_experts(size, dtype, generator), _step_inputs(size, dtype, generator)
        grown = memory_growth(partial(_gradients, module, implementation, *given))
    return grown


def _routing_share(shape: Shape, dtype: torch.dtype, seconds: float) -> float | None:
    """Return the time of the router and of sorting over that of a whole layer, forward; None if it is too noisy."""
    from kpt_moe import MoEConfig, MoELayer
    from kpt_moe.permutation import sort_by_expert

    sizes = {name: getattr(shape, name) for name in ("hidden_size", "num_experts", "top_k", "intermediate_size")}
    layer = MoELayer(MoEConfig(**sizes, activation="swiglu" if shape.gated else "gelu"), dtype=dtype)
    x = torch.randn(shape.tokens, shape.hidden_size).to(dtype)

    def route() -> object:
        return sort_by_expert(layer.route(x).index, shape.num_experts)

    with torch.inference_mode():
        routing, whole = interleaved_times([route, lambda: layer(x)], x.device, seconds)
    share, error = gain_of(routing, whole)
    return None if noise_share(share, error) > UNSTEADY else share
