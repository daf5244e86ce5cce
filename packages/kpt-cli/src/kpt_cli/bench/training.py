"""The training benchmark: a step of experts, forward and backward, its peak memory, and what routing costs."""

import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kpt_core import KptError
from kpt_optimize import gain_of, interleaved_times

from .moe import PEERS, GateError, Refused, Shape, random_routing, require_right_output, transformers_experts

IMPLEMENTATIONS = ("kpt", *PEERS)

SHAPES = (
    Shape("step 32x128", 4096, 512, 2048, 8, 2, gated=False),
    Shape("step 32x128", 4096, 512, 2048, 8, 2, gated=True),
    Shape("step 32x128", 4096, 1024, 4096, 8, 2, gated=False),
)
QUICK_SHAPES = (replace(SHAPES[1], name="step 4x128", tokens=512, hidden_size=256, intermediate_size=512),)
#: Tokens on which gradients are compared with float64.
_GATE_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Result:
    """What one implementation did on one shape.

    Attributes:
        implementation: `kpt` or a name of `PEERS`.
        seconds: median time of a forward and backward, with the gradients of tokens, routing weights and parameters.
        gflops: billions of operations of matrix products a second.
        gain: KPT's speed over this implementation's, the median of the rounds' ratios; 1 for `kpt` itself.
        noise: standard error of `gain`.
        peak: bytes by which resident memory grows in a step, gradients included, in a process of its own.
    """

    implementation: str
    seconds: float
    gflops: float
    gain: float
    noise: float
    peak: int


@dataclass(frozen=True, slots=True)
class Line:
    """All results on one shape and dtype.

    Attributes:
        shape: of the experts.
        dtype: its name.
        results: of each implementation, KPT first.
        routing_share: time of the router and of sorting by expert, over that of a whole KPT layer, forward.
    """

    shape: Shape
    dtype: str
    results: tuple[Result, ...]
    routing_share: float

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        fastest = min(self.results[1:], key=lambda result: result.seconds)
        smallest = min(self.results[1:], key=lambda result: result.peak)
        return {
            **asdict(self),
            "best_peer": fastest.implementation,
            "gain": fastest.gain,
            "peak_over_best_peer": self.results[0].peak / max(smallest.peak, 1),
        }


