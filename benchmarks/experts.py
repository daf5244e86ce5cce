"""Experts as a problem, and everybody who computes them: each a plain function of the same tensors."""

import importlib.util
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any

import torch
from devices import Call
from harness import Contestant, LeftOutError, Role
from torch import Tensor, nn
from torch.nn import functional as F

from kpt_cli.bench.moe import Shape, transformers_experts
from kpt_fp8 import quantize_to_fp8
from kpt_moe.experts import experts

#: What shares a scale, and what tables call them.
SCHEMES = {"row": "fp8 row", "128x128": "fp8 block"}
#: gpt-oss: `(up + 1) * gate * sigmoid(1.702 * gate)`, both clamped; matrices are stored as input by output.
_GPT_OSS = {"transposed": True, "interleaved": True, "alpha": 1.702, "beta": 1.0, "limit": 7.0}
_LIMIT, _ALPHA, _BLOCK = 7.0, 1.702, 128
#: What an implementation may copy for one call.
_MOST_COPIED = 2**31
#: Calls that take turns: so many different routings.
_TURNS = 16

Routing = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Experts:
    """The tensors of a problem; all who take part share them.

    Attributes:
        shape: sizes; `gated` experts are SwiGLU, others GELU.
        gpt_oss: matrices stored as input by output, gate and up alternating, biases, clamped.
        copies: of the parameters: the input and the output matrices, and their biases or, if quantised, scales.
        x: tokens.
        grad: gradient of the output.
        routings: expert and weight of each token, in turn.
        rows: of the tokens, whose results are compared.
    """

    shape: Shape
    gpt_oss: bool
    copies: Sequence[tuple[Tensor, ...]]
    x: Tensor
    grad: Tensor
    routings: Sequence[Routing]
    rows: Tensor

    @property
    def expert_bytes(self) -> int:
        """Return the bytes of one expert."""
        return sum(tensor.nbytes for tensor in self.copies[0]) // self.shape.num_experts

    @property
    def experts_touched(self) -> float:
        """Return how many experts a call reads, on average over the turns."""
        return statistics.fmean(index.unique().numel() for index, _ in self.routings)

    @property
    def least_saved(self) -> int:
        """Return the bytes that any backward by the chain rule needs: input, pre-activation and routing."""
        index, weights = self.routings[0]
        width = self.shape.intermediate_size * (2 if self.shape.gated else 1)
        return self.x.nbytes + index.numel() * width * self.x.element_size() + index.nbytes + weights.nbytes

    def few(self) -> "Experts":
        """Return the same with the tokens alone whose results are compared."""
        index, weights = self.routings[0]
        routing = index[self.rows], weights[self.rows].detach()
        x, grad = self.x[self.rows].detach(), self.grad[self.rows]
        return Experts(self.shape, self.gpt_oss, self.copies, x, grad, [routing], torch.arange(len(x)))

    @torch.no_grad()
    def exact(self, turn: int = 0) -> Tensor:
        """Return the rows of a turn in float64."""
        index, weights = (tensor[self.rows] for tensor in self.routings[turn])
        parameters = [_dequantised(t) for t in self.matrices(turn)]
        return in_float64(self, self.x[self.rows], index, weights, *parameters)

    def matrices(self, turn: int) -> list[tuple[Tensor, ...]]:
        """Return the parameters of a turn, each with what scales it."""
        own = self.copies[turn % len(self.copies)]
        if own[0].dtype.itemsize == 1:
            return [(own[0], own[2]), (own[1], own[3])]
        return [(tensor,) for tensor in own]


def activate(h: Tensor, *, gated: bool, gpt_oss: bool) -> Tensor:
    """Return the activation of a pre-activation, as its model's paper or code writes it."""
    if gpt_oss:
        gate, up = h[..., ::2].clamp(max=_LIMIT), h[..., 1::2].clamp(-_LIMIT, _LIMIT)
        return (up + 1) * gate * torch.sigmoid(_ALPHA * gate)
    if gated:
        gate, up = h.chunk(2, dim=-1)
        return F.silu(gate) * up
    return F.gelu(h)


