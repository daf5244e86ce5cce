"""The suite: one test for each check, crossed with the kernels of a backend, the cases of their ops and dtypes."""

from collections.abc import Callable, Iterator
from typing import ClassVar

import pytest
import torch

import kpt_core
from kpt_core import CaseTable, InputError, LayerCase, UnknownNameError, WrongInput

from .checks import declarations, devices, purity, results, transforms, values
from .extent import Extent
from .trial import REFERENCE, Subject, Trial

#: Each is run on every trial of its extent.
CHECKS: tuple[Callable[[Trial], None], ...] = (
    values.values,
    values.derivatives,
    values.layouts,
    values.cotangents,
    values.far_strides,
    values.padding,
    values.nans,
    values.without_gradients,
    values.single_gradients,
    purity.inputs_unchanged,
    purity.no_aliasing,
    purity.poisoned_outputs,
    purity.repeatable,
    purity.double_use,
    purity.threads,
    purity.settings,
    results.result_type,
    results.fake_result,
    results.meta_result,
    transforms.custom_ops,
    transforms.compiled,
    transforms.compiled_dynamic,
    transforms.exported,
    transforms.vmapped,
    transforms.autocast,
)

#: Likewise, and last: the fake device stays in the process.
DEVICE_CHECKS: tuple[Callable[[Trial], None], ...] = (devices.fake_device_result,)

#: Each is run once for a kernel.
DECLARATIONS: tuple[Callable[[Subject, CaseTable], None], ...] = (declarations.declaration, declarations.device_index)


class Suite:
    """What every kernel of a backend must do; a backend's test file is a subclass that names the backend.

    Attributes:
        backend: name of the backend, or `reference` for the references of every op; None is what `--kpt-backend` says.
        device: where to run; None is the backend's first device. On a device of another type than the backend's,
            kernels are called past dispatch (Triton's interpreter runs on the CPU, for instance).

    Example:
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
        check(trial)

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

    def test_layer(self, layer_check: Callable[[LayerCase], None], layer: LayerCase) -> None:
        """A layer is at home on every device; part of `reference`."""
        layer_check(layer)


def subjects(backend: str, device: str | None = None) -> list[tuple[Subject, CaseTable]]:
    """What a backend offers for ops that have a case table, or all references.

    Raises:
        UnknownNameError: no such backend is installed.
        InputError: a kernel's op has no case table, or torch knows no such device.
    """
    tables = kpt_core.case_tables()
    if backend == REFERENCE:
        place = device_of(device or "cpu")
        return [(Subject(kpt_core.get_op(op), REFERENCE, REFERENCE, place), table) for op, table in tables.items()]
    known = kpt_core.backends()
    if backend not in known:
        raise UnknownNameError("backend", backend, [*known, REFERENCE])
    found = known[backend]
    place = device_of(device or found.device_type)
    offered = []
    served = set()
    for kernel in found.kernels():
        if kernel.op not in kpt_core.ops():
            continue  # of a feature package that is not installed
        if kernel.op not in tables:
            raise InputError(
                f"op {kernel.op} has no case table, so {kernel.target} can't be tried; see kpt_core.CaseTable"
            )
        served.add(kernel.op)
        direct = place.type != found.device_type
        subject = Subject(kpt_core.get_op(kernel.op), kernel.target, backend, place, kernel, direct=direct)
        offered.append((subject, tables[kernel.op]))
    for name, table in tables.items():
        op = kpt_core.get_op(name)
        children = tuple(child for child in op.composed_of if child in served)
        if name not in served and children and place.type == found.device_type:
            offered.append((Subject(op, backend, backend, place, children=children), table))
    return offered


def device_of(name: str) -> torch.device:
    """A device as the tensors on it name it: the first one of its type if none is said, and none of the CPU.

    Raises:
        InputError: torch knows no such device.
    """
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InputError(f"{name!r} is no device: {error}") from None
    return torch.device("cpu") if device.type == "cpu" else torch.device(device.type, device.index or 0)


def trials(subject: Subject, table: CaseTable, extent: Extent) -> Iterator[Trial]:
    """The trials of a subject that a check asks for."""
    if subject.target != REFERENCE and not extent.kernels:
        return
    dtypes = subject.dtypes(table)
    for case in table.cases:
        if case.large and subject.device.type == "cpu":
            continue
        every = extent.models == "all" if case.model else extent.dtypes
        if not case.model or extent.models != "none":
            yield from (Trial(subject, table, case, dtype) for dtype in (dtypes if every else dtypes[:1]))
