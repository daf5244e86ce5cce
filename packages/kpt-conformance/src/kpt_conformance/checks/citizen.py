"""What a call leaves of itself in the process: no setting changed, no memory kept."""

import gc
import itertools
import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from kpt_conformance.extent import over
from kpt_conformance.interpreter import interpreting
from kpt_conformance.tensors import noted_in, require_addresses, tensors_of
from kpt_conformance.trial import Trial
from kpt_optimize.cases import Arguments

_CALLS = 4
_SEED = 20_261


def _arithmetic() -> list[float]:
    """Sums and products that denormals and the direction of rounding decide, of Python's and of torch."""
    tiny, one = torch.tensor([1e-40, 1.0]), torch.ones(1)
    return [*(tiny * 0.5).tolist(), *(one / 3).tolist(), *(-one / 3).tolist(), sys.float_info.min * tiny[1].item() / 2]


def _process(device: torch.device) -> dict[str, Any]:
    """What torch, Python and NumPy keep for the whole thread or process."""
    module: Any = getattr(torch, device.type, None)
    generator = getattr(module, "get_rng_state", None)
    numpy: Any = sys.modules.get("numpy")
    return {
        "torch's random numbers": torch.get_rng_state().tolist(),
        "the device's random numbers": generator(device).tolist() if generator else None,
        "Python's random numbers": random.getstate(),
        "NumPy's random numbers": str(numpy.random.get_state(legacy=False)) if numpy else None,
        "what NumPy does about errors": numpy.geterr() if numpy else None,
        "how denormals and halves are rounded": _arithmetic(),
        "the default dtype": torch.get_default_dtype(),
        "the default device": torch.get_default_device(),
        "the current device": module.current_device() if hasattr(module, "current_device") else None,
        "the current stream": module.current_stream() if hasattr(module, "current_stream") else None,
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled(device.type),
        "deterministic algorithms": torch.get_deterministic_debug_mode(),
        "the precision of float32 products": torch.get_float32_matmul_precision(),
        "the number of threads": torch.get_num_threads(),
        "filters of warnings": list(warnings.filters),
        "mkldnn": torch.backends.mkldnn.enabled,
        "cudnn": (torch.backends.cudnn.enabled, torch.backends.cudnn.benchmark),
        "the search for anomalies": torch.is_anomaly_enabled(),
        "the environment": dict(os.environ),
        "the working directory": os.getcwd(),
        "handlers of signals": [signal.getsignal(number) for number in sorted(signal.valid_signals())],
    }


@contextmanager
def _unusual(device: torch.device) -> Iterator[None]:
    """Settings that no kernel would make, so that one which was made before is made again; put back afterwards."""
    state, threads, denormals = random.getstate(), torch.get_num_threads(), _arithmetic()[0] != 0
    numpy: Any = sys.modules.get("numpy")
    of_numpy = numpy.random.get_state() if numpy else None
    apart = device.type != "cpu" and hasattr(getattr(torch, device.type, None), "get_rng_state")
    fork = torch.random.fork_rng([device] if apart else [], device_type=device.type if apart else "cuda")
    with fork, torch.enable_grad():
        try:
            torch.manual_seed(_SEED)
            random.seed(_SEED)
            if numpy:
                numpy.random.seed(_SEED)
            torch.set_num_threads(threads + 1)
            torch.set_flush_denormal(False)
            yield
        finally:
            random.setstate(state)
            torch.set_num_threads(threads)
            torch.set_flush_denormal(not denormals)
            if numpy:
                numpy.random.set_state(of_numpy)


