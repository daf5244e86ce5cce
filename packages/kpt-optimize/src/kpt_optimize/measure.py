"""Measuring two ways of doing one thing, fairly on a noisy machine."""

import math
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from kpt_core import backends

#: Twice the standard error that a settled gain has at most, as a share of it.
SETTLED = 0.05
#: Twice the standard error, as a share of a figure, past which the figure is not shown.
UNSTEADY = 0.2
#: What is called better, worse and equal.
_WORDS = {"faster": ("faster", "slower", "as fast"), "smaller": ("smaller", "larger", "as large")}

#: Share of the processors that other programs may take before figures are those of a busy machine.
BUSY = 0.1
AGAIN = "the machine is busy: measure again when it does nothing else"


class Load:
    """How much of the machine's processors other programs take, from when it is made."""

    def __init__(self) -> None:
        self._start = _processor_seconds()

    def others(self) -> float | None:
        """Their share of all processors, 0 to 1; None where the system does not tell, or after less than 50 ms."""
        wall, everyone, own = (now - then for now, then in zip(_processor_seconds(), self._start, strict=True))
        if not everyone or wall < 0.05:
            return None
        return min(max((everyone - own) / (wall * (os.cpu_count() or 1)), 0.0), 1.0)

    def note(self, *, noisy: bool = False) -> str:
        """Return what to say of figures that were measured meanwhile: nothing unless the machine is busy.

        A figure that is too noisy tells it too, also where the system does not tell what other programs take.
        """
        share = self.others()
        if share is None or share < BUSY:
            return AGAIN if noisy else ""
        return f"{AGAIN} (other programs took {share:.0%} of its processors)"


