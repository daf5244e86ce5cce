"""Contests of whole experts: decode, in float dtypes and with 8-bit weights, and prefill."""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kpt_cli.bench.moe import (
    Shape,
    dense_forward,
    dense_inputs,
    dense_layers,
    exact_experts,
    random_routing,
    transformers_experts,
)
from kpt_moe.experts import experts
from kpt_moe.quantised_experts import quantise_weights

from .ceilings import Work
from .contest import LAYERS, Call, Contest, Contestant, Role, Trial, in_plain_pytorch
from .float8 import SCHEMES, dequantised
from .ipex import ipex_absence, ipex_experts

#: What tables call dtypes.
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
#: Calls that take turns: so many different routings.
_TURNS = 16
#: What an implementation may copy for one call.
_MOST_COPIED = 2**31
#: Rows of a long call that are compared with float64.
_ROWS = 64


@dataclass(frozen=True, slots=True)
class _Weights:
    """Several copies of an experts module's matrices, and of their scales if quantised."""

    shape: Shape
    copies: Sequence[tuple[Tensor, Tensor, Tensor | None, Tensor | None]]

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert."""
        return sum(t.nbytes for t in self.copies[0] if t is not None) // self.shape.num_experts

    @property
    def nbytes(self) -> int:
        """Bytes of all copies."""
        return self.expert_bytes * self.shape.num_experts * len(self.copies)

    def run(self, copy: int, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """KPT's op."""
        up, down, up_scale, down_scale = self.copies[copy]
        activation = "swiglu" if self.shape.gated else "gelu"
        return experts(
            x, index, weights, up, down, activation=activation, gate_up_scale=up_scale, down_scale=down_scale
        )

    def exact(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """The output in float64."""
        up, down, up_scale, down_scale = self.copies[0]
        return exact_experts(
            x, index, weights, _matrix(up, up_scale), _matrix(down, down_scale), gated=self.shape.gated
        )


@dataclass(frozen=True, slots=True)
class _Inputs:
    """Tokens and the routings that calls take turns over."""

    x: Tensor
    routings: Sequence[tuple[Tensor, Tensor]]
    rows: Tensor

    def trial(self, run: Callable[..., Tensor], turn: int, exact: Tensor) -> Trial:
        """A call of which some rows are compared."""
        return Trial(lambda: (run(self.x, *self.routings[turn])[self.rows],), (exact,))


def decode_contests(shape: Shape, tokens: Sequence[int], dtype: torch.dtype, seed: int) -> Iterator[Contest]:
    """Contests of few tokens; in bfloat16 also those of 8-bit weights, beside the bfloat16 ones.

    Calls take turns over routings, and over two copies of weights smaller than float32, so that weights come from
    memory; a single token's consecutive routings have no expert in common.

    Args:
        shape: of the experts; its number of tokens does not matter.
        tokens: how many there are in a call, one contest after the other.
        dtype: of the tokens, and of the weights that are not quantised.
        seed: of weights, tokens and routings.
    """
    generator = torch.Generator().manual_seed(seed)
    module = transformers_experts(shape, dtype, generator)
    modules = [module] if dtype is torch.float32 else [module, copy.deepcopy(module)]
    plain = _Weights(shape, [(m.gate_up_proj, m.down_proj, None, None) for m in modules])
    quantised = {}
    if dtype is torch.bfloat16:
        quantised = {scheme: _quantised(shape, module, scheme) for scheme in SCHEMES}
    ipex = ipex_experts(module)
    for count in tokens:
        own = replace(shape, tokens=count, name=f"{count} token{'s' if count > 1 else ''}")
        x = torch.randn(count, shape.hidden_size, generator=generator).to(dtype)
        routings = _disjoint(own, generator) if count == 1 else [random_routing(own, generator) for _ in range(_TURNS)]
        inputs = _Inputs(x, routings, torch.arange(count))
        beside, absent = _contestants(own, plain, modules, inputs, dtype)
        if ipex is None:
            absent["ipex"] = ipex_absence()
        else:
            beside.append(_contestant("ipex", "peer", dtype, inputs, [ipex], _exacts(plain, inputs)))
        yield _contest("decode", own, NAMES[dtype], plain, inputs, (dtype, torch.float32), beside, absent)
        # Of bfloat16's contestants KPT is another of our own; plain PyTorch is left out.
        others = [replace(c, name=f"{c.name} bf16", role="own" if c.role == "kpt" else c.role) for c in beside]
        others = [contestant for contestant in others if contestant.role != "plain"]
        unquantised = {
            "transformers fp8": "its 8-bit experts are Triton kernels for GPUs; on a CPU it dequantises them"
        }
        for scheme, weights in quantised.items():
            ours = _ours(weights, inputs, dtype, _exacts(weights, inputs))
            products = (dtype, torch.float32)
            yield _contest(
                "decode", own, SCHEMES[scheme], weights, inputs, products, [*ours, *others], absent | unquantised
            )


def prefill_contest(shape: Shape, dtype: torch.dtype, seed: int) -> Contest:
    """The contest of many tokens: all through the same weights, which each call reads once."""
    generator = torch.Generator().manual_seed(seed)
    module = transformers_experts(shape, dtype, generator)
    up = module.gate_up_proj if shape.gated else module.up_proj
    weights = _Weights(shape, [(up, module.down_proj, None, None)])
    x = torch.randn(shape.tokens, shape.hidden_size, generator=generator).to(dtype)
    rows = torch.linspace(0, shape.tokens - 1, min(shape.tokens, _ROWS)).long()
    inputs = _Inputs(x, [random_routing(shape, generator)], rows)
    contestants, absent = _contestants(shape, weights, [module], inputs, dtype)
    absent["ipex"] = "it has gated experts alone"
    return _contest("prefill", shape, NAMES[dtype], weights, inputs, (dtype, torch.float32), contestants, absent)


def _contest(
    group: str,
    shape: Shape,
    dtype: str,
    weights: _Weights,
    inputs: _Inputs,
    products: tuple[torch.dtype, ...],
    contestants: Sequence[Contestant],
    absent: dict[str, str],
) -> Contest:
    used = sum(index.unique().numel() for index, _ in inputs.routings) / len(inputs.routings)
    moved = int(used * weights.expert_bytes) + 2 * inputs.x.nbytes
    names = ("tokens", "hidden_size", "intermediate_size", "num_experts", "top_k")
    return Contest(
        group=group,
        name=shape.name,
        sizes={name: getattr(shape, name) for name in names},
        dtype=dtype,
        work=Work(shape.flops, moved, products),
        rotation=weights.nbytes,
        contestants=contestants,
        yardstick="plain" if dtype in SCHEMES.values() else "eager",
        absent=absent,
        in_a_row=LAYERS if group == "decode" else 1,
    )


def _contestants(
    shape: Shape, weights: _Weights, modules: Sequence[Any], inputs: _Inputs, dtype: torch.dtype
) -> tuple[list[Contestant], dict[str, str]]:
    """KPT with a vendor's kernels and without, transformers' ways, and the dense product; and what is left out."""
    exacts = _exacts(weights, inputs)
    found = _ours(weights, inputs, dtype, exacts)
    absent: dict[str, str] = {}
    for name in ("eager", "grouped_mm", "batched_mm"):
        copied = shape.tokens * shape.top_k * weights.expert_bytes
        if name == "batched_mm" and copied > _MOST_COPIED:
            absent[name] = f"it would copy {copied / 2**30:,.0f} GiB of weights"
            continue
        runs = [partial(_transformers, module, name) for module in modules]
        found.append(_contestant(name, "peer", dtype, inputs, runs, exacts))
    layers = [layer for module in modules for layer in dense_layers(shape, module)]
    x = dense_inputs(shape, inputs.x)
    calls = [partial(dense_forward, x, *layer, gated=shape.gated) for layer in layers]
    exact = dense_forward(x[inputs.rows].double(), *(matrix.double() for matrix in layers[0]), gated=shape.gated)
    found.append(Contestant("dense", "dense", dtype, calls, [Trial(lambda: (calls[0]()[inputs.rows],), (exact,))]))
    return found, absent


def _ours(weights: _Weights, inputs: _Inputs, dtype: torch.dtype, exacts: Sequence[Tensor]) -> list[Contestant]:
    runs = [partial(weights.run, number) for number in range(len(weights.copies))]
    kpt = _contestant("kpt", "kpt", dtype, inputs, runs, exacts)
    trials = [replace(trial, call=in_plain_pytorch(trial.call)) for trial in kpt.trials]
    calls = [in_plain_pytorch(call) for call in kpt.calls]
    return [kpt, replace(kpt, name="plain", role="plain", calls=calls, trials=trials)]


def _contestant(
    name: str,
    role: Role,
    dtype: torch.dtype,
    inputs: _Inputs,
    runs: Sequence[Callable[..., Tensor]],
    exacts: Sequence[Tensor],
) -> Contestant:
    """One that runs on each routing in turn, and on each copy of the weights in turn; the first ones are checked."""
    calls: list[Call] = [
        partial(runs[turn % len(runs)], inputs.x, *routing) for turn, routing in enumerate(inputs.routings)
    ]
    trials = [inputs.trial(runs[turn % len(runs)], turn, exact) for turn, exact in enumerate(exacts)]
    return Contestant(name, role, dtype, calls, trials)


def _exacts(weights: _Weights, inputs: _Inputs) -> list[Tensor]:
    """What the first calls must give: one for each copy of the weights."""
    x = inputs.x[inputs.rows]
    routings = inputs.routings[: len(weights.copies)]
    return [weights.exact(x, *(tensor[inputs.rows] for tensor in routing)) for routing in routings]


def _transformers(module: Any, name: str, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    module.config._experts_implementation = name
    return module(x, index, weights)  # type: ignore[no-any-return]


def _disjoint(shape: Shape, generator: torch.Generator) -> list[tuple[Tensor, Tensor]]:
    """Routings of one token through all experts in turn, none of which two in a row have in common."""
    groups = max(1, shape.num_experts // shape.top_k)
    order = torch.randperm(shape.num_experts, generator=generator)[: groups * shape.top_k].view(groups, 1, shape.top_k)
    weights = torch.rand(groups, 1, shape.top_k, generator=generator)
    weights /= weights.sum(-1, keepdim=True)
    # Twice, shifted by an odd number, so that each group meets both copies of the weights.
    turns = [*range(groups), *((turn + 3) % groups for turn in range(groups))]
    return [(order[turn], weights[turn]) for turn in turns]


def _quantised(shape: Shape, module: Any, scheme: str) -> _Weights:
    up, down = (quantise_weights(matrices, scheme) for matrices in (module.gate_up_proj, module.down_proj))
    (codes, scale), (down_codes, down_scale) = up, down
    second = codes.clone(), down_codes.clone(), scale.clone(), down_scale.clone()
    return _Weights(shape, [(codes, down_codes, scale, down_scale), second])


def _matrix(matrices: Tensor, scale: Tensor | None) -> Callable[[int], Tensor]:
    """What gives an expert's matrix in float64."""
    if scale is None:
        return lambda expert: matrices[expert].double()
    return lambda expert: dequantised(matrices[expert], scale[expert])
