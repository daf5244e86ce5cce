"""Who takes part in the benchmark, each on the same tensors."""

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kpt_cli.bench.moe import transformers_experts
from kpt_cli.plain_pytorch import plain_pytorch
from kpt_moe.experts import experts

from .loads import Load, Problem
from .machine import Machine
from .oracle import activate
from .rows import LeftOutError

#: Copies of weights that `batched_mm` may make, in bytes.
_MOST_COPIED = 8 * 2**30


@dataclass(frozen=True, slots=True)
class Contestant:
    """One way of computing a problem.

    Attributes:
        name: as it stands in the report.
        forward: gives the output `[tokens, hidden_size]`.
        capturable: whether a CUDA graph may hold it: it never waits for the device.
        same: whether it computes what the others do, so that its output can be compared.
        leaves: what a training step differentiates in; None for the problem's.
        pull: gradient of the output; None for the problem's.
    """

    name: str
    forward: Callable[[], Tensor]
    capturable: bool = True
    same: bool = True
    leaves: tuple[Tensor, ...] | None = None
    pull: Tensor | None = None


KPT, PLAIN, DENSE = "kpt", "kpt in plain PyTorch", "dense cuBLAS"
Maker = Callable[[Problem, Machine], Contestant]


def makers(machine: Machine) -> dict[str, Maker]:
    """Who may take part, KPT first; a maker raises `LeftOutError` where a contestant can't."""
    found: dict[str, Maker] = {KPT: partial(_kpt, KPT), PLAIN: partial(_kpt, PLAIN)}
    for name in ("eager", "grouped_mm", "batched_mm"):
        found[f"transformers {name}"] = partial(_transformers, name)
    return found | {
        "torch grouped_mm": _composed,
        "torch grouped_mm, compiled": _compiled,
        "ScatterMoE": _scattermoe,
        DENSE: _dense,
    }


def _kpt(name: str, problem: Problem, machine: Machine) -> Contestant:
    arguments = problem.arguments()
    return Contestant(name, lambda: experts(**arguments))


@contextmanager
def in_force(name: str) -> Iterator[None]:
    """The choice of kernels under which a contestant runs, in its backward too."""
    if name != PLAIN:
        yield
        return
    # Autograd's own threads for accelerators would not see the choice.
    with torch.autograd.set_multithreading_enabled(False), plain_pytorch():
        yield


def _transformers(implementation: str, problem: Problem, machine: Machine) -> Contestant:
    shape, copied = problem.load.shape, problem.index.numel() * problem.expert_bytes
    if implementation == "batched_mm" and copied > _MOST_COPIED:
        raise LeftOutError(f"it would copy {copied / 2**30:.0f} GiB of weights")
    with torch.device("meta"):
        module = _experts_of(problem.load)
    module.config._experts_implementation = implementation
    names = {"up": "gate_up_proj" if shape.gated else "up_proj", "down": "down_proj"}
    names |= {f"{name}_bias": f"{own}_bias" for name, own in names.items()} if problem.load.gpt_oss else {}
    for name, own in names.items():
        # The very tensor: what requires a gradient later does so here too.
        del module._parameters[own]
        setattr(module, own, getattr(problem, name))

    def call() -> Tensor:
        return module(problem.x, problem.index, problem.weights)  # type: ignore[no-any-return]

    return Contestant(f"transformers {implementation}", call, capturable=implementation != "eager")


def _experts_of(load: Load) -> Any:
    if not load.gpt_oss:
        return transformers_experts(load.shape, load.dtype, torch.Generator("cpu"))
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    config = SimpleNamespace(
        intermediate_size=load.shape.intermediate_size,
        num_local_experts=load.shape.num_experts,
        hidden_size=load.shape.hidden_size,
        swiglu_limit=7.0,
        swiglu_alpha=1.702,
        _experts_implementation="eager",
    )
    return GptOssExperts(config).eval()  # type: ignore[no-untyped-call]