def _processor_seconds() -> tuple[float, float, float]:
    """Seconds of the clock, of processors for all programs (0 where that is unknown), and for this one."""
    everyone = 0.0
    with suppress(OSError):
        user, nice, system, _, _, *interrupts = map(int, Path("/proc/stat").read_text().split(maxsplit=9)[1:9])
        everyone = (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")
    times = os.times()
    return times.elapsed, everyone, sum(times[:4])


def device_of(module: nn.Module) -> torch.device:
    """Return where a module's first parameter or buffer lives."""
    tensor = next(iter((*module.parameters(), *module.buffers())), None)
    return tensor.device if tensor is not None else torch.device("cpu")


def synchronize(device: torch.device) -> None:
    """Wait for the device, as the backend that it is of does: XLA's devices run nothing before. Nothing on a CPU."""
    if device.type in ("cpu", "meta"):
        return
    for backend in backends().values():
        if device.type in backend.device_types:
            backend.synchronize(device)
            return
    torch.accelerator.synchronize(device)


def interleaved_times(
    functions: Sequence[Callable[[], object]], device: torch.device, seconds: float = 0.6, rounds: int | None = None
) -> list[list[float]]:
    """Time several functions in turn, so that a change of the machine's load meets all of them.

    They begin rounds in turn, and the others follow in another order every time: what runs before leaves its mark on
    caches and sleeping threads.

    Args:
        functions: called without arguments, each once a round after two rounds of warm-up.
        device: waited for before the clock is read.
        seconds: about how long to measure in all; at least five rounds are run, at most two hundred.
        rounds: how many rounds to run instead.

    Returns:
        Seconds of each round, a list for each function.
    """
    times: list[list[float]] = [[] for _ in functions]
    orders = random.Random(0)

    def run_all(turn: int) -> list[tuple[int, float]]:
        taken = []
        first = turn % len(functions)
        others = [index for index in range(len(functions)) if index != first]
        orders.shuffle(others)
        for index in (first, *others):
            synchronize(device)
            start = time.perf_counter()
            functions[index]()
            synchronize(device)
            taken.append((index, time.perf_counter() - start))
        return taken

    run_all(0)
    estimate = sum(taken for _, taken in run_all(0))
    for turn in range(rounds or max(5, min(200, int(seconds / max(estimate, 1e-9))))):
        for index, taken in run_all(turn):
            times[index].append(taken)
    return times


def settled_times(
    functions: Sequence[Callable[[], object]], device: torch.device, seconds: float = 0.6
) -> list[list[float]]:
    """Time two functions in turn until their ratio is known, at most five times as long as `interleaved_times` does.

    It is known to 5%, or further from 1 than chance explains (six standard errors). What would count as a gain does not
    end it: looking again until there is one would find one.
    """
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(5):
        for collected, more in zip(times, interleaved_times(functions, device, seconds), strict=True):
            collected += more
        gain, noise = gain_of(*times)
        if 2 * noise <= SETTLED * gain or abs(gain - 1) > 6 * noise:
            break
    return times


def gain_of(before: Sequence[float], after: Sequence[float]) -> tuple[float, float]:
    """Return how much faster `after` is, and the noise of that figure.

    Args:
        before: seconds of each round.
        after: seconds of the same rounds.

    Returns:
        The median of the rounds' ratios, and its standard error (from the median absolute deviation), relative to 1.
    """
    return median_of([a / b for a, b in zip(before, after, strict=True)])


def median_of(values: Sequence[float]) -> tuple[float, float]:
    """Return the median of some values, and its standard error from the median absolute deviation."""
    median = statistics.median(values)
    spread = statistics.median(abs(value - median) for value in values)
    return median, 1.86 * spread / len(values) ** 0.5


def noise_share(figure: float, error: float) -> float:
    """Return twice the standard error of a figure as a share of it: what stands behind ±."""
    return 2 * error / figure if figure else math.inf


def describe_gain(gain: float | None, noise: float, what: str = "faster") -> str:
    """Return a gain in words, such as `1.19x slower (±2.5%)`; `too noisy` without the figure where chance may make it.

    Args:
        gain: seconds (or bytes) before / after; None if it is too noisy to be told.
        noise: twice its standard error, as a share of it; 0 where it is exact.
        what: `faster` of times, `smaller` of bytes.
    """
    better, worse, same = _WORDS[what]
    if gain is None:
        return f"too noisy (±{noise:.0%})"
    word = better if gain * (1 - noise) > 1 else worse if gain * (1 + noise) < 1 else same
    if noise > UNSTEADY:
        return f"{'' if word == same else f'{word}, but '}too noisy for a figure (±{noise:.0%})"
    given = f" (±{noise:.1%})" if noise else ""
    times = max(gain, 1 / gain)
    return f"{word}{given}" if word == same else f"{times:.{2 if times >= 1.005 else 4}f}x {word}{given}"


def relative_error(after: Any, before: Any) -> float:
    """Return `max |after - before| / max |before|` of the numbers of two outputs; inf if they don't match.

    Numbers are floating and complex tensors, those in dataclasses too.
    """
    got, wanted = _leaves(after), _leaves(before)
    if len(got) != len(wanted):
        return math.inf
    return max((_error(a, b) for a, b in zip(got, wanted, strict=True) if _is_floating(b)), default=0.0)


def rounding(output: Any) -> float:
    """Return the relative error that the coarsest dtype of an output explains, if only the order of sums differs.

    An intermediate result that is rounded is off by at most half an `eps`. Four `eps` are eight of them in one
    direction, or many more that partly cancel: 3.1e-2 in bfloat16, 3.9e-3 in float16, 4.8e-7 in float32.
    """
    leaves = [leaf for leaf in _leaves(output) if _is_floating(leaf)]
    return 4 * max((torch.finfo(leaf.dtype).eps for leaf in leaves), default=0.0)


def has_numbers(output: Any) -> bool:
    """Tell whether an output has numbers that `relative_error` compares."""
    return any(map(_is_floating, _leaves(output)))


def _is_floating(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def _error(after: object, before: Tensor) -> float:
    if not isinstance(after, Tensor) or after.shape != before.shape:
        return math.inf
    a, b = after.double(), before.double()
    # Equal infinities, as of masked scores, are no error, though their difference is NaN.
    differs = (a != b) & ~(a.isnan() & b.isnan())
    if not differs.any():
        return 0.0
    difference = (a - b)[differs].abs().max().item()
    # An infinity is no scale: any error would vanish beside it.
    scale = b.where(b.isfinite(), 0).abs().max().item()
    return math.inf if math.isnan(difference) else difference / max(scale, 1e-30)


def _plain(output: Any) -> Any:
    """The tensors of a model's output that are compared: not the cache that Hugging Face models return."""
    if hasattr(output, "logits"):
        return output.logits
    if hasattr(output, "last_hidden_state"):
        return output.last_hidden_state
    return output


def _leaves(output: Any) -> list[Any]:
    """List what an output holds; complex tensors as pairs of real ones, and dataclasses, of which torch knows none."""
    found: list[Any] = []
    for leaf in tree_leaves(_plain(output)):
        if isinstance(leaf, Tensor):
            found.append(torch.view_as_real(leaf.resolve_conj()) if leaf.is_complex() else leaf)
        elif is_dataclass(leaf):
            found += _leaves([getattr(leaf, each.name) for each in fields(leaf)])
        else:
            found.append(leaf)
    return found


def parameter_bytes(module: nn.Module) -> int:
    """Count bytes of distinct parameters and buffers; of tensors that wrap others, as quantised ones do, of those."""
    tensors = (each for whole in (*module.parameters(), *module.buffers()) for each in _in_memory(whole))
    return sum(dict(map(_storage, tensors)).values())


def _storage(tensor: Tensor) -> tuple[int, int]:
    """Return what tells a tensor's memory from others', and its bytes; tensors on `xla` tell nothing of theirs."""
    if tensor.device.type == "xla":
        return id(tensor), tensor.nbytes
    storage = tensor.untyped_storage()
    return storage.data_ptr() or id(tensor), storage.nbytes()


def _in_memory(tensor: Any) -> Iterator[Tensor]:
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()
    for name in names:
        yield from _in_memory(getattr(tensor, name))
