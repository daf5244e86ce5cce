"""The suite's checks."""

from collections.abc import Callable
from types import ModuleType

from kpt_conformance.subject import Subject
from kpt_conformance.trial import Trial
from kpt_optimize.cases import CaseTable

from . import (
    accelerators,
    citizen,
    cost,
    declarations,
    gradients,
    histories,
    leaks,
    magnitudes,
    objects,
    purity,
    randomness,
    results,
    transforms,
    values,
)


def _checks_of(*modules: ModuleType) -> tuple[Callable[[Trial], None], ...]:
    """Return what these modules mark with `over`, in the order of their files."""
    made = ((module, each) for module in modules for each in vars(module).values() if hasattr(each, "kpt_extent"))
    return tuple(each for module, each in made if each.__module__ == module.__name__)


#: Last, since the fake device stays in the process.
DEVICE_CHECKS: tuple[Callable[[Trial], None], ...] = (results.fake_device_result,)

#: Each is run on every trial of its extent.
CHECKS = tuple(
    check
    for check in _checks_of(
        values,
        gradients,
        magnitudes,
        purity,
        histories,
        objects,
        citizen,
        leaks,
        cost,
        randomness,
        results,
        transforms,
        accelerators,
    )
    if check not in DEVICE_CHECKS
)

#: Each is run once for a kernel.
DECLARATIONS: tuple[Callable[[Subject, CaseTable], None], ...] = (declarations.declaration, declarations.device_index)