@over()
def process_state(trial: Trial) -> None:
    """Calls leave random generators, rounding, torch's settings and the process alone, whatever the default dtype."""
    arguments = trial.arguments()
    with _unusual(trial.subject.device):
        before, running = _process(trial.subject.device), [threading.active_count()]
        plain = trial.forward_only()
        for call in (trial.run, plain.run, lambda given: _called(plain, given)):
            with redirect_stdout(StringIO()) as printed:
                call(arguments)
            assert not printed.getvalue(), f"the call printed {printed.getvalue()!r}"
            after = _process(trial.subject.device)
            changed = [name for name in before if before[name] != after[name]]
            assert not changed, f"the call changed {' and '.join(changed)}"
            running.append(threading.active_count())
        # A pool may be started by one call, and others' threads end and begin: but not with every call.
        steady = any(later <= earlier for earlier, later in itertools.pairwise(running))
        assert steady, "every call leaves a thread behind"
        # As in layers that are built in their model's dtype.
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            got = trial.run(arguments)
        finally:
            torch.set_default_dtype(default)
    trial.assert_right(arguments, got, "with bfloat16 as the default dtype")


def _called(trial: Trial, arguments: Arguments) -> None:
    """A call as it is, in no mode that would be put back after it."""
    with trial.subject.chosen():
        trial.outputs(trial.leaves(arguments))


def _watched(kind: str, tensors: Mapping[str, Tensor] | Iterable[Tensor]) -> dict[str, StorageWeakRef]:
    """Weak references to the memory of tensors, by what a message calls them."""
    named = tensors.items() if isinstance(tensors, Mapping) else ((f"tensor {i}", t) for i, t in enumerate(tensors))
    return {f"{kind} {name}": StorageWeakRef(tensor.untyped_storage()) for name, tensor in named if tensor.numel()}


def _call(trial: Trial, arguments: Arguments) -> dict[str, StorageWeakRef]:
    """One call with copies of the arguments, and its backward; watches all that goes in, is saved, and comes out."""
    leaves = trial.leaves({name: _copied(value) for name, value in arguments.items()})
    saved: list[Tensor] = []
    pulls: list[Tensor] = []
    gradients: dict[str, Tensor] = {}
    with trial.subject.chosen(), torch.set_grad_enabled(trial.differentiable):
        with torch.autograd.graph.saved_tensors_hooks(noted_in(saved), lambda tensor: tensor):
            outputs = trial.outputs(leaves)
        if trial.differentiable:
            found = trial.gradients(leaves, outputs, noted_in(pulls))
            gradients = {name: gradient for name, gradient in found.items() if gradient is not None}
    watched = {
        **_watched("argument", tensors_of(leaves)),
        **_watched("", outputs),
        **_watched("saved", saved),
        **_watched("cotangent", pulls),
        **_watched("gradient of", gradients),
    }
    saved.clear()  # the graph holds the hook, which holds them
    return watched


def _copied(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_copied(each) for each in value]
    return value.clone() if isinstance(value, Tensor) else value


@over()
def keeps_nothing_alive(trial: Trial) -> None:
    """After a call no memory of its arguments, results, cotangents and gradients is held, and calls don't pile up."""
    require_addresses(trial.subject.device)
    arguments = trial.arguments()
    _call(trial, arguments)
    watched = _call(trial, arguments)
    if interpreting():
        gc.collect()  # Triton's interpreter makes cycles, and no kernel can help it
    alive = [name.strip() for name, reference in watched.items() if not reference.expired()]
    if alive:
        gc.collect()
        cyclic = all(reference.expired() for reference in watched.values())
        until = "until Python looks for cycles" if cyclic else "for good"
        raise AssertionError(f"after the call is over, the memory of {', '.join(alive)} is still held, {until}")
    if trial.case is trial.table.cases[0]:
        _require_no_growth(trial, arguments)


def _require_no_growth(trial: Trial, arguments: Arguments) -> None:
    """Raise `AssertionError` if every further call leaves more of Python's objects."""

    def objects() -> int:
        gc.collect()
        return len(gc.get_objects())

    gc.freeze()  # what is there already is not looked at, which would take seconds
    try:
        counts = [objects()]
        for _ in range(2):
            for _ in range(_CALLS):
                _call(trial, arguments)
            counts.append(objects())
    finally:
        gc.unfreeze()
    # Twice in a row: other threads and caches make objects too, but not with every call.
    assert any(after - before < _CALLS for before, after in itertools.pairwise(counts)), (
        f"each of {2 * _CALLS} calls leaves objects of Python behind, {(counts[-1] - counts[0]) / (2 * _CALLS):.1f} "
        "of them a call"
    )
