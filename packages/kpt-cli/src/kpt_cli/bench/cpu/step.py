"""The contest of a training step: forward and backward of experts."""

from dataclasses import replace
from functools import partial

import torch

from kpt_cli.bench.moe import Shape, transformers_experts
from kpt_cli.bench.training import gradients, make_inputs

from .ceilings import Work
from .contest import Contest, Contestant, Trial, in_plain_pytorch
from .experts import NAMES

#: Tokens on which gradients are compared with float64.
_TOKENS = 64


def step_contest(shape: Shape, dtype: torch.dtype, seed: int) -> Contest:
    """The gradients of tokens, routing weights and parameters.

    Those of a few tokens are compared with float64. KPT's may have 1.5 times the mean error of eager's and 3 times its
    largest: that of the routing weights is another sum than autograd's, of which neither is always the nearer one.
    """
    generator = torch.Generator().manual_seed(seed)
    module = transformers_experts(shape, dtype, generator)
    small = make_inputs(replace(shape, tokens=min(shape.tokens, _TOKENS)), dtype, generator)
    exact = gradients(module.double(), "eager", small.to(torch.float64))
    module.to(dtype)
    inputs = make_inputs(shape, dtype, generator)
    kpt, eager, grouped_mm = (
        Contestant(
            name,
            "kpt" if name == "kpt" else "peer",
            dtype,
            [partial(gradients, module, name, inputs)],
            [Trial(partial(gradients, module, name, small), exact)],
        )
        for name in ("kpt", "eager", "grouped_mm")
    )
    plain = replace(
        kpt,
        name="plain",
        role="plain",
        calls=[in_plain_pytorch(call) for call in kpt.calls],
        trials=[Trial(in_plain_pytorch(trial.call), exact) for trial in kpt.trials],
    )
    weights = sum(parameter.nbytes for parameter in module.parameters())
    names = ("tokens", "hidden_size", "intermediate_size", "num_experts", "top_k")
    return Contest(
        group="step",
        name=shape.name,
        sizes={name: getattr(shape, name) for name in names},
        dtype=NAMES[dtype],
        # Weights are read twice and their gradients written; tokens, output and the gradients of both move once.
        work=Work(3 * shape.flops, 3 * weights + 4 * inputs.x.nbytes, (dtype, torch.float32)),
        rotation=weights,
        contestants=[kpt, plain, eager, grouped_mm],
        yardstick="eager",
        absent={"batched_mm": "it would copy the weights for every pair of token and expert"},
        margins=(1.5, 3.0),
        training=True,
    )
