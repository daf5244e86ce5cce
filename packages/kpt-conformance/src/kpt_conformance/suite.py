"""The suite: one test for each check, crossed with the kernels of a backend, the cases of their ops and dtypes."""

from collections.abc import Callable, Iterator
from typing import ClassVar

import pytest
import torch

import kpt_core
from kpt_core import InputError, Kernel, NoKernelError, UnknownNameError
from kpt_core.contract import TORCH
from kpt_core.selection import REFERENCE
from kpt_optimize.cases import CaseTable, LayerCase, WrongInput, case_tables

from .checks import declarations
from .checks.catalog import CHECKS
from .coverage import planned
from .drawing import drawn_cases
from .extent import Extent
from .subject import Subject
from .trial import Trial


class Suite:
    """What every kernel of a backend must do; a backend's test file is a subclass that names the backend.

    Attributes:
        backend: name of the backend, or `reference` for the references of every op; None is what `--kpt-backend` says.
        device: where to run; None is the backend's first device. On a device of another type than the backend's,
            kernels are forced to run (Triton's interpreter runs on the CPU, for instance).

    Examples:
        >>> class TestAcme(Suite):
        ...     backend = "acme"
    """

    is_kpt_suite: ClassVar[bool] = True
    backend: ClassVar[str | None] = None
    device: ClassVar[str | None] = None

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _untuned(cls) -> Iterator[None]:
        """Leave out what this machine's user tuned: kernels are tried as they are shipped."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("KPT_TUNING", "0")
            kpt_core.refresh()
            yield
        kpt_core.refresh()

    def test_kernel(self, check: Callable[[Trial], None], trial: Trial) -> None:
        """A kernel passes a check on a case, in a dtype."""
        try:
            check(trial)
        except NoKernelError:
            # Some take a call with gradients alone, and leave it to another kernel without.
            refusal = trial.subject.refusal(trial.arguments())
            if refusal is None:
                raise
            pytest.skip(f"refused: without gradients: {refusal}")

    def test_declaration(
        self, declared: Callable[[Subject, CaseTable], None], subject: Subject, table: CaseTable
    ) -> None:
        """What a kernel says of itself holds."""
        declared(subject, table)

    def test_wrong_input(self, subject: Subject, table: CaseTable, wrong: WrongInput) -> None:
        """An op refuses what its table calls wrong."""
        declarations.wrong_input(subject, table, wrong)

    def test_device(self, device_check: Callable[[Trial], None], trial: Trial) -> None:
        """An op's reference runs on a device that is not the CPU."""
        device_check(trial)

    def test_coverage(self, table: CaseTable) -> None:
        """What an op documents is exercised; part of `reference`."""
        unexercised = planned(table, CHECKS).unexercised()
        assert not unexercised, "\n".join(unexercised)

    def test_layer(self, layer_check: Callable[[LayerCase], None], layer: LayerCase) -> None:
        """A layer is at home on every device; part of `reference`."""
        layer_check(layer)


def subjects(backend: str, device: str | None = None) -> list[tuple[Subject, CaseTable]]:
    """Return what a backend offers for ops, with their case tables, or all references."""
    tables = case_tables()
    if backend == REFERENCE:
        place = device_of(device or "cpu")
        return [(Subject(kpt_core.get_op(op), REFERENCE, REFERENCE, place), table) for op, table in tables.items()]
    known = kpt_core.backends()
    if backend not in known:
        raise UnknownNameError("backend", backend, [*known, REFERENCE])
    found = known[backend]
    place = device_of(device or next(iter(found.device_types), "cpu"))
    # A backend may be installed without the feature package whose ops it serves.
    kernels = [kernel for kernel in found.kernels() if kernel.op in kpt_core.ops()]
    if backend == TORCH:  # some of its kernels are for GPUs, others for memory of the host
        kernels = [kernel for kernel in kernels if kernel.requires <= found.capabilities(place)]
    served = {kernel.op for kernel in kernels}
    if served - tables.keys():
        raise InputError(
            f"no case table for {', '.join(sorted(served - tables.keys()))}, whose kernels can't be tried so; "
            "see kpt_optimize.cases.CaseTable"
        )
    direct = not found.serves(place.type)

    def subject(kernel: Kernel, target: str, children: set[str]) -> tuple[Subject, CaseTable]:
        op = kpt_core.get_op(kernel.op)
        tried = Subject(op, target, backend, place, kernel, children=tuple(sorted(children)), direct=direct)
        return tried, tables[kernel.op]

    # What a kernel of backend `torch` calls is tried as this backend serves it, whatever else is installed.
    own = [subject(each, each.forward, {*each.composed_of} & served if backend == TORCH else set()) for each in kernels]
    composites = [
        subject(each, f"{each.forward}+{backend}", {*each.composed_of} & served)
        for each in known[TORCH].kernels()
        if each.op in tables and each.op not in served and not served.isdisjoint(each.composed_of) and not direct
    ]
    return own + composites


def device_of(name: str) -> torch.device:
    """Return a device as the tensors on it name it: the first one of its type if none is said, and none of the CPU."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InputError(f"{name!r} is no device: {error}") from None
    return torch.device("cpu") if device.type == "cpu" else torch.device(device.type, device.index or 0)


def trials(subject: Subject, table: CaseTable, extent: Extent) -> Iterator[Trial]:
    """Yield the trials of a subject that a check asks for."""
    if not (extent.references if subject.kernel is None else extent.kernels):
        return
    rare = subject.rare(table)
    dtypes = tuple(dtype for dtype in subject.dtypes(table) if dtype not in rare)
    cases = (*table.cases, *drawn_cases(table))
    for case, dtype in extent.trials(cases, dtypes, rare, slow=subject.direct):
        if not (case.large and subject.device.type == "cpu"):
            yield Trial(subject, table, case, dtype)
