"""What a call leaves behind: nothing in its arguments, earlier results and torch's settings; the same bits again."""

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import deterministic

from kpt_conformance.comparison import assert_right, assert_same_bits, outputs_of
from kpt_conformance.extent import over
from kpt_conformance.tensors import tensors_of
from kpt_conformance.trial import Trial

_THREADS = 4


@over(dtypes=True)
def inputs_unchanged(trial: Trial) -> None:
    """Neither forward nor backward changes the cotangent or an argument, but those that the op says it mutates."""
    arguments = trial.arguments()
    before = {name: tensor.clone() for name, tensor in tensors_of(arguments).items()}
    pulls: list[tuple[Tensor, Tensor]] = []

    def remember(pull: Tensor) -> Tensor:
        pulls.append((pull, pull.clone()))
        return pull

    trial.run(arguments, cotangent=remember)
    assert_same_bits(before, tensors_of(arguments), "the call changed this argument")
    for pull, copy in pulls:
        assert_same_bits({"cotangent": copy}, {"cotangent": pull}, "backward changed it")


@over()
def no_aliasing(trial: Trial) -> None:
    """The result shares no memory with an argument."""
    arguments = trial.leaves(trial.arguments())
    with torch.no_grad(), trial.subject.chosen():
        outputs = outputs_of(trial.subject.call(arguments))
    for name, out in outputs.items():
        for argument, tensor in tensors_of(arguments).items():
            shared = out.numel() and out.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
            assert not shared, f"{name} shares its memory with {argument}"


@contextmanager
def _poisoned() -> Iterator[None]:
    """Fill memory that is not initialised with NaN."""
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=True)
    deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]


@over(dtypes=True)
def poisoned_outputs(trial: Trial) -> None:
    """Every element of result and gradients is written: memory that was NaN before has none of it afterwards."""
    arguments = trial.arguments()
    with _poisoned(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*determinis.*", UserWarning)
        got = trial.run(arguments)
    trial.assert_right(arguments, got)


@over(models="first", dtypes=True)
def repeatable(trial: Trial) -> None:
    """Repeated calls give the same bits, where that is claimed; references claim it on a CPU."""
    kernel = trial.subject.kernel
    claimed = kernel.deterministic if kernel else trial.subject.device.type == "cpu"
    if not claimed:
        pytest.skip("not claimed")
    arguments = trial.arguments()
    first = trial.run(arguments).named()
    for _ in range(4):
        assert_same_bits(
            first, trial.run(arguments).named(), "repeated runs differ, though it claims to be deterministic"
        )


@over(dtypes=True)
def double_use(trial: Trial) -> None:
    """A second call leaves the first one's result and graph alone; backward can be run twice."""
    arguments, others = trial.arguments(), trial.arguments(seed=1)
    baseline, oracle = trial.truth(arguments)
    with trial.subject.chosen():
        if not trial.differentiable:
            with torch.no_grad():
                first = trial.outputs(trial.leaves(arguments))
                kept = {name: out.clone() for name, out in first.items()}
                trial.outputs(trial.leaves(others))
            assert_same_bits(kept, first, "a second call changed the first one's result")
            return
        leaves = trial.leaves(arguments)
        first = trial.outputs(leaves)
        kept = {name: out.detach().clone() for name, out in first.items()}
        second_leaves = trial.leaves(others)
        second = trial.outputs(second_leaves)
        trial.gradients(second_leaves, second)
        assert_same_bits(
            kept, {n: o.detach() for n, o in first.items()}, "a second call changed the first one's result"
        )
        once = trial.gradients(leaves, first, retain_graph=True)
        kept_once = {name: grad.clone() for name, grad in once.items() if grad is not None}
        twice = trial.gradients(leaves, first)
    got = trial.outcome(first, {**once, **kept_once})
    assert_right(got, baseline, oracle, "backward after another call")
    assert_right(trial.outcome(first, twice), baseline, oracle, "the second backward")
    assert_same_bits(kept_once, {n: g for n, g in once.items() if g is not None}, "the second backward changed it")


@over()
def threads(trial: Trial) -> None:
    """Calls from several Python threads at once don't disturb one another."""
    seeds = range(_THREADS)
    prepared = [(arguments := trial.arguments(seed), trial.truth(arguments)) for seed in seeds]
    faults: list[str] = []
    start = threading.Barrier(_THREADS)

    def work(seed: int) -> None:
        arguments, (baseline, oracle) = prepared[seed]
        try:
            start.wait()
            for _ in range(3):
                assert_right(trial.run(arguments), baseline, oracle)
        except Exception as error:  # the thread's own failure must reach the test
            faults.append(f"thread {seed}: {type(error).__name__}: {error}")

    workers = [threading.Thread(target=work, args=(seed,)) for seed in seeds]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not faults, "\n".join(faults)


def _settings(device: torch.device) -> dict[str, Any]:
    """What torch keeps for the whole thread or process."""
    module: Any = getattr(torch, device.type, None)
    generator = getattr(module, "get_rng_state", None)
    return {
        "the CPU's random numbers": torch.get_rng_state().tolist(),
        "the device's random numbers": generator(device).tolist() if generator else None,
        "the default dtype": torch.get_default_dtype(),
        "the default device": torch.get_default_device(),
        "the current device": module.current_device() if hasattr(module, "current_device") else None,
        "grad mode": torch.is_grad_enabled(),
        "autocast": torch.is_autocast_enabled(device.type),
        "deterministic algorithms": torch.get_deterministic_debug_mode(),
        "the precision of float32 products": torch.get_float32_matmul_precision(),
        "the number of threads": torch.get_num_threads(),
    }


@over()
def settings(trial: Trial) -> None:
    """Forward and backward leave torch's settings and random numbers alone, and need no default dtype of float32."""
    arguments = trial.arguments()
    before = _settings(trial.subject.device)
    trial.run(arguments)
    after = _settings(trial.subject.device)
    changed = [name for name in before if before[name] != after[name]]
    assert not changed, f"the call changed {' and '.join(changed)}"
    # As in layers that are built in their model's dtype.
    torch.set_default_dtype(torch.bfloat16)
    try:
        got = trial.run(arguments)
    finally:
        torch.set_default_dtype(before["the default dtype"])
    trial.assert_right(arguments, got, "with bfloat16 as the default dtype")