def _grouped_mm() -> Callable[..., Tensor]:
    found = getattr(F, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
    if found is None:
        raise LeftOutError(f"torch {torch.__version__} has no grouped_mm")
    return found  # type: ignore[no-any-return]


def _composed_of(problem: Problem) -> Callable[..., Tensor]:
    """The experts as a user of torch composes them."""
    product, load = _grouped_mm(), problem.load
    experts, top_k = load.shape.num_experts, load.shape.top_k

    def call(
        x: Tensor,
        index: Tensor,
        weights: Tensor,
        up: Tensor,
        down: Tensor,
        up_bias: Tensor | None,
        down_bias: Tensor | None,
    ) -> Tensor:
        expert, order = index.flatten().sort(stable=True)
        ids = torch.arange(experts, device=x.device)
        offsets = torch.searchsorted(expert, ids, right=True).int()
        h = product(x[order // top_k], up if load.gpt_oss else up.mT, offs=offsets)
        h = h if up_bias is None else h + up_bias[expert]
        a = activate(h, gated=load.shape.gated, gpt_oss=load.gpt_oss)
        y = product(a.contiguous(), down if load.gpt_oss else down.mT, offs=offsets)
        y = y if down_bias is None else y + down_bias[expert]
        y = y * weights.flatten()[order, None]
        place = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=x.device))
        return y[place].view(-1, top_k, x.shape[1]).sum(1)

    return call


def _tensors(problem: Problem) -> tuple[Tensor | None, ...]:
    return (
        problem.x,
        problem.index,
        problem.weights,
        problem.up,
        problem.down,
        problem.up_bias,
        problem.down_bias,
    )


def _composed(problem: Problem, machine: Machine) -> Contestant:
    function = _composed_of(problem)
    return Contestant("torch grouped_mm", lambda: function(*_tensors(problem)))


def _compiled(problem: Problem, machine: Machine) -> Contestant:
    if problem.x.dtype is not torch.bfloat16:
        raise LeftOutError("torch compiles grouped_mm in bfloat16 alone")
    torch.compiler.reset()
    backend = "aot_eager" if machine.plan.tiny else "inductor"
    function = torch.compile(_composed_of(problem), fullgraph=True, dynamic=False, backend=backend)
    return Contestant("torch grouped_mm, compiled", lambda: function(*_tensors(problem)))


def _scattermoe(problem: Problem, machine: Machine) -> Contestant:
    if importlib.util.find_spec("scattermoe") is None:
        raise LeftOutError("scattermoe is not installed")
    if problem.load.gpt_oss:
        raise LeftOutError("its network has no clamped gate")
    mlp: Any = importlib.import_module("scattermoe.mlp")
    shape = problem.load.shape
    sizes = (shape.hidden_size, shape.intermediate_size, shape.num_experts, shape.top_k)
    with torch.device("meta"):
        module = mlp.GLUMLP(*sizes, activation=nn.SiLU()) if shape.gated else mlp.MLP(*sizes, activation=nn.GELU())
    # It keeps up before gate, so its weights are a copy.
    up = torch.cat(problem.up.detach().chunk(2, 1)[::-1], 1) if shape.gated else problem.up.detach()
    module.experts.weight, module.output_experts.weight = nn.Parameter(up), nn.Parameter(problem.down.detach())
    leaves = (problem.x, problem.weights, *module.parameters())
    return Contestant("ScatterMoE", lambda: module(problem.x, problem.weights, problem.index), leaves=leaves)


def _dense(problem: Problem, machine: Machine) -> Contestant:
    """The two products of one expert for as many rows: as many operations, and nothing else."""
    if "decode" in problem.load.phases:
        raise LeftOutError("for few tokens reading weights is what takes time, of which a dense product has fewer")
    top_k, inner = problem.load.shape.top_k, problem.load.shape.intermediate_size
    rows, pull = (tensor.detach().repeat(top_k, 1) for tensor in (problem.x, problem.grad))
    up, down = (t[0].detach() if problem.load.gpt_oss else t[0].detach().mT for t in (problem.up, problem.down))

    def call() -> Tensor:
        return (rows @ up)[:, :inner] @ down

    return Contestant(DENSE, call, same=False, leaves=(rows, up, down), pull=pull)
