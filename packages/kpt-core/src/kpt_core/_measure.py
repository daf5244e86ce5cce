"""Measuring two ways of doing one thing, fairly on a noisy machine."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


def synchronize(device: torch.device) -> None:
    """Wait for the device; nothing on a CPU."""
    if device.type not in ("cpu", "meta"):
        torch.accelerator.synchronize(device)


def interleaved_medians(
    before: Callable[[], object], after: Callable[[], object], device: torch.device, seconds: float = 0.6
) -> tuple[float, float, float]:
    """Median seconds of `before` and `after`, run in turn so that a change of the machine's load meets both.

    Args:
        before: called without arguments.
        after: likewise.
        device: waited for before the clock is read.
        seconds: about how long to measure; at least five rounds are run, at most two hundred.

    Returns:
        Median of `before`, median of `after`, and the noise: the standard error of the median of the per-round ratios,
        relative. A gain smaller than twice the noise is no gain.
    """

    def run(function: Callable[[], object]) -> float:
        synchronize(device)
        start = time.perf_counter()
        function()
        synchronize(device)
        return time.perf_counter() - start

    run(before), run(after)
    estimate = run(before) + run(after)
    rounds = max(5, min(200, int(seconds / max(estimate, 1e-9))))
    times = [(run(before), run(after)) if i % 2 else tuple(reversed((run(after), run(before)))) for i in range(rounds)]
    first, second = (list(column) for column in zip(*times, strict=True))
    ratios = [a / b for a, b in times]
    spread = statistics.median(abs(r - statistics.median(ratios)) for r in ratios)
    return statistics.median(first), statistics.median(second), 1.86 * spread / rounds**0.5


def relative_error(after: Any, before: Any) -> float:
    """`max |after - before| / max |before|` over all floating tensors of two outputs; inf where they don't match."""
    worst = 0.0
    pairs = list(zip(tree_leaves(_plain(after)), tree_leaves(_plain(before)), strict=True))
    for a, b in pairs:
        if not isinstance(b, Tensor) or not b.is_floating_point():
            continue
        if not isinstance(a, Tensor) or a.shape != b.shape:
            return float("inf")
        if b.numel() == 0:
            continue
        difference = (a.double() - b.double()).abs().max().item()
        scale = b.double().abs().max().item()
        error = 0.0 if difference == 0 else difference / max(scale, 1e-30)
        worst = max(worst, error if error == error else float("inf"))
    return worst


def _plain(output: Any) -> Any:
    """The tensors of a model's output that are compared: not the cache that Hugging Face models return."""
    if hasattr(output, "logits"):
        return output.logits
    if hasattr(output, "last_hidden_state"):
        return output.last_hidden_state
    return output


def parameter_bytes(module: nn.Module) -> int:
    """Bytes of distinct parameters and buffers."""
    storages = {
        t.untyped_storage().data_ptr() or id(t): t.untyped_storage().nbytes()
        for t in (*module.parameters(), *module.buffers())
    }
    return sum(storages.values())
