"""The device of a run: its clock, whether it still answers, and our backend on it."""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from kpt_core import Backend, Kernel
from kpt_core.registry import add_backend, remove_backend

from .plan import Plan

Stage = Callable[[Any], Any]
#: Bytes that are written before each call that is timed, so that nothing of the last one is left in a cache.
_FLUSHED = 256 * 2**20


class Machine:
    """The device that a plan names.

    Args:
        plan: what the worker was told.

    Raises:
        SystemExit: there is no such device.
    """

    def __init__(self, plan: Plan) -> None:
        if plan.device == "cuda" and not torch.cuda.is_available():
            raise SystemExit("no CUDA device is seen; `--device cpu --tiny` tries this program without one")
        self.plan = plan
        self.device = torch.device("cuda", 0) if plan.device == "cuda" else torch.device("cpu")
        self.interpreted = plan.device == "cpu"
        if self.interpreted:
            from kpt_conformance.interpreter import prepare_once

            prepare_once()
        self._flushed = None
        if self.device.type == "cuda":
            self._flushed = torch.empty(_FLUSHED, dtype=torch.uint8, device=self.device)

    def dtype(self, wanted: torch.dtype) -> torch.dtype:
        """The dtype, or float32 where Triton's interpreter gets its products wrong."""
        return torch.float32 if self.interpreted and wanted is torch.bfloat16 else wanted

    def alive(self) -> bool:
        """Whether the device still answers: after an access to memory that is not there it never does again."""
        if self.device.type == "cpu":
            return True
        try:
            torch.cuda.synchronize()
            return bool(torch.ones(2, device=self.device).sum() == 2)
        except RuntimeError:
            return False

    def wait(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    @contextmanager
    def served(self) -> Iterator[None]:
        """Have dispatch choose the nvidia backend's kernels, also on a CPU, where a stand-in offers the same ones."""
        if self.device.type == "cuda":
            yield
            return
        stand_in = _OnCPU()
        add_backend(stand_in)
        try:
            yield
        finally:
            remove_backend(stand_in.name)

    def stages(self, stages: Sequence[Stage]) -> list[float]:
        """Seconds of calls, each of which is given what the one before gave; caches are cold when the first begins."""
        if self._flushed is not None:
            self._flushed.zero_()
        marks = [self._mark()]
        value: Any = None
        for stage in stages:
            value = stage(value)
            marks.append(self._mark())
        self.wait()
        return [_between(first, last) for first, last in pairwise(marks)]

    def _mark(self) -> Any:
        if self.device.type == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def interleaved(
        self, contest: Mapping[str, Sequence[Stage]], seconds: float, turn: Callable[[int], None] = lambda turn: None
    ) -> dict[str, list[list[float]]]:
        """Time several things in turn, so that a change of the machine's state meets all of them.

        Args:
            contest: stages by name.
            seconds: about how long to measure in all.
            turn: called before each round with its number, for instance to change the inputs.

        Returns:
            For each name the seconds of all rounds, a list for each stage.
        """
        names = list(contest)
        taken: dict[str, list[list[float]]] = {name: [] for name in names}
        least, most = (1, 2) if self.plan.tiny else (7, 100)
        for _ in range(1 if self.plan.tiny else 2):
            turn(0)
            start = time.perf_counter()
            for name in names:
                self.stages(contest[name])
            estimate = time.perf_counter() - start
        for number in range(max(least, min(most, int(seconds / max(estimate, 1e-9))))):
            turn(number)
            first = number % len(names)
            for name in names[first:] + names[:first]:
                taken[name].append(self.stages(contest[name]))
        return {name: [list(stage) for stage in zip(*rounds, strict=True)] for name, rounds in taken.items()}

    def copy_bandwidth(self) -> float:
        """Bytes that the device reads and writes in a second when it copies."""
        size = 2**30 if self.device.type == "cuda" else 2**22
        source = torch.ones(size, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        rounds = self.interleaved({"copy": [lambda _: target.copy_(source)]}, seconds=0.5)["copy"][0]
        return 2 * size / statistics.median(rounds)

    def captured(self, call: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """A CUDA graph of a call: each replay gives the tensor that the call gave, computed anew.

        Raises:
            RuntimeError: the call can't be captured.
        """
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                call()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = call()

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay


def _between(first: Any, last: Any) -> float:
    if isinstance(first, float):
        return float(last - first)
    return float(first.elapsed_time(last)) / 1e3


class _OnCPU(Backend):
    """The nvidia backend's kernels, offered to the CPU, where Triton interprets them."""

    name = "nvidia_interpreted"
    device_types = ("cpu",)

    def capabilities(self, device: torch.device) -> frozenset[str]:
        """Whatever a kernel asks for."""
        return frozenset().union(*(kernel.requires for kernel in self.kernels()))

    def kernels(self) -> tuple[Kernel, ...]:
        """The nvidia backend's."""
        from kpt_backend_nvidia import BACKEND

        return BACKEND.kernels()