def in_float64(problem: Experts, x: Tensor, index: Tensor, weights: Tensor, *parameters: Any) -> Tensor:
    """Return the output in float64, one expert after the other.

    Args:
        problem: tells the form of the parameters.
        x: tokens.
        index: experts of each.
        weights: of these.
        *parameters: for each what gives, or holds, those of an expert.
    """
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for expert in index.unique().tolist():
        token, choice = torch.where(index == expert)
        up, down, *biases = (own[expert] if isinstance(own, tuple) else own(expert) for own in parameters)
        up_bias, down_bias = biases or (0.0, 0.0)
        if not problem.gpt_oss:
            up, down = up.mT, down.mT
        a = activate(x[token].double() @ up + up_bias, gated=problem.shape.gated, gpt_oss=problem.gpt_oss)
        y = (a @ down + down_bias) * weights[token, choice, None].double()
        out = out.index_add(0, token, y)
    return out


def gradients_in_float64(problem: Experts) -> list[Tensor]:
    """Return the gradients of tokens, routing weights and parameters in float64."""
    index, weights = problem.routings[0]
    leaves = [t.detach().double().requires_grad_() for t in (problem.x, weights, *problem.copies[0])]
    out = in_float64(problem, leaves[0], index, leaves[1], *(leaf.unbind() for leaf in leaves[2:]))
    return list(torch.autograd.grad(out, leaves, problem.grad.double()))


def dequantised(codes: Tensor, scale: Tensor) -> Tensor:
    """Return a matrix `[outputs, inputs]` in float64.

    Args:
        codes: `[outputs, inputs]` of a float8 dtype.
        scale: `[outputs]`, or one for each block of 128 by 128.
    """
    if scale.dim() == 1:
        return codes.double() * scale.double().unsqueeze(1)
    rows, columns = codes.shape
    spread = scale.double().repeat_interleave(_BLOCK, 0)[:rows].repeat_interleave(_BLOCK, 1)
    return codes.double() * spread[:, :columns]


def _dequantised(pair: tuple[Tensor, ...]) -> Callable[[int], Tensor]:
    if len(pair) == 1:
        return lambda expert: pair[0][expert].double()
    return lambda expert: dequantised(pair[0][expert], pair[1][expert])


@lru_cache(maxsize=1)
def _parameters(
    sizes: tuple[int, int, int], gated: bool, dtype: torch.dtype, device: str, gpt_oss: bool, seed: int
) -> tuple[Tensor, ...]:
    """Return random parameters of experts, kept for the next problem of the same ones."""
    count, hidden, inner = sizes
    generator = torch.Generator(device).manual_seed(seed)
    width = 2 * inner if gated else inner

    def matrices(inputs: int, outputs: int) -> Tensor:
        size = (count, inputs, outputs) if gpt_oss else (count, outputs, inputs)
        return torch.empty(size, dtype=dtype, device=device).normal_(0, inputs**-0.5, generator=generator)

    found = [matrices(hidden, width), matrices(inner, hidden)]
    if gpt_oss:
        found += [
            torch.empty(count, columns, dtype=dtype, device=device).normal_(0, 0.1, generator=generator)
            for columns in (width, hidden)
        ]
    return tuple(found)


def problem_of(
    shape: Shape, dtype: torch.dtype, device: torch.device, seed: int, *, gpt_oss: bool = False, decode: bool = False
) -> Experts:
    """Make the tensors of a problem on a device.

    Args:
        shape: sizes.
        dtype: of everything that floats, routing weights excepted in a decode of float32 weights.
        device: where they lie.
        seed: of the numbers.
        gpt_oss: see `Experts`.
        decode: calls take turns over routings, and over two copies of weights smaller than float32, so that weights
            come from memory; a single token's consecutive routings have no expert in common.
    """
    sizes = shape.num_experts, shape.hidden_size, shape.intermediate_size
    own = _parameters(sizes, shape.gated, dtype, str(device), gpt_oss, seed)
    twice = decode and dtype.itemsize < 4 and device.type == "cpu"
    copies = [own, tuple(tensor.clone() for tensor in own)] if twice else [own]
    generator = torch.Generator(device).manual_seed(seed + 1)
    x, grad = (
        torch.empty(shape.tokens, shape.hidden_size, dtype=dtype, device=device).normal_(generator=generator)
        for _ in range(2)
    )
    if decode and shape.tokens == 1:
        routings = _disjoint(shape, device, generator)
    else:
        routings = [_routing(shape, device, generator) for _ in range(_TURNS if decode else 1)]
    routings = [(index, weights.to(dtype) if device.type == "cuda" else weights) for index, weights in routings]
    # On a CPU float64 takes too long for all of them.
    count = shape.tokens if device.type == "cuda" else min(shape.tokens, 64)
    rows = torch.linspace(0, shape.tokens - 1, count, device=device).long()
    return Experts(shape, gpt_oss, copies, x, grad, routings, rows)


