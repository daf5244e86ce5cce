"""What the owner of a model may do for speed, each with the figure that led to it."""

import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kpt_optimize.changes import Changes
from kpt_optimize.measure import synchronize
from kpt_optimize.padding import advise
from kpt_optimize.trial import first_run

from .recipe import FORMATS
from .report import Recommendation
from .steps import FUSED, Situation, convolutions_of

#: Operators of PyTorch that hand a tensor's value to the host.
READS = ("_local_scalar_dense", "nonzero", "is_nonzero", "_unique2", "masked_select")
#: Launching a kernel from PyTorch takes the host this long: below it, the device waits.
LAUNCH_SECONDS = 10e-6


def recommend(situation: Situation) -> tuple[Recommendation, ...]:
    """Look at a model's parameters, its optimiser and, with a sample, a forward in evaluation mode.

    Raises:
        InputError: the model does not run on the sample.
    """
    return (*_of_parameters(situation), *_of_forward(situation), *_of_optimizer(situation))


def _of_parameters(situation: Situation) -> Iterator[Recommendation]:
    model, peaks = situation.model, situation.peaks
    total = sum(p.numel() for p in model.parameters())
    single = sum(p.numel() for p in model.parameters() if p.dtype is torch.float32)
    if single:
        effect = f"{single * 4 / 2**20:.1f} MiB of weights become {single * 2 / 2**20:.1f} MiB"
        if peaks is not None:
            effect += f", and products run at up to {peaks.bf16_tflops:g} TFLOP/s ({peaks.source})"
        yield Recommendation(
            "compute in bfloat16",
            f"{single:,} of {total:,} parameters ({single / total:.0%}) are float32",
            effect,
            "Level 'balanced' tries it within its error budget: weights for inference, torch.autocast for training",
        )
    if awkward := advise(model, torch.bfloat16 if single else None):
        yield Recommendation(
            "pad awkward sizes",
            f"{len(awkward)} matrices have rows that are no multiple of 16 bytes in half precision, the first: "
            f"{awkward[0]}",
            f"matrix units at full rate for {sum(advice.extra_bytes for advice in awkward):,} bytes more",
            "kpt_optimize.padding.pad_model(model) pads linear layers; for others choose sizes that are multiples of "
            f"{awkward[0].multiple}",
        )
    weights = [convolution.weight for convolution in convolutions_of(model)]
    if strided := sum(not weight.is_contiguous(memory_format=FORMATS[weight.dim()]) for weight in weights):
        yield Recommendation(
            "store convolutions channels last",
            f"the weights of {strided} convolution(s) are channels first",
            "convolutions' matrix kernels read channels last, and convert on the fly what is not",
            "model.to(memory_format=torch.channels_last), inputs likewise; step 'channels_last' tries it",
        )


def _of_forward(situation: Situation) -> Iterator[Recommendation]:
    model, sample, device = situation.model, situation.sample, situation.device
    if sample is None:
        return
    times = []
    with Changes(model).evaluating(), torch.no_grad():
        with _Counter() as counter:
            first_run(lambda: sample(model), "sample")
        for _ in range(2):
            start = time.perf_counter()
            sample(model)
            synchronize(device)
            times.append(time.perf_counter() - start)
    if reads := {name: counter.found[name] for name in sorted(READS) if name in counter.found}:
        listed = ", ".join(f"{name} {count}x" for name, count in reads.items())
        yield Recommendation(
            "keep values on the device",
            f"a forward reads tensor values on the host {sum(reads.values())} times ({listed})",
            "no wait for the device at each, and CUDA graphs become possible",
            "Replace .item(), bool(tensor), nonzero and masked indexing by torch.where and fixed sizes",
        )
    operators, seconds = counter.found.total(), min(times)
    each = seconds / max(operators, 1)
    if each < 2 * LAUNCH_SECONDS:
        yield Recommendation(
            "launch fewer kernels",
            f"{operators} operators in {seconds * 1e3:.2f} ms on {device}: {each * 1e6:.1f} µs each, and launching one "
            f"on a GPU takes the host about {LAUNCH_SECONDS * 1e6:.0f} µs",
            "torch.compile fuses them, a CUDA graph launches them at once",
            "Level 'aggressive' tries torch.compile's 'reduce-overhead' and a CUDA graph; a larger batch helps as well",
        )


def _of_optimizer(situation: Situation) -> Iterator[Recommendation]:
    optimizer = situation.optimizer
    if optimizer is None or type(optimizer) not in FUSED or all(g.get("fused") for g in optimizer.param_groups):
        return
    kind = type(optimizer).__name__
    yield Recommendation(
        "fuse the optimiser",
        f"{kind} updates {sum(len(group['params']) for group in optimizer.param_groups)} tensors and is not fused",
        "one kernel for many tensors instead of several for each",
        f"{kind}(..., fused=True); step 'fused_optimizer' tries it",
    )


class _Counter(TorchDispatchMode):
    """Count the operators of PyTorch that run, views included."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))
