"""What a kernel refused always of what its op documents: values of options, dtypes, sizes, families of models."""

import inspect
from collections.abc import Iterator

from kpt_optimize.cases import Domain

from .coverage import BUCKETS
from .drawing import FAMILY, same
from .trial import Trial


def labels_of(trial: Trial) -> tuple[str, ...]:
    """Return what a trial meets of its op's domain, each as a few words."""
    family = (trial.case.name,) if trial.case.name.startswith(FAMILY) else ()
    return (f"dtype {_plain(trial.dtype)}", *_of_case(trial), *family)


def _of_case(trial: Trial) -> Iterator[str]:
    domain = trial.table.domain or Domain()
    parameters = inspect.signature(trial.table.build).parameters.values()
    values = {each.name: each.default for each in parameters if each.default is not each.empty} | dict(trial.case.sizes)
    for name, documented in domain.options.items():
        value = values.get(name, documented[0])
        if any(same(each, value) for each in documented):
            yield f"{name}={_plain(value)}"
    for name in domain.sizes:
        size = values.get(name)
        if isinstance(size, int):
            yield from (f"{name} {bucket}" for bucket, holds in BUCKETS.items() if holds(size))


def _plain(value: object) -> str:
    return repr(value).removeprefix("torch.")
