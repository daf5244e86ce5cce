"""`--kpt-bench`: how fast each kernel is on the cases of its op, for pytest-benchmark. What is wrong gets no figure."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import kpt_core
from kpt_core import InputError, UnknownNameError
from kpt_core.registry import backend_of
from kpt_optimize.cases import Arguments, Case, CaseTable

from .checks.values import values
from .suite import subjects
from .tensors import cotangent_like, tensors_of
from .trial import Trial


@dataclass(frozen=True, slots=True)
class Measured:
    """A trial in one direction."""

    trial: Trial
    training: bool  # forward with backward, for random cotangents; else the forward alone, without gradients

    def __str__(self) -> str:
        return f"{self.trial}-{self.direction}"

    @property
    def direction(self) -> str:
        """Return what it is called in names and records."""
        return "forward+backward" if self.training else "forward"

    def check(self) -> None:
        """Fail the test unless the kernel passes `values` on this case."""
        fault = _fault(self.trial)
        if fault is not None:
            pytest.fail(f"no figure, because `values` is red on this case: {fault}", pytrace=False)

    def measure(self, benchmark: Any) -> None:
        """Hand the kernel to pytest-benchmark's fixture."""
        arguments, subject, case = self.trial.arguments(), self.trial.subject, self.trial.case.name
        benchmark.group = f"{subject.op.name} {case}"
        names = {"op": subject.op.name, "case": case, "backend": subject.backend, "kernel": subject.target}
        dtype = str(self.trial.dtype).removeprefix("torch.")
        benchmark.params = {**names, "dtype": dtype, "direction": self.direction}
        facts = {"device": str(subject.device), "threads": torch.get_num_threads(), "torch": torch.__version__}
        if subject.op.flops is not None:
            facts["forward_flops"] = subject.op.flops(subject.record(arguments))
        benchmark.extra_info.update(facts)
        with self._ready(arguments) as call:
            benchmark(call)

    @contextmanager
    def _ready(self, arguments: Arguments) -> Iterator[Callable[[], None]]:
        """A call of the kernel that ends when the device has ended."""
        trial, device = self.trial, self.trial.subject.device
        backend = backend_of(device)
        made = trial.leaves(arguments) if self.training else arguments

        def forward() -> None:
            trial.subject.call(made)
            backend.synchronize(device)

        def train() -> None:
            outputs = trial.outputs(made)
            torch.autograd.grad([outputs[name] for name in pulls], wanted, list(pulls.values()), allow_unused=True)
            backend.synchronize(device)

        with trial.subject.chosen(), torch.set_grad_enabled(self.training):
            if self.training:
                wanted = [tensor for name, tensor in tensors_of(made).items() if trial.wants_gradient(name, tensor)]
                pulls = {n: cotangent_like(out) for n, out in trial.outputs(made).items() if out.requires_grad}
                if not pulls:
                    pytest.skip("no result depends on an argument that has a gradient")
            yield train if self.training else forward


#: Trial -> why the kernel is wrong there: one answer for both directions.
_faults: dict[str, str | None] = {}


def _fault(trial: Trial) -> str | None:
    """Why a kernel is wrong on a case, or None; skips the test if the kernel refuses it."""
    if str(trial) not in _faults:
        try:
            values(trial)
            _faults[str(trial)] = None
        except AssertionError as error:
            _faults[str(trial)] = str(error)
    return _faults[str(trial)]


def cases_of(table: CaseTable) -> tuple[Case, ...]:
    """Those of real models, and of the others the first."""
    first = next((case for case in table.cases if not case.model), None)
    return tuple(case for case in table.cases if case.model or case is first)


def parametrize(metafunc: pytest.Metafunc) -> None:
    """Give the benchmark its parameters: kernels, cases, dtypes and directions."""
    backend, device = (metafunc.config.getoption(name) for name in ("--kpt-backend", "--kpt-device"))
    known = kpt_core.backends().get(backend)
    unavailable = known.unavailable() if known is not None and device is None else None
    if unavailable:
        raise pytest.UsageError(f"backend {backend} can't run here: {unavailable}")
    try:
        made = [
            Measured(Trial(subject, table, case, dtype), training)
            for subject, table in subjects(backend, device)
            for case in cases_of(table)
            if not (case.large and subject.device.type == "cpu")
            for dtype in subject.dtypes(table)
            if dtype in table.dtypes
            for training in (False, True)
            if not training or Trial(subject, table, case, dtype).differentiable
        ]
    except (UnknownNameError, InputError) as error:
        raise pytest.UsageError(str(error)) from None
    metafunc.parametrize("measured", made, ids=str)
