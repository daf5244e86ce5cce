"""What only an accelerator shows: waiting, graphs, streams, a second device, memory past 2**31 elements."""

import inspect
import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kpt_conformance.comparison import assert_right
from kpt_conformance.extent import over
from kpt_conformance.tensors import cotangent_like, tensors_of, with_tensors
from kpt_conformance.trial import Trial
from kpt_core import KptError
from kpt_core.contract import TORCH
from kpt_optimize.cases import Arguments

#: Cycles that a stream is kept busy, some ten milliseconds: longer than a kernel that does not wait for it.
_BUSY = 20_000_000
_PAST_INT32 = 2**31 + 2**16
#: Copies of the result that the kernel and the reference may need.
_COPIES = 8


def _cuda(trial: Trial) -> Any:
    """`torch.cuda`, where the subject runs on its devices."""
    if trial.subject.device.type != "cuda" or not torch.cuda.is_available():
        pytest.skip("absent: no CUDA device runs this")
    return torch.cuda


def _may_wait(trial: Trial) -> None:
    if trial.subject.backend == TORCH:
        pytest.skip("a kernel in plain PyTorch may wait for the device: torch's own grouped product does on some")


@over(references=False)
def no_host_sync(trial: Trial) -> None:
    """From the second call on, neither forward nor backward makes the host wait for the device."""
    cuda = _cuda(trial)
    _may_wait(trial)
    arguments = trial.arguments()
    trial.run(arguments)
    leaves = trial.leaves(arguments)
    wanted = [t for n, t in tensors_of(leaves).items() if trial.differentiable and trial.wants_gradient(n, t)]
    with trial.subject.chosen(), torch.set_grad_enabled(trial.differentiable):
        outputs = _without_waiting(cuda, lambda: trial.outputs(leaves))
        pulled = [out for out in outputs.values() if out.requires_grad]
        pulls = [cotangent_like(out) for out in pulled]
        if pulled:
            _without_waiting(cuda, lambda: torch.autograd.grad(pulled, wanted, pulls, allow_unused=True))


def _without_waiting(cuda: Any, call: Any) -> Any:
    cuda.synchronize()
    before = cuda.get_sync_debug_mode()
    cuda.set_sync_debug_mode("error")
    try:
        return call()
    except RuntimeError as error:
        raise AssertionError(f"the host waits for the device: {error}") from error
    finally:
        cuda.set_sync_debug_mode(before)


@over(references=False)
def graph_capture(trial: Trial) -> None:
    """A forward that a CUDA graph captured computes anew, from what its arguments hold when it is replayed."""
    cuda = _cuda(trial)
    _may_wait(trial)
    arguments, others = trial.arguments(), trial.arguments(seed=1)
    if trial.subject.op.mutates:
        pytest.skip("the warm-up would change what it mutates")
    static = with_tensors(arguments, lambda name, tensor: tensor.clone())
    stream, graph = cuda.Stream(), cuda.CUDAGraph()
    with torch.no_grad(), trial.subject.chosen():
        stream.wait_stream(cuda.current_stream())
        with cuda.stream(stream):
            for _ in range(3):
                trial.outputs(static)
        cuda.current_stream().wait_stream(stream)
        with cuda.graph(graph):
            outputs = trial.outputs(static)
    for values in (others, arguments):
        if any(t.shape != tensors_of(static)[n].shape for n, t in tensors_of(values).items()):
            continue
        for name, tensor in tensors_of(values).items():
            tensors_of(static)[name].copy_(tensor)
        graph.replay()
        cuda.synchronize()
        plain = trial.forward_only()
        plain.assert_right(values, trial.outcome(outputs, {}), "replayed from a graph")


@over(references=False)
def other_streams(trial: Trial) -> None:
    """It runs on the current stream: arguments that are still being written there are waited for."""
    cuda = _cuda(trial)
    arguments = trial.arguments()
    want = trial.truth(arguments)
    trial.run(arguments)  # what is compiled at the first call takes longer than the stream is busy
    late = with_tensors(arguments, lambda name, tensor: torch.zeros_like(tensor))
    stream = cuda.Stream()
    cuda.synchronize()
    with cuda.stream(stream):
        cuda._sleep(_BUSY)
        for name, tensor in tensors_of(late).items():
            tensor.copy_(tensors_of(arguments)[name])
        got = trial.run(late)
    cuda.synchronize()
    assert_right(got, *want, "on another stream")


