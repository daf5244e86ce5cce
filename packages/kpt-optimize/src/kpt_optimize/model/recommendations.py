"""What the owner of a model may do for speed, each with the figure that led to it."""

import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from kpt_optimize.accelerator.devices import Peaks
from kpt_optimize.padding import advise
from kpt_optimize.trial import Example, first_run

from .steps import FUSED, convolutions_of

#: Operators of PyTorch that hand a tensor's value to the host.
READS = ("_local_scalar_dense", "nonzero", "is_nonzero", "_unique2", "masked_select")
#: Launching a kernel from PyTorch takes the host this long: below it, the device waits.
LAUNCH_SECONDS = 10e-6


@dataclass(frozen=True, slots=True)
class Recommendation:
    """One thing to do.

    Attributes:
        what: to do.
        why: with the figure that led to it.
        effect: what to expect.
        how: to do it.
    """

    what: str
    why: str
    effect: str
    how: str

    def __str__(self) -> str:
        return f"{self.what}: {self.why}; {self.effect}. {self.how}"


@dataclass(frozen=True, slots=True)
class Profile:
    """A forward, counted.

    Attributes:
        operators: of PyTorch that ran, views included.
        reads: of tensor values by the host, by operator.
        seconds: of a forward, the better of two.
    """

    operators: int
    reads: dict[str, int]
    seconds: float


def profile(model: nn.Module, sample: Example, device: torch.device) -> Profile:
    """Count what a forward in evaluation mode does.

    Raises:
        InputError: the model does not run on the sample.
    """
    with torch.no_grad():
        with _Counter() as counter:
            first_run(lambda: sample(model), "sample")
        times = []
        for _ in range(2):
            start = time.perf_counter()
            sample(model)
            if device.type != "cpu":
                torch.accelerator.synchronize(device)
            times.append(time.perf_counter() - start)
    reads = {name: count for name, count in counter.names.items() if name in READS}
    return Profile(sum(counter.names.values()), reads, min(times))


def recommend(
    model: nn.Module,
    device: torch.device,
    found: Profile | None,
    optimizer: Optimizer | None = None,
    peaks: Peaks | None = None,
) -> tuple[Recommendation, ...]:
    """Look at a model's parameters, its profile and its optimiser.

    Args:
        model: looked at.
        device: where it runs.
        found: of a forward; None gives what can be told without.
        optimizer: of its training.
        peaks: of the device, if its vendor's data sheet is known.
    """
    given = (
        _precision(model, peaks),
        _sizes(model),
        _memory_format(model),
        _reads(found),
        _launches(found, device),
        _fusion(optimizer),
    )
    return tuple(recommendation for recommendation in given if recommendation is not None)


class _Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def _precision(model: nn.Module, peaks: Peaks | None) -> Recommendation | None:
    parameters = list(model.parameters())
    single = sum(p.numel() for p in parameters if p.dtype is torch.float32)
    if not single:
        return None
    share = single / sum(p.numel() for p in parameters)
    effect = f"{single * 4 / 2**20:.1f} MiB of weights become {single * 2 / 2**20:.1f} MiB"
    if peaks is not None:
        effect += f", and products run at up to {peaks.bf16_tflops:g} TFLOP/s ({peaks.source})"
    return Recommendation(
        "compute in bfloat16",
        f"{single:,} of {sum(p.numel() for p in parameters):,} parameters ({share:.0%}) are float32",
        effect,
        "Level 'balanced' tries it within its error budget: weights for inference, torch.autocast for training",
    )


def _sizes(model: nn.Module) -> Recommendation | None:
    awkward = advise(model, torch.bfloat16 if any(p.dtype is torch.float32 for p in model.parameters()) else None)
    if not awkward:
        return None
    first = awkward[0]
    return Recommendation(
        "pad awkward sizes",
        f"{len(awkward)} matrices have rows that are no multiple of 16 bytes in half precision, the first: {first}",
        f"matrix units at full rate for {sum(advice.extra_bytes for advice in awkward):,} bytes more",
        "kpt_optimize.padding.pad_model(model) pads linear layers; for others choose sizes that are multiples of "
        f"{first.multiple}",
    )


def _memory_format(model: nn.Module) -> Recommendation | None:
    strided = [
        convolution
        for convolution in convolutions_of(model)
        for form in [torch.channels_last if convolution.weight.dim() == 4 else torch.channels_last_3d]
        if not convolution.weight.is_contiguous(memory_format=form)
    ]
    if not strided:
        return None
    return Recommendation(
        "store convolutions channels last",
        f"the weights of {len(strided)} convolution(s) are channels first",
        "convolutions' matrix kernels read channels last, and convert on the fly what is not",
        "model.to(memory_format=torch.channels_last), inputs likewise; step 'channels_last' tries it",
    )


def _reads(found: Profile | None) -> Recommendation | None:
    if found is None or not found.reads:
        return None
    listed = ", ".join(f"{name} {count}x" for name, count in sorted(found.reads.items()))
    return Recommendation(
        "keep values on the device",
        f"a forward reads tensor values on the host {sum(found.reads.values())} times ({listed})",
        "no wait for the device at each, and CUDA graphs become possible",
        "Replace .item(), bool(tensor), nonzero and masked indexing by torch.where and fixed sizes",
    )


def _launches(found: Profile | None, device: torch.device) -> Recommendation | None:
    if found is None:
        return None
    each = found.seconds / max(found.operators, 1)
    if each >= 2 * LAUNCH_SECONDS:
        return None
    return Recommendation(
        "launch fewer kernels",
        f"{found.operators} operators in {found.seconds * 1e3:.2f} ms on {device}: {each * 1e6:.1f} µs each, and "
        f"launching one on a GPU takes the host about {LAUNCH_SECONDS * 1e6:.0f} µs",
        "torch.compile fuses them, a CUDA graph launches them at once",
        "Level 'aggressive' tries torch.compile's 'reduce-overhead' and a CUDA graph; a larger batch helps as well",
    )


def _fusion(optimizer: Optimizer | None) -> Recommendation | None:
    if type(optimizer) not in FUSED or optimizer is None or all(group.get("fused") for group in optimizer.param_groups):
        return None
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    return Recommendation(
        "fuse the optimiser",
        f"{type(optimizer).__name__} updates {count} tensors and is not fused",
        "one kernel for many tensors instead of several for each",
        f"{type(optimizer).__name__}(..., fused=True); step 'fused_optimizer' tries it",
    )