def run(
    shapes: tuple[Shape, ...], dtypes: tuple[torch.dtype, ...], seconds: float, seed: int
) -> Iterator[Line | Refused]:
    """Measure every shape in every dtype.

    Args:
        shapes: what to measure.
        dtypes: in which dtypes.
        seconds: about how long the timing of each line takes.
        seed: of weights, inputs and routings.

    Yields:
        A line as soon as it is measured, or `Refused` where an output or a gradient of KPT is further from float64 than
        that of transformers' eager implementation.
    """
    for shape in shapes:
        for dtype in dtypes:
            generator = torch.Generator().manual_seed(seed)
            module = transformers_experts(shape, dtype, generator)
            try:
                _gate(replace(shape, tokens=min(shape.tokens, _GATE_TOKENS)), module, generator)
            except GateError as error:
                yield Refused(shape.name, str(dtype).removeprefix("torch."), str(error), shape)
                continue
            inputs = make_inputs(shape, dtype, generator)
            times = interleaved_times(
                [partial(gradients, module, name, inputs) for name in IMPLEMENTATIONS], inputs.x.device, seconds
            )
            del module, inputs
            results = []
            for name, taken in zip(IMPLEMENTATIONS, times, strict=True):
                median = statistics.median(taken)
                gain, noise = gain_of(taken, times[0])
                peak = _peak_of_step(shape, dtype, name, seed)
                results.append(Result(name, median, 3 * shape.flops / median / 1e9, gain, noise, peak))
            share = _routing_share(shape, dtype, seconds / 4)
            yield Line(shape, str(dtype).removeprefix("torch."), tuple(results), share)


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a training step is called with: tokens, routing, and the gradient of the output."""

    x: Tensor
    index: Tensor
    weights: Tensor
    grad: Tensor

    def to(self, dtype: torch.dtype) -> "Inputs":
        """The same values in another dtype."""
        return Inputs(self.x.to(dtype), self.index, self.weights.to(dtype), self.grad.to(dtype))


def make_inputs(shape: Shape, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    """Random inputs of a step."""
    x, grad = (torch.randn(shape.tokens, shape.hidden_size, generator=generator).to(dtype) for _ in range(2))
    return Inputs(x, *random_routing(shape, generator), grad)


def gradients(module: Any, implementation: str, inputs: Inputs) -> list[Tensor]:
    """A training step of an experts module: the gradients of tokens, routing weights and parameters."""
    module.config._experts_implementation = implementation
    parameters = [parameter.requires_grad_() for parameter in module.parameters()]
    x, weights = (tensor.detach().requires_grad_() for tensor in (inputs.x, inputs.weights))
    return list(torch.autograd.grad(module(x, inputs.index, weights), [x, weights, *parameters], inputs.grad))


def _gate(shape: Shape, module: Any, generator: torch.Generator) -> None:
    """Refuse unless output and gradients are as near to float64 as eager's.

    Gradients may have 1.5x its mean error and 3x its largest: that of the routing weights is another sum here than
    autograd's, of which neither is always the nearer one.
    """
    dtype = module.down_proj.dtype
    inputs = make_inputs(shape, dtype, generator)
    with torch.no_grad():
        require_right_output(shape, module, inputs.x, [(inputs.index, inputs.weights)])
    have, peer = (gradients(module, name, inputs) for name in ("kpt", "eager"))
    exact = gradients(module.double(), "eager", inputs.to(torch.float64))
    module.to(dtype)
    for number, (mine, other, truth) in enumerate(zip(have, peer, exact, strict=True)):
        errors = [(gradient.double() - truth).abs() for gradient in (mine, other)]
        (mean, largest), (peer_mean, peer_largest) = ((e.mean().item(), e.max().item()) for e in errors)
        floor = torch.finfo(torch.float32).eps * truth.abs().max().item()
        if not (mean <= 1.5 * peer_mean + floor and largest <= 3 * peer_largest + floor):
            raise GateError(
                f"no figures for {shape.name} in {dtype}: KPT's error of gradient {number} against float64 is "
                f"{mean:.2e} on average and {largest:.2e} at most, transformers' eager has {peer_mean:.2e} and "
                f"{peer_largest:.2e}"
            )


def _peak_of_step(shape: Shape, dtype: torch.dtype, implementation: str, seed: int) -> int:
    """By how many bytes resident memory grows in a step, in a fresh process."""
    asked = json.dumps({"shape": asdict(shape), "dtype": str(dtype).removeprefix("torch."), "seed": seed})
    command = [
        sys.executable,
        "-m",
        "kpt_cli.bench.training_probe",
        implementation,
        str(torch.get_num_threads()),
        asked,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise KptError(f"the memory probe failed with exit code {done.returncode}:\n{done.stderr}")
    return int(done.stdout.splitlines()[-1])


def _routing_share(shape: Shape, dtype: torch.dtype, seconds: float) -> float:
    """Time of the router and of sorting by expert over that of a whole layer, forward."""
    from kpt_moe import MoEConfig, MoELayer
    from kpt_moe.permutation import sort_by_expert

    sizes = {name: getattr(shape, name) for name in ("hidden_size", "num_experts", "top_k", "intermediate_size")}
    layer = MoELayer(MoEConfig(**sizes, activation="swiglu" if shape.gated else "gelu"), dtype=dtype)
    x = torch.randn(shape.tokens, shape.hidden_size).to(dtype)

    def route() -> object:
        return sort_by_expert(layer.route(x).index, shape.num_experts)

    with torch.inference_mode():
        routing, whole = interleaved_times([route, lambda: layer(x)], x.device, seconds)
    return statistics.median(routing) / statistics.median(whole)