@over(references=False)
def second_device(trial: Trial) -> None:
    """Arguments on another device than the current one are computed there."""
    cuda = _cuda(trial)
    if cuda.device_count() < 2:
        pytest.skip("absent: there is one CUDA device")
    index = (trial.subject.device.index or 0) + 1
    there = replace(trial, subject=replace(trial.subject, device=torch.device("cuda", index % cuda.device_count())))
    arguments, current = there.arguments(), cuda.current_device()
    got = there.run(arguments)
    assert cuda.current_device() == current, f"the current device is {cuda.current_device()} after the call"
    for name, out in got.named().items():
        assert out.device == there.subject.device, f"{name} is on {out.device}; expected {there.subject.device}"
    there.assert_right(arguments, got, f"on {there.subject.device}")


@over(dtypes=True, references=False)
def past_int32(trial: Trial) -> None:
    """A result of more than 2**31 elements is right at both ends."""
    cuda = _cuda(trial)
    if trial.case is not trial.table.cases[0] or trial.dtype.itemsize > 2:
        pytest.skip("the first case in half precision is tried")
    sizes = _large_sizes(trial)
    if sizes is None:
        pytest.skip("no two sizes of the case multiply to the result's")
    free, _ = cuda.mem_get_info(trial.subject.device)
    if free < _COPIES * _PAST_INT32 * trial.dtype.itemsize:
        pytest.skip(f"absent: {free / 2**30:.0f} GiB are free; the result and its copies take more")
    large = replace(trial, case=replace(trial.case, sizes={**trial.case.sizes, **sizes}))
    arguments = large.table.arguments(large.case, dtype=trial.dtype, device=trial.subject.device)
    if large.subject.refusal(arguments) is not None:
        pytest.skip(f"refused: {large.subject.refusal(arguments)}")
    with torch.no_grad(), trial.subject.chosen():
        got = _ends(trial.outputs(arguments))
    with torch.no_grad():
        want = _ends({"result": trial.subject.op.reference(**arguments)})
    for found, expected in zip(got, want, strict=True):
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


def _ends(outputs: dict[str, Tensor]) -> list[Tensor]:
    """The first rows and the last of the largest result."""
    largest = max(outputs.values(), key=lambda out: out.numel()).flatten()
    return [largest[: 2**16].clone(), largest[-(2**16) :].clone()]


def _large_sizes(trial: Trial) -> dict[str, int] | None:
    """Two sizes of the case, raised so that the result has more than 2**31 elements and no argument a tenth of them."""
    given = {n: trial.case.sizes.get(n, p.default) for n, p in inspect.signature(trial.table.build).parameters.items()}
    numbers = {name: size for name, size in given.items() if type(size) is int and size > 1}

    def elements(sizes: dict[str, int]) -> tuple[int, int]:
        """Of the result, and of all arguments."""
        case = replace(trial.case, sizes={**trial.case.sizes, **sizes})
        arguments: Arguments = trial.table.arguments(case, dtype=trial.dtype)
        with torch.no_grad():
            result = trial.subject.op(**with_tensors(arguments, lambda name, tensor: tensor.to("meta")))
        total = sum(tensor.numel() for tensor in tensors_of(arguments).values())
        return max(out.numel() for out in torch.utils._pytree.tree_leaves(result)), total

    plain, _ = elements({})
    for pair in itertools.combinations(numbers, 2):
        try:
            doubled, arguments = elements({name: 4 * numbers[name] for name in pair})
        except KptError:
            continue
        if doubled == 16 * plain and arguments < 16 * plain * 4:
            factor = math.ceil(math.sqrt(_PAST_INT32 / plain))
            return {name: factor * numbers[name] for name in pair}
    return None