def _routing(shape: Shape, device: torch.device, generator: torch.Generator) -> Routing:
    scores = torch.rand(shape.tokens, shape.num_experts, generator=generator, device=device)
    weights = torch.rand(shape.tokens, shape.top_k, generator=generator, device=device)
    return scores.topk(shape.top_k, dim=-1).indices, weights / weights.sum(-1, keepdim=True)


def _disjoint(shape: Shape, device: torch.device, generator: torch.Generator) -> list[Routing]:
    """Return routings of one token through all experts in turn, none of which two in a row have in common."""
    groups = max(1, shape.num_experts // shape.top_k)
    order = torch.randperm(shape.num_experts, generator=generator, device=device)
    order = order[: groups * shape.top_k].view(groups, 1, shape.top_k)
    weights = torch.rand(groups, 1, shape.top_k, generator=generator, device=device)
    weights /= weights.sum(-1, keepdim=True)
    # Twice, shifted by an odd number, so that each group meets both copies of the weights.
    turns = [*range(groups), *((turn + 3) % groups for turn in range(groups))]
    return [(order[turn], weights[turn]) for turn in turns]


def quantised(problem: Experts, scheme: str) -> Experts:
    """Return the problem with 8-bit weights, in two copies."""
    up, down = (quantize_to_fp8(matrices, granularity=scheme) for matrices in problem.copies[0])
    own = up.codes, down.codes, up.scale, down.scale
    copies = [own, tuple(tensor.clone() for tensor in own)]
    return Experts(problem.shape, False, copies, problem.x, problem.grad, problem.routings, problem.rows)


@dataclass(frozen=True, slots=True)
class Implementation:
    """A way to compute a problem with one copy of its parameters.

    Attributes:
        forward: gives the output of tokens, index and weights.
        parameters: what a training step differentiates in.
        capturable: whether a CUDA graph may hold it.
    """

    forward: Callable[[Tensor, Tensor, Tensor], Tensor]
    parameters: Sequence[Tensor]
    capturable: bool = True


def arguments_of(problem: Experts, copy: int) -> dict[str, Any]:
    """Return the arguments of `moe.experts` that are not tokens and routing."""
    own = problem.copies[copy]
    names = ["gate_up_proj", "down_proj"]
    names += ["gate_up_scale", "down_scale"] if own[0].dtype.itemsize == 1 else [f"{name}_bias" for name in names]
    given = dict(zip(names, own, strict=False)) | (_GPT_OSS if problem.gpt_oss else {})
    return given | {"activation": "swiglu" if problem.shape.gated else "gelu"}


def kpt(problem: Experts, copy: int) -> Implementation:
    """KPT's op."""
    given = arguments_of(problem, copy)
    return Implementation(lambda x, index, weights: experts(x, index, weights, **given), problem.copies[copy])


def transformers(name: str, problem: Experts, copy: int) -> Implementation:
    """An implementation of transformers' experts, on the very same parameters."""
    shape = problem.shape
    copied = shape.tokens * shape.top_k * problem.expert_bytes
    if name == "batched_mm" and copied > _MOST_COPIED:
        raise LeftOutError(f"it would copy {copied / 2**30:,.0f} GiB of weights")
    with torch.device("meta"):
        module = _gpt_oss_experts(shape) if problem.gpt_oss else _experts(shape)
    module.config._experts_implementation = name
    names = ["gate_up_proj" if shape.gated else "up_proj", "down_proj"]
    for own, tensor in zip([*names, *(f"{name}_bias" for name in names)], problem.copies[copy], strict=False):
        del module._parameters[own]
        setattr(module, own, tensor)
    return Implementation(module, problem.copies[copy], capturable=name != "eager")


def _experts(shape: Shape) -> Any:
    return transformers_experts(shape, torch.float32, torch.Generator("cpu"))


def _gpt_oss_experts(shape: Shape) -> Any:
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    config = SimpleNamespace(
        intermediate_size=shape.intermediate_size,
        num_local_experts=shape.num_experts,
        hidden_size=shape.hidden_size,
        swiglu_limit=_LIMIT,
        swiglu_alpha=_ALPHA,
        _experts_implementation="eager",
    )
    return GptOssExperts(config).eval()  # type: ignore[no-untyped-call]


def torch_grouped_mm(problem: Experts, copy: int) -> Implementation:
    """The experts as a user of torch composes them."""
    product = getattr(F, "grouped_mm", None)
    if product is None:
        raise LeftOutError(f"torch {torch.__version__} has no grouped_mm")
    shape, top_k, own = problem.shape, problem.shape.top_k, problem.copies[copy]

    def call(x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        up, down, *biases = own if problem.gpt_oss else [matrices.mT for matrices in own]
        expert, order = index.flatten().sort(stable=True)
        ids = torch.arange(shape.num_experts, device=x.device)
        offsets = torch.searchsorted(expert, ids, right=True).int()
        h = product(x[order // top_k], up, offs=offsets)
        h = h + biases[0][expert] if biases else h
        y = product(activate(h, gated=shape.gated, gpt_oss=problem.gpt_oss).contiguous(), down, offs=offsets)
        y = y + biases[1][expert] if biases else y
        y = y * weights.flatten()[order, None]
        place = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=x.device))
        mixed: Tensor = y[place].view(-1, top_k, x.shape[1]).sum(1)
        return mixed.to(x.dtype)

    return Implementation(call, own)


def torch_compiled(problem: Experts, copy: int) -> Implementation:
    """The same by torch's compiler."""
    if problem.x.dtype is not torch.bfloat16 or problem.x.device.type == "cpu":
        raise LeftOutError("torch compiles grouped_mm in bfloat16 alone, for GPUs")
    torch.compiler.reset()
    composed = torch_grouped_mm(problem, copy)
    return Implementation(torch.compile(composed.forward, fullgraph=True, dynamic=False), composed.parameters)


def scattermoe(problem: Experts, copy: int) -> Implementation:
    """ScatterMoE, where it is installed."""
    if importlib.util.find_spec("scattermoe") is None:
        raise LeftOutError("scattermoe is not installed")
    if problem.gpt_oss:
        raise LeftOutError("its network has no clamped gate")
    mlp: Any = importlib.import_module("scattermoe.mlp")
    shape, (up, down) = problem.shape, problem.copies[copy]
    sizes = (shape.hidden_size, shape.intermediate_size, shape.num_experts, shape.top_k)
    with torch.device("meta"):
        module = mlp.GLUMLP(*sizes, activation=nn.SiLU()) if shape.gated else mlp.MLP(*sizes, activation=nn.GELU())
    # It keeps up before gate, so its weights are a copy.
    up = torch.cat(up.detach().chunk(2, 1)[::-1], 1) if shape.gated else up.detach()
    module.experts.weight, module.output_experts.weight = nn.Parameter(up), nn.Parameter(down.detach())
    forward = module.forward

    def call(x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return forward(x, weights, index)  # type: ignore[no-any-return]

    return Implementation(call, list(module.parameters()))


#: Who computes a problem beside KPT, on a CPU and on a GPU.
PEERS: dict[str, dict[str, Callable[[Experts, int], Implementation]]] = {
    "cpu": {name: partial(transformers, name) for name in ("eager", "grouped_mm", "batched_mm")},
}
PEERS["cuda"] = PEERS["cpu"] | {
    "torch grouped_mm": torch_grouped_mm,
    "torch grouped_mm, compiled": torch_compiled,
    "ScatterMoE": scattermoe,
}


def contestants_of(problem: Experts, kind: str, *, training: bool) -> tuple[list[Contestant], dict[str, str]]:
    """Return KPT with a vendor's kernels and without, its peers and a dense product; and why peers are left out.

    Args:
        problem: what they compute.
        kind: of the device, a key of `PEERS`.
        training: they take a step each: gradients of tokens, routing weights and parameters.
    """
    turns = range(1 if training else min(len(problem.copies), len(problem.routings)))
    exact = gradients_in_float64(problem.few()) if training else [problem.exact(turn) for turn in turns]
    ours = _contestant("kpt", "kpt", problem, kpt, exact, training=training)
    found, absent = [ours, ours.in_plain_pytorch()], {}
    for name, peer in PEERS[kind].items():
        try:
            found.append(_contestant(name, "peer", problem, peer, exact, training=training))
        except LeftOutError as reason:
            absent[name] = str(reason)
    if not problem.gpt_oss and problem.copies[0][0].dtype.itemsize > 1:
        found.append(_dense(problem, training=training))
    return found, absent


def ours_of(problem: Experts) -> list[Contestant]:
    """Return KPT with a vendor's kernels and without."""
    exact = [problem.exact(turn) for turn in range(len(problem.copies))]
    ours = _contestant("kpt", "kpt", problem, kpt, exact, training=False)
    return [ours, ours.in_plain_pytorch()]


def _contestant(
    name: str,
    role: Role,
    problem: Experts,
    implement: Callable[[Experts, int], Implementation],
    exact: Sequence[Tensor],
    *,
    training: bool,
) -> Contestant:
    """Return one that runs on each routing in turn, and on each copy of the weights in turn; the first are checked."""
    runs = [implement(problem, copy) for copy in range(len(problem.copies))]
    dtype, capturable = problem.x.dtype, runs[0].capturable
    if training:
        few = problem.few()
        # One may have learned from the sizes: another one is made for the few.
        small = runs[0] if len(few.x) == len(problem.x) else implement(few, 0)
        step, check = partial(_step, runs[0], problem), partial(_step, small, few)
        if name == "ScatterMoE":  # whose parameters are in another order
            return Contestant(name, role, dtype, [step], lambda: check()[:2], exact[:2])
        return Contestant(name, role, dtype, [step], check, exact)
    calls: list[Call] = [
        partial(runs[turn % len(runs)].forward, problem.x, *routing) for turn, routing in enumerate(problem.routings)
    ]

    def checked() -> list[Tensor]:
        return [call()[problem.rows] for call in calls[: len(exact)]]

    return Contestant(name, role, dtype, calls, checked, exact, capturable)


def _step(implementation: Implementation, problem: Experts) -> list[Tensor]:
    """Take a training step: the gradients of tokens, routing weights and parameters."""
    index, weights = problem.routings[0]
    x, weights = (tensor.detach().requires_grad_() for tensor in (problem.x, weights))
    leaves = [x, weights, *(parameter.requires_grad_() for parameter in implementation.parameters)]
    out = implementation.forward(x, index, weights)
    return list(torch.autograd.grad(out, leaves, problem.grad))


def _dense(problem: Experts, *, training: bool) -> Contestant:
    """Return a dense feed-forward of as many operations: wide for few tokens, one expert's for many rows."""
    shape = problem.shape
    wide = shape.tokens < shape.num_experts
    layers: list[tuple[Tensor, Tensor]] = []
    for up, down in problem.copies:
        if wide:
            count = max(1, shape.num_experts // shape.top_k)
            used = count * shape.top_k
            # The numbers of the down projection lie in another order than in the experts: it is one dense matrix.
            ups = up[:used].detach().view(count, -1, shape.hidden_size)
            layers += zip(ups, down[:used].detach().reshape(count, shape.hidden_size, -1), strict=True)
        else:
            layers.append((up[0].detach(), down[0].detach()))
    x = problem.x if wide else problem.x.repeat(shape.top_k, 1)
    grad = problem.grad if wide else problem.grad.repeat(shape.top_k, 1)

    def forward(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return F.linear(activate(F.linear(x, up), gated=shape.gated, gpt_oss=False), down)

    def step() -> Sequence[Tensor]:
        leaves = [tensor.detach().requires_grad_() for tensor in (x, *layers[0])]
        return torch.autograd.grad(forward(*leaves), leaves, grad)

    def checked() -> list[Tensor]:
        with torch.no_grad():
            return [forward(x, *layers[0])[problem.rows]]

    exact = forward(x[problem.rows].double(), *(matrix.double() for matrix in layers[0]))
    calls: list[Call] = [step] if training else [partial(forward, x, *layer) for layer in layers]
    return Contestant("dense", "dense", x.dtype, calls, checked, [exact])
