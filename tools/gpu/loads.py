"""What the benchmark measures: sizes of experts, and the tensors that all contestants share."""

import statistics
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kpt_cli.bench.moe import Shape

from .machine import Machine

#: gpt-oss: `(up + 1) * gate * sigmoid(1.702 * gate)`, both clamped.
_GPT_OSS = {"alpha": 1.702, "beta": 1.0, "limit": 7.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One line of the benchmark.

    Attributes:
        shape: sizes; `gated` experts are SwiGLU, others GELU.
        dtype: of everything that floats.
        phases: `forward`; `graph`, the same as a CUDA graph, where the time of launching does not count; `training`
            (forward, then backward); `decode`, as a CUDA graph too, with another routing each time.
        gpt_oss: matrices stored as input by output, gate and up alternating, biases, clamped.
        tflops: wanted in a phase on an H200, in TFLOP/s.
        tokens_per_second: wanted forward on an H200.
    """

    shape: Shape
    dtype: torch.dtype
    phases: tuple[str, ...]
    gpt_oss: bool = False
    tflops: tuple[tuple[str, float], ...] = ()
    tokens_per_second: float | None = None

    @property
    def name(self) -> str:
        """For people; unique among the loads."""
        shape, dtype = self.shape, str(self.dtype).removeprefix("torch.")
        return f"{shape.name}, {shape.tokens} tokens, hidden {shape.hidden_size}, {dtype}"


_BF16, _BOTH = torch.bfloat16, ("forward", "training")
QWEN3 = Load(
    shape=Shape("Qwen3-30B", 16384, 2048, 768, 128, 8, gated=True),
    dtype=_BF16,
    phases=_BOTH,
    tflops=(("forward", 450.0), ("forward+backward", 380.0)),
)
MIXTRAL = Load(
    shape=Shape("Mixtral-8x7B", 8192, 4096, 14336, 8, 2, gated=True),
    dtype=_BF16,
    phases=_BOTH,
    tflops=(("forward", 600.0),),
)
PLAIN = tuple(
    Load(
        shape=Shape("32x128", 4096, hidden, 4 * hidden, 8, 2, gated=False),
        dtype=_BF16,
        phases=("forward", "graph", "training"),
        tokens_per_second=wanted,
    )
    for hidden, wanted in ((512, 15e6), (1024, 8e6))
)
DECODE = tuple(
    Load(shape=replace(shape, tokens=tokens), dtype=_BF16, phases=("decode",))
    for shape in (
        Shape("OLMoE", 1, 2048, 1024, 64, 8, gated=True),
        Shape("Qwen3-30B", 1, 2048, 768, 128, 8, gated=True),
    )
    for tokens in (1, 4, 16, 64)
)
_GPT_OSS_20B = Load(
    shape=Shape("gpt-oss-20b", 8192, 2880, 2880, 32, 4, gated=True), dtype=_BF16, phases=_BOTH, gpt_oss=True
)
LOADS = (
    QWEN3,
    MIXTRAL,
    *PLAIN,
    *DECODE,
    _GPT_OSS_20B,
    *(replace(load, dtype=torch.float32, tokens_per_second=None) for load in PLAIN),
)
HEADLINES = (QWEN3, MIXTRAL, *PLAIN, DECODE[0], DECODE[4])

_SMALL = Shape("tiny", 12, 32, 16, 4, 2, gated=True)
TINY_LOADS = (
    Load(shape=_SMALL, dtype=torch.float32, phases=_BOTH),
    Load(shape=replace(_SMALL, name="tiny decode", tokens=1), dtype=torch.float32, phases=("decode",)),
    Load(shape=replace(_SMALL, name="tiny plain", gated=False), dtype=torch.float32, phases=("graph",)),
    Load(shape=replace(_SMALL, name="tiny gpt-oss"), dtype=torch.float32, phases=("training",), gpt_oss=True),
)


@dataclass(frozen=True, slots=True)
class Problem:
    """A load's tensors; the contestants share them.

    Attributes:
        load: what they are for.
        x: `[tokens, hidden_size]`.
        index: `[tokens, top_k]` int64; replaced in place from turn to turn where few tokens are measured.
        weights: `[tokens, top_k]`.
        up: `[experts, width, hidden_size]`, its last two exchanged for gpt-oss.
        down: `[experts, hidden_size, inner]`, likewise.
        up_bias: `[experts, width]`, or None.
        down_bias: `[experts, hidden_size]`, or None.
        grad: `[tokens, hidden_size]`, the gradient of the output.
        routings: what `index` is in turn.
    """

    load: Load
    x: Tensor
    index: Tensor
    weights: Tensor
    up: Tensor
    down: Tensor
    up_bias: Tensor | None
    down_bias: Tensor | None
    grad: Tensor
    routings: tuple[Tensor, ...]

    @property
    def leaves(self) -> dict[str, Tensor]:
        """What the output is differentiable in."""
        names = ("x", "weights", "up", "down", "up_bias", "down_bias")
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def turn(self, number: int) -> None:
        """Route the tokens in another way."""
        self.index.copy_(self.routings[number % len(self.routings)])

    def require_gradients(self, wanted: bool) -> None:
        """Whether the next calls are a training step's."""
        for leaf in self.leaves.values():
            leaf.requires_grad_(wanted)

    def arguments(self) -> dict[str, Any]:
        """Of the op `moe.experts`."""
        special = {"transposed": True, "interleaved": True, **_GPT_OSS} if self.load.gpt_oss else {}
        return {
            "x": self.x,
            "top_k_index": self.index,
            "top_k_weights": self.weights,
            "gate_up_proj": self.up,
            "down_proj": self.down,
            "gate_up_proj_bias": self.up_bias,
            "down_proj_bias": self.down_bias,
            "activation": "swiglu" if self.load.shape.gated else "gelu",
            **special,
        }

    @property
    def experts_touched(self) -> float:
        """Experts that a turn reads, on average over the turns."""
        return statistics.fmean(routing.unique().numel() for routing in self.routings)

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert's matrices."""
        return (self.up[0].numel() + self.down[0].numel()) * self.x.element_size()

    @property
    def least_saved(self) -> int:
        """Bytes that any backward by the chain rule needs: input, pre-activation and routing."""
        width = self.up.shape[2 if self.load.gpt_oss else 1]
        pre_activation = self.index.numel() * width * self.x.element_size()
        return self.x.nbytes + pre_activation + self.index.nbytes + self.weights.nbytes


def problem_of(load: Load, machine: Machine, seed: int = 0) -> Problem:
    """Random tensors of a load, made on the device."""
    shape, device = load.shape, machine.device
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*size: int, scale: float = 1.0) -> Tensor:
        return torch.empty(size, dtype=load.dtype, device=device).normal_(0, scale, generator=generator)

    experts, hidden, inner = shape.num_experts, shape.hidden_size, shape.intermediate_size
    width = 2 * inner if shape.gated else inner

    def matrices(inputs: int, outputs: int) -> Tensor:
        size = (inputs, outputs) if load.gpt_oss else (outputs, inputs)
        return normal(experts, *size, scale=inputs**-0.5)

    turns = 16 if "decode" in load.phases else 1
    scores = torch.rand(turns, shape.tokens, experts, generator=generator, device=device)
    routings = tuple(scores.topk(shape.top_k, dim=-1).indices.unbind())
    weights = torch.rand(shape.tokens, shape.top_k, generator=generator, device=device)
    return Problem(
        load,
        normal(shape.tokens, hidden),
        routings[0].clone(),
        (weights / weights.sum(-1, keepdim=True)).to(load.dtype),
        matrices(hidden, width),
        matrices(inner, hidden),
        normal(experts, width, scale=0.1) if load.gpt_oss else None,
        normal(experts, hidden, scale=0.1) if load.gpt_oss else None,
        normal(shape.tokens, hidden),
        routings,
    )
